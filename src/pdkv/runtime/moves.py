"""What the engine posts, until it has ended: from a `PostRead` or `PostWrite` to its one `ReadEnded` or `WriteEnded`.

Each goes HELLO (the peer's facts agree; its key proves a grant to read, its life is the one that gave a grant to write)
-> MOVER (ours is up) -> MOVING. Until it is MOVING nothing can touch the destination, so it can end at once, and a
mover's restart does not concern it.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pdkv.core.ports import InboxItem, MoverRestarted, Plan, PostRead, PostWrite, ReadEnded, SendMessage, WriteEnded
from pdkv.core.transfer.messages import Grant, Heartbeat, Peer, WriteGrant
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
    moves: int = 0  # that the mover has now


@dataclass(slots=True)
class _Move:
    post: PostRead | PostWrite
    stage: _Stage = _Stage.HELLO
    deadline_ns: int = 0
    asked: bool = False  # a handshake of its own: whatever the peer told then is the last word
    cancelled: bool = False  # nobody wants it any more: it is not tried again
    connection: _Connection | None = None
    failure: str | None = None  # of the attempt over `connection`
    cut_off: bool = False  # in any attempt

    @property
    def peer(self) -> Peer:
        return self.post.source.peer if isinstance(self.post, PostRead) else self.post.consumer

    @property
    def grant(self) -> Grant | WriteGrant:
        return self.post.source.grant if isinstance(self.post, PostRead) else self.post.grant


@dataclass
class Moves:
    """All READs and WRITEs of one instance. Used by the control thread only."""

    peers: Peers
    mover: MoverHost
    stats: TransferStats
    deliver: Callable[[InboxItem], None]
    _moves: dict[int, _Move] = field(default_factory=dict)
    _connections: dict[Peer, _Connection] = field(default_factory=dict)  # that what is to come may use
    _made: int = 0

    # --------------------------------------------------------------------------------------------- from the engine

    def take(self, plan: Plan, now_ns: int) -> None:
        """Carry out one plan's posts and cancellations; its restart of the mover comes before them."""
        if plan.restart_mover:
            self.mover.restart()
            self.mover_lost()
        posts: tuple[PostRead | PostWrite, ...] = (*plan.reads, *plan.writes)
        for post in posts:
            move = self._moves[post.handle] = _Move(post)
            try:
                self._push(move, now_ns)
            except Exception as error:  # a bad one must not take the others of this plan with it
                log.exception("transfer %d cannot begin", post.handle)
                self._fail(move, f"{name_of(move.peer)}: {readable(str(error))}")
        for handle in plan.cancels:
            self._cancel(handle)

    def _cancel(self, handle: int) -> None:
        move = self._moves.get(handle)
        if move is None:  # over, and reported
            return
        move.cancelled = True
        if move.stage is _Stage.MOVING:
            self.mover.send(Cancel(handle=handle))
        else:
            self._fail(move, CANCELLED)

    # ---------------------------------------------------------------------------------------------- from the peers

    def settled(self, link: PeerLink, problem: str | None, now_ns: int) -> None:
        """A handshake has ended: what waited for it goes on, or fails with ``problem``."""
        for move in [move for move in self._moves.values() if move.peer == link.peer and move.stage is _Stage.HELLO]:
            if problem is None:
                self._push(move, now_ns)
            else:
                self._fail(move, problem if move.failure is None else f"{move.failure}; then {problem}")

    # ----------------------------------------------------------------------------------------------- from the mover

    def ended(self, message: Ended, now_ns: int) -> None:
        """A transfer is over for certain, or the one attempt at it (see `_again`)."""
        move = self._moves.get(message.handle)
        if move is None:
            return
        self.peers.link(move.peer, now_ns)  # it is in use
        self._let_go(move)
        move.cut_off |= message.cut_off
        error = None if message.error is None else readable(message.error, REASON_CHARS)  # it may quote the peer
        if error is not None and error != CANCELLED:
            self._retire(move.peer)
            if self._again(move, error, now_ns):
                return
            self.stats.failed_transfers += 1
        del self._moves[message.handle]
        if error is None:
            self.stats.finished(message.moved_bytes, message.seconds)
        self._report(move, message, error)

    def _again(self, move: _Move, error: str, now_ns: int) -> bool:
        """Whether to ask the peer, once, if there is another memory there by now (its mover was restarted)."""
        link = self.peers.link(move.peer, now_ns)
        if move.cancelled or move.failure is not None or not isinstance(link, PeerLink):
            return False
        move.stage, move.failure, move.asked = _Stage.HELLO, error, True
        self.peers.ask(link, now_ns)
        return True

    def mover_lost(self) -> None:
        """The mover was killed or died: what it had is fenced and will not be reported; the rest goes to the next."""
        handles = tuple(handle for handle, move in self._moves.items() if move.stage is _Stage.MOVING)
        for handle in handles:
            del self._moves[handle]
        self._connections.clear()
        self.deliver(MoverRestarted(handles=handles, cut_off=self.mover.leaves_sockets))

    def mover_ready(self, now_ns: int) -> None:
        """Hand over what waited for it."""
        for move in [move for move in self._moves.values() if move.stage is _Stage.MOVER]:
            self._push(move, now_ns)

    # ------------------------------------------------------------------------------------------------------- timers

    def tick(self, now_ns: int) -> None:
        """What has waited too long for our mover, and connections to peers whose link is gone."""
        for move in [move for move in self._moves.values() if move.stage is _Stage.MOVER]:
            if now_ns >= move.deadline_ns:
                self._fail(move, f"{name_of(move.peer)}: our mover does not start")
        for peer in [peer for peer in self._connections if peer not in self.peers]:
            self._retire(peer)

    def next_ns(self) -> int | None:
        """When `tick` is wanted next; None when nothing is timed."""
        return min((move.deadline_ns for move in self._moves.values() if move.stage is _Stage.MOVER), default=None)

    # ------------------------------------------------------------------------------------------------------- steps

    def _push(self, move: _Move, now_ns: int) -> None:
        """The next step of what is not moving yet: ask who is there, or check the grant and hand it over."""
        link = self.peers.link(move.peer, now_ns)
        if not isinstance(link, PeerLink):
            self._fail(move, link)
            return
        # An answer from before the post may be that of the peer's earlier life, with another key: ask, once.
        stale = link.reply is not None and not move.asked and not _is_of_now(move, link.reply)
        if link.handshake is not Handshake.DONE or stale:
            move.stage, move.asked = _Stage.HELLO, True
            self.peers.ask(link, now_ns)
            return
        assert link.reply is not None
        problem = _refusal(move, link.reply)
        if problem is None:
            self._hand_over(move, link, link.reply, now_ns)
        else:
            self.stats.refusals += move.failure is None
            self._fail(move, problem)

    def _hand_over(self, move: _Move, link: PeerLink, reply: HelloReply, now_ns: int) -> None:
        if not self.mover.ready:
            if move.stage is not _Stage.MOVER:
                move.stage, move.deadline_ns = _Stage.MOVER, now_ns + _MOVER_TIMEOUT_NS
            return
        move.connection = connection = self._connect(link.peer, reply)
        connection.moves += 1
        move.stage = _Stage.MOVING
        post, grant = move.post, move.grant
        self.mover.send(
            Post(
                handle=post.handle,
                peer=connection.key,
                remote_blocks=np.ascontiguousarray(post.remote_blocks, dtype="<i4").tobytes(),
                local_blocks=np.ascontiguousarray(post.local_blocks, dtype="<i4").tobytes(),
                slot=grant.slot,
                grant=(grant.nonce, grant.grant_id) if isinstance(grant, WriteGrant) else None,
            )
        )
        # It renews the lease (unless it is of a kept turn), and the peer learns that its mover's help may be needed.
        tokens = (grant.token,) if isinstance(grant, Grant) else ()
        self.peers.send((SendMessage(link.peer, Heartbeat(tokens)),), now_ns)

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

    def _fail(self, move: _Move, error: str) -> None:
        """End what is not in the mover."""
        del self._moves[move.post.handle]
        self.stats.failed_transfers += error != CANCELLED
        ended = Ended(handle=move.post.handle, slot=None, moved_bytes=0, seconds=0.0)
        self._report(move, ended, error)

    def _report(self, move: _Move, ended: Ended, error: str | None) -> None:
        handle, moved, seconds = ended.handle, ended.moved_bytes, ended.seconds
        if isinstance(move.post, PostWrite):
            cut_off = move.cut_off and error is not None
            self.deliver(WriteEnded(handle=handle, moved_bytes=moved, seconds=seconds, error=error, cut_off=cut_off))
        else:
            self.deliver(ReadEnded(handle=handle, slot=ended.slot, moved_bytes=moved, seconds=seconds, error=error))

    def _let_go(self, move: _Move) -> None:
        """The mover has it no longer."""
        connection = move.connection
        assert connection is not None
        connection.moves -= 1
        if self._connections.get(move.peer) is not connection:
            self._forget_unused(connection)

    def _retire(self, peer: Peer) -> None:
        """The next one connects anew; the connection of now is forgotten when nothing moves over it any more."""
        connection = self._connections.pop(peer, None)
        if connection is not None:
            self._forget_unused(connection)

    def _forget_unused(self, connection: _Connection) -> None:
        if connection.moves == 0 and connection.life == self.mover.life:
            self.mover.send(Forget(peer=connection.key))


def _same_memory(one: HelloReply, other: HelloReply) -> bool:
    return (one.nonce, one.epoch) == (other.nonce, other.epoch)


def _is_of_now(move: _Move, reply: HelloReply) -> bool:
    """Whether the peer's life, and for a WRITE its mover's too, is still the one of the grant."""
    same_life = move.grant.nonce == reply.nonce
    return same_life and (isinstance(move.post, PostRead) or move.post.epoch == reply.epoch)


def _refusal(move: _Move, reply: HelloReply) -> str | None:
    """Why nothing may move for this one; None when its grant is the peer's own and has not failed there already."""
    if move.failure is not None and move.connection is not None and _same_memory(move.connection.reply, reply):
        return move.failure
    if move.grant.nonce != reply.nonce:
        return f"{name_of(move.peer)}: the grant is of another life of this engine"
    if not _is_of_now(move, reply):
        return f"{name_of(move.peer)}: the grant was given with a mover that is no more"
    if move.grant.block_size != reply.memory.geometry.block_size:
        return (
            f"{name_of(move.peer)}: the grant is of blocks of {move.grant.block_size} tokens, its pool has blocks of "
            f"{reply.memory.geometry.block_size}"
        )
    if isinstance(move.post, PostWrite):  # it came from that very engine, which looks after its own memory
        return None
    source = move.post.source
    if not is_proved(reply.grant_key, source.grant, source.prompt_digest):
        return (
            f"{name_of(source.peer)} did not give this grant for this prompt: kv_transfer_params must be passed on "
            "unchanged, and both instances must turn the request into the same tokens (tokenizer, chat template)"
        )
    return None
