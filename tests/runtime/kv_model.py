"""KV as it is meant, by token and head, and as it lies in memory: laid out by slicing, no offset is computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdkv.runtime.geometry import Geometry

Bytes = npt.NDArray[np.uint8]


def meant(pool: Geometry, rng: np.random.Generator) -> Bytes:
    """KV as [block, layer, vector, token, head, byte]."""
    shape = (pool.num_blocks, pool.layers, pool.vectors, pool.block_size, pool.heads, pool.head_bytes)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def laid_out(kv: Bytes, pool: Geometry) -> Bytes:
    """The same as the memory of all ranks."""
    firsts = [rank * pool.heads // pool.ranks for rank in range(pool.ranks)]
    count = max(1, pool.heads // pool.ranks)
    return np.concatenate([kv[..., first : first + count, :].ravel() for first in firsts])
