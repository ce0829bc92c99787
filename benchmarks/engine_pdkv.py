"""Child process: one pdkv instance (scheduler, executor, sampler; no HTTP) that answers measurement commands."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from workload import CONTEXT_TOKENS, WORDS, Clock, DecodeWindow, answer_commands, make_prompt, rates

from pdkv.core.events import Event, Finished, FinishReason, TokenSampled
from pdkv.core.ports import NewRequest
from pdkv.runtime.boot import start_instance
from pdkv.runtime.instance import Update
from pdkv.runtime.models.files import resolve_model
from pdkv.runtime.sampler import SamplingParams
from pdkv.serve.options import InstanceOptions

_GREEDY = SamplingParams(temperature=0.0)
_TIMEOUT_S = 300.0


class PdkvEngine:
    """Greedy requests on one instance; times are taken on the engine's thread, as its steps end."""

    def __init__(self, config: dict[str, Any]) -> None:
        options = {key: config[key] for key in ("weight_storage",) if config.get(key)}
        self.model = config["model"]
        self._window: DecodeWindow | None = None
        self.instance = start_instance(
            InstanceOptions(
                role="decode",
                model=self.model,
                threads=config["threads"],
                kv_cache_memory_bytes=config["kv_bytes"],
                max_num_batched_tokens=config["max_batched_tokens"],
                transport="shm",
                **options,
            ),
            on_events=self._on_events,
        )
        tokenizer = self.instance.model.tokenizer
        ids = [tokenizer(" " + word)["input_ids"] for word in WORDS]
        self.word_ids = [one[0] for one in ids if len(one) == 1]
        self._count = 0

    def facts(self) -> dict[str, Any]:
        """What the parent needs: where the converted model is, and the ids of the words that prompts consist of."""
        import torch

        return {
            "model_dir": str(resolve_model(self.model).directory),
            "word_ids": self.word_ids,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }

    def fill(self, batch: int, seed: int) -> None:
        """Compute the decode contexts once; later decode legs find their KV in the prefix cache."""
        self._run([make_prompt(self.word_ids, CONTEXT_TOKENS, seed + i) for i in range(batch)], 1)

    def decode(self, batch: int, steps: int, seed: int) -> dict[str, float]:
        """Tokens per second of ``batch`` requests decoding together, ``steps`` tokens each."""
        self._window = window = DecodeWindow(batch)
        self._run([make_prompt(self.word_ids, CONTEXT_TOKENS, seed + i) for i in range(batch)], steps + 1)
        self._window = None
        assert window.result is not None
        return window.result

    def prefill(self, tokens: int, seed: int) -> dict[str, float]:
        """Prompt tokens per second, from submission to the first token: its wall time is the TTFT."""
        clock = Clock()
        self._run([make_prompt(self.word_ids, tokens, seed)], 1)
        return rates(tokens, *clock.read())

    def _on_events(self, events: tuple[Event, ...]) -> None:
        """All events of one step, on the engine's thread."""
        if self._window is None:
            return
        counts = Counter(event.request_id for event in events if isinstance(event, TokenSampled))
        if counts:
            self._window.step(counts, ended=any(isinstance(event, Finished) for event in events))

    def _run(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Serve ``prompts`` to their ends."""
        ended: queue.SimpleQueue[Finished] = queue.SimpleQueue()

        def sink(update: Update) -> None:
            if isinstance(update.events[-1], Finished):
                ended.put(update.events[-1])

        requests = []
        for prompt in prompts:
            self._count += 1
            array = np.asarray(prompt, dtype=np.int32)
            requests.append(NewRequest(request_id=f"r{self._count}", prompt=array, max_tokens=max_tokens))
        for request in requests:
            self.instance.submit(request, _GREEDY, sink)
        for _ in requests:
            outcome = ended.get(timeout=_TIMEOUT_S)
            if outcome.reason is not FinishReason.LENGTH:
                raise RuntimeError(f"a request ended with {outcome}")

    def close(self) -> None:
        """Stop the instance."""
        self.instance.close()


def _start(config: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    engine = PdkvEngine(config)
    return {name: getattr(engine, name) for name in ("facts", "fill", "decode", "prefill", "close")}


if __name__ == "__main__":
    answer_commands(_start)
