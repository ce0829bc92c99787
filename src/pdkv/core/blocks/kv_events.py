"""What a router or monitor may know about the prefix cache: content stored, removed, cleared (spec block-pool 8).

Hashes are whole digests; whoever publishes them cuts them as his readers expect. Stored means that it can be hit, not
that memory was taken; removed means that it cannot be hit any more, not that memory came free.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.core.blocks.extra_keys import ExtraKeys
from pdkv.core.ports import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockStored:
    """``hashes`` of blocks of ``block_size`` tokens; ``tokens`` int32[n] are the whole range they lie in.

    Blocks that no hit needs are left out of ``hashes`` and ``extra_keys`` (one entry a hash), not out of ``tokens``.
    """

    group: int
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: Int32Array
    block_size: int
    extra_keys: tuple[ExtraKeys, ...]
    lora_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """One hash that is not to be found any more in a block (another may still have the same content)."""

    group: int
    key: bytes


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
