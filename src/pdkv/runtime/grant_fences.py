"""D's side of the control thread: grants that were given up, until nothing can be written under them any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdkv.core.ports import GrantsFenced, InboxItem, Plan, Revoked
from pdkv.runtime.mover_host import MoverHost
from pdkv.runtime.moves import Moves
from pdkv.runtime.transports import grant_locks
from pdkv.runtime.transports.base import TransferMemory

log = logging.getLogger("pdkv.control")

_LOOK_NS = 20_000_000  # between two looks at whether a slice that was under way has ended
# A peer on this host may be inside process_vm_writev(2) into our mover's memory when that is killed. The call keeps the
# memory alive, ends by itself (it cannot be stopped in the middle) and the next one finds no process: a slice of 16 MiB
# takes some milliseconds.
_LAST_CALL_S = 0.2


@dataclass
class GrantFences:
    """Looks after the grants of one instance that were given up. Used by the control thread only.

    Through shared memory a grant is fenced as soon as no slice of it is being copied (`grant_locks`). Through NIXL only
    its producer can say so, or the end of our mover: without the process that NIXL knows there is nothing to write to,
    and nothing is written to the next one under a grant that was given with this one (`RegisterWrite.epoch`).
    """

    transport: str
    memory: TransferMemory
    mover: MoverHost
    moves: Moves
    deliver: Callable[[InboxItem], None]
    _revoked: dict[int, Revoked] = field(default_factory=dict)
    _fenced: set[int] = field(default_factory=set)  # reported, but the engine does not know it yet
    _look_at_ns: int | None = None

    def take(self, plan: Plan, now_ns: int) -> None:
        """Carry out one plan: see after what was given up, and end whoever may still write where it says so."""
        named = {revoked.grant_id: revoked for revoked in plan.revoked}
        self._fenced &= named.keys()
        self._revoked = {number: one for number, one in named.items() if number not in self._fenced}
        for grant_id in plan.evict:
            if grant_id in self._revoked:
                self._evict(self._revoked[grant_id])
        self._look(now_ns)

    def mover_lost(self) -> None:
        """Our mover is no more, nor what NIXL could have written to."""
        if self.transport == "nixl" and self._revoked:
            time.sleep(_LAST_CALL_S)
            self._report(list(self._revoked))

    def tick(self, now_ns: int) -> None:
        """Look again whether locks have been let go."""
        if self._look_at_ns is not None and now_ns >= self._look_at_ns:
            self._look(now_ns)

    def next_ns(self) -> int | None:
        """When `tick` is wanted next."""
        return self._look_at_ns

    def _look(self, now_ns: int) -> None:
        if self.transport == "shm":
            slots = self.memory.slots
            self._report([number for number, one in self._revoked.items() if grant_locks.passed(slots, one.slot)])
        self._look_at_ns = now_ns + _LOOK_NS if self.transport == "shm" and self._revoked else None

    def _report(self, grant_ids: list[int]) -> None:
        if not grant_ids:
            return
        for grant_id in grant_ids:
            del self._revoked[grant_id]
        self._fenced.update(grant_ids)
        self.deliver(GrantsFenced(tuple(grant_ids)))

    def _evict(self, revoked: Revoked) -> None:
        if self.transport == "nixl":
            log.warning(
                "grant %d: its producer does not say that it has stopped; our mover is replaced", revoked.grant_id
            )
            self.mover.restart()
            self.moves.mover_lost()
            self.mover_lost()
            return
        killed = grant_locks.evict(self.memory.slots, revoked.slot)
        log.warning(
            "grant %d: a producer's mover stands still in the middle of a write; ended process %s",
            revoked.grant_id,
            killed,
        )
