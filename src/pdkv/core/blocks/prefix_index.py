"""Which block holds the content of which hash (design 5a). The plain form: a dict entry per block.

Each group has its own index, so a hash names content *of one group*, as the group id inside vLLM's keys does. Full
attention has another form, `pdkv.core.blocks.run_index`, which does the same and is tested against this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from pdkv.core.blocks.hashing import HashChain
from pdkv.core.blocks.tables import NULL_BLOCK
from pdkv.core.ports import BlockIds, Int32Array, Int64Array


class PrefixIndex(Protocol):
    """Lookup, insert and drop of hashed blocks; duplicates are kept, and the first inserted is found."""

    def lookup(self, hashes: HashChain, most: int | None = None) -> Int32Array:
        """int32[m]: blocks of the longest prefix of ``hashes``, at most ``most``, that is cached."""
        ...

    def find(self, key: bytes) -> int | None:
        """The block that holds the content of one hash. A run index knows those of `add_alias` only."""
        ...

    def insert(self, hashes: HashChain, first: int, blocks: BlockIds, before: int) -> None:
        """``blocks[i]``, which carries no hash, now holds the content of ``hashes[first + i]``; null ones are left out.

        ``hashes`` are those of a whole sequence, ``before`` is its block in front of ``blocks`` (null at the start).
        """
        ...

    def insert_each(
        self, chains: Sequence[HashChain], first: Int64Array, counts: Int64Array, blocks: BlockIds, before: BlockIds
    ) -> None:
        """`insert` for many sequences, in that order; no block of them is null.

        The next ``counts[i]`` of ``blocks`` hold what ``chains[i]`` says from ``first[i]`` on, behind ``before[i]``.
        """
        ...

    def add_alias(self, key: bytes, block: int) -> None:
        """``block`` also holds the content of ``key``, a prefix of what it holds."""
        ...

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        """The hashes that ``block`` carries, the one it got first in front."""
        ...

    def drop(self, blocks: BlockIds) -> None:
        """Forget what ``blocks`` hold."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...

    def contents(self) -> dict[bytes, list[int]]:
        """All there is, for checks: the blocks of each hash, the first inserted in front."""
        ...

    def check(self) -> None:
        """Recount; raises ``AssertionError`` on any difference."""
        ...


class DictPrefixIndex:
    """One dict entry per cached block. Duplicates hang in a dict of their own, in order of insertion."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._twins: dict[bytes, dict[int, None]] = {}
        self._keys: dict[int, tuple[bytes, ...]] = {}

    def lookup(self, hashes: HashChain, most: int | None = None) -> Int32Array:
        """int32[m]: blocks of the longest prefix of ``hashes``, at most ``most``, that is cached."""
        found: list[int] = []
        for key in islice(hashes, most):
            block = self._first.get(key)
            if block is None:
                break
            found.append(block)
        return np.asarray(found, dtype=np.int32)

    def find(self, key: bytes) -> int | None:
        """The block that holds the content of one hash."""
        return self._first.get(key)

    def insert(self, hashes: HashChain, first: int, blocks: BlockIds, before: int) -> None:
        """``blocks[i]`` now holds the content of ``hashes[first + i]``, where it is not null."""
        for entry in np.flatnonzero(blocks).tolist():
            self._insert(hashes[first + entry], blocks.item(entry))

    def insert_each(
        self, chains: Sequence[HashChain], first: Int64Array, counts: Int64Array, blocks: BlockIds, before: BlockIds
    ) -> None:
        """`insert` for many sequences, in that order."""
        own = iter(blocks.tolist())
        for hashes, at, count in zip(chains, first.tolist(), counts.tolist(), strict=True):
            for entry in range(at, at + count):
                self._insert(hashes[entry], next(own))

    def _insert(self, key: bytes, block: int) -> None:
        assert block not in self._keys, f"block {block} already carries a hash"
        self._keys[block] = (key,)
        self._enter(key, block)

    def add_alias(self, key: bytes, block: int) -> None:
        """``block`` also holds the content of ``key``."""
        known = self.keys_of(block)
        assert key not in known, f"block {block} already carries this hash"
        self._keys[block] = (*known, key)
        self._enter(key, block)

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        """The hashes that ``block`` carries, the one it got first in front."""
        return self._keys.get(block, ())

    def drop(self, blocks: BlockIds) -> None:
        """Forget what ``blocks`` hold."""
        if not self._keys:
            return
        for block in blocks.tolist():
            for key in self._keys.pop(block, ()):
                self._leave(key, block)

    def clear(self) -> None:
        """Forget everything."""
        self._first.clear()
        self._twins.clear()
        self._keys.clear()

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

    def contents(self) -> dict[bytes, list[int]]:
        """All there is, for checks: the blocks of each hash, the first inserted in front."""
        return {key: [first] for key, first in self._first.items()} | {
            key: list(twins) for key, twins in self._twins.items()
        }

    def check(self) -> None:
        """Recount; raises ``AssertionError`` on any difference."""
        pairs = {(key, block) for block, keys in self._keys.items() for key in keys}
        found = {(key, block) for key, blocks in self.contents().items() for block in blocks}
        assert all(self._first[key] == blocks[0] for key, blocks in self.contents().items()), "prefix index: the first"
        assert pairs == found, "prefix index: hashes of blocks and blocks of hashes differ"
        assert NULL_BLOCK not in self._keys, "prefix index: the null block carries a hash"
