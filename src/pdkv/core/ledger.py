"""The ledger: at every instant each block is in exactly one account, and the accounts add up to the pool (design 4).

Owners hold blocks in accounts; a block that several owners hold is counted once, in the account of the highest
precedence. Everything that shows memory (`/debug/memory`, metrics, reports, fault tests) reads this.

Pools have many blocks, but at any time these are in few different states ("one owner, running, content can be hit").
So each state has a number, one array says which number each block has, and a change is looked up once for all blocks
that are in the same state.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.core.ports import BlockIds, BoolArray


class Account(enum.IntEnum):
    """Where a block is. The value is the precedence: of several holds on a block the largest is what it counts as."""

    FREE = 0  # no content
    CACHED = 1  # free, but its content can still be hit
    RETAINED = 2  # finished, kept for a peer
    LOADED_WAITING = 3  # KV arrived, request not yet running
    DRAFT = 4  # lookahead
    RUNNING = 5
    DEFERRED = 6  # given back, but an outstanding plan may still use it
    LOADING = 7  # allocated, KV in flight
    QUARANTINE = 8  # a transfer that was given up may still touch it
    NULL = 9  # block 0

    __hash__ = int.__hash__  # enum's own is a function in Python


class Change(NamedTuple):
    """What happens to a block: an owner leaves ``source``, one enters ``target``, its content becomes ``hashed``."""

    source: Account | None = None
    target: Account | None = None
    hashed: bool | None = None


@dataclass(frozen=True, slots=True)
class BlockState:
    """All there is to say about a block: owners by account (``holds[account]``), and whether its content can be hit.

    From these follow ``owners``, how many hold it over all accounts (nobody owns the null block), and ``account``: of
    those it is held in the one of the highest precedence; if nobody holds it, what its content says.
    """

    holds: tuple[int, ...]
    hashed: bool
    owners: int = field(init=False, compare=False)
    account: Account = field(init=False, compare=False)

    def __post_init__(self) -> None:
        held = [account for account in Account if self.holds[account]]
        account = max(held) if held else Account.CACHED if self.hashed else Account.FREE
        object.__setattr__(self, "owners", sum(self.holds[: Account.NULL]))
        object.__setattr__(self, "account", account)

    def after(self, change: Change) -> BlockState:
        """The state that ``change`` leads to; raises ``AssertionError`` when nobody is there to leave (our own bug)."""
        holds = list(self.holds)
        if change.source is not None:
            assert holds[change.source] > 0, f"release or move of blocks not held in {change.source.name}"
            holds[change.source] -= 1
        if change.target is not None:
            holds[change.target] += 1
        return BlockState(tuple(holds), self.hashed if change.hashed is None else change.hashed)


_NOBODY = (0,) * len(Account)
_NULL = BlockState(tuple(int(account is Account.NULL) for account in Account), hashed=False)
_FIRST_STATES = [BlockState(_NOBODY, hashed=False), BlockState(_NOBODY, hashed=True), _NULL]
_NULL_NUMBER = 2

_CLAIM = [Change(target=account, hashed=False) for account in Account]
_HOLD = [Change(target=account) for account in Account]
_RELEASE = [Change(source=account) for account in Account]
_HASHED = [Change(hashed=False), Change(hashed=True)]

_EMPTY = np.empty(0, dtype=np.int32)
_NUMBER_BYTES = 4  # of a state's number
_MOST_STRETCHES = 8  # with more, blocks are sorted by state
_MOST_STATES = 4096  # beyond so many, numbers that no block has any more are given out anew


class Ledger:
    """Holds of blocks, and blocks per account. A change costs a few array operations, whatever states it meets.

    ``counts`` and ``peaks`` are lists by `Account`. A hold is one owner's claim: the same owner may not hold a
    block twice in one call (tables never repeat a block).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._number: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)  # of the state each block is in
        self._single = self._number.data  # the same memory: for one block this is faster than numpy
        self._most_states = _MOST_STATES
        self._renumbered = 0  # how often states were numbered anew
        self._name_states(_FIRST_STATES.copy())
        self._number[0] = _NULL_NUMBER
        self.counts = [0] * len(Account)
        self.counts[Account.FREE], self.counts[Account.NULL] = num_blocks - 1, 1
        self.peaks = self.counts.copy()

    # ------------------------------------------------------------------------------------------------------ changing

    def hold(self, blocks: BlockIds, account: Account) -> None:
        """One more owner of ``blocks`` in ``account``."""
        self._change(blocks, _HOLD[account])

    def claim(self, blocks: BlockIds, account: Account) -> BlockIds:
        """The first owner of ``blocks``, whose content is given up; returns those whose content could be hit so far.

        Raises ``AssertionError`` if somebody holds any of them (our own bug).
        """
        parts, steps = self._change(blocks, _CLAIM[account])
        assert all(map(_WAS_IDLE, steps)), "claim of blocks that somebody holds"
        return parts.where(map(_WAS_HASHED, steps))

    def release(self, blocks: BlockIds, account: Account) -> tuple[BlockIds, BlockIds]:
        """One owner fewer; returns those that nobody holds any more: the ones without content, the ones with.

        Raises ``AssertionError`` if there was no owner (our own bug).
        """
        parts, steps = self._change(blocks, _RELEASE[account])
        return parts.where(map(_IS_FREE, steps)), parts.where(map(_IS_CACHED, steps))

    def move(self, blocks: BlockIds, source: Account, target: Account) -> None:
        """The same owner, another account."""
        self._change(blocks, Change(source, target))

    def set_hashed(self, blocks: BlockIds, hashed: bool) -> BlockIds:
        """Content of ``blocks`` can (no longer) be hit; returns those of which it could before."""
        parts, steps = self._change(blocks, _HASHED[hashed])
        return parts.where(map(_WAS_HASHED, steps))

    def _change(self, blocks: BlockIds, change: Change) -> tuple[_Parts, list[_Step]]:
        """Put ``blocks`` into the states that ``change`` leads to; returns them by state before, with their steps."""
        if len(self._states) > self._most_states:
            self._drop_unused_states()
        parts = self._parts(blocks)
        known, counts, steps = self._steps[change], self.counts, []
        for number, some in zip(parts.numbers, parts.blocks, strict=True):
            step = known.get(number) or self._step(number, change)
            steps.append(step)
            after, leaves, enters = step[:3]
            amount = len(some)
            if amount == 1:
                self._single[some.item()] = after
            else:
                self._number[some] = after
            if leaves is not enters:
                counts[leaves] -= amount
                counts[enters] += amount
                if counts[enters] > self.peaks[enters]:
                    self.peaks[enters] = counts[enters]
        return parts, steps

    def _parts(self, blocks: BlockIds) -> _Parts:
        """``blocks`` by the states they are in."""
        count = len(blocks)
        if count == 1:
            return _Parts(blocks, [self._single[blocks.item()]], [blocks])
        if not count:
            return _Parts(blocks, [], [])
        numbers = self._number[blocks]
        raw = numbers.tobytes()
        if raw[_NUMBER_BYTES:] == raw[:-_NUMBER_BYTES]:  # each as the one before
            return _Parts(blocks, [numbers.item(0)], [blocks])
        # A table goes through few states, one stretch after the other: what is shared, what is full, its last block.
        lasts = (numbers[1:] != numbers[:-1]).nonzero()[0].tolist()
        if len(lasts) < _MOST_STRETCHES:
            stretches, found, first = [], [], 0
            for last in (*lasts, count - 1):
                stretches.append(blocks[first : last + 1])
                found.append(numbers.item(last))
                first = last + 1
            return _Parts(blocks, found, stretches)
        met = np.flatnonzero(np.bincount(numbers)).tolist()
        return _Parts(blocks, met, [blocks[numbers == number] for number in met], numbers)

    # ---------------------------------------------------------------------------------------- states and their numbers

    def _name_states(self, states: list[BlockState]) -> None:
        """Number ``states`` from 0 on; those met later follow."""
        self._states = states
        self._numbers = {state: number for number, state in enumerate(states)}
        self._steps: defaultdict[Change, dict[int, _Step]] = defaultdict(dict)  # by number of the state before

    def _step(self, number: int, change: Change) -> _Step:
        """Where ``change`` leads to from the state that has ``number``."""
        step = self._steps[change].get(number)
        if step is None:
            before = self._states[number]
            state = before.after(change)
            after = self._numbers.setdefault(state, len(self._states))
            if after == len(self._states):
                self._states.append(state)
            step = self._steps[change][number] = _Step(
                after=after, leaves=before.account, enters=state.account, was_hashed=before.hashed,
                was_idle=before.account <= Account.CACHED, is_free=state.account is Account.FREE,
                is_cached=state.account is Account.CACHED,
            )  # fmt: skip
        return step

    def _drop_unused_states(self) -> None:
        amounts = np.bincount(self._number, minlength=len(self._states))
        amounts[: len(_FIRST_STATES)] = 1  # these keep their numbers
        used = np.flatnonzero(amounts)
        renumbered = np.zeros(len(self._states), dtype=np.int32)
        renumbered[used] = np.arange(len(used))
        self._number[:] = renumbered[self._number]
        self._name_states([self._states[number] for number in used.tolist()])
        self._most_states = max(self._most_states, 2 * len(used))
        self._renumbered += 1

    # ------------------------------------------------------------------------------------------------------- looking

    def hashed(self, blocks: BlockIds) -> BoolArray:
        """bool[n]: which of ``blocks`` carry content that can be hit."""
        by_number: BoolArray = np.array([state.hashed for state in self._states])
        hashed: BoolArray = by_number.take(self._number.take(blocks))
        return hashed

    @property
    def num_hashed(self) -> int:
        """Blocks that carry a hash, held or not."""
        return int(self.hashed(np.arange(self.num_blocks, dtype=np.int32)).sum())

    def holders(self, blocks: BlockIds) -> npt.NDArray[np.int64]:
        """int64[n]: owners of each block over all accounts (its reference count)."""
        return self._owners_by_number().take(self._number.take(blocks))

    def all_holders(self) -> npt.NDArray[np.int64]:
        """int64[num_blocks]: `holders` of every block, 0 for the null block."""
        return self._owners_by_number().take(self._number)

    def _owners_by_number(self) -> npt.NDArray[np.int64]:
        owners: npt.NDArray[np.int64] = np.array([state.owners for state in self._states])
        return owners

    def idle(self, blocks: BlockIds) -> BlockIds:
        """int[m]: those of ``blocks`` that nobody holds, in order."""
        parts = self._parts(blocks)
        return parts.where([self._states[number].owners == 0 for number in parts.numbers])

    def account_of(self, block: int) -> Account:
        """The one account ``block`` is in."""
        return self._states[self._single[block]].account

    def states(self) -> list[BlockState]:
        """The state of every block."""
        return list(map(self._states.__getitem__, self._number.tolist()))

    def fingerprint(self) -> object:
        """Equal to that of another time when nothing is different (numbers of states are never given out twice)."""
        return self._number.tobytes(), self._renumbered, self.counts.copy(), self.peaks.copy()

    def as_dict(self) -> dict[str, int]:
        """Blocks per account, by the account's lower-case name; sums to ``num_blocks``."""
        return {account.name.lower(): self.counts[account] for account in Account}

    def peaks_as_dict(self) -> dict[str, int]:
        """Largest number of blocks each account ever had, by name."""
        return {account.name.lower(): self.peaks[account] for account in Account}

    def check(self) -> None:
        """Recount from the states; raises ``AssertionError`` on any difference."""
        amounts = np.bincount(self._number, minlength=len(self._states))
        counts = [0] * len(Account)
        for number in amounts.nonzero()[0].tolist():
            counts[self._states[number].account] += amounts.item(number)
        assert counts == self.counts, "ledger: counts differ"
        assert sum(counts) == self.num_blocks, "ledger: accounts do not add up to the pool"
        assert self.account_of(0) is Account.NULL, "ledger: block 0 is not the null block"
        assert all(peak >= count for peak, count in zip(self.peaks, counts, strict=True)), "ledger: a peak was missed"


class _Step(NamedTuple):
    """What a change does to the blocks of one state: ``after`` is the number of the state that they come into."""

    after: int
    leaves: Account
    enters: Account
    was_hashed: bool
    was_idle: bool  # nobody held them
    is_free: bool  # what they come to
    is_cached: bool


_WAS_HASHED, _WAS_IDLE = attrgetter("was_hashed"), attrgetter("was_idle")
_IS_FREE, _IS_CACHED = attrgetter("is_free"), attrgetter("is_cached")


class _Parts(msgspec.Struct, frozen=True, eq=False):
    """Blocks by state: ``blocks[i]`` are in the state that has ``numbers[i]``.

    The parts lie one behind the other in ``whole``, in this order; or ``mixed`` is int32[n], the number of each block.
    """

    whole: BlockIds
    numbers: list[int]
    blocks: list[BlockIds]
    mixed: BlockIds | None = None

    def where(self, of_parts: Iterable[bool]) -> BlockIds:
        """int[m]: the blocks of the parts ``of_parts`` chooses, in the order in which they stand in the whole."""
        if len(self.numbers) == 1:
            return self.whole if next(iter(of_parts)) else _EMPTY
        chosen = list(of_parts)
        count = sum(chosen)
        if count == 0:
            return _EMPTY
        if count == len(chosen):
            return self.whole
        if count == 1:
            return self.blocks[chosen.index(True)]
        if self.mixed is None:
            return np.concatenate(list(compress(self.blocks, chosen)))
        return self.whole[np.isin(self.mixed, list(compress(self.numbers, chosen)))]
