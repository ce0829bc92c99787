"""The prefix index against a naive model: duplicates, first inserted wins, drops one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.core.blocks.prefix_index import DictPrefixIndex

BLOCKS = 12


class Naive:
    """(hash, block) pairs in order of insertion."""

    def __init__(self) -> None:
        self.pairs: list[tuple[bytes, int]] = []

    def lookup(self, hashes: list[bytes]) -> list[int]:
        found = []
        for key in hashes:
            block = next((block for other, block in self.pairs if other == key), None)
            if block is None:
                break
            found.append(block)
        return found

    def drop(self, blocks: list[int]) -> tuple[bytes, ...]:
        dropped = []
        for block in blocks:
            dropped += self.keys_of(block)
            self.pairs = [pair for pair in self.pairs if pair[1] != block]
        return tuple(dropped)

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        return tuple(key for key, other in self.pairs if other == block)


KEYS = [bytes([i]) for i in range(4)]
OPERATION = st.tuples(
    st.sampled_from(["insert", "alias", "drop", "lookup", "clear"]),
    st.lists(st.integers(0, BLOCKS - 1), max_size=4, unique=True),
    st.lists(st.sampled_from(KEYS), min_size=4, max_size=4),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(OPERATION, max_size=60))
def test_equals_a_naive_index(operations: list[tuple[str, list[int], list[bytes]]]) -> None:
    index, model = DictPrefixIndex(BLOCKS), Naive()
    for name, blocks, keys in operations:
        if name == "insert":
            taken = {block for _, block in model.pairs}
            fresh = [block for block in blocks if block not in taken]
            index.insert(keys[: len(fresh)], np.asarray(fresh, dtype=np.int32))
            model.pairs += zip(keys, fresh, strict=False)
        elif name == "alias" and blocks and keys[0] not in model.keys_of(blocks[0]):
            index.add_alias(keys[0], blocks[0])
            model.pairs.append((keys[0], blocks[0]))
        elif name == "drop":
            assert index.drop(blocks) == model.drop(blocks)
        elif name == "clear" and len(blocks) == 4:
            index.clear()
            model.pairs.clear()
        for key in KEYS:
            found = model.lookup([key])
            assert index.lookup([key]).tolist() == found
            assert index.find(key) == (found[0] if found else None)
        assert all(index.keys_of(block) == model.keys_of(block) for block in range(BLOCKS))
        assert index.lookup(keys).tolist() == model.lookup(keys)


def test_interleaved_duplicates_of_the_design() -> None:
    """Design 5a: A caches blocks 1-2, B 1-4, then A 3-4: a hit is A1 A2 B3 B4; without A1 it is B1 A2 B3 B4."""
    index, keys = DictPrefixIndex(9), KEYS
    index.insert(keys[:2], np.asarray([1, 2], dtype=np.int32))
    index.insert(keys, np.asarray([5, 6, 7, 8], dtype=np.int32))
    index.insert(keys[2:], np.asarray([3, 4], dtype=np.int32))
    assert index.lookup(keys).tolist() == [1, 2, 7, 8]
    assert index.drop([1]) == (keys[0],)
    assert index.lookup(keys).tolist() == [5, 2, 7, 8]


def test_a_block_carries_one_hash() -> None:
    index = DictPrefixIndex(3)
    index.insert([b"a"], np.asarray([1], dtype=np.int32))
    with pytest.raises(AssertionError, match="already carries"):
        index.insert([b"b"], np.asarray([1], dtype=np.int32))
