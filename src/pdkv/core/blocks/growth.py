"""One more token for many running requests at once: `KVCacheManager.allocate_slots` of one token each, as arrays.

Almost always that changes nothing. Where it does, a request needs its next block, has filled one that can be hit from
now on, or no longer needs its first ones. Those requests are found by comparing arrays, and as long as the order of
single calls cannot show they are served together; else each is served by the single call, which stays the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pdkv.core.blocks.boundaries import Boundaries
from pdkv.core.blocks.holders import Holder
from pdkv.core.blocks.kinds.base import Kind
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.blocks.tables import NULL_BLOCK, TableStore
from pdkv.core.ledger import Account
from pdkv.core.ports import BlockIds, BoolArray, Int32Array, Int64Array
from pdkv.core.scheduler.request import Request

if TYPE_CHECKING:
    from pdkv.core.scheduler.running import RunningSet


class Step(msgspec.Struct, frozen=True, eq=False):
    """n running requests, past their prompt, that compute one more token each; arrays int64[n].

    They are ``numbers`` in running order, and their tables are ``rows`` of the stores. They have ``computed`` tokens;
    those before ``final`` are known and will then be computed.
    """

    running: RunningSet
    numbers: Int64Array
    rows: Int64Array
    computed: Int64Array
    final: Int64Array

    @classmethod
    def of(cls, running: RunningSet, numbers: Int64Array) -> Step:
        """The running requests of these numbers, before they are planned."""
        rows, counters = running.columns[numbers], running.counters
        computed = counters.num_computed[rows]
        return cls(running, numbers, rows, computed, np.minimum(computed + 1, counters.num_tokens[rows]))

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, count: int) -> Step:
        """The first ``count`` of them."""
        arrays = (self.numbers, self.rows, self.computed, self.final)
        return Step(self.running, *(array[:count] for array in arrays))

    @property
    def prompt(self) -> Int64Array:
        """Tokens of their prompts."""
        prompt: Int64Array = self.running.prompt[self.rows]
        return prompt

    @property
    def processed(self) -> Int64Array:
        """Their tokens that no plan under way looks at."""
        processed: Int64Array = self.computed - self.running.counters.in_flight_tokens[self.rows]
        return processed


class Due(msgspec.Struct, frozen=True, eq=False):
    """Which of n requests have something to do, bool[n, groups]: grow, drop their first blocks, register full ones.

    ``flags`` are these three, bool[3, n, groups].
    """

    flags: BoolArray
    grow: BoolArray
    drop: BoolArray
    register: BoolArray

    @classmethod
    def none(cls, requests: int, groups: int) -> Due:
        """Nothing, to begin with."""
        flags = np.zeros((3, requests, groups), dtype=np.bool_)
        return cls(flags, *flags)

    def first(self, count: int) -> Due:
        """The first ``count`` requests'."""
        flags = self.flags[:, :count]
        return Due(flags, *flags)

    def __bool__(self) -> bool:
        return bool(np.count_nonzero(self.flags))

    def numbers(self) -> list[int]:
        """Those requests, in order."""
        return np.flatnonzero(self.flags.any(axis=(0, 2))).tolist()


class Dropped(msgspec.Struct, frozen=True, eq=False):
    """Entries of block tables that are needed no more: of request ``number[i]`` in ``group[i]``; arrays [m]."""

    number: Int64Array
    group: Int64Array
    entry: Int64Array
    blocks: Int32Array


_NONE = np.empty(0, dtype=np.int64)
NOTHING_DROPPED = Dropped(_NONE, _NONE, _NONE, np.empty(0, dtype=np.int32))


class RunningGrowth:
    """The tables of running requests, in a store a group, and how they grow."""

    def __init__(self, pool: BlockPool, kinds: Sequence[Kind], boundaries: Boundaries) -> None:
        self._pool = pool
        self._kinds = kinds
        self._boundaries = boundaries
        self._stores = [TableStore(0) for _ in kinds]
        self._seated: dict[int, Holder] = {}  # by row
        self._bulk = all(kind.grows_in_bulk for kind in kinds)
        self._idle_until: Int64Array = np.zeros(0, dtype=np.int64)  # by row: with fewer tokens computed nothing is due

    def seat(self, holder: Holder, row: int) -> None:
        """From now on the holder's tables are row ``row`` of the stores."""
        self._seated[row] = holder
        for hold, store in zip(holder.groups, self._stores, strict=True):
            hold.table.seat(store, row)
        if row >= len(self._idle_until):
            self._idle_until = np.concatenate((self._idle_until, np.zeros(row + 1, dtype=np.int64)))
        self.look_again(row)

    def look_again(self, row: int) -> None:
        """What is expected of the row's tables holds no more."""
        self._idle_until[row] = 0

    def unseat(self, row: int) -> None:
        """The tables of the holder in ``row`` are its own again; of one that was released none is left."""
        for hold in self._seated.pop(row).groups:
            hold.table.unseat()

    def tables(self, rows: Int64Array, group: int) -> Int32Array:
        """int32[n, longest]: a copy of the tables of ``rows``, null beyond each one's end."""
        return self._stores[group].padded(rows)

    # ------------------------------------------------------------------------------------------------------ one token

    def grow(self, running: RunningSet, first: int, last: int, single: Callable[[Request], bool]) -> int:
        """See `KVCacheManager.grow_by_one`; ``single`` serves one request and says whether it fits."""
        rows = running.columns[first:last]
        suspects = (running.counters.num_computed[rows] >= self._idle_until[rows]).nonzero()[0]
        if not len(suspects):
            return last - first
        step = Step.of(running, first + suspects)
        served = self._serve(step, self.due(step), single)
        self._look_ahead(step)
        return last - first if served == len(step) else suspects.item(served)

    def _serve(self, step: Step, due: Due, single: Callable[[Request], bool]) -> int:
        """Returns how many of them were served, as `grow`."""
        if not due:
            return len(step)
        dropped = self._dropped(step, due) if self._bulk and self._pool.events is None else None
        if dropped is None:
            requests = step.running.at(step.numbers)
            return next((at for at in due.numbers() if not single(requests[at])), len(step))
        quiet = not len(dropped.blocks) and not np.count_nonzero(due.grow)
        fitting = len(step) if quiet else self._exchange(step, due.grow, dropped)
        if fitting < len(step):
            return self._serve(step.first(fitting), due.first(fitting), single)
        if np.count_nonzero(due.register):
            self._register(step, due.register)
        return len(step)

    def _look_ahead(self, step: Step) -> None:
        """From how many computed tokens on something is due for each; a plan under way may put it off."""
        rows = step.rows
        idle = self._kinds[0].capacity_tokens(self._stores[0].lengths[rows])
        for kind, store in zip(self._kinds, self._stores, strict=True):
            if kind.group:
                idle = np.minimum(idle, kind.capacity_tokens(store.lengths[rows]))
            if kind.recycles:
                idle = np.minimum(idle, kind.next_drop(store, rows))
            if self._pool.enable_caching and kind.registers:
                full = self._boundaries.next_end((store.hashed[rows] + 1) * kind.block_size)
                idle = np.minimum(idle, full - 1)
                if kind.keeps_prompt_end:
                    passed = self._boundaries.last_end(step.final) > kind.prompt_end(step.prompt)
                    idle = np.where(passed, idle, 0)
        self._idle_until[rows] = idle

    def check(self, running: RunningSet) -> None:
        """Nothing is due where nothing was expected; raises ``AssertionError`` otherwise."""
        numbers = np.flatnonzero(running.counters.num_computed[running.columns] < self._idle_until[running.columns])
        if len(numbers):
            assert not self.due(Step.of(running, numbers)), "growth: something is due earlier than expected"

    def expectations(self, rows: Sequence[int]) -> list[tuple[Holder, int]]:
        """By row: whose tables stand there, and with fewer than how many computed tokens nothing is due."""
        return [(self._seated[row], self._idle_until.item(row)) for row in rows]

    def due(self, step: Step) -> Due:
        """What a token more means to each."""
        due = Due.none(len(step), len(self._kinds))
        for group, (kind, store) in enumerate(zip(self._kinds, self._stores, strict=True)):
            due.grow[:, group] = step.computed >= kind.capacity_tokens(store.lengths[step.rows])
            if kind.recycles:
                due.drop[:, group] = kind.may_drop(store, step.rows, step.processed, step.prompt)
            if self._pool.enable_caching and kind.registers:
                due.register[:, group] = self._unregistered(group, step.rows, step.final)
                if kind.keeps_prompt_end:
                    due.register[:, group] |= self._boundaries.last_end(step.final) == kind.prompt_end(step.prompt)
        return due

    def _unregistered(self, group: int, rows: Int64Array, final: Int64Array) -> BoolArray:
        """bool[n]: who has full blocks below ``final`` tokens that registration is not through with."""
        full = self._boundaries.last_end(final) // self._kinds[group].block_size
        more: BoolArray = full > self._stores[group].hashed[rows]
        return more

    def unregistered(self, rows: Int64Array, final: Int64Array) -> list[int]:
        """For which of ``rows`` `KVCacheManager.cache_blocks` has something to do below ``final`` tokens."""
        groups = [kind.group for kind in self._kinds if kind.registers]
        return np.flatnonzero(sum(self._unregistered(group, rows, final) for group in groups)).tolist()

    def _dropped(self, step: Step, due: Due) -> Dropped | None:
        """What the requests give back; ``None`` when it is more than a block each, or only single calls tell."""
        if not np.count_nonzero(due.drop):
            return NOTHING_DROPPED
        number, group = np.nonzero(due.drop)
        if self._pool.residency is not None:
            return None  # draws by lot which of the blocks handed out it follows
        entry = np.empty(len(number), dtype=np.int64)
        blocks = np.empty(len(number), dtype=np.int32)
        for at, (kind, store) in enumerate(zip(self._kinds, self._stores, strict=True)):
            mine = group == at
            row = step.rows[number[mine]]
            entry[mine] = store.dropped[row]
            blocks[mine] = store.blocks[row, store.dropped[row]]
            if kind.may_drop(store, row, step.processed[number[mine]], step.prompt[number[mine]], ahead=1).any():
                return None
        held = blocks[blocks != NULL_BLOCK]
        if len(np.unique(held)) < len(held):
            return None  # one block of two requests: free only once the second one lets it go
        return Dropped(number, group, entry, blocks)

    def _exchange(self, step: Step, grow: BoolArray, dropped: Dropped) -> int:
        """Blocks given back and handed out. Returns how many requests fit; when not all do, nothing has been done.

        In the order of single calls, a block without content that one request gives back goes to the next that needs
        one, for it stands at the front of the free queue.
        """
        number, group = np.nonzero(grow)
        if not len(dropped.blocks):
            short = len(number) - self._pool.num_free
            if short > 0:
                return number.item(-short)
            self._push(step, number, group, self._pool.take(len(number), Account.RUNNING))
            return len(step)
        held = dropped.blocks != NULL_BLOCK
        givers, given = dropped.number[held], dropped.blocks[held]
        reusable = self._pool.only_held_empty(given)
        reused, left = pair_up(givers[reusable].tolist(), number.tolist())
        fresh = reused < 0
        short = int(fresh.sum()) - self._pool.num_free
        if short > 0:
            return number[fresh].item(-short)
        for at, store in enumerate(self._stores):
            row, entry = step.rows[dropped.number[dropped.group == at]], dropped.entry[dropped.group == at]
            store.blocks[row, entry] = NULL_BLOCK
            store.dropped[row] = entry + 1
        empty = given[reusable]
        self._pool.give_back(given[~reusable], Account.RUNNING)
        blocks = np.empty(len(number), dtype=np.int32)
        blocks[~fresh] = empty[reused[~fresh]]
        blocks[fresh] = self._pool.take(int(fresh.sum()), Account.RUNNING)
        self._pool.give_back(empty[left][::-1], Account.RUNNING)  # each goes to the front, before the one before
        self._push(step, number, group, blocks)
        return len(step)

    def _push(self, step: Step, number: Int64Array, group: Int64Array, blocks: BlockIds) -> None:
        """``blocks[i]`` is the next one of request ``number[i]`` in ``group[i]``."""
        if len(self._stores) == 1:
            self._stores[0].push(step.rows[number], blocks)
            return
        for at, store in enumerate(self._stores):
            mine = group == at
            store.push(step.rows[number[mine]], blocks[mine])

    def _register(self, step: Step, register: BoolArray) -> None:
        """The block that each has filled."""
        for group, (kind, store) in enumerate(zip(self._kinds, self._stores, strict=True)):
            number = register[:, group].nonzero()[0]
            if len(number):
                row = step.rows[number]
                entries = store.hashed[row]
                store.hashed[row] = entries + 1
                kind.register_each(
                    step.running.at(step.numbers[number]),
                    entries,
                    store.blocks[row, entries],
                    store.before(row, entries),
                )

    # --------------------------------------------------------------------------------------------- many steps at once

    @property
    def can_stride(self) -> bool:
        """Whether many steps can be taken together: nothing comes back in between, and nobody listens."""
        return self._bulk and self._pool.events is None and not any(kind.recycles for kind in self._kinds)

    def _missing(self, group: int, rows: Int64Array, tokens: Int64Array) -> Int64Array:
        """int64[n]: blocks that the requests of ``rows`` need for ``tokens`` tokens, beyond those they have."""
        kind, lengths = self._kinds[group], self._stores[group].lengths[rows]
        beyond = np.maximum(tokens - kind.capacity_tokens(lengths), 0)
        missing: Int64Array = -(-beyond // kind.block_size)
        return missing

    def steps_with_room(self, running: RunningSet, steps: int) -> int:
        """For how many steps, at most ``steps``, free blocks cover the growth of all, whatever comes back meanwhile."""
        rows, groups = running.columns, range(len(self._kinds))
        computed = running.counters.num_computed[rows]
        low = 0
        high = probe = steps  # most of the time all of them
        while low < high:
            demand = sum(int(self._missing(group, rows, computed + probe).sum()) for group in groups)
            low, high = (probe, high) if demand <= self._pool.num_free else (low, probe - 1)
            probe = (low + high + 1) // 2
        return low

    def stride(self, running: RunningSet, steps: int) -> None:
        """``steps`` tokens more for each, which are known: pops in the order (step, request, group)."""
        rows, computed = running.columns, running.counters.num_computed[running.columns]
        wanted = []
        for group, (kind, store) in enumerate(zip(self._kinds, self._stores, strict=True)):
            number, entry = spread(store.lengths[rows], self._missing(group, rows, computed + steps))
            wanted.append((number, entry, entry * kind.block_size - computed[number]))
        step = np.concatenate([steps_of for _, _, steps_of in wanted])
        number = np.concatenate([numbers for numbers, _, _ in wanted])
        order = np.argsort(step * len(rows) + number, kind="stable")  # by group at last
        blocks = np.empty(len(step), dtype=np.int32)
        blocks[order] = self._pool.take(len(step), Account.RUNNING)
        at = 0
        for (number, entry, _), store in zip(wanted, self._stores, strict=True):
            store.put(rows[number], entry, blocks[at : at + len(number)])
            at += len(number)
        if self._pool.enable_caching:
            for group in range(len(self._kinds)):
                self._register_runs(group, rows, computed, steps, running)

    def _register_runs(
        self, group: int, rows: Int64Array, computed: Int64Array, steps: int, requests: Sequence[Request]
    ) -> None:
        """What each fills, at once: of equal contents the one that is filled in an earlier step comes first."""
        store = self._stores[group]
        full = (computed + steps) // self._kinds[group].block_size
        order = np.argsort(-computed, kind="stable")
        order = order[full[order] > store.hashed[rows[order]]]
        if len(order):
            row = rows[order]
            first, counts = store.hashed[row], full[order] - store.hashed[row]
            number, entry = spread(first, counts)
            chains = [requests[at].hashes for at in order.tolist()]
            blocks = store.blocks[row[number], entry]
            self._pool.insert_each(group, chains, first, counts, blocks, store.before(row, first))
            store.hashed[row] = full[order]


def spread(first: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """``counts[i]`` pairs (i, ``first[i]`` and on) for each i, as two int64 arrays."""
    number = np.repeat(np.arange(len(counts)), counts)
    offset = np.arange(len(number)) - np.repeat(counts.cumsum() - counts, counts)
    return number, first[number] + offset


def pair_up(givers: list[int], takers: list[int]) -> tuple[Int64Array, Int64Array]:
    """Both lists ascend. For each taker the index of the last giver not behind it that nobody has taken, -1 for none.

    And the indexes of the givers that are left, in order.
    """
    if not givers:
        return np.full(len(takers), -1), _NONE
    waiting: list[int] = []
    taken: list[int] = []
    at = 0
    for taker in takers:
        while at < len(givers) and givers[at] <= taker:
            waiting.append(at)
            at += 1
        taken.append(waiting.pop() if waiting else -1)
    left = [*waiting, *range(at, len(givers))]
    return np.asarray(taken, dtype=np.int64), np.asarray(left, dtype=np.int64)
