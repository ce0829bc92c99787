"""How long blocks live, lie idle and wait for their next hit, on a sample of them (spec block-pool 9)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pdkv.core.ports import BlockIds, BoolArray


@dataclass(frozen=True, slots=True)
class Eviction:
    """A sampled block was handed out again: its times in nanoseconds.

    ``gaps_ns`` lie between its last hits, at most the last four of them.
    """

    lifetime_ns: int
    idle_ns: int
    gaps_ns: tuple[int, ...]


@dataclass(slots=True)
class _Life:
    born_ns: int
    last_ns: int
    hits_ns: deque[int] = field(default_factory=lambda: deque(maxlen=4))


class Residency:
    """Follows a share ``rate`` of allocations, drawn by ``seed``; ``now_ns`` reads the time passed to the engine."""

    def __init__(self, rate: float, seed: int, now_ns: Callable[[], int]) -> None:
        self._limit = min(int(rate * 2**64), 2**64 - 1)
        self._seed = seed
        self._drawn = 0
        self._now_ns = now_ns
        self._lives: dict[int, _Life] = {}
        self._evictions: list[Eviction] = []

    def allocated(self, blocks: BlockIds) -> None:
        """``blocks`` were handed out: the end of their last life, and perhaps the start of one that is followed."""
        self.evicted(blocks)
        now = self._now_ns()
        for block in blocks[self._draw(len(blocks))].tolist():
            self._lives[block] = _Life(now, now)

    def accessed(self, blocks: BlockIds) -> None:
        """``blocks`` were hit."""
        if not self._lives:
            return
        now = self._now_ns()
        for block in blocks.tolist():
            life = self._lives.get(block)
            if life is not None:
                life.last_ns = now
                life.hits_ns.append(now)

    def evicted(self, blocks: BlockIds) -> None:
        """The content of ``blocks`` is gone."""
        if not self._lives:
            return
        now = self._now_ns()
        for block in blocks.tolist():
            life = self._lives.pop(block, None)
            if life is not None:
                hits = list(life.hits_ns)
                gaps = tuple(later - sooner for sooner, later in pairwise(hits))
                self._evictions.append(Eviction(now - life.born_ns, now - life.last_ns, gaps))

    def reset(self) -> None:
        """The prefix cache was reset: forget all."""
        self._lives.clear()
        self._evictions.clear()

    def take(self) -> tuple[Eviction, ...]:
        """Evictions since the last call."""
        evictions, self._evictions = tuple(self._evictions), []
        return evictions

    def _draw(self, count: int) -> BoolArray:
        """bool[count]: a splitmix64 stream of the seed, so that a run can be repeated."""
        first = self._seed * 2**32 + self._drawn
        self._drawn += count
        mixed: npt.NDArray[np.uint64] = np.arange(count, dtype=np.uint64) + np.uint64(first % 2**64)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        chosen: BoolArray = (mixed ^ (mixed >> np.uint64(31))) < np.uint64(self._limit)
        return chosen
