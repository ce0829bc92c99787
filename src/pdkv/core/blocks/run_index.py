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
from dataclasses import dataclass, field

import numpy as np

from pdkv.core.blocks.hashing import HashChain
from pdkv.core.blocks.prefix_index import DictPrefixIndex
from pdkv.core.ports import BoolArray, Int32Array, Int64Array

_SHIFT = 32  # a block's place is layer number << 32 | position in the layer; 0: it carries no hash
_POSITION = (1 << _SHIFT) - 1
_ID_BYTES = 4  # of a block's id
_EMPTY = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class _Run:
    """Hashes side by side; the first is hash number ``depth`` of every sequence that has it."""

    depth: int
    digest_bytes: int
    digests: bytearray
    layers: dict[int, _Layer] = field(default_factory=dict)  # by number, which is the order of insertion
    open_place: int = 0  # of the last block of the last layer, if no content of the run goes beyond it
    dead: int = 0  # entries, those of layers that are gone included, that belong to no block any more

    def __len__(self) -> int:
        return len(self.digests) // self.digest_bytes

    def digest(self, position: int) -> bytes:
        """One hash."""
        return bytes(self.digests[position * self.digest_bytes : (position + 1) * self.digest_bytes])

    def same(self, position: int, hashes: HashChain, at: int) -> int:
        """How many hashes from ``position`` on are those from ``hashes[at]`` on."""
        low, high = 0, min(len(self) - position, len(hashes) - at)
        probe = high  # most of the time all of them
        while low < high:
            if self.digest(position + probe - 1) == hashes.item(at + probe - 1):
                low = probe
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        return low


@dataclass(slots=True, eq=False)
class _Layer:
    """``blocks[i]`` was cached with the content of the run's hash ``start + i``; ``alive`` of them still hold it."""

    number: int
    run: _Run
    start: int
    blocks: array[int]
    alive: int = 0

    @property
    def end(self) -> int:
        """The position in the run behind its last block."""
        return self.start + len(self.blocks)


class RunPrefixIndex:
    """Does what `DictPrefixIndex` does, for groups that register every block of a sequence."""

    def __init__(self, num_blocks: int) -> None:
        self._place = np.zeros(num_blocks, dtype=np.int64)
        self._single = self._place.data  # the same memory: for one block this is faster than numpy
        self._most_dead = max(num_blocks // 2, 16)
        self._partial = DictPrefixIndex()  # content that ends inside a block
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._place[:] = 0
        self._partial.clear()
        self._heads: dict[bytes, _Run] = {}  # by first hash
        self._depths: dict[int, int] = {}  # how many runs begin there
        self._layers: dict[int, _Layer] = {}
        self._last_number = 0
        self._dead = 0  # over all runs

    # -------------------------------------------------------------------------------------------------------- looking

    def lookup(self, hashes: HashChain) -> Int32Array:
        """int32[m]: blocks of the longest prefix of ``hashes`` that is cached."""
        found: list[Int32Array] = []
        at = 0
        while at < len(hashes):
            run = self._heads.get(hashes.item(at))
            if run is None:
                break
            length = run.same(0, hashes, at)
            found.append(self._first_blocks(run, length))
            at += len(found[-1])
            if len(found[-1]) < length:
                break
        return found[0] if len(found) == 1 else np.concatenate(found) if found else _EMPTY

    def _first_blocks(self, run: _Run, length: int) -> Int32Array:
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

    def _entries(self, layer: _Layer, most: int) -> tuple[Int32Array, BoolArray]:
        """int32[n] and bool[n]: the layer's first blocks, at most ``most``; which of them still hold what they held."""
        count = min(len(layer.blocks), most)
        ids: Int32Array = np.frombuffer(layer.blocks, dtype=np.int32, count=count).copy()  # who looks in forbids growth
        if layer.alive == len(layer.blocks):
            return ids, np.ones(count, dtype=np.bool_)
        first = layer.number << _SHIFT
        return ids, self._place.take(ids) == np.arange(first, first + count)

    def find(self, key: bytes) -> int | None:
        """The block whose content up to ``key`` ends inside it."""
        return self._partial.find(key)

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        """The hashes that ``block`` carries, the one it got first in front."""
        place = self._single[block]
        if not place:
            return self._partial.keys_of(block)
        layer = self._layers[place >> _SHIFT]
        return (layer.run.digest(layer.start + (place & _POSITION)), *self._partial.keys_of(block))

    # ------------------------------------------------------------------------------------------------------ inserting

    def insert(self, hashes: HashChain, first: int, blocks: Int32Array, before: int) -> None:
        """``blocks[i]``, none of them null, now holds the content of ``hashes[first + i]``."""
        assert np.count_nonzero(self._place.take(blocks)) == 0, "a block already carries a hash"
        self._insert(hashes, first, blocks, before)

    def _insert(self, hashes: HashChain, first: int, blocks: Int32Array, before: int) -> None:
        layer, run, position = self._behind(hashes, first, before)
        at, end = first, first + len(blocks)
        while at < end:
            count = 0 if run is None or position == len(run) else min(run.same(position, hashes, at), end - at)
            if not count:
                known = self._heads.get(hashes.item(at))
                if known is not None:
                    layer, run, position = None, known, 0
                    continue
                count = self._new_until(hashes, at, end) - at
                new = hashes.joined(at, at + count)
                if run is not None and position == len(run):
                    run.digests += new
                else:
                    layer, run, position = None, self._enter(_Run(at, len(new) // count, bytearray(new))), 0
            assert run is not None
            self._put(run, position, blocks[at - first : at - first + count], layer)
            at += count
            position += count

    def insert_each(
        self, chains: Sequence[HashChain], first: Int64Array, counts: Int64Array, blocks: Int32Array, before: Int32Array
    ) -> None:
        """`insert` for many sequences: the next ``counts[i]`` of ``blocks`` for ``chains[i]`` from ``first[i]`` on."""
        assert np.count_nonzero(self._place.take(blocks)) == 0, "a block already carries a hash"
        places, ends = self._place.take(before), counts.cumsum()
        # Where they stand if all go on at the end of a layer; the others are put elsewhere below.
        self._place.put(blocks, np.repeat(places + 1 - (ends - counts), counts) + np.arange(len(blocks)))
        layers, heads, ids = self._layers, self._heads, blocks.tobytes()
        arrays = (array.tolist() for array in (first, counts, ends, places, before))
        for hashes, at, count, end, place, last in zip(chains, *arrays, strict=True):
            layer = layers[place >> _SHIFT] if place else None
            key = hashes.item(at)
            if (
                layer is not None
                and (run := layer.run).open_place == place
                and key not in heads
                and (count == 1 or self._new_until(hashes, at, at + count) == at + count)
            ):
                run.digests += key if count == 1 else hashes.joined(at, at + count)
                layer.blocks.frombytes(ids[_ID_BYTES * (end - count) : _ID_BYTES * end])
                layer.alive += count
                run.open_place = place + count
            else:
                self._insert(hashes, at, blocks[end - count : end], last)

    def _behind(self, hashes: HashChain, first: int, before: int) -> tuple[_Layer | None, _Run | None, int]:
        """Where content ``hashes[first]`` stands or would be appended: layer of block ``before``, run and position."""
        place = self._single[before]
        if place:
            layer = self._layers[place >> _SHIFT]
            return layer, layer.run, layer.start + (place & _POSITION) + 1
        if first == 0:
            return None, None, 0
        # The block before was dropped while in use: others with its content may stand in the nearest run before it.
        for depth in sorted((depth for depth in self._depths if depth < first), reverse=True):
            run = self._heads.get(hashes[depth])
            if run is not None:
                position = first - depth
                inside = position <= len(run) and run.digest(position - 1) == hashes[first - 1]
                return None, run if inside else None, position
        return None, None, 0

    def _new_until(self, hashes: HashChain, at: int, end: int) -> int:
        """Up to where ``hashes[at:end]``, of which the first is new, are new: to the first hash of another run."""
        for place in self._depths if len(self._depths) < end - at else range(at + 1, end):
            if at < place < end and hashes.item(place) in self._heads:
                end = place
        return end

    def _enter(self, run: _Run) -> _Run:
        """From now on ``run``, which has its first hash, can be found."""
        self._heads[run.digest(0)] = run
        self._depths[run.depth] = self._depths.get(run.depth, 0) + 1
        return run

    def _put(self, run: _Run, position: int, blocks: Int32Array, layer: _Layer | None) -> None:
        """Append to ``layer`` where that keeps the order of insertion, else lay a new one over the run."""
        if layer is None or layer.end != position or self._covered_behind(layer, position):
            self._last_number += 1
            layer = self._layers[self._last_number] = _Layer(self._last_number, run, position, array("i"))
            run.layers[layer.number] = layer
        count = len(blocks)
        layer.alive += count
        place = (layer.number << _SHIFT) + len(layer.blocks)
        if count == 1:
            block = blocks.item()
            layer.blocks.append(block)
            self._single[block] = place
        else:
            layer.blocks.frombytes(blocks.tobytes())
            self._place.put(blocks, np.arange(place, place + count))
        at_end = position + count == len(run) and next(reversed(run.layers)) == layer.number
        run.open_place = place + count - 1 if at_end else 0

    @staticmethod
    def _covered_behind(layer: _Layer, position: int) -> bool:
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

    def drop(self, blocks: Int32Array) -> None:
        """Forget what ``blocks`` hold."""
        self._partial.drop(blocks)
        if len(blocks) == 1:
            block = blocks.item()
            number, self._single[block] = self._single[block] >> _SHIFT, 0
            self._lose(number, 1)
        else:  # a request's blocks come one after the other, in few stretches
            numbers = self._place.take(blocks) >> _SHIFT
            self._place.put(blocks, 0)
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
        layer.alive -= count
        run.dead += count
        self._dead += count
        if not layer.alive:
            del self._layers[number], run.layers[number]
            if not run.layers:
                self._remove(run)

    def _remove(self, run: _Run) -> None:
        del self._heads[run.digest(0)]
        self._depths[run.depth] -= 1
        if not self._depths[run.depth]:
            del self._depths[run.depth]
        self._dead -= run.dead

    def _rebuild(self, run: _Run) -> None:
        """In place of ``run``, runs of the stretches that blocks hold, with layers of the blocks that hold them."""
        self._remove(run)
        kept: list[tuple[int, Int32Array]] = []
        held = np.zeros(len(run), dtype=np.bool_)
        for layer in run.layers.values():
            del self._layers[layer.number]
            ids, alive = self._entries(layer, len(run))
            held[layer.start : layer.end] |= alive
            kept += [(layer.start + first, ids[first:end]) for first, end in _stretches(alive)]
        firsts: list[int] = []
        rests: list[_Run] = []
        for first, end in _stretches(held):
            digests = run.digests[first * run.digest_bytes : end * run.digest_bytes]
            firsts.append(first)
            rests.append(self._enter(_Run(run.depth + first, run.digest_bytes, digests)))
        for start, ids in kept:
            at = bisect_right(firsts, start) - 1
            self._put(rests[at], start - firsts[at], ids, None)

    # ------------------------------------------------------------------------------------------------------- checking

    def contents(self) -> dict[bytes, list[int]]:
        """All there is, for checks: the blocks of each hash, the first inserted in front."""
        found = self._partial.contents()
        for run in self._heads.values():
            for layer in run.layers.values():
                ids, alive = self._entries(layer, len(run))
                for position in np.flatnonzero(alive).tolist():
                    found.setdefault(run.digest(layer.start + position), []).append(ids.item(position))
        return found

    def check(self) -> None:
        """Recount; raises ``AssertionError`` on any difference."""
        self._partial.check()
        hashes = [run.digest(position) for run in self._heads.values() for position in range(len(run))]
        assert len(set(hashes)) == len(hashes), "run index: a hash stands twice"
        assert Counter(run.depth for run in self._heads.values()) == self._depths, "run index: depths differ"
        stored = 0
        for head, run in self._heads.items():
            assert run.digest(0) == head, "run index: a run stands under another hash than its first"
            assert run.layers, "run index: a run that no block holds"
            last = run.layers[next(reversed(run.layers))]
            end = (last.number << _SHIFT) + len(last.blocks) - 1 if last.end == len(run) else 0
            stale = run.open_place >> _SHIFT not in run.layers  # no block stands there any more
            assert stale or run.open_place == end, "run index: the end of a run"
            for layer in run.layers.values():
                assert layer.alive == np.count_nonzero(self._entries(layer, len(run))[1]), "run index: blocks left"
                assert layer.alive > 0, "run index: a layer of which nothing is left"
                assert self._layers[layer.number] is layer, "run index: a layer is not known by its number"
                assert layer.run is run, "run index: a layer names another run"
                assert 0 <= layer.start < layer.end <= len(run), "run index: a layer reaches beyond its run"
                stored += len(layer.blocks)
        assert len(self._layers) == sum(len(run.layers) for run in self._heads.values()), "run index: a lost layer"
        held = {(self.keys_of(block)[0], block) for block in np.flatnonzero(self._place).tolist()}
        found = {(key, block) for key, blocks in self.contents().items() for block in blocks}
        partial = {(key, block) for key, blocks in self._partial.contents().items() for block in blocks}
        assert held == found - partial, "run index: hashes of blocks and blocks of hashes differ"
        assert sum(run.dead for run in self._heads.values()) == self._dead, "run index: dead entries differ"
        assert stored - np.count_nonzero(self._place) <= self._dead, "run index: dead entries are not counted"


def _stretches(flags: BoolArray) -> Iterator[tuple[int, int]]:
    """(first, end) of each stretch of true ``flags``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.view(np.int8), [0]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
