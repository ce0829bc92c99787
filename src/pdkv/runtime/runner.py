"""Forward passes of one rank: a batch in, K/V into the rank's pool, logits out."""

from __future__ import annotations

import numpy as np
import torch

from pdkv.core.ports import Batch
from pdkv.errors import ConfigError
from pdkv.runtime.attention import STEP_KWARG, build_step
from pdkv.runtime.kernels import native
from pdkv.runtime.kv_pool import KvPool
from pdkv.runtime.models.loader import LoadedModel


def attending_kernels(model: LoadedModel, kv_dtype: torch.dtype) -> native.Native | None:
    """The C kernels, where they serve this model's attention on a pool of that dtype."""
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return None
    kernels = native.load()
    served = kernels is not None and kernels.can_attend(model.heads, model.kv_heads, model.head_dim, kv_dtype)
    return kernels if served else None


class Runner:
    """One model, or one rank's share of it, on one KV pool. Not thread-safe."""

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
        self._kernels = attending_kernels(model, pool.tensor.dtype)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [n, vocab] behind the last token of each of the n rows that sample; writes the batch's K/V.

        No token of ``batch`` may be pending. A rank other than 0 gets its own columns of the logits.
        """
        device = self.model.device
        step = build_step(batch, self.pool, self._kernels)
        last = np.cumsum(batch.num_scheduled, dtype=np.int64) - 1
        output = self.model.model(
            torch.from_numpy(batch.tokens.astype(np.int64)).to(device)[None],
            position_ids=step.position_ids,
            use_cache=False,
            logits_to_keep=torch.from_numpy(last[batch.samples]).to(device),
            **{STEP_KWARG: step},
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def finish(self) -> None:
        """Wait for the device."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()
