"""Owners of blocks: a request, a lease, a quarantined transfer, a deferred free, a copy under way."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from pdkv.core.blocks.tables import NULL_BLOCK, BlockTable
from pdkv.core.ledger import Account
from pdkv.core.ports import Int32Array

_EMPTY = np.empty(0, dtype=np.int32)


class GroupHold:
    """What one owner has in one group; its numbers stand in its table's store, for steps over many requests."""

    __slots__ = ("checkpoint", "drafts", "has_state", "partial", "table")

    def __init__(self) -> None:
        self.table = BlockTable()
        self.partial: tuple[int, int] | None = None  # (entry, block) whose content ends inside: to be copied on write
        self.checkpoint: tuple[int, int] | None = None  # (tokens, entry): a state that is written inside this chunk
        self.has_state = False  # state groups: the running state has its block (and the drafts theirs)
        self.drafts: slice | None = None  # entries at the end that stand in the account of drafts, not in the holder's

    @property
    def num_hashed(self) -> int:
        """Leading entries that registration in the prefix index is through with."""
        return self.table.store.hashed.item(self.table.row)

    @num_hashed.setter
    def num_hashed(self, entries: int) -> None:
        self.table.store.hashed[self.table.row] = entries

    @property
    def num_dropped(self) -> int:
        """Leading entries that were given back, or never needed: null from then on."""
        return self.table.store.dropped.item(self.table.row)

    @num_dropped.setter
    def num_dropped(self, entries: int) -> None:
        self.table.store.dropped[self.table.row] = entries

    @property
    def last_state(self) -> int | None:
        """State groups: the entry whose state the next step starts from."""
        entry = self.table.store.last_state.item(self.table.row)
        return None if entry < 0 else entry

    @last_state.setter
    def last_state(self, entry: int | None) -> None:
        self.table.store.last_state[self.table.row] = -1 if entry is None else entry


@dataclass(slots=True)
class Holder:
    """One owner. Keys of holders are request ids for requests and private strings for the rest."""

    request_id: str
    account: Account
    cause: str
    since_ns: int
    groups: tuple[GroupHold, ...]
    deadline_ns: int | None = None

    @property
    def blocks(self) -> Int32Array:
        """int32[n]: every block it holds, group by group in token order, null entries left out; a copy."""
        tables = [hold.table.ids for hold in self.groups]
        everything = tables[0] if len(tables) == 1 else np.concatenate(tables)
        blocks: Int32Array = everything[everything != NULL_BLOCK]
        return blocks

    @property
    def num_blocks(self) -> int:
        """How many blocks it holds."""
        return sum(int(np.count_nonzero(hold.table.ids)) for hold in self.groups)


class Hit(msgspec.Struct, frozen=True, eq=False):
    """A prefix that is cached: ``tokens`` of it, in ``blocks[group]`` (int32, null where the group needs no block).

    ``boundary`` is where the longest hit of a single group ends when that is beyond ``tokens``, else 0: a prefix that
    requests share, of which a group that keeps few blocks has not kept what is needed (spec block-pool 5).
    """

    tokens: int
    blocks: tuple[Int32Array, ...]
    boundary: int = 0

    def __bool__(self) -> bool:
        return any(map(len, self.blocks))


def no_hit(num_groups: int) -> Hit:
    """Nothing is cached."""
    return Hit(0, (_EMPTY,) * num_groups)
