"""P's side of bidirectional mode: what a decode instance kept of a conversation's turn before (spec pd-transfer 8).

D's KV goes by D's clock and nothing renews it, so P must know how far the two clocks differ before it asks for any: the
handshake tells. Until then such a request waits without memory, as it does for a peer's announcement.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass

from msgspec.structs import replace

from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.events import TurnDeclined
from pdkv.core.journal import Journal
from pdkv.core.scheduler.request import Request, Status
from pdkv.core.transfer.messages import Peer, RemoteSource
from pdkv.core.validation import check_source
from pdkv.errors import BadRequest
from pdkv.units import NS_PER_S

EXPIRY_MARGIN_NS = 5 * NS_PER_S
"""What would be let go in less than this is not read any more (vLLM 0.32: nixl/pull_worker.py, the turn-2 read)."""
_MOST_CLOCKS = 4096


class Turn(enum.Enum):
    """What to do about the KV that a request was offered."""

    WAIT = enum.auto()  # nobody knows yet how its peer's clock goes
    READ = enum.auto()
    DECLINED = enum.auto()


@dataclass(slots=True)
class Offer:
    """A request with a kept turn, until it has read it, or has no need of it."""

    request: Request
    source: RemoteSource
    deadline_ns: int  # of the wait for its peer's clock


class NextTurns:
    """Kept turns that requests here were offered, and the clocks of the peers that keep them."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager, journal: Journal) -> None:
        self._config, self._manager, self._journal = config, manager, journal
        self._offers: dict[str, Offer] = {}
        self._offsets: OrderedDict[Peer, int] = OrderedDict()

    def arrive(self, request: Request) -> None:
        """A request that was offered a kept turn. One that is of no use here supplies nothing."""
        assert request.source is not None
        source = replace(request.source, usable_tokens=self._usable_tokens(request, request.source))
        request.source = source
        deadline_ns = self._journal.now_ns + self._config.kv_load_timeout_ns
        self._offers[request.request_id] = Offer(request, source, deadline_ns)

    def forget(self, request: Request) -> None:
        """It has been read, or is not needed."""
        self._offers.pop(request.request_id, None)

    def _usable_tokens(self, request: Request, source: RemoteSource) -> int:
        """How many tokens of the kept turn the request can go on behind.

        Of windows and states D has kept what the next token needs, so there it is all of it or nothing.
        """
        try:
            check_source(request.new, source, self._config, self._manager)
        except BadRequest:
            return 0
        usable = source.usable_tokens
        if self._manager.leaves_last_token and (usable < source.grant.num_tokens or usable >= request.num_prompt):
            return 0
        return usable

    def external_tokens(self, source: RemoteSource, local_tokens: int) -> int:
        """Tokens worth reading beyond the local hit: none when they are fewer than ``kv_recompute_threshold``."""
        more = max(source.usable_tokens - local_tokens, 0)
        return more if more >= self._config.kv_recompute_threshold else 0

    def decide(self, request: Request) -> Turn:
        """Whether to read what the request was offered, which is more than it has here."""
        source = request.source
        assert source is not None
        assert source.expires_ns is not None
        offset_ns = self._offsets.get(source.peer)
        if offset_ns is None:
            return Turn.WAIT
        left_ns = source.expires_ns - offset_ns - self._journal.now_ns
        if left_ns > EXPIRY_MARGIN_NS:
            return Turn.READ
        seconds = f"{left_ns / NS_PER_S:.1f} s"
        self._journal.emit(
            TurnDeclined(
                request_id=request.request_id,
                at_ns=self._journal.now_ns,
                cause=f"{source.peer.engine_id[:80]} keeps the turn before for {seconds} more: too short for a read",
            )
        )
        return Turn.DECLINED

    def met(self, peer: Peer, clock_offset_ns: int) -> None:
        """A handshake with ``peer``: its clock shows ``clock_offset_ns`` more than ours."""
        self._offsets[peer] = clock_offset_ns
        self._offsets.move_to_end(peer)
        while len(self._offsets) > _MOST_CLOCKS:
            self._offsets.popitem(last=False)

    def waiting_at(self, peer: Peer) -> list[Request]:
        """The requests that have not read yet what ``peer`` keeps."""
        return [
            offer.request
            for offer in self._offers.values()
            if offer.source.peer == peer and offer.request.status is Status.WAITING
        ]

    def overdue(self) -> list[Request]:
        """Requests that have waited too long to learn their peer's clock."""
        if not self._offers:
            return []
        return [offer.request for offer in self._unmet() if offer.deadline_ns <= self._journal.now_ns]

    def next_deadline_ns(self) -> int | None:
        """When somebody has waited long enough for a peer's clock."""
        if not self._offers:
            return None
        return min((offer.deadline_ns for offer in self._unmet()), default=None)

    def peers(self) -> tuple[Peer, ...]:
        """Whom to shake hands with, each once."""
        return tuple({offer.source.peer: None for offer in self._offers.values()})

    def _unmet(self) -> list[Offer]:
        waiting = [offer for offer in self._offers.values() if offer.request.status is Status.WAITING]
        return [offer for offer in waiting if offer.source.peer not in self._offsets]
