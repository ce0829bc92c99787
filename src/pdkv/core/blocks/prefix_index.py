"""Which block holds the content of which hash (design 5a). The plain form: a dict entry per block.

Each group has its own index, so a hash names content *of one group*, as the group id inside vLLM's keys does.
"""

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

    def find(self, key: bytes) -> int | None:
        """The block that holds the content of one hash."""
        ...

    def insert(self, hashes: Sequence[bytes], blocks: Int32Array) -> None:
        """``blocks[i]``, which carries no hash, now holds the content of ``hashes[i]``."""
        ...

    def add_alias(self, key: bytes, block: int) -> None:
        """``block`` also holds the content of ``key``, a prefix of what it holds."""
        ...

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        """The hashes that ``block`` carries, the one it got first in front."""
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
        self._aliases: dict[int, list[bytes]] = {}

    def lookup(self, hashes: Sequence[bytes]) -> Int32Array:
        """int32[m]: blocks of the longest prefix of ``hashes`` that is cached."""
        found: list[int] = []
        for key in hashes:
            block = self._first.get(key)
            if block is None:
                break
            found.append(block)
        return np.asarray(found, dtype=np.int32)

    def find(self, key: bytes) -> int | None:
        """The block that holds the content of one hash."""
        return self._first.get(key)

    def insert(self, hashes: Sequence[bytes], blocks: Int32Array) -> None:
        """``blocks[i]`` now holds the content of ``hashes[i]``."""
        for key, block in zip(hashes, blocks.tolist(), strict=True):
            assert self._hash[block] is None, f"block {block} already carries a hash"
            self._hash[block] = key
            self._enter(key, block)

    def add_alias(self, key: bytes, block: int) -> None:
        """``block`` also holds the content of ``key``."""
        assert key not in self.keys_of(block), f"block {block} already carries this hash"
        if self._hash[block] is None:
            self._hash[block] = key
        else:
            self._aliases.setdefault(block, []).append(key)
        self._enter(key, block)

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        """The hashes that ``block`` carries, the one it got first in front."""
        first = self._hash[block]
        return () if first is None else (first, *self._aliases.get(block, ()))

    def drop(self, blocks: Iterable[int]) -> tuple[bytes, ...]:
        """Forget what ``blocks`` hold; returns the hashes dropped."""
        dropped: list[bytes] = []
        for block in blocks:
            key = self._hash[block]
            if key is None:
                continue
            self._hash[block] = None
            self._leave(key, block)
            dropped.append(key)
            if self._aliases and block in self._aliases:
                for alias in self._aliases.pop(block):
                    self._leave(alias, block)
                    dropped.append(alias)
        return tuple(dropped)

    def clear(self) -> None:
        """Forget everything."""
        self._first.clear()
        self._twins.clear()
        self._aliases.clear()
        self._hash = [None] * len(self._hash)

    def _enter(self, key: bytes, block: int) -> None:
        first = self._first.setdefault(key, block)
        if first != block:
            self._twins.setdefault(key, {first: None})[block] = None

    def _leave(self, key: bytes, block: int) -> None:
        twins = self._twins.get(key)
        if twins is None:
            del self._first[key]
            return
        del twins[block]
        self._first[key] = next(iter(twins))
        if len(twins) == 1:
            del self._twins[key]
