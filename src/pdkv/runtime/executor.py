"""Runs batches: token ids and block tables in, sampled tokens out. Sampling state lives here, by request id."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pdkv.core.ports import Batch, Int32Array, Outputs
from pdkv.errors import ConfigError
from pdkv.runtime.attention import STEP_KWARG, build_step
from pdkv.runtime.kernels import native
from pdkv.runtime.kv_pool import KvPool
from pdkv.runtime.models.loader import LoadedModel
from pdkv.runtime.sampler import SamplingParams, SamplingState, TokenLogprobs, sample


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one batch gave: the engine's `Outputs`, and log-probabilities of the requests that asked for them."""

    outputs: Outputs
    logprobs: dict[str, TokenLogprobs]


class Executor:
    """One model on one KV pool. Not thread-safe: the engine's thread owns it."""

    def __init__(self, model: LoadedModel, pool: KvPool) -> None:
        """Raises ConfigError when the pool's shape or device is not the model's."""
        have = (pool.num_layers, pool.kv_heads, pool.head_dim, pool.tensor.device)
        need = (model.num_layers, model.kv_heads, model.head_dim, model.device)
        if have != need:
            raise ConfigError(
                f"KV pool is {have} (layers, kv_heads, head_dim, device), model {model.name} needs {need}"
            )
        self.model = model
        self.pool = pool
        self._kernels = self._find_kernels()
        self._states: dict[str, SamplingState] = {}

    def _find_kernels(self) -> native.Native | None:
        """The C kernels, where they serve this model on this pool."""
        model, pool = self.model, self.pool.tensor
        if pool.device.type != "cpu" or model.dtype != torch.float32:
            return None
        kernels = native.load()
        served = kernels is not None and kernels.can_decode(model.heads, model.kv_heads, model.head_dim, pool.dtype)
        return kernels if served else None

    def add_request(
        self,
        request_id: str,
        prompt: Int32Array,
        sampling: SamplingParams,
        *,
        min_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Start sampling state for a request; before ``min_tokens`` outputs none of ``stop_token_ids`` is sampled.

        ``prompt`` int32[n] is what repetition penalties count. Raises BadRequest for bad sampling values.
        """
        assert request_id not in self._states, f"request {request_id} was added twice"
        sampling.validate()
        stops = tuple(sorted(t for t in stop_token_ids if 0 <= t < self.model.vocab_size))
        self._states[request_id] = SamplingState(sampling, np.array(prompt, np.int32), min_tokens, stops)

    def remove_request(self, request_id: str) -> None:
        """Forget a request (unknown ids are ignored: it may never have been added)."""
        self._states.pop(request_id, None)

    def execute(self, batch: Batch) -> StepResult:
        """Run one forward pass and sample where ``batch.samples``. Returns tokens int32[len(batch)], 0 elsewhere.

        Every row's request must have been added. A request's outputs are remembered across preemption: the rows that
        recompute them do not sample.

        When it returns, all K/V of the batch are in the pool, on a GPU too: the engine then frees, grants and refills
        blocks, and the mover reads and writes them without a thought for CUDA's streams.
        """
        tokens = np.zeros(len(batch), np.int32)
        if len(batch) == 0:
            return StepResult(Outputs(tokens), {})
        rows = np.flatnonzero(batch.samples)
        logits = self._forward(batch, rows)
        if len(rows) == 0:
            self._finish()
            return StepResult(Outputs(tokens), {})
        ids = [batch.request_ids[i] for i in rows]
        with torch.inference_mode():
            sampled, logprobs = sample(logits, [self._states[i] for i in ids])
        tokens[rows] = sampled
        return StepResult(Outputs(tokens), {i: lp for i, lp in zip(ids, logprobs, strict=True) if lp is not None})

    def _finish(self) -> None:
        """Wait for the device. A step that samples has waited already: its tokens came to the host in stream order."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()

    @torch.inference_mode()
    def _forward(self, batch: Batch, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> torch.Tensor:
        """Logits [len(rows), vocab] behind the last token of each of ``rows``; writes the batch's K/V to the pool."""
        device = self.model.device
        step = build_step(batch, self.pool, self._kernels)
        last = np.cumsum(batch.num_scheduled, dtype=np.int64) - 1
        output = self.model.model(
            torch.from_numpy(self._input_tokens(batch, last)).to(device)[None],
            position_ids=step.position_ids,
            use_cache=False,
            logits_to_keep=torch.from_numpy(last[rows]).to(device),
            **{STEP_KWARG: step},
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _input_tokens(
        self, batch: Batch, last: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The batch's tokens int64[T], with the tokens filled in that an earlier batch sampled."""
        tokens = batch.tokens.astype(np.int64)
        for i in np.flatnonzero(batch.pending):
            tokens[last[i]] = self._states[batch.request_ids[i]].output[-1]
        return tokens
