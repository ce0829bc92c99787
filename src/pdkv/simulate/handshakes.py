"""What the control thread of an instance learns of the peers that something is to be decided at (`runtime.peers`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pdkv.core.ports import Keepalive, PeerLost, PeerMet
from pdkv.core.transfer.messages import Peer
from pdkv.simulate.weather import MS

if TYPE_CHECKING:
    from pdkv.simulate.instance import Life

_NO_ANSWER_NS = 5000 * MS
_ASK_AGAIN_NS = 1000 * MS


class Handshakes:
    """One with each peer when it is first awaited, and again for as long as there is none (`PeerMet`, `PeerLost`)."""

    def __init__(self, life: Life) -> None:
        self._life, self._world = life, life.world
        self._awaited: dict[Peer, None] = {}
        self._asked: set[Peer] = set()  # by a handshake that is under way
        self._best: dict[Peer, tuple[int, int]] = {}  # (round trip, clock offset) of the shortest round trip

    def keep(self, keepalives: Iterable[Keepalive]) -> None:
        """These are all that is awaited now."""
        before, self._awaited = self._awaited, {one.peer: None for one in keepalives if one.awaited}
        for peer in self._awaited:
            if peer not in before:
                self._ask(peer)

    def broke(self, peer: Peer) -> None:
        """The connection to a peer that died: a handshake that stood counts no longer."""
        self._life.later(self._world.network.delay_ns(), self._ask, peer)

    def _ask(self, peer: Peer) -> None:
        if peer in self._awaited and peer not in self._asked:
            self._asked.add(peer)
            self._world.time.after(self._world.network.delay_ns(), self._arrive, peer, self._life.now_ns)

    def _arrive(self, peer: Peer, sent_ns: int) -> None:
        """At the other side: who is not there refuses, who stands still or hears nothing does not answer."""
        other, network = self._world.life_of(peer), self._world.network
        if other is None:
            self._life.later(network.delay_ns(), self._lost, peer)
        elif other.stopped_for_ns or network.is_cut(peer.port) or network.loses():
            self._life.later(_NO_ANSWER_NS, self._lost, peer)
        else:
            self._life.later(network.delay_ns(), self._met, peer, sent_ns, other.now_ns)

    def _met(self, peer: Peer, sent_ns: int, clock_ns: int) -> None:
        self._asked.discard(peer)
        now_ns = self._life.now_ns
        sample = now_ns - sent_ns, clock_ns - (sent_ns + now_ns) // 2
        best = self._best[peer] = min(sample, self._best.get(peer, sample), key=lambda one: one[0])
        self._life.deliver(PeerMet(peer, best[1]))

    def _lost(self, peer: Peer) -> None:
        self._asked.discard(peer)
        if peer in self._awaited:
            self._world.note(self._life.name, "PeerLost", peer.engine_id)
            self._life.deliver(PeerLost(peer, "no handshake"))
            self._life.later(_ASK_AGAIN_NS, self._ask, peer)
