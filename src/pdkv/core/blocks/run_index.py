"""The prefix index of full attention (design 5a): cached sequences are runs, not an entry per block.

A *run* is a stretch of hashes, each chained to the one before it, that stand side by side. Hashes of a sequence that
are equal at one place are equal at all places before it, so where two sequences part is found by binary search. A run
ends where its sequence ended or another one branched off; the branch is a run of its own, found by its first hash.

    every hash stands in exactly one run, so only first hashes need a dict

The blocks that hold a run's content lie over it in *layers*, one for each time that a stretch of blocks was cached;
of those at one place the first in order of layers is the first inserted:

    run      h0 h1 h2 h3          (design 5a: A caches two blocks, B four, then A two more)
    layer 1  A1 A2
    layer 2  B1 B2 B3 B4
    layer 3        A3 A4          a hit is A1 A2 B3 B4; once A1 is evicted, B1 A2 B3 B4

Each block knows the layer and the place in it where it stands; dropping it changes just that, and the layer's count of
blocks that are left. A layer, and a run, of which nothing is left is gone at once. Where a part is left the rest stays,
and is swept out when such entries are as many as half of the pool.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from pdkv.core.blocks.hashing import HashChain
from pdkv.core.blocks.prefix_index import DictPrefixIndex
from pdkv.core.blocks.runs import Layer, Run
from pdkv.core.ports import BlockIds, BoolArray, Int32Array, Int64Array

_EMPTY = np.empty(0, dtype=np.int32)
_BLOCK_BYTES = _EMPTY.itemsize


class RunPrefixIndex:
    """Does what `DictPrefixIndex` does, for groups that register every block of a sequence."""

    def __init__(self, num_blocks: int) -> None:
        self._number: Int64Array = np.zeros(num_blocks, dtype=np.int64)  # of each block's layer; 0: it carries no hash
        self._position: Int32Array = np.zeros(num_blocks, dtype=np.int32)  # in that layer
        # the same memory: for one block this is faster than numpy
        self._single_number, self._single_position = self._number.data, self._position.data
        self._most_dead = max(num_blocks // 2, 16)
        self._partial = DictPrefixIndex()  # content that ends inside a block
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._number[:] = 0
        self._partial.clear()
        self._heads: dict[bytes, Run] = {}  # by first hash
        self._depths: dict[int, int] = {}  # how many runs begin there
        self._layers: dict[int, Layer] = {}
        self._last_number = 0
        self._dead = 0  # over all runs

    # -------------------------------------------------------------------------------------------------------- looking

    def lookup(self, hashes: HashChain, most: int | None = None) -> Int32Array:
        """int32[m]: blocks of the longest prefix of ``hashes``, at most ``most``, that is cached."""
        found: list[Int32Array] = []
        at, end = 0, len(hashes) if most is None else min(most, len(hashes))
        while at < end:
            run = self._heads.get(hashes.item(at))
            if run is None:
                break
            length = run.same(0, hashes, at, end)
            found.append(self._first_blocks(run, length))
            at += len(found[-1])
            if len(found[-1]) < length:
                break
        return found[0] if len(found) == 1 else np.concatenate(found) if found else _EMPTY

    def _first_blocks(self, run: Run, length: int) -> Int32Array:
        """int32[m]: first inserted blocks of the run's first hashes, at most ``length``, to the first without any."""
        blocks = np.zeros(length, dtype=np.int32)
        for layer in run.layers.values():
            if layer.start < length:
                ids, alive = self._entries(layer, length - layer.start)
                window = blocks[layer.start : layer.start + len(ids)]
                np.copyto(window, ids, where=alive & (window == 0))
                if np.count_nonzero(blocks) == length:
                    return blocks
        return blocks[: int(np.argmin(blocks))]

    def _entries(self, layer: Layer, most: int) -> tuple[Int32Array, BoolArray]:
        """int32[n] and bool[n]: the layer's first blocks, at most ``most``; which of them still hold what they held."""
        count = min(len(layer.blocks), most)
        ids: Int32Array = np.frombuffer(layer.blocks, dtype=np.int32, count=count).copy()  # who looks in forbids growth
        if not layer.lost:
            return ids, np.ones(count, dtype=np.bool_)
        return ids, (self._number[ids] == layer.number) & (self._position[ids] == np.arange(count))

    def find(self, key: bytes) -> int | None:
        """The block whose content up to ``key`` ends inside it."""
        return self._partial.find(key)

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        """The hashes that ``block`` carries, the one it got first in front."""
        number = self._single_number[block]
        if not number:
            return self._partial.keys_of(block)
        layer = self._layers[number]
        digest = layer.run.digest(layer.start + self._single_position[block])
        return (digest, *self._partial.keys_of(block))

    # ------------------------------------------------------------------------------------------------------ inserting

    def insert(self, hashes: HashChain, first: int, blocks: BlockIds, before: int) -> None:
        """``blocks[i]``, none of them null, now holds the content of ``hashes[first + i]``."""
        assert not np.count_nonzero(self._number[blocks]), "a block already carries a hash"
        self._insert(hashes, first, blocks, before)

    def _insert(self, hashes: HashChain, first: int, blocks: BlockIds, before: int) -> None:
        layer, run, position = self._behind(hashes, first, before)
        at, end = first, first + len(blocks)
        while at < end:
            count = 0 if run is None or position == run.length else run.same(position, hashes, at, end)
            if not count:
                known = self._heads.get(hashes.item(at))
                if known is not None:
                    layer, run, position = None, known, 0
                    continue
                count = self._new_until(hashes, at, end) - at
                if run is not None and position == run.length:
                    run.extend(hashes, at, count)
                else:
                    layer, run, position = None, self._enter(Run.of(hashes, at, count)), 0
            assert run is not None
            self._put(run, position, blocks[at - first : at - first + count], layer)
            at += count
            position += count

    def insert_each(
        self, chains: Sequence[HashChain], first: Int64Array, counts: Int64Array, blocks: BlockIds, before: BlockIds
    ) -> None:
        """`insert` for many sequences: the next ``counts[i]`` of ``blocks`` for ``chains[i]`` from ``first[i]`` on."""
        assert not np.count_nonzero(self._number[blocks]), "a block already carries a hash"
        numbers, positions, ends = self._number[before], self._position[before] + 1, counts.cumsum()
        # Where they stand if all go on at the end of a layer; the others are put elsewhere below.
        if len(blocks) == len(chains):
            self._number[blocks], self._position[blocks] = numbers, positions
        else:
            self._number[blocks] = np.repeat(numbers, counts)
            self._position[blocks] = np.repeat(positions - (ends - counts), counts) + np.arange(len(blocks))
        starts, stops, raw = first.tolist(), ends.tolist(), memoryview(blocks.astype(np.int32).tobytes())
        if len(blocks) == len(chains):
            alone = self._depths.keys().isdisjoint(starts)  # nobody else's runs begin there
        else:
            alone = max(self._depths, default=-1) < min(starts)
        layers, stop = map(self._layers.get, numbers.tolist()), 0
        for row, (hashes, layer, position) in enumerate(zip(chains, layers, positions.tolist(), strict=True)):
            start, stop = stop, stops[row]
            if alone and layer is not None and layer.grows_with is hashes and len(layer.blocks) == position:
                layer.blocks.frombytes(raw[start * _BLOCK_BYTES : stop * _BLOCK_BYTES])
            else:
                self._go_on(layer, position, hashes, starts[row], blocks[start:stop], before.item(row))

    def _go_on(
        self, layer: Layer | None, position: int, hashes: HashChain, first: int, blocks: BlockIds, before: int
    ) -> None:
        """`_insert` of blocks that belong into ``layer`` from ``position`` on, if it ends there and is open."""
        end = first + len(blocks)
        if (
            layer is not None
            and layer.run.open is layer
            and len(layer.blocks) == position
            and (first not in self._depths or hashes.item(first) not in self._heads)
            and self._new_until(hashes, first, end) == end
        ):
            layer.run.append(hashes, first, len(blocks))
            layer.blocks.frombytes(blocks.astype(np.int32).tobytes())
        else:
            self._insert(hashes, first, blocks, before)

    def _behind(self, hashes: HashChain, first: int, before: int) -> tuple[Layer | None, Run | None, int]:
        """Where content ``hashes[first]`` stands or would be appended: layer of block ``before``, run and position."""
        number = self._single_number[before]
        if number:
            layer = self._layers[number]
            return layer, layer.run, layer.start + self._single_position[before] + 1
        if first == 0:
            return None, None, 0
        # The block before was dropped while in use: others with its content may stand in the nearest run before it.
        for depth in sorted((depth for depth in self._depths if depth < first), reverse=True):
            run = self._heads.get(hashes[depth])
            if run is not None:
                position = first - depth
                inside = position <= run.length and run.digest(position - 1) == hashes[first - 1]
                return None, run if inside else None, position
        return None, None, 0

    def _new_until(self, hashes: HashChain, at: int, end: int) -> int:
        """Up to where ``hashes[at:end]``, of which the first is new, are new: to the first hash of another run."""
        for place in self._depths if len(self._depths) < end - at else range(at + 1, end):
            if at < place < end and hashes.item(place) in self._heads:
                end = place
        return end

    def _enter(self, run: Run) -> Run:
        """From now on ``run``, which has its first hash, can be found."""
        self._heads[run.digest(0)] = run
        self._depths[run.depth] = self._depths.get(run.depth, 0) + 1
        return run

    def _put(self, run: Run, position: int, blocks: BlockIds, layer: Layer | None) -> None:
        """Append to ``layer`` where that keeps the order of insertion, else lay a new one over the run."""
        if layer is None or layer.end != position or self._covered_behind(layer, position):
            self._last_number += 1
            layer = self._layers[self._last_number] = Layer(self._last_number, run, position, array("i"))
            run.layers[layer.number] = layer
        count, place = len(blocks), len(layer.blocks)
        if count == 1:
            block = blocks.item()
            layer.blocks.append(block)
            self._single_number[block], self._single_position[block] = layer.number, place
        else:
            layer.blocks.frombytes(blocks.astype(np.int32).tobytes())
            self._number[blocks] = layer.number
            self._position[blocks] = np.arange(place, place + count, dtype=np.int32)
        if position + count == run.length and next(reversed(run.layers)) == layer.number:
            run.open_with(layer)
        else:
            run.close()

    @staticmethod
    def _covered_behind(layer: Layer, position: int) -> bool:
        """Whether layers behind this one have, at ``position`` or later, blocks that were inserted before."""
        for other in reversed(layer.run.layers.values()):
            if other is layer:
                return False
            if other.end > position:
                return True
        raise AssertionError("run index: a layer is not one of its run's")

    def add_alias(self, key: bytes, block: int) -> None:
        """``block`` also holds the content of ``key``, which ends inside it."""
        self._partial.add_alias(key, block)

    # ------------------------------------------------------------------------------------------------------- dropping

    def drop(self, blocks: BlockIds) -> None:
        """Forget what ``blocks`` hold."""
        self._partial.drop(blocks)
        if len(blocks) == 1:
            block = blocks.item()
            number, self._single_number[block] = self._single_number[block], 0
            self._lose(number, 1)
        else:  # a request's blocks come one after the other, in few stretches
            numbers = self._number[blocks]
            self._number[blocks] = 0
            first = 0
            for last in (*(numbers[1:] != numbers[:-1]).nonzero()[0].tolist(), len(blocks) - 1):
                self._lose(numbers.item(first), last + 1 - first)
                first = last + 1
        if self._dead > self._most_dead:
            for run in [run for run in self._heads.values() if run.dead]:
                self._rebuild(run)

    def _lose(self, number: int, count: int) -> None:
        """``count`` blocks of layer ``number`` (0: of none) hold what they held no longer."""
        if not number:
            return
        layer = self._layers[number]
        run = layer.run
        layer.lost += count
        run.dead += count
        self._dead += count
        if layer.lost == len(layer.blocks):
            del self._layers[number], run.layers[number]
            if run.open is layer:
                run.close()
            if not run.layers:
                self._remove(run)

    def _remove(self, run: Run) -> None:
        del self._heads[run.digest(0)]
        self._depths[run.depth] -= 1
        if not self._depths[run.depth]:
            del self._depths[run.depth]
        self._dead -= run.dead

    def _rebuild(self, run: Run) -> None:
        """In place of ``run``, runs of the stretches that blocks hold, with layers of the blocks that hold them."""
        self._remove(run)
        kept: list[tuple[int, Int32Array]] = []
        held = np.zeros(run.length, dtype=np.bool_)
        for layer in run.layers.values():
            del self._layers[layer.number]
            ids, alive = self._entries(layer, run.length)
            held[layer.start : layer.end] |= alive
            kept += [(layer.start + first, ids[first:end]) for first, end in _stretches(alive)]
        firsts: list[int] = []
        rests: list[Run] = []
        for first, end in _stretches(held):
            firsts.append(first)
            rests.append(self._enter(Run(run.depth + first, run.hashes.copy(first, end), end - first)))
        for start, ids in kept:
            at = bisect_right(firsts, start) - 1
            self._put(rests[at], start - firsts[at], ids, None)

    # ------------------------------------------------------------------------------------------------------- checking

    def contents(self) -> dict[bytes, list[int]]:
        """All there is, for checks: the blocks of each hash, the first inserted in front."""
        found = self._partial.contents()
        for run in self._heads.values():
            for layer in run.layers.values():
                ids, alive = self._entries(layer, run.length)
                for position in np.flatnonzero(alive).tolist():
                    found.setdefault(run.digest(layer.start + position), []).append(ids.item(position))
        return found

    def check(self) -> None:
        """Recount; raises ``AssertionError`` on any difference."""
        self._partial.check()
        hashes = [run.digest(position) for run in self._heads.values() for position in range(run.length)]
        assert len(set(hashes)) == len(hashes), "run index: a hash stands twice"
        assert Counter(run.depth for run in self._heads.values()) == self._depths, "run index: depths differ"
        stored = 0
        for head, run in self._heads.items():
            assert run.digest(0) == head, "run index: a run stands under another hash than its first"
            assert run.layers, "run index: a run that no block holds"
            last = run.layers[next(reversed(run.layers))]
            at_end = last.end == run.length
            assert run.open in ((last, None) if at_end else (None,)), "run index: the end of a run"
            for layer in run.layers.values():
                left = np.count_nonzero(self._entries(layer, run.length)[1])
                assert left == len(layer.blocks) - layer.lost, "run index: blocks left"
                assert left, "run index: a layer of which nothing is left"
                growing = run.hashes if run.shares and run.open is layer else None
                assert layer.grows_with is growing, "run index: who may append to a layer"
                assert self._layers[layer.number] is layer, "run index: a layer is not known by its number"
                assert layer.run is run, "run index: a layer names another run"
                assert 0 <= layer.start < layer.end <= run.length, "run index: a layer reaches beyond its run"
                stored += len(layer.blocks)
        assert len(self._layers) == sum(len(run.layers) for run in self._heads.values()), "run index: a lost layer"
        held = {(self.keys_of(block)[0], block) for block in np.flatnonzero(self._number).tolist()}
        found = {(key, block) for key, blocks in self.contents().items() for block in blocks}
        partial = {(key, block) for key, blocks in self._partial.contents().items() for block in blocks}
        assert held == found - partial, "run index: hashes of blocks and blocks of hashes differ"
        assert sum(run.dead for run in self._heads.values()) == self._dead, "run index: dead entries differ"
        assert stored - np.count_nonzero(self._number) <= self._dead, "run index: dead entries are not counted"


def _stretches(flags: BoolArray) -> Iterator[tuple[int, int]]:
    """(first, end) of each stretch of true ``flags``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.view(np.int8), [0]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
