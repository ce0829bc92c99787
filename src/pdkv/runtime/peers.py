"""The peers that this instance asks: one link to each, its handshake, and the heartbeats to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import zmq

from pdkv.core.ports import Keepalive, SendMessage
from pdkv.core.transfer.messages import Gone, Heartbeat, NotWritten, Peer, Register, RegisterWrite, ToConsumer
from pdkv.runtime.doorkeeper import differing_facts
from pdkv.runtime.geometry import Geometry, unlike
from pdkv.runtime.peer_auth import line_for
from pdkv.runtime.peer_link import Handshake, PeerLink, name_of
from pdkv.runtime.shown import REASON_CHARS, quoted, readable
from pdkv.runtime.transfer_stats import TransferStats
from pdkv.runtime.wire import Hello, HelloReply, Refused

log = logging.getLogger("pdkv.control")

_ANSWER_TIMEOUT_NS = 5 * 10**9
_IDLE_LINK_NS = 60 * 10**9  # without a handshake that stands: the peer may be gone
_NEW_LEASE_BEAT_NS = 10**9
_UNKNOWN_LEASE_BEAT_NS = 10**9  # before the handshake
_ASK_AGAIN_NS = 10**9  # a handshake in vain, of a peer that is to announce something
_SHORTEST_BEAT_NS = 50_000_000  # whatever lease a peer claims to grant
_MAX_LINKS = 1024


@dataclass
class Peers:
    """All links of one instance. Used by the control thread only. ``secret`` None: links reach this host only.

    ``engine_ttl_ns`` is how long a peer that nothing is wanted of is remembered; ``None``: for ever.
    """

    context: zmq.Context[zmq.Socket[bytes]]
    engine_id: str
    facts: Mapping[str, str]
    geometry: Geometry
    stats: TransferStats
    beat_ns: int
    engine_ttl_ns: int | None = 3600 * 10**9
    secret: bytes | None = field(default=None, repr=False)
    _links: dict[Peer, PeerLink] = field(default_factory=dict)
    _settled: list[tuple[PeerLink, str | None]] = field(default_factory=list)
    _seq: int = 0

    def links(self) -> tuple[PeerLink, ...]:
        """The connections to poll."""
        return tuple(self._links.values())

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._links

    def link(self, peer: Peer, now_ns: int) -> PeerLink | str:
        """The link to ``peer``, made if need be; or why there can be none."""
        link = self._links.get(peer)
        if link is not None:
            link.last_used_ns = now_ns
            return link
        if len(self._links) >= _MAX_LINKS and not self._drop_idlest():
            return f"{name_of(peer)}: already connected to {_MAX_LINKS} peers, and all are needed"
        try:
            link = self._links[peer] = PeerLink(self.context, peer, line_for(self.secret, self.engine_id), now_ns)
        except (zmq.ZMQError, OverflowError, ValueError) as error:
            return f"{name_of(peer)} is no address to connect to: {readable(str(error))}"
        return link

    def _drop_idlest(self) -> bool:
        """Whether there was a link that nothing is wanted of: no lease, no announcement, and no answer."""
        idle = [
            link
            for link in self._links.values()
            if not (link.tokens or link.awaited or link.handshake is Handshake.ASKED)
        ]
        if idle:
            self._drop(min(idle, key=lambda link: link.last_used_ns))
        return bool(idle)

    def _drop(self, link: PeerLink) -> None:
        del self._links[link.peer]
        link.close()

    # ------------------------------------------------------------------------------------------------- handshakes

    def ask(self, link: PeerLink, now_ns: int) -> None:
        """Begin a handshake, unless one is under way; what an earlier one has told no longer counts."""
        if link.handshake is Handshake.ASKED:
            return
        self._seq += 1
        link.hello_seq = self._seq
        link.hello_sent_ns = now_ns
        link.hello_deadline_ns = now_ns + _ANSWER_TIMEOUT_NS
        link.ask_again_ns = now_ns + _ASK_AGAIN_NS
        link.handshake = Handshake.ASKED
        link.send(
            Hello(seq=link.hello_seq, engine_id=self.engine_id, target=link.peer.engine_id, facts=dict(self.facts))
        )

    def take_settled(self) -> list[tuple[PeerLink, str | None]]:
        """Handshakes that have ended since the last call: why in vain, or None where ``link.reply`` stands.

        One that stood before it was awaited is told as well.
        """
        settled, self._settled = self._settled, []
        return settled

    def hear(self, link: PeerLink, limit: int, now_ns: int) -> list[ToConsumer]:
        """Take what a peer answered; what of it is for the engine."""
        answers, dropped = link.receive(limit)
        self.stats.dropped_frames += dropped
        told: list[ToConsumer] = []
        for answer in answers:
            link.last_used_ns = now_ns
            if isinstance(answer, Gone):
                told.append(Gone(answer.transfer_id, readable(answer.reason, REASON_CHARS)))  # it will stand in logs
            elif isinstance(answer, NotWritten):
                told.append(msgspec.structs.replace(answer, reason=readable(answer.reason, REASON_CHARS)))
            elif isinstance(answer, ToConsumer):
                told.append(answer)
            elif link.handshake is Handshake.ASKED and answer.seq == link.hello_seq:
                self._on_answer(link, answer, now_ns)
        return told

    def _on_answer(self, link: PeerLink, answer: HelloReply | Refused, now_ns: int) -> None:
        reason = self._unfit(link, answer)
        if reason is None:
            assert isinstance(answer, HelloReply)
            link.handshake, link.reply = Handshake.DONE, answer
            link.compare_clocks(now_ns, answer.clock_ns)
            self._settled.append((link, None))
            return
        log.debug("%s refused: %s", name_of(link.peer), reason)  # the read that fails of it is warned of
        self.stats.refused_ns, self.stats.refused_because = now_ns, f"{name_of(link.peer)} refused: {reason}"
        self._in_vain(link, Handshake.REFUSED, f"{name_of(link.peer)} refused the handshake: {reason}")

    def _unfit(self, link: PeerLink, reply: HelloReply | Refused) -> str | None:
        """Why there is no handshake with a peer that refused us, or that is none for us."""
        if isinstance(reply, Refused):
            return readable(reply.reason, REASON_CHARS)
        if reply.engine_id != link.peer.engine_id:
            return f"engine {quoted(link.peer.engine_id)} is gone, {quoted(reply.engine_id)} answers there now"
        reason = differing_facts(self.engine_id, self.facts, reply.engine_id, reply.facts)
        return reason or unlike(reply.memory.geometry, self.geometry)

    def lost(self, link: PeerLink) -> None:
        """The connection to a peer broke or was refused: no answer will come, so nobody need wait for one."""
        if link.handshake is Handshake.ASKED:
            cause = f"{name_of(link.peer)} is gone: it closed the connection, or nobody listens there"
            self._in_vain(link, Handshake.NONE, cause)
        elif link.handshake is Handshake.DONE:
            link.handshake = Handshake.NONE

    def _no_answer(self, link: PeerLink) -> None:
        try:
            link.reopen()  # so that what queued up for a dead peer is not delivered to the next one there
        except zmq.ZMQError as error:  # no descriptor left, say: the others' heartbeats must go on
            log.warning("%s is not connected to anew: %s", name_of(link.peer), readable(str(error)))
        cause = f"{name_of(link.peer)} did not answer the handshake within 5 s: is it reachable?"
        self._in_vain(link, Handshake.NONE, cause)

    def _in_vain(self, link: PeerLink, state: Handshake, problem: str) -> None:
        link.handshake = state
        self.stats.failed_handshakes += 1
        self._settled.append((link, problem))

    # ------------------------------------------------------------------------------------------------- messages

    def send(self, messages: tuple[SendMessage, ...], now_ns: int) -> None:
        """Send hints; lost ones are counted, no more."""
        for message in messages:
            link = self.link(message.peer, now_ns)
            if isinstance(link, PeerLink) and link.handshake is Handshake.NONE and not link.line.is_open:
                self.ask(link, now_ns)  # the hint follows when it has opened
            if not isinstance(link, PeerLink) or not link.send(message.message):
                self.stats.lost_messages += 1
            elif isinstance(message.message, Heartbeat):
                self.stats.heartbeats_sent += 1
            else:
                self.stats.registrations_sent += isinstance(message.message, Register | RegisterWrite)

    def keep_alive(self, keepalives: tuple[Keepalive, ...], now_ns: int) -> None:
        """Make these the whole set of leases that are renewed."""
        wanted = {keepalive.peer for keepalive in keepalives}
        for link in self.links():
            if link.peer not in wanted:
                link.tokens, link.awaited = (), False
        for keepalive in keepalives:
            if keepalive.tokens or keepalive.awaited:
                self._keep(keepalive, now_ns)

    def _keep(self, keepalive: Keepalive, now_ns: int) -> None:
        link, tokens = self.link(keepalive.peer, now_ns), keepalive.tokens
        if not isinstance(link, PeerLink):
            log.warning("no heartbeats: %s", link)
            return
        if keepalive.awaited and not link.awaited and link.handshake is Handshake.DONE:
            self._settled.append((link, None))
        link.awaited = keepalive.awaited
        if not set(tokens) <= set(link.tokens):
            # A lease may be nearly over when its request reaches us: say so soon, at most once a second.
            link.next_beat_ns = min(link.next_beat_ns, max(now_ns, link.last_beat_ns + _NEW_LEASE_BEAT_NS))
        if link.handshake is Handshake.NONE:
            self.ask(link, now_ns)
        link.tokens = tokens

    # ------------------------------------------------------------------------------------------------- timers

    def tick(self, now_ns: int, *, engine_alive: bool) -> None:
        """Heartbeats that are due (only for an engine that steps), answers that did not come, links nobody needs."""
        for link in self.links():
            if link.handshake is Handshake.ASKED and now_ns >= link.hello_deadline_ns:
                self._no_answer(link)
            if link.tokens and now_ns >= link.next_beat_ns:
                self._beat(link, now_ns, engine_alive=engine_alive)
            if link.awaited and _is_idle(link) and now_ns >= link.ask_again_ns:
                self.ask(link, now_ns)
            if not link.tokens and not link.awaited and self._is_stale(link, now_ns):
                self._drop(link)

    def _is_stale(self, link: PeerLink, now_ns: int) -> bool:
        idle_ns = now_ns - link.last_used_ns
        if link.handshake is not Handshake.DONE:
            return idle_ns > _IDLE_LINK_NS
        return self.engine_ttl_ns is not None and idle_ns > self.engine_ttl_ns

    def _beat(self, link: PeerLink, now_ns: int, *, engine_alive: bool) -> None:
        link.last_beat_ns = now_ns
        link.next_beat_ns = now_ns + self._beat_ns(link)
        if not engine_alive or link.handshake is Handshake.REFUSED:
            return
        if link.handshake is Handshake.NONE:
            self.ask(link, now_ns)
        self.stats.heartbeats_sent += link.beat()
        link.last_used_ns = now_ns

    def _beat_ns(self, link: PeerLink) -> int:
        """A sixth of the lease: of the peer's once it has told, for it is the peer's clock that runs out."""
        if link.reply is None:
            return min(self.beat_ns, _UNKNOWN_LEASE_BEAT_NS)
        return min(self.beat_ns, max(link.reply.lease_ns // 6, _SHORTEST_BEAT_NS))

    def next_ns(self) -> int | None:
        """When `tick` is wanted next; None when nothing is timed."""
        times = [link.hello_deadline_ns for link in self._links.values() if link.handshake is Handshake.ASKED]
        times += [link.next_beat_ns for link in self._links.values() if link.tokens]
        times += [link.ask_again_ns for link in self._links.values() if link.awaited and _is_idle(link)]
        return min(times, default=None)


def _is_idle(link: PeerLink) -> bool:
    """No handshake stands, nor is one under way."""
    return link.handshake in (Handshake.NONE, Handshake.REFUSED)
