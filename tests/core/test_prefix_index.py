"""Both prefix indexes against a naive model: duplicates, first inserted wins, drops, memory that is bounded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdkv.core.blocks.hashing import HashChain
from pdkv.core.blocks.prefix_index import DictPrefixIndex, PrefixIndex
from pdkv.core.blocks.run_index import RunPrefixIndex

BLOCKS = 40
LENGTH = 7

MAKERS: dict[str, Callable[[int], PrefixIndex]] = {"dict": lambda _: DictPrefixIndex(), "runs": RunPrefixIndex}


def ids(blocks: Sequence[int]) -> np.ndarray:
    return np.asarray(blocks, dtype=np.int32)


def chain(tokens: Sequence[int]) -> HashChain:
    """The hashes of a sequence of one-token blocks."""
    hashes = HashChain()
    hashes.extend([hashlib.sha256(bytes(tokens[: end + 1])).digest() for end in range(len(tokens))])
    return hashes


class Naive:
    """(hash, block) pairs in order of insertion."""

    def __init__(self) -> None:
        self.pairs: list[tuple[bytes, int]] = []

    def blocks_of(self, key: bytes) -> list[int]:
        return [block for other, block in self.pairs if other == key]

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        found = []
        for key in hashes:
            if not self.blocks_of(key):
                break
            found.append(self.blocks_of(key)[0])
        return found

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        return tuple(key for key, other in self.pairs if other == block)


SEQUENCE = st.lists(st.integers(0, 1), min_size=1, max_size=LENGTH)


class IndexMachine(RuleBasedStateMachine):
    """Sequences over two tokens, so that they share prefixes, part, and are cached more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Naive()
        self.indexes: list[PrefixIndex] = [make(BLOCKS) for make in MAKERS.values()]

    def fresh(self) -> list[int]:
        taken = {block for _, block in self.model.pairs}
        return [block for block in range(1, BLOCKS) if block not in taken]

    @rule(tokens=SEQUENCE, first=st.integers(0, LENGTH - 1), seed=st.integers(0, 2**31), lost=st.booleans())
    def insert(self, tokens: list[int], first: int, seed: int, lost: bool) -> None:
        """``lost``: the block before carries no hash any more, though others of its content may."""
        hashes, rng = chain(tokens), np.random.default_rng(seed)
        first = min(first, len(hashes) - 1)
        blocks = rng.permutation(self.fresh())[: len(hashes) - first].tolist()
        before = 0
        if first and not lost:
            before = int(rng.choice([0, *self.model.blocks_of(hashes[first - 1])]))
        if not blocks:
            return
        for index in self.indexes:
            index.insert(hashes, first, ids(blocks), before)
        self.model.pairs += zip(hashes[first : first + len(blocks)], blocks, strict=True)

    @rule(sequences=st.lists(SEQUENCE, min_size=1, max_size=3), steps=st.lists(st.integers(1, 3), max_size=LENGTH))
    def decode_together(self, sequences: list[list[int]], steps: list[int]) -> None:
        """Requests, perhaps of one content, register their next blocks together, so many in each step."""
        chains, before, first = [chain(tokens) for tokens in sequences], [0] * len(sequences), 0
        for step in steps:
            rows = [row for row, hashes in enumerate(chains) if first < len(hashes)]
            counts = [min(step, len(chains[row]) - first) for row in rows]
            blocks = self.fresh()[: sum(counts)]
            if len(blocks) < sum(counts):
                return
            for index in self.indexes:
                firsts, ahead = np.full(len(rows), first), ids([before[row] for row in rows])
                index.insert_each([chains[row] for row in rows], firsts, np.asarray(counts, int), ids(blocks), ahead)
            for row, count in zip(rows, counts, strict=True):
                own, blocks = blocks[:count], blocks[count:]
                self.model.pairs += zip(chains[row][first : first + count], own, strict=True)
                before[row] = own[-1]
            first += step

    @rule(tokens=SEQUENCE, seed=st.integers(0, 99))
    def alias(self, tokens: list[int], seed: int) -> None:
        """Content that ends inside a block: never under a hash of whole blocks."""
        key = b"inside " + bytes(tokens)
        block = 1 + seed % (BLOCKS - 1)
        if key in self.model.keys_of(block):
            return
        for index in self.indexes:
            index.add_alias(key, block)
            assert index.find(key) == [*self.model.blocks_of(key), block][0]
        self.model.pairs.append((key, block))

    @precondition(lambda self: self.model.pairs)
    @rule(seed=st.integers(0, 2**31), share=st.sampled_from([0.05, 0.3, 0.9]), tail=st.booleans())
    def drop(self, seed: int, share: float, tail: bool) -> None:
        rng = np.random.default_rng(seed)
        held = list(dict.fromkeys(block for _, block in self.model.pairs))
        count = max(1, int(share * len(held)))
        blocks = held[-count:] if tail else rng.permutation(held)[:count].tolist()
        for index in self.indexes:
            index.drop(ids(blocks))
        self.model.pairs = [pair for pair in self.model.pairs if pair[1] not in blocks]

    @rule(really=st.integers(0, 9))
    def clear(self, really: int) -> None:
        if really == 0:
            for index in self.indexes:
                index.clear()
            self.model.pairs.clear()

    @rule(tokens=SEQUENCE)
    def look(self, tokens: list[int]) -> None:
        hashes = chain(tokens)
        for index in self.indexes:
            assert index.lookup(hashes).tolist() == self.model.lookup(hashes)

    @invariant()
    def all_agree(self) -> None:
        contents = {key: self.model.blocks_of(key) for key, _ in self.model.pairs}
        for index in self.indexes:
            index.check()
            assert index.contents() == contents
            for block in range(BLOCKS):
                assert index.keys_of(block) == self.model.keys_of(block)


IndexMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestIndexes = IndexMachine.TestCase


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[int], PrefixIndex]:
    return MAKERS[request.param]


def test_interleaved_duplicates_of_the_design(make: Callable[[int], PrefixIndex]) -> None:
    """Design 5a: A caches blocks 1-2, B 1-4, then A 3-4: a hit is A1 A2 B3 B4; without A1 it is B1 A2 B3 B4."""
    index, hashes = make(9), chain([0, 1, 2, 3])
    index.insert(hashes, 0, ids([1, 2]), 0)
    index.insert(hashes, 0, ids([5, 6, 7, 8]), 0)
    index.insert(hashes, 2, ids([3, 4]), 2)
    assert index.lookup(hashes).tolist() == [1, 2, 7, 8]
    assert index.keys_of(1) == (hashes[0],)
    index.drop(ids([1]))
    assert index.lookup(hashes).tolist() == [5, 2, 7, 8]


def test_a_block_carries_one_hash(make: Callable[[int], PrefixIndex]) -> None:
    index = make(3)
    index.insert(chain([0]), 0, ids([1]), 0)
    with pytest.raises(AssertionError, match="already carries"):
        index.insert(chain([1]), 0, ids([1]), 0)


def test_runs_that_nobody_holds_are_swept_out() -> None:
    """A pool of 256 blocks through which 100 pools' worth of content goes stores never more than one and a half."""
    index, size, tables = RunPrefixIndex(256), 16, []
    for number in range(1600):
        tokens = [number // 256, number % 256, *range(size - 2)]
        hashes = chain(tokens)
        if len(tables) == 15:
            index.drop(tables.pop(0)[::-1])
        held = {block for table in tables for block in table.tolist()}
        table = ids([block for block in range(1, 256) if block not in held][:size])
        index.insert(hashes, 0, table, 0)
        tables.append(table)
        stored = sum(len(layer.blocks) for layer in index._layers.values())
        assert stored <= 256 + 128
        assert sum(run.length for run in index._heads.values()) <= 256 + 128
    index.check()


def test_layers_that_nobody_holds_are_taken_off() -> None:
    """One content cached and evicted again and again in a large pool: a lookup does not go through all its past."""
    index, hashes = RunPrefixIndex(10_000), chain([1, 2])
    for turn in range(1000):
        table = ids([1 + turn, 2000 + turn])
        index.insert(hashes, 0, table, 0)
        assert index.lookup(hashes).tolist() == table.tolist()
        assert len(index._layers) == 1
        index.drop(table)
    index.check()


def test_a_sparse_run_falls_apart_when_swept() -> None:
    """Blocks in the middle of a sequence outlive those before them: they are found again when the gap is filled."""
    index, hashes = RunPrefixIndex(256), chain(list(range(200)))
    index.insert(hashes, 0, ids(range(1, 201)), 0)
    index.drop(ids([*range(1, 100), *range(120, 201)]))
    assert sum(run.length for run in index._heads.values()) == 20
    assert index.lookup(hashes).tolist() == []
    index.insert(hashes, 0, ids(range(1, 100)), 0)
    index.check()
    assert index.lookup(hashes).tolist() == list(range(1, 120))
    index.insert(hashes, 120, ids(range(130, 210)), 0)  # behind blocks whose table lost them
    index.check()
    assert index.lookup(hashes).tolist() == [*range(1, 120)]
    index.insert(hashes, 119, ids([220]), 119)
    assert index.lookup(hashes).tolist() == [*range(1, 120), 220, *range(130, 210)]
