"""Pools of blocks whose inside does not matter."""

from __future__ import annotations

from pdkv.runtime.geometry import Geometry


def plain(num_blocks: int, bytes_per_block: int) -> Geometry:
    """Blocks of so many bytes: one token, one layer, one head."""
    return Geometry(
        ranks=1, num_blocks=num_blocks, layers=1, vectors=1, block_size=1, heads=1, head_bytes=bytes_per_block
    )
