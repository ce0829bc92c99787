"""vLLM's side of `benchmarks/core.py`: its own classes, driven as `core_ours.py` drives ours.

Runs under a Python that has vLLM 0.32. Reads ``[measurement, arguments]``, one JSON list a line; one answer a line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONHASHSEED", "0")

import numpy as np
import torch
from core_work import (
    BLOCK,
    CHURN_BLOCKS,
    CHURN_OUTPUT,
    CHURN_PROMPT,
    CONTEXT,
    DECODERS,
    MILLION,
    WINDOW,
    Stopwatch,
    churn,
    random_tokens,
)
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


def layout(num_blocks: int, *, hybrid: bool = False) -> KVCacheConfig:
    """One group of full attention, or another of sliding window as well."""
    heads = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs: list[Any] = [FullAttentionSpec(**heads)]
    if hybrid:
        specs.append(SlidingWindowSpec(sliding_window=WINDOW, **heads))
    groups = [KVCacheGroupSpec(layer_names=[f"layer.{at}"], kv_cache_spec=spec) for at, spec in enumerate(specs)]
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups,
        prefix_cache_retention_interval=0 if hybrid else None,
    )  # fmt: skip


def make_manager(num_blocks: int, *, hybrid: bool = False) -> KVCacheManager:
    """vLLM's manager, prefix caching on."""
    return KVCacheManager(
        layout(num_blocks, hybrid=hybrid), max_model_len=MILLION + BLOCK, scheduler_block_size=BLOCK,
        hash_block_size=BLOCK, max_in_flight_tokens=8192, enable_caching=True,
    )  # fmt: skip


class Side:
    """The measurements of `core_ours.Side`."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._sequence = 0
        self._kept: dict[str, Any] = {}

    def _keep(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def _request(self, tokens: list[int], output: list[int] | None = None, *, max_tokens: int = MILLION) -> Request:
        self._sequence += 1
        request = Request(
            request_id=f"r{self._sequence}", prompt_token_ids=tokens, pooling_params=None,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True), block_hasher=self._hasher,
        )  # fmt: skip
        if output is not None:
            request.append_output_token_ids(output)
        return request

    def _million(self) -> list[int]:
        return self._keep("million", lambda: random_tokens(MILLION, 1).tolist())

    def hashes(self, algorithm: str) -> tuple[float, str]:
        function = get_hash_fn_by_name(algorithm)
        init_none_hash(function)
        request = Request(
            request_id="h", prompt_token_ids=self._million(), pooling_params=None,
            sampling_params=SamplingParams(max_tokens=1), block_hasher=None,
        )  # fmt: skip
        hasher = get_request_block_hasher(BLOCK, function)
        with Stopwatch() as watch:
            found = hasher(request)
        init_none_hash(sha256)
        return watch.seconds, found[-1].hex()

    def alloc_free(self) -> float:
        manager, request = make_manager(MILLION // BLOCK + 64), self._request(self._million())
        with Stopwatch() as watch:
            assert manager.allocate_slots(request, MILLION) is not None
            manager.free(request)
        return watch.seconds

    def lookup(self) -> float:
        def make() -> tuple[KVCacheManager, Request]:
            manager = make_manager(MILLION // BLOCK + 64)
            manager.allocate_slots(self._request(self._million()), MILLION)
            return manager, self._request(self._million())

        manager, request = self._keep("lookup", make)
        with Stopwatch() as watch:
            _, tokens, _ = manager.get_computed_blocks(request)
        assert tokens == MILLION - BLOCK
        return watch.seconds

    def decode(self, steps: int, hybrid: bool = False) -> float:
        blocks = DECODERS * (CONTEXT + steps + BLOCK) // BLOCK * (2 if hybrid else 1) + 64
        manager = make_manager(blocks, hybrid=hybrid)
        output = random_tokens(steps + 1, 9).tolist()
        requests = [self._request(random_tokens(CONTEXT, 100 + i).tolist(), output) for i in range(DECODERS)]
        for request in requests:
            assert manager.allocate_slots(request, CONTEXT) is not None
            request.num_computed_tokens = CONTEXT
            request.status = RequestStatus.RUNNING
        with Stopwatch() as watch:
            for _ in range(steps):
                for request in requests:
                    manager.allocate_slots(request, 1)
                    request.num_computed_tokens += 1
        return watch.seconds

    def scheduler_step(self, steps: int) -> list[float]:
        scheduler, seconds = self._decoding(steps), []
        sampled = random_tokens(steps * DECODERS, 11).reshape(steps, DECODERS).tolist()
        for step in range(steps):
            with Stopwatch() as schedule:
                output = scheduler.schedule()
            result = self._result(output, sampled[step])
            with Stopwatch() as update:
                scheduler.update_from_output(output, result)
            seconds.append(schedule.seconds + update.seconds)
        return seconds

    @staticmethod
    def _result(output: Any, tokens: list[int]) -> ModelRunnerOutput:
        rows = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=rows, req_id_to_index={key: at for at, key in enumerate(rows)},
            sampled_token_ids=[[token] for token in tokens[: len(rows)]],
        )  # fmt: skip

    def _decoding(self, steps: int) -> Scheduler:
        num_blocks = DECODERS * (CONTEXT + steps + 64) // BLOCK
        directory = Path(tempfile.mkdtemp(prefix="core-bench-"))
        facts = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 128_000,
            "max_position_embeddings": 16_384, "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "float32",
        }  # fmt: skip
        (directory / "config.json").write_text(json.dumps(facts))
        model = ModelConfig(model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=16_384)
        limits = SchedulerConfig(
            max_num_seqs=DECODERS, max_num_batched_tokens=DECODERS * CONTEXT, max_model_len=16_384,
            is_encoder_decoder=False, enable_chunked_prefill=True, async_scheduling=False,
        )  # fmt: skip
        whole = VllmConfig(
            model_config=model, scheduler_config=limits, device_config=DeviceConfig("cpu"),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        )  # fmt: skip
        whole.scheduler_config.async_scheduling = False
        whole.scheduler_config.max_num_batched_tokens = DECODERS * CONTEXT
        whole.scheduler_config.max_num_scheduled_tokens = DECODERS * CONTEXT
        whole.cache_config.num_gpu_blocks = num_blocks
        whole.cache_config.block_size = BLOCK
        whole.cache_config.enable_prefix_caching = True
        scheduler = Scheduler(
            vllm_config=whole, kv_cache_config=layout(num_blocks), block_size=BLOCK, hash_block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(whole),
        )  # fmt: skip
        for i in range(DECODERS):
            prompt = random_tokens(CONTEXT, 100 + i).tolist()
            scheduler.add_request(self._request(prompt, max_tokens=steps + 64))
        output = scheduler.schedule()
        assert len(scheduler.running) == DECODERS
        scheduler.update_from_output(output, self._result(output, [1] * DECODERS))
        return scheduler

    def churn(self, count: int) -> float:
        return churn(Churner(make_manager(CHURN_BLOCKS), self._request), count)


class Churner:
    """`core_work.Churner` over vLLM's manager."""

    def __init__(self, manager: KVCacheManager, request: Callable[[list[int]], Request]) -> None:
        self._manager = manager
        self._request = request
        self._running: list[Request] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    def arrive(self, prompt: np.ndarray) -> Request:
        return self._request(prompt.tolist())

    def admit(self, request: Request) -> bool:
        blocks, hit_tokens, _ = self._manager.get_computed_blocks(request)
        new = self._manager.allocate_slots(
            request, CHURN_PROMPT - hit_tokens, hit_tokens, blocks, full_sequence_must_fit=True, has_scheduled_reqs=True
        )
        return new is not None

    def know_output(self, request: Request, tokens: np.ndarray) -> None:
        request.num_computed_tokens = CHURN_PROMPT
        request.status = RequestStatus.RUNNING
        request.append_output_token_ids(tokens.tolist())

    def start(self, request: Request) -> None:
        self._running.append(request)

    def step(self) -> int:
        at, before = 0, len(self._running)
        while at < len(self._running):
            request = self._running[at]
            if self._manager.allocate_slots(request, 1) is not None:
                request.num_computed_tokens += 1
                at += 1
            else:
                self._manager.free(self._running.pop())
        left = []
        for request in self._running:
            if request.num_computed_tokens < CHURN_PROMPT + CHURN_OUTPUT:
                left.append(request)
            else:
                self._manager.free(request)
        self._running = left
        return before - len(left)


def main() -> None:
    """Serve measurements until stdin ends. What vLLM prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = Side()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answers.write(json.dumps(getattr(side, name)(**arguments)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
