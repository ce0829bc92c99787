"""The control thread: handshakes, heartbeats and the mover, none of which may wait for a forward pass.

One thread owns every socket and the mover. The engine only calls `Control.submit`, which queues and returns.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import zmq

from pdkv.core.ports import (
    FromProducer,
    InboxItem,
    Keepalive,
    PeerLost,
    PeerMet,
    Plan,
    Revoked,
    SendMessage,
)
from pdkv.core.transfer.messages import Announce, Gone, RegisterWrite
from pdkv.errors import ConfigError, FenceLost
from pdkv.runtime.doorkeeper import Doorkeeper, PeerIdentity
from pdkv.runtime.grant_fences import GrantFences
from pdkv.runtime.mover_host import MoverHost, MoverKind
from pdkv.runtime.moves import Moves
from pdkv.runtime.peer_auth import door_for
from pdkv.runtime.peers import Peers
from pdkv.runtime.side_channel import FRAMES_PER_TURN, SideChannel, bind, port_of
from pdkv.runtime.transfer_stats import TransferStats
from pdkv.runtime.transports.base import TransferMemory
from pdkv.runtime.transports.shm import CPU_ONLY
from pdkv.runtime.wire import WIRE_VERSION, MemoryKind

log = logging.getLogger("pdkv.control")

__all__ = ["Control", "PeerIdentity", "TransferMemory", "TransferStats", "available_transport"]

_START_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 20.0
_POLL_LIMIT_S = 1.0


def available_transport(wanted: str, kind: MemoryKind = "DRAM") -> str:
    """``nixl`` or ``shm`` for ``auto``, ``nixl`` or ``shm``, between pools of this kind.

    Raises `ConfigError` for NIXL where it has no wheel, and for shared memory between GPU pools.
    """
    if wanted not in ("auto", "nixl", "shm"):
        raise ConfigError(f"transport {wanted!r} is not one of auto, nixl, shm")
    if wanted == "shm":
        if kind != "DRAM":
            raise ConfigError(CPU_ONLY)
        return "shm"
    if any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13", "nixl")):
        return "nixl"
    if kind != "DRAM":
        raise ConfigError(
            "GPU pools are moved by NIXL, but none is installed: pip install nixl-cu12 (or nixl-cu13), "
            "or start with --device cpu"
        )
    if wanted == "nixl":
        raise ConfigError(
            "transport nixl was asked for, but no NIXL is installed: pip install nixl-cu12 (or nixl-cu13), "
            "or use --transport shm on one host"
        )
    return "shm"


class Control:
    """Owns the side channel of one instance.

    ``deliver`` is called on the control thread with every `InboxItem` that comes from peers or the mover; it must only
    queue. ``last_step_ns`` says when the engine last stepped: one that stands still for 60 s stops renewing leases.
    Both clocks are the instance's own (``now_ns``). ``port`` 0 picks a free one. ``mover`` None means a process for a
    CPU pool and a thread for a GPU pool. ``secret`` (`peer_auth.secret_key`) is what peers must prove and are proved;
    None: nothing is, and only peers on this host are asked. ``engine_ttl_ns`` is for how long an idle peer is
    remembered; None: for ever.

    When a mover cannot be ended the thread stops for good: nothing is answered, renewed or reported any more, so the
    memory in question stays with whoever holds it. ``on_failure`` is called with the `FenceLost`, once, on the thread.
    """

    def __init__(
        self,
        identity: PeerIdentity,
        memory: TransferMemory,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        transport: str = "auto",
        mover: MoverKind | None = None,
        lease_ns: int,
        engine_ttl_ns: int | None = 3600 * 10**9,
        secret: bytes | None = None,
        deliver: Callable[[InboxItem], None],
        last_step_ns: Callable[[], int],
        on_failure: Callable[[FenceLost], None] = lambda error: None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.transport = available_transport(transport, memory.pool.kind)
        self.host = host
        self.port = port
        self._identity = identity
        self._memory = memory
        self._fallback = transport == "auto" and memory.pool.kind == "DRAM"
        self._lease_ns, self._engine_ttl_ns = lease_ns, engine_ttl_ns
        self._secret = secret
        self._door = door_for(secret, identity.core.engine_id)
        self._deliver_raw = deliver
        self._last_step_ns = last_step_ns
        self._on_failure = on_failure
        self._now_ns = now_ns
        self._stats = TransferStats()
        self._mover = MoverHost(memory, self._stats, now_ns, mover)
        self._fence_lost: FenceLost | None = None
        self._submitted: deque[Plan] = deque()
        self._standing: tuple[tuple[Keepalive, ...], tuple[Revoked, ...]] = (), ()  # of the plan submitted last
        self._closing = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------------ other threads

    def start(self) -> None:
        """Bind, start the mover, and return when peers can be answered.

        Raises `ConfigError` when the port cannot be bound or the transport cannot start, with what to change.
        """
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="pdkv-control", daemon=True)
        self._thread.start()
        try:
            started.result(_START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def submit(self, plan: Plan) -> None:
        """Carry out the plan's transfers and messages. Only queues: never blocks. Called by one thread at a time.

        ``plan.keepalives`` and ``plan.revoked`` are whole sets, so a plan that only repeats them costs nothing.
        """
        standing = plan.keepalives, plan.revoked
        posts = plan.reads or plan.writes or plan.cancels
        if standing != self._standing or posts or plan.messages or plan.replies or plan.restart_mover or plan.evict:
            self._standing = standing
            self._submitted.append(plan)
            self._wake()

    def stats(self) -> TransferStats:
        """Counters since the start (a copy)."""
        return self._stats.copy()

    @property
    def without_nixl(self) -> str | None:
        """Why NIXL, which was tried first, could not start; None when it did or was not tried."""
        return self._mover.without_nixl

    @property
    def mover_pid(self) -> int | None:
        """Process id of the mover of now; None while there is none, or when it is a thread."""
        return self._mover.pid

    @property
    def epoch(self) -> int:
        """Of the memory that peers reach; another one when they must be told anew how (`MoverHost`)."""
        return self._mover.epoch

    def close(self) -> None:
        """Stop: no read goes on, the mover is gone, all sockets are closed. Unfinished reads are not reported.

        Raises `FenceLost` (each time) when a mover could not be ended: the memory must not be given back then.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._closing = True
            self._wake()
            thread.join(_CLOSE_TIMEOUT_S)
            if thread.is_alive():
                raise RuntimeError("the control thread does not stop")
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1
        if self._fence_lost is not None:
            raise self._fence_lost

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    # ---------------------------------------------------------------------------------------------- the thread's own

    def _run(self, started: Future[None]) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            try:
                self._serve(context, started)
            finally:
                self._mover.stop()
        except FenceLost as error:
            log.critical("this instance stops serving: %s", error)
            self._fence_lost = error
            self._on_failure(error)
        finally:
            context.destroy(linger=200)

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]], started: Future[None]) -> None:
        try:
            router = bind(context, self.host, self.port)
            self.port = port_of(router)
            self.transport = self._mover.begin(self.transport, fallback=self._fallback, closing=lambda: self._closing)
            self._set_up(context, router)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        self._loop(router)

    def _set_up(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
        facts = {**self._identity.facts, "wire": WIRE_VERSION, "transport": self.transport}
        self._doorkeeper = Doorkeeper(
            identity=self._identity,
            facts=facts,
            memory=self._memory,
            lease_ns=self._lease_ns,
            describe=self._mover.describe,
            now_ns=self._now_ns,
        )
        self._peers = Peers(
            context=context,
            engine_id=self._identity.core.engine_id,
            facts=facts,
            geometry=self._memory.geometry,
            stats=self._stats,
            beat_ns=self._lease_ns // 6,
            engine_ttl_ns=self._engine_ttl_ns,
            secret=self._secret,
        )
        self._moves = Moves(peers=self._peers, mover=self._mover, stats=self._stats, deliver=self._deliver)
        self._fences = GrantFences(
            transport=self.transport,
            memory=self._memory,
            mover=self._mover,
            moves=self._moves,
            deliver=self._deliver,
        )
        self._asked = SideChannel(
            router=router,
            door=self._door,
            doorkeeper=self._doorkeeper,
            stats=self._stats,
            deliver=self._deliver,
            now_ns=self._now_ns,
        )

    def _loop(self, router: zmq.Socket[bytes]) -> None:
        while not self._closing:
            try:
                self._turn(router)
            except FenceLost:
                raise
            except Exception:
                # A fault in one message must not end the heartbeats of all others.
                log.exception("control thread: unexpected error, going on")
                self._stats.internal_errors += 1
                time.sleep(0.05)

    def _turn(self, router: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        links = self._peers.links()
        for link in links:
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
        mover_fd = self._mover.fileno()
        if mover_fd is not None:
            poller.register(mover_fd, zmq.POLLIN | (zmq.POLLOUT if self._mover.wants_write else 0))
        ready = dict(poller.poll(self._wait_ms()))

        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if mover_fd in ready:
            self._mover_turn()
        while self._submitted:
            self._carry_out(self._submitted.popleft())
        if router in ready:
            self._asked.turn(mover_ready=self._mover.ready)
        for link in links:
            if link.socket in ready:
                for told in self._peers.hear(link, FRAMES_PER_TURN, self._now_ns()):
                    self._stats.announcements_received += isinstance(told, Announce)
                    self._stats.gone_received += isinstance(told, Gone)
                    self._deliver(FromProducer(told, link.peer))
            if link.monitor in ready and link.connection_lost():
                self._peers.lost(link)
        now_ns = self._now_ns()
        self._mover.tick(now_ns)
        self._peers.tick(now_ns, engine_alive=now_ns - self._last_step_ns() < 60 * 10**9)
        for link, problem in self._peers.take_settled():
            self._moves.settled(link, problem, now_ns)
            if link.awaited:
                met = PeerMet(link.peer, link.clock_offset_ns)
                self._deliver(met if problem is None else PeerLost(link.peer, problem))
        self._moves.tick(now_ns)
        self._fences.tick(now_ns)
        self._mover.serve_until(self._doorkeeper.readers_until_ns(now_ns), now_ns)

    def _carry_out(self, plan: Plan) -> None:
        now_ns = self._now_ns()
        self._moves.take(plan, now_ns)
        if plan.restart_mover:
            self._fences.mover_lost()
        self._fences.take(plan, now_ns)
        self._peers.send(tuple(map(self._stamped, plan.messages)), now_ns)
        self._asked.reply(plan.replies)
        self._peers.keep_alive(plan.keepalives, now_ns)
        for keepalive in plan.keepalives:
            if keepalive.awaited and isinstance(link := self._peers.link(keepalive.peer, now_ns), str):
                self._deliver(PeerLost(keepalive.peer, link))  # here ``link`` says why there is none

    def _stamped(self, message: SendMessage) -> SendMessage:
        """A registration that grants memory says of which epoch that is: it must not outlive our mover."""
        if not isinstance(message.message, RegisterWrite):
            return message
        return SendMessage(message.peer, msgspec.structs.replace(message.message, epoch=self._mover.epoch))

    def _wait_ms(self) -> int:
        timed = (self._peers, self._moves, self._fences, self._mover)
        times = [at for one in timed if (at := one.next_ns()) is not None]
        wait_s = min([_POLL_LIMIT_S, *((t - self._now_ns()) / 1e9 for t in times)])
        return max(0, int(wait_s * 1000) + (1 if wait_s > 0 else 0))

    def _mover_turn(self) -> None:
        """Take the mover's reports; a mover that died is replaced (its handles are fenced: they cannot write)."""
        was_ready = self._mover.ready
        ended, died = self._mover.receive()
        for message in ended:
            self._moves.ended(message, self._now_ns())
        if died:
            self._moves.mover_lost()
            self._fences.mover_lost()
        elif self._mover.ready and not was_ready:
            self._moves.mover_ready(self._now_ns())
            self._asked.answer_deferred()

    def _deliver(self, item: InboxItem) -> None:
        try:
            self._deliver_raw(item)
        except Exception:
            log.exception("the engine did not take %s", type(item).__name__)
            self._stats.internal_errors += 1
