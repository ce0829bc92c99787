"""The consumer's side of the control thread: from a `PostRead` to its one `ReadEnded`.

Each read goes HELLO (the peer's facts agree, its key proves the grant) -> MOVER (ours is up) -> MOVING. Until it is
MOVING nothing can touch the destination, so it can end at once, and a mover's restart does not concern it.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pdkv.core.ports import InboxItem, MoverRestarted, Plan, PostRead, ReadEnded, SendMessage
from pdkv.core.transfer.messages import Heartbeat, Peer
from pdkv.core.transfer.proof import is_proved
from pdkv.runtime.mover_host import MoverHost
from pdkv.runtime.peer_link import Handshake, PeerLink, name_of
from pdkv.runtime.peers import Peers
from pdkv.runtime.shown import REASON_CHARS, readable
from pdkv.runtime.transfer_stats import TransferStats
from pdkv.runtime.wire import Cancel, Connect, Ended, Forget, HelloReply, Post

log = logging.getLogger("pdkv.control")

CANCELLED = "cancelled"
_MOVER_TIMEOUT_NS = 30 * 10**9  # a new mover has to import NIXL, on a busy machine


class _Stage(enum.Enum):
    HELLO = "waits for the handshake"
    MOVER = "waits for our mover"
    MOVING = "moves"


@dataclass(slots=True, eq=False)
class _Connection:
    """A peer's memory, as ``reply`` described it, under the name by which the mover of ``life`` knows it."""

    key: str
    life: int
    reply: HelloReply
    reads: int = 0  # that the mover has now


@dataclass(slots=True)
class _Read:
    post: PostRead
    stage: _Stage = _Stage.HELLO
    deadline_ns: int = 0
    asked: bool = False  # a handshake of its own: whatever the peer told then is the last word
    cancelled: bool = False  # nobody wants it any more: it is not tried again
    connection: _Connection | None = None
    failure: str | None = None  # of the attempt over `connection`

    @property
    def peer(self) -> Peer:
        return self.post.source.peer


@dataclass
class Reader:
    """All reads of one instance. Used by the control thread only."""

    peers: Peers
    mover: MoverHost
    stats: TransferStats
    deliver: Callable[[InboxItem], None]
    _reads: dict[int, _Read] = field(default_factory=dict)
    _connections: dict[Peer, _Connection] = field(default_factory=dict)  # that reads to come may use
    _made: int = 0

    # --------------------------------------------------------------------------------------------- from the engine

    def take(self, plan: Plan, now_ns: int) -> None:
        """Carry out one plan's reads; its restart of the mover comes before them."""
        if plan.restart_mover:
            self.mover.restart()
            self.mover_lost()
        for post in plan.reads:
            read = self._reads[post.handle] = _Read(post)
            try:
                self._push(read, now_ns)
            except Exception as error:  # one bad read must not take the others of this plan with it
                log.exception("read %d cannot begin", post.handle)
                self._fail(read, f"{name_of(read.peer)}: {readable(str(error))}")
        for handle in plan.cancels:
            self._cancel(handle)

    def _cancel(self, handle: int) -> None:
        read = self._reads.get(handle)
        if read is None:  # over, and reported
            return
        read.cancelled = True
        if read.stage is _Stage.MOVING:
            self.mover.send(Cancel(handle=handle))
        else:
            self._fail(read, CANCELLED)

    # ---------------------------------------------------------------------------------------------- from the peers

    def settled(self, link: PeerLink, problem: str | None, now_ns: int) -> None:
        """A handshake has ended: the reads that waited for it go on, or fail with ``problem``."""
        for read in [read for read in self._reads.values() if read.peer == link.peer and read.stage is _Stage.HELLO]:
            if problem is None:
                self._push(read, now_ns)
            else:
                self._fail(read, problem if read.failure is None else f"{read.failure}; then {problem}")

    # ----------------------------------------------------------------------------------------------- from the mover

    def ended(self, message: Ended, now_ns: int) -> None:
        """A READ is over for certain, or the one attempt at it (see `_again`)."""
        read = self._reads.get(message.handle)
        if read is None:
            return
        self.peers.link(read.peer, now_ns)  # it is in use
        self._let_go(read)
        error = None if message.error is None else readable(message.error, REASON_CHARS)  # it may quote the peer
        if error is not None and error != CANCELLED:
            self._retire(read.peer)
            if self._again(read, error, now_ns):
                return
            self.stats.failed_transfers += 1
        del self._reads[message.handle]
        if message.slot is not None:
            self.stats.finished(message.moved_bytes, message.seconds)
        moved, seconds = message.moved_bytes, message.seconds
        self.deliver(
            ReadEnded(handle=message.handle, slot=message.slot, moved_bytes=moved, seconds=seconds, error=error)
        )

    def _again(self, read: _Read, error: str, now_ns: int) -> bool:
        """Whether to ask the peer, once, if there is another memory to read from by now (its mover was restarted)."""
        link = self.peers.link(read.peer, now_ns)
        if read.cancelled or read.failure is not None or not isinstance(link, PeerLink):
            return False
        read.stage, read.failure, read.asked = _Stage.HELLO, error, True
        self.peers.ask(link, now_ns)
        return True

    def mover_lost(self) -> None:
        """The mover was killed or died: what it had is fenced and will not be reported; the rest goes to the next."""
        handles = tuple(handle for handle, read in self._reads.items() if read.stage is _Stage.MOVING)
        for handle in handles:
            del self._reads[handle]
        self._connections.clear()
        self.deliver(MoverRestarted(handles=handles))

    def mover_ready(self, now_ns: int) -> None:
        """Hand over the reads that waited for it."""
        for read in [read for read in self._reads.values() if read.stage is _Stage.MOVER]:
            self._push(read, now_ns)

    # ------------------------------------------------------------------------------------------------------- timers

    def tick(self, now_ns: int) -> None:
        """Reads that have waited too long for our mover, and connections to peers whose link is gone."""
        for read in [read for read in self._reads.values() if read.stage is _Stage.MOVER]:
            if now_ns >= read.deadline_ns:
                self._fail(read, f"{name_of(read.peer)}: our mover does not start")
        for peer in [peer for peer in self._connections if peer not in self.peers]:
            self._retire(peer)

    def next_ns(self) -> int | None:
        """When `tick` is wanted next; None when nothing is timed."""
        return min((read.deadline_ns for read in self._reads.values() if read.stage is _Stage.MOVER), default=None)

    # ------------------------------------------------------------------------------------------------------- steps

    def _push(self, read: _Read, now_ns: int) -> None:
        """The next step of a read that is not moving: ask who is there, or check the grant and hand it over."""
        link = self.peers.link(read.peer, now_ns)
        if not isinstance(link, PeerLink):
            self._fail(read, link)
            return
        # An answer from before the read may be that of the peer's earlier life, with another key: ask, once.
        stale = link.reply is not None and link.reply.nonce != read.post.source.grant.nonce and not read.asked
        if link.handshake is not Handshake.DONE or stale:
            read.stage, read.asked = _Stage.HELLO, True
            self.peers.ask(link, now_ns)
            return
        assert link.reply is not None
        problem = _refusal(read, link.reply)
        if problem is None:
            self._hand_over(read, link, link.reply, now_ns)
        else:
            self.stats.refusals += read.failure is None
            self._fail(read, problem)

    def _hand_over(self, read: _Read, link: PeerLink, reply: HelloReply, now_ns: int) -> None:
        if not self.mover.ready:
            if read.stage is not _Stage.MOVER:
                read.stage, read.deadline_ns = _Stage.MOVER, now_ns + _MOVER_TIMEOUT_NS
            return
        read.connection = connection = self._connect(link.peer, reply)
        connection.reads += 1
        read.stage = _Stage.MOVING
        post, grant = read.post, read.post.source.grant
        self.mover.send(
            Post(
                handle=post.handle,
                peer=connection.key,
                remote_blocks=np.ascontiguousarray(post.remote_blocks, dtype="<i4").tobytes(),
                local_blocks=np.ascontiguousarray(post.local_blocks, dtype="<i4").tobytes(),
                slot=grant.slot,
            )
        )
        # It renews the lease (unless it is of a kept turn), and the peer learns that its mover's help may be needed.
        self.peers.send((SendMessage(link.peer, Heartbeat((grant.token,))),), now_ns)

    def _connect(self, peer: Peer, reply: HelloReply) -> _Connection:
        """The connection of now, or a new one where the mover or the peer's memory is another."""
        known = self._connections.get(peer)
        if known is not None and known.life == self.mover.life and _same_memory(known.reply, reply):
            return known
        self._retire(peer)
        self._made += 1
        made = self._connections[peer] = _Connection(f"{name_of(peer)} #{self._made}", self.mover.life, reply)
        self.mover.send(Connect(peer=made.key, memory=reply.memory))
        return made

    def _fail(self, read: _Read, error: str) -> None:
        """End a read that is not in the mover."""
        del self._reads[read.post.handle]
        self.stats.failed_transfers += error != CANCELLED
        self.deliver(ReadEnded(handle=read.post.handle, slot=None, error=error))

    def _let_go(self, read: _Read) -> None:
        """The mover has this read no longer."""
        connection = read.connection
        assert connection is not None
        connection.reads -= 1
        if self._connections.get(read.peer) is not connection:
            self._forget_unused(connection)

    def _retire(self, peer: Peer) -> None:
        """The next read connects anew; the connection of now is forgotten after its last read."""
        connection = self._connections.pop(peer, None)
        if connection is not None:
            self._forget_unused(connection)

    def _forget_unused(self, connection: _Connection) -> None:
        if connection.reads == 0 and connection.life == self.mover.life:
            self.mover.send(Forget(peer=connection.key))


def _same_memory(one: HelloReply, other: HelloReply) -> bool:
    return (one.nonce, one.epoch) == (other.nonce, other.epoch)


def _refusal(read: _Read, reply: HelloReply) -> str | None:
    """Why nothing may move for this read; None when its grant is proved and its source has not failed already."""
    source = read.post.source
    if read.failure is not None and read.connection is not None and _same_memory(read.connection.reply, reply):
        return read.failure
    if source.grant.nonce != reply.nonce:
        return f"{name_of(source.peer)}: the lease is of another life of this engine"
    if source.grant.block_size != reply.memory.geometry.block_size:
        return (
            f"{name_of(source.peer)}: the lease is of blocks of {source.grant.block_size} tokens, its pool has blocks "
            f"of {reply.memory.geometry.block_size}"
        )
    if not is_proved(reply.grant_key, source.grant, source.prompt_digest):
        return (
            f"{name_of(source.peer)} did not give this grant for this prompt: kv_transfer_params must be passed on "
            "unchanged, and both instances must turn the request into the same tokens (tokenizer, chat template)"
        )
    return None
