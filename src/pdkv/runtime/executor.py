"""Runs batches: token ids and block tables in, sampled tokens out. Sampling state lives here, by request id."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from pdkv.core.ports import Batch, Int32Array, Outputs
from pdkv.runtime.kv_pool import KvPool
from pdkv.runtime.models.loader import LoadedModel
from pdkv.runtime.ranks.processes import RankProcesses
from pdkv.runtime.runner import Runner
from pdkv.runtime.sampler import SamplingParams, SamplingState, TokenLogprobs, sample


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one batch gave: the engine's `Outputs`, and log-probabilities of the requests that asked for them."""

    outputs: Outputs
    logprobs: dict[str, TokenLogprobs]


class Executor:
    """One model on one KV pool, or rank 0 of several ranks. Not thread-safe: the engine's thread owns it."""

    def __init__(self, model: LoadedModel, pool: KvPool, ranks: RankProcesses | None = None) -> None:
        """Takes the other ``ranks`` over, which follow. Raises ConfigError when the pool is not the model's."""
        self.model = model
        self.pool = pool
        self._runner = Runner(model, pool)
        self._ranks = ranks
        self._states: dict[str, SamplingState] = {}

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
        recompute them do not sample. Raises RankFailed when another rank has died or hangs.

        When it returns, all K/V of the batch are in the pool, on a GPU too: the engine then frees, grants and refills
        blocks, and the mover reads and writes them without a thought for CUDA's streams. (So are those of other ranks:
        each writes a layer's K/V before it adds to the sum that ends the layer.)
        """
        tokens = np.zeros(len(batch), np.int32)
        if len(batch) == 0:
            return StepResult(Outputs(tokens), {})
        rows = np.flatnonzero(batch.samples)
        logits = self._forward(self._known(batch))
        if len(rows) == 0:
            self._runner.finish()  # a step that samples has waited: its tokens came to the host in stream order
            return StepResult(Outputs(tokens), {})
        ids = [batch.request_ids[i] for i in rows]
        with torch.inference_mode():
            sampled, logprobs = sample(logits, [self._states[i] for i in ids])
        tokens[rows] = sampled
        return StepResult(Outputs(tokens), {i: lp for i, lp in zip(ids, logprobs, strict=True) if lp is not None})

    def close(self) -> None:
        """End the other ranks; a forward pass that still waits for them fails."""
        if self._ranks is not None:
            self._ranks.close()

    def _forward(self, batch: Batch) -> torch.Tensor:
        """`Runner.forward` on all ranks."""
        if self._ranks is None:
            return self._runner.forward(batch)
        self._ranks.step(batch)
        with self._ranks.explained():
            return self._runner.forward(batch)

    def _known(self, batch: Batch) -> Batch:
        """``batch`` with the tokens filled in that an earlier batch sampled."""
        if not batch.pending.any():
            return batch
        tokens = batch.tokens.copy()
        last = np.cumsum(batch.num_scheduled, dtype=np.int64) - 1
        for i in np.flatnonzero(batch.pending):
            tokens[last[i]] = self._states[batch.request_ids[i]].output[-1]
        return msgspec.structs.replace(batch, tokens=tokens, pending=np.zeros_like(batch.pending))
