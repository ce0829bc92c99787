"""Which block holds the content of which hash (design 5a). The plain form: a dict entry per block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from pdkv.core.ports import Int32Array


class PrefixIndex(Protocol):
    """Lookup, insert and drop of hashed blocks; duplicates are kept, and the first inserted is found."""

    def lookup(self, hashes: Sequence[bytes]) -> Int32Array:
        """int32[m]: blocks of the longest prefix of ``hashes`` that is cached."""
        ...

    def insert(self, hashes: Sequence[bytes], blocks: Int32Array) -> None:
        """``blocks[i]`` now holds the content of ``hashes[i]``; a block carries at most one hash."""
        ...

    def drop(self, blocks: Iterable[int]) -> tuple[bytes, ...]:
        """Forget what ``blocks`` hold; returns the hashes dropped, one by one, in that order (for KV events)."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


class DictPrefixIndex:
    """One dict entry per cached block. Duplicates hang in a dict of their own, in order of insertion."""

    def __init__(self, num_blocks: int) -> None:
        self._first: dict[bytes, int] = {}
        self._twins: dict[bytes, dict[int, None]] = {}
        self._hash: list[bytes | None] = [None] * num_blocks

    def lookup(self, hashes: Sequence[bytes]) -> Int32Array:
        """int32[m]: blocks of the longest prefix of ``hashes`` that is cached."""
        found: list[int] = []
        for key in hashes:
            block = self._first.get(key)
            if block is None:
                break
            found.append(block)
        return np.asarray(found, dtype=np.int32)

    def insert(self, hashes: Sequence[bytes], blocks: Int32Array) -> None:
        """``blocks[i]`` now holds the content of ``hashes[i]``."""
        for key, block in zip(hashes, blocks.tolist(), strict=True):
            assert self._hash[block] is None, f"block {block} already carries a hash"
            self._hash[block] = key
            first = self._first.setdefault(key, block)
            if first != block:
                self._twins.setdefault(key, {first: None})[block] = None

    def drop(self, blocks: Iterable[int]) -> tuple[bytes, ...]:
        """Forget what ``blocks`` hold; returns the hashes dropped."""
        dropped: list[bytes] = []
        for block in blocks:
            key = self._hash[block]
            if key is None:
                continue
            self._hash[block] = None
            dropped.append(key)
            twins = self._twins.get(key)
            if twins is None:
                del self._first[key]
                continue
            del twins[block]
            self._first[key] = next(iter(twins))
            if len(twins) == 1:
                del self._twins[key]
        return tuple(dropped)

    def clear(self) -> None:
        """Forget everything."""
        self._first.clear()
        self._twins.clear()
        self._hash = [None] * len(self._hash)
