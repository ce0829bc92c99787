"""The consumer's side of the control thread: from a `PostRead` to its one `ReadEnded`, and the heartbeats.

Each read goes HELLO (the peer's facts agree) -> CLAIM (the peer knows the grant) -> MOVER (ours is up) -> MOVING.
Until it is MOVING nothing can touch the destination, so it can end at once, and a mover's restart does not concern it.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import zmq

from pdkv.core.ports import Heartbeat, InboxItem, MoverRestarted, Peer, Plan, PostRead, ReadEnded
from pdkv.runtime.doorkeeper import differing_facts
from pdkv.runtime.mover_host import MoverHost
from pdkv.runtime.peer_link import Handshake, PeerLink, name_of
from pdkv.runtime.shown import REASON_CHARS, quoted, readable
from pdkv.runtime.transfer_stats import TransferStats
from pdkv.runtime.wire import (
    Answer,
    Cancel,
    Claim,
    ClaimReply,
    Connect,
    Ended,
    Forget,
    Hello,
    HelloReply,
    Post,
    Refused,
)

log = logging.getLogger("pdkv.control")

CANCELLED = "cancelled"
_ANSWER_TIMEOUT_NS = 5 * 10**9
_MOVER_TIMEOUT_NS = 30 * 10**9  # a new mover has to import NIXL, on a busy machine
_IDLE_LINK_NS = 60 * 10**9
_NEW_LEASE_BEAT_NS = 10**9
_UNKNOWN_LEASE_BEAT_NS = 10**9  # before the handshake
_SHORTEST_BEAT_NS = 50_000_000  # whatever lease a peer claims to grant
_MAX_LINKS = 1024
_MAX_TRIES = 4  # handshakes for one read: a peer whose mover restarts meanwhile asks for another


class _Stage(enum.Enum):
    HELLO = "waits for the handshake"
    CLAIM = "waits for the claim"
    MOVER = "waits for our mover"
    MOVING = "moves"


@dataclass(slots=True)
class _Read:
    post: PostRead
    stage: _Stage = _Stage.HELLO
    deadline_ns: int = 0
    seq: int = 0
    tries: int = 0
    mover_key: str = ""


@dataclass
class Reader:
    """All reads and links of one instance. Used by the control thread only."""

    context: zmq.Context[zmq.Socket[bytes]]
    engine_id: str
    facts: Mapping[str, str]
    bytes_per_block: int
    mover: MoverHost
    stats: TransferStats
    deliver: Callable[[InboxItem], None]
    beat_ns: int
    _links: dict[Peer, PeerLink] = field(default_factory=dict)
    _reads: dict[int, _Read] = field(default_factory=dict)
    _claims: dict[int, int] = field(default_factory=dict)  # seq -> handle
    _moving: Counter[str] = field(default_factory=Counter)  # reads in the mover per connection
    _seq: int = 0
    _connections: int = 0

    # --------------------------------------------------------------------------------------------- from the engine

    def take(self, plan: Plan, now_ns: int) -> None:
        """Carry out one plan; its restart of the mover comes before its reads."""
        if plan.restart_mover:
            self.mover.restart()
            self.mover_lost()
        for post in plan.reads:
            try:
                self._begin(post, now_ns)
            except Exception as error:  # one bad read must not take the others of this plan with it
                log.exception("read %d cannot begin", post.handle)
                self._fail(self._reads[post.handle], f"{name_of(post.source.peer)}: {readable(str(error))}")
        for handle in plan.cancels:
            self._cancel(handle)
        for message in plan.messages:
            link = self._link(message.peer, now_ns)
            if not isinstance(link, PeerLink) or not link.send(message.message):
                self.stats.lost_messages += 1
            elif isinstance(message.message, Heartbeat):
                self.stats.heartbeats_sent += 1
        self._keep_alive({keepalive.peer: keepalive.tokens for keepalive in plan.keepalives}, now_ns)

    def _keep_alive(self, wanted: Mapping[Peer, tuple[bytes, ...]], now_ns: int) -> None:
        """Make ``wanted`` the whole set of leases that are renewed."""
        for link in self.links():
            if link.peer not in wanted:
                link.tokens = ()
        for peer, tokens in wanted.items():
            if tokens:
                self._keep_peer(peer, tokens, now_ns)

    def _keep_peer(self, peer: Peer, tokens: tuple[bytes, ...], now_ns: int) -> None:
        link = self._link(peer, now_ns)
        if not isinstance(link, PeerLink):
            log.warning("no heartbeats: %s", link)
            return
        if not set(tokens) <= set(link.tokens):
            # A lease may be nearly over when its request reaches us: say so soon, at most once a second.
            link.next_beat_ns = min(link.next_beat_ns, max(now_ns, link.last_beat_ns + _NEW_LEASE_BEAT_NS))
        if link.handshake is Handshake.NONE:
            self._ask(link, now_ns)
        link.tokens = tokens

    def _begin(self, post: PostRead, now_ns: int) -> None:
        read = _Read(post)
        self._reads[post.handle] = read
        link = self._link(post.source.peer, now_ns)
        if isinstance(link, PeerLink):
            self._push(read, link, now_ns)
        else:
            self._fail(read, link)

    def _cancel(self, handle: int) -> None:
        read = self._reads.get(handle)
        if read is None:  # over, and reported
            return
        if read.stage is _Stage.MOVING:
            self.mover.send(Cancel(handle=handle))
        else:
            self._fail(read, CANCELLED)

    # ---------------------------------------------------------------------------------------------- from the peers

    def links(self) -> tuple[PeerLink, ...]:
        """The connections to poll."""
        return tuple(self._links.values())

    def hear(self, link: PeerLink, limit: int, now_ns: int) -> None:
        """Take what a peer answered."""
        answers, dropped = link.receive(limit)
        self.stats.dropped_frames += dropped
        for answer in answers:
            self._on_answer(link, answer, now_ns)

    def lost(self, link: PeerLink) -> None:
        """The connection to a peer broke or was refused: no answer will come, so nobody need wait for one."""
        if link.handshake in (Handshake.ASKED, Handshake.DONE):
            link.handshake = Handshake.NONE
        for read in self._reads_of(link.peer):
            if read.stage in (_Stage.HELLO, _Stage.CLAIM):
                self.stats.failed_handshakes += 1
                self._fail(read, f"{name_of(link.peer)} is gone: it closed the connection, or nobody listens there")

    def _on_answer(self, link: PeerLink, answer: Answer, now_ns: int) -> None:
        link.last_used_ns = now_ns
        if link.handshake is Handshake.ASKED and answer.seq == link.hello_seq:
            if isinstance(answer, ClaimReply):
                return
            self._on_hello(link, answer, now_ns)
            return
        handle = self._claims.get(answer.seq)
        read = self._reads.get(handle) if handle is not None else None
        if read is not None and read.post.source.peer != link.peer:
            return  # somebody answers for another
        self._claims.pop(answer.seq, None)
        if read is None or read.stage is not _Stage.CLAIM or read.seq != answer.seq:
            return  # late: the read was cancelled or timed out
        if isinstance(answer, Refused):
            self.stats.failed_handshakes += 1
            self._fail(read, f"{name_of(link.peer)} refused the read: {readable(answer.reason, REASON_CHARS)}")
        elif isinstance(answer, ClaimReply):
            if link.reply is not None and answer.epoch == link.reply.epoch:
                self._hand_over(read, link, now_ns)
            else:
                link.handshake = Handshake.NONE  # its mover was restarted: what can be read from has changed
                self._push(read, link, now_ns)

    def _unfit(self, link: PeerLink, reply: HelloReply | Refused) -> str | None:
        """Why there is no handshake with a peer that refused us, or that is none for us."""
        if isinstance(reply, Refused):
            return readable(reply.reason, REASON_CHARS)
        if reply.engine_id != link.peer.engine_id:
            return f"engine {quoted(link.peer.engine_id)} is gone, {quoted(reply.engine_id)} answers there now"
        reason = differing_facts(self.engine_id, self.facts, reply.engine_id, reply.facts)
        if reason is None and reply.memory.bytes_per_block != self.bytes_per_block:
            reason = f"its blocks have {reply.memory.bytes_per_block} bytes, ours {self.bytes_per_block}"
        return reason

    def _on_hello(self, link: PeerLink, answer: HelloReply | Refused, now_ns: int) -> None:
        reason = self._unfit(link, answer)
        waiting = [read for read in self._reads_of(link.peer) if read.stage is _Stage.HELLO]
        if reason is None:
            assert isinstance(answer, HelloReply)
            link.handshake, link.reply = Handshake.DONE, answer
            self._retire(link)
            for read in waiting:
                self._push(read, link, now_ns)
            return
        link.handshake = Handshake.REFUSED
        self.stats.failed_handshakes += 1
        log.warning("%s refused: %s", name_of(link.peer), reason)
        for read in waiting:
            self._fail(read, f"{name_of(link.peer)} refused the handshake: {reason}")

    # ----------------------------------------------------------------------------------------------- from the mover

    def ended(self, message: Ended, now_ns: int) -> None:
        """A READ is over for certain."""
        read = self._reads.pop(message.handle, None)
        if read is None:
            return
        link = self._links.get(read.post.source.peer)
        if link is not None:
            link.last_used_ns = now_ns
            if message.error not in (None, CANCELLED):
                if link.handshake is Handshake.DONE:
                    link.handshake = Handshake.NONE  # whatever it was: the next read asks anew
                self._retire(link)
        self._moving[read.mover_key] -= 1
        self._forget_unused(read.mover_key)
        if message.slot is not None:
            self.stats.finished(message.moved_bytes, message.seconds)
        elif message.error != CANCELLED:
            self.stats.failed_transfers += 1
        error = None if message.error is None else readable(message.error, REASON_CHARS)  # it may quote the peer
        moved, seconds = message.moved_bytes, message.seconds
        self.deliver(
            ReadEnded(handle=message.handle, slot=message.slot, moved_bytes=moved, seconds=seconds, error=error)
        )

    def mover_lost(self) -> None:
        """The mover was killed or died: what it had is fenced and will not be reported; the rest goes to the next."""
        handles = tuple(handle for handle, read in self._reads.items() if read.stage is _Stage.MOVING)
        for handle in handles:
            del self._reads[handle]
        self._moving.clear()
        self.deliver(MoverRestarted(handles=handles))

    def mover_ready(self, now_ns: int) -> None:
        """Hand over the reads that waited for it."""
        for read in list(self._reads.values()):
            link = self._links.get(read.post.source.peer)
            if read.stage is _Stage.MOVER and link is not None:
                self._hand_over(read, link, now_ns)

    # ------------------------------------------------------------------------------------------------------- timers

    def tick(self, now_ns: int, *, engine_alive: bool) -> None:
        """Heartbeats that are due (only for an engine that steps), answers that did not come, links nobody needs."""
        for link in self.links():
            if link.handshake is Handshake.ASKED and now_ns >= link.hello_deadline_ns:
                self._no_answer(link)
            if link.tokens and now_ns >= link.next_beat_ns:
                link.last_beat_ns = now_ns
                link.next_beat_ns = now_ns + self._beat_ns(link)
                if engine_alive and link.handshake is not Handshake.REFUSED:
                    if link.handshake is Handshake.NONE:
                        self._ask(link, now_ns)
                    self.stats.heartbeats_sent += link.beat()
                    link.last_used_ns = now_ns
            if not link.tokens and now_ns - link.last_used_ns > _IDLE_LINK_NS and not any(self._reads_of(link.peer)):
                self._drop(link)
        for read in list(self._reads.values()):
            if read.stage in (_Stage.CLAIM, _Stage.MOVER) and now_ns >= read.deadline_ns:
                self.stats.failed_handshakes += read.stage is _Stage.CLAIM
                late = "did not answer the claim within 5 s"
                cause = late if read.stage is _Stage.CLAIM else "our mover does not start"
                self._fail(read, f"{name_of(read.post.source.peer)}: {cause}")

    def _beat_ns(self, link: PeerLink) -> int:
        """A sixth of the lease: of the peer's once it has told, for it is the peer's clock that runs out."""
        if link.reply is None:
            return min(self.beat_ns, _UNKNOWN_LEASE_BEAT_NS)
        return min(self.beat_ns, max(link.reply.lease_ns // 6, _SHORTEST_BEAT_NS))

    def next_ns(self) -> int | None:
        """When `tick` is wanted next; None when nothing is timed."""
        times = [link.hello_deadline_ns for link in self._links.values() if link.handshake is Handshake.ASKED]
        times += [link.next_beat_ns for link in self._links.values() if link.tokens]
        times += [read.deadline_ns for read in self._reads.values() if read.stage in (_Stage.CLAIM, _Stage.MOVER)]
        return min(times, default=None)

    def _no_answer(self, link: PeerLink) -> None:
        self.stats.failed_handshakes += 1
        link.handshake = Handshake.NONE
        link.reopen()  # so that what queued up for a dead peer is not delivered to the next one there
        for read in self._reads_of(link.peer):
            if read.stage is _Stage.HELLO:
                self._fail(read, f"{name_of(link.peer)} did not answer the handshake within 5 s: is it reachable?")

    # ------------------------------------------------------------------------------------------------------- steps

    def _link(self, peer: Peer, now_ns: int) -> PeerLink | str:
        """The link to ``peer``, made if need be; or why there can be none."""
        link = self._links.get(peer)
        if link is not None:
            link.last_used_ns = now_ns
            return link
        if len(self._links) >= _MAX_LINKS:
            return f"{name_of(peer)}: already connected to {_MAX_LINKS} peers"
        try:
            link = self._links[peer] = PeerLink(self.context, peer, now_ns)
        except (zmq.ZMQError, OverflowError, ValueError) as error:
            return f"{name_of(peer)} is no address to connect to: {readable(str(error))}"
        return link

    def _ask(self, link: PeerLink, now_ns: int) -> None:
        link.hello_seq = self._next_seq()
        link.hello_deadline_ns = now_ns + _ANSWER_TIMEOUT_NS
        link.handshake = Handshake.ASKED
        link.send(
            Hello(seq=link.hello_seq, engine_id=self.engine_id, target=link.peer.engine_id, facts=dict(self.facts))
        )

    def _push(self, read: _Read, link: PeerLink, now_ns: int) -> None:
        """The next step of a read that is not moving: ask who is there, or claim."""
        if link.handshake is Handshake.DONE:
            read.stage, read.seq = _Stage.CLAIM, self._next_seq()
            read.deadline_ns = now_ns + _ANSWER_TIMEOUT_NS
            self._claims[read.seq] = read.post.handle
            link.send(Claim(seq=read.seq, consumer=self.engine_id, source=read.post.source))
            return
        read.stage = _Stage.HELLO
        read.tries += 1
        if read.tries > _MAX_TRIES:
            self._fail(read, f"{name_of(link.peer)} keeps restarting its mover")
        elif link.handshake is not Handshake.ASKED:
            self._ask(link, now_ns)

    def _hand_over(self, read: _Read, link: PeerLink, now_ns: int) -> None:
        if not self.mover.ready:
            read.stage, read.deadline_ns = _Stage.MOVER, now_ns + _MOVER_TIMEOUT_NS
            return
        assert link.reply is not None
        if link.mover_key is None or link.mover_life != self.mover.life:
            self._connections += 1
            link.mover_key = f"{name_of(link.peer)} #{self._connections}"
            link.mover_life = self.mover.life
            self.mover.send(Connect(peer=link.mover_key, memory=link.reply.memory))
        read.stage, read.mover_key = _Stage.MOVING, link.mover_key
        self._moving[link.mover_key] += 1
        post = read.post
        self.mover.send(
            Post(
                handle=post.handle,
                peer=link.mover_key,
                remote_blocks=np.ascontiguousarray(post.remote_blocks, dtype="<i4").tobytes(),
                local_blocks=np.ascontiguousarray(post.local_blocks, dtype="<i4").tobytes(),
                slot=post.source.slot,
            )
        )

    def _fail(self, read: _Read, error: str) -> None:
        """End a read that never reached the mover."""
        del self._reads[read.post.handle]
        self._claims.pop(read.seq, None)
        self.stats.failed_transfers += error != CANCELLED
        self.deliver(ReadEnded(handle=read.post.handle, slot=None, error=error))

    def _retire(self, link: PeerLink) -> None:
        """The next read connects anew; the connection of now is forgotten after its last read."""
        key, link.mover_key = link.mover_key, None
        if key is not None and link.mover_life == self.mover.life:
            self._forget_unused(key)

    def _forget_unused(self, key: str) -> None:
        if self._moving[key] <= 0 and all(link.mover_key != key for link in self._links.values()):
            del self._moving[key]
            self.mover.send(Forget(peer=key))

    def _drop(self, link: PeerLink) -> None:
        self._retire(link)
        del self._links[link.peer]
        link.close()

    def _reads_of(self, peer: Peer) -> list[_Read]:
        return [read for read in self._reads.values() if read.post.source.peer == peer]

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq
