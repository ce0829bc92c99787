"""Child process (the peer's interpreter): vLLM's engine in this process, the same commands as `engine_pdkv`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workload import CONTEXT_TOKENS, Clock, DecodeWindow, answer_commands, make_prompt, rates


class VllmEngine:
    """Greedy requests without detokenisation, stepped by hand; weights and arithmetic in ``dtype``."""

    def __init__(self, config: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._sampling = SamplingParams
        self.llm = LLM(
            model=config["model_dir"],
            dtype=config["dtype"],
            enforce_eager=config["eager"],
            max_model_len=4096,
            max_num_seqs=128,
            max_num_batched_tokens=config["max_batched_tokens"],
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
        )
        self.word_ids = config["word_ids"]
        self._count = 0

    def facts(self) -> dict[str, Any]:
        """Versions, threads, and the block size that was chosen."""
        import torch
        import vllm

        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "block_size": self.llm.llm_engine.vllm_config.cache_config.block_size,
        }

    def fill(self, batch: int, seed: int) -> None:
        """Compute the decode contexts once; later decode legs find their KV in the prefix cache."""
        self._run([make_prompt(self.word_ids, CONTEXT_TOKENS, seed + i) for i in range(batch)], 1)

    def decode(self, batch: int, steps: int, seed: int) -> dict[str, float]:
        """Tokens per second of ``batch`` requests decoding together, ``steps`` tokens each."""
        window = DecodeWindow(batch)
        prompts = [make_prompt(self.word_ids, CONTEXT_TOKENS, seed + i) for i in range(batch)]
        self._run(prompts, steps + 1, on_step=window.step)
        assert window.result is not None
        return window.result

    def prefill(self, tokens: int, seed: int) -> dict[str, float]:
        """Prompt tokens per second, from submission to the first token: its wall time is the TTFT."""
        clock = Clock()
        self._run([make_prompt(self.word_ids, tokens, seed)], 1)
        return rates(tokens, *clock.read())

    def _run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        on_step: Callable[..., None] = lambda counts, *, ended: None,
    ) -> None:
        engine = self.llm.llm_engine
        params = self._sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        seen: dict[str, int] = {}
        for prompt in prompts:
            self._count += 1
            engine.add_request(f"r{self._count}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            counts, ended = {}, False
            for output in engine.step():
                total = len(output.outputs[0].token_ids)
                counts[output.request_id] = total - seen.get(output.request_id, 0)
                seen[output.request_id] = total
                ended |= output.finished
            if counts:
                on_step(counts, ended=ended)

    def close(self) -> None:
        """Nothing to stop: the engine lives in this process."""


def _start(config: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    engine = VllmEngine(config)
    return {name: getattr(engine, name) for name in ("facts", "fill", "decode", "prefill", "close")}


if __name__ == "__main__":
    answer_commands(_start)
