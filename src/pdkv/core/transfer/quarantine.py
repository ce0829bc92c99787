"""Blocks that a transfer which was given up may still touch, and the last fence: a new mover (design 3.2)."""

from __future__ import annotations

from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.events import Fenced, Quarantined
from pdkv.core.journal import Journal
from pdkv.core.ledger import Account
from pdkv.core.scheduler.request import Request


class Quarantine:
    """Puts the destination of a READ or WRITE aside when its request leaves it, and gives it back when it is fenced."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager, journal: Journal) -> None:
        self._config, self._manager, self._journal = config, manager, journal

    def enter(self, request: Request, owner: str, number: int, hits: int, blocks: int, cause: str, danger: str) -> int:
        """All that the request holds belongs to ``owner`` now; returns by when it should be fenced (ns).

        The blocks of its first ``hits`` tokens, which the transfer does not touch, come back at once where the policy
        says so. ``number`` (a handle or a grant's id) and ``blocks`` are for the event, ``danger`` is for people.
        """
        deadline_ns = self._journal.now_ns + self._config.fence_timeout_ns
        if self._config.transfer.abort_frees_hits:
            self._manager.release_hits(request.request_id, hits)
        self._manager.rename(request.request_id, owner)
        shown = deadline_ns if self._config.transfer.bounded_waits else None
        self._manager.move(owner, Account.QUARANTINE, f"{cause}; {danger}", shown)
        self._journal.emit(
            Quarantined(
                request_id=request.request_id, at_ns=self._journal.now_ns, handle=number, blocks=blocks, cause=cause
            )
        )
        return deadline_ns

    def leave(self, request_id: str, owner: str, number: int, blocks: int) -> None:
        """Nothing can touch them any more."""
        self._manager.release(owner)
        self._journal.emit(Fenced(request_id=request_id, at_ns=self._journal.now_ns, handle=number, blocks=blocks))


class LastFence:
    """Orders a new mover, once until it is there: what the old one had under way is over then for certain."""

    def __init__(self) -> None:
        self.pending = False
        self._ordered = False

    def order(self) -> None:
        """The mover must be killed and started again now."""
        if not self.pending:
            self._ordered = self.pending = True

    def take(self) -> bool:
        """Whether it was ordered, once."""
        ordered, self._ordered = self._ordered, False
        return ordered

    def restarted(self) -> None:
        """The new one is there."""
        self.pending = False
