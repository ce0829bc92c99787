"""The mover as the control thread sees it: one life after the other, always one that can be killed."""

from __future__ import annotations

import logging
import select
import time
import uuid
from collections.abc import Callable
from typing import Literal

from pdkv.errors import ConfigError
from pdkv.runtime.mover_channel import MoverChannel
from pdkv.runtime.mover_process import MoverProcess
from pdkv.runtime.mover_thread import MoverThread
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transfer_stats import TransferStats
from pdkv.runtime.transports.base import TransferMemory
from pdkv.runtime.transports.shm import shm_offer
from pdkv.runtime.wire import Broken, Ended, NixlOffer, PeerMemory, Ready, Serve, ShmOffer, Start, ToMover

log = logging.getLogger("pdkv.control")

_READY_TIMEOUT_S = 90.0
_FIRST_RETRY_NS = 250_000_000
_LONGEST_RETRY_NS = 30 * 10**9
_SERVE_SLACK_NS = 2 * 10**9

MoverKind = Literal["process", "thread"]


class MoverHost:
    """Starts, restarts and stops the mover. Used by the control thread only.

    A CPU pool gets a process unless ``kind`` says otherwise, a GPU pool a thread. ``life`` counts the movers, ``epoch``
    the changes of what peers must know to read from here. `begin`, `receive`, `restart` and `stop` raise `FenceLost`
    when a mover could not be ended: the pool must not be reused then, and no new mover is started.
    """

    def __init__(
        self,
        memory: TransferMemory,
        stats: TransferStats,
        now_ns: Callable[[], int],
        kind: MoverKind | None = None,
    ) -> None:
        self._memory = memory
        self._kind = kind or ("process" if isinstance(memory.pool, SharedMemory) else "thread")
        self._stats = stats
        self._now_ns = now_ns
        self._mover: MoverChannel | None = None
        self._transport = "shm"
        self.without_nixl: str | None = None  # why, where it was asked for first
        self._nixl: NixlOffer | None = None
        self._retry_at_ns: int | None = None
        self._retry_ns = _FIRST_RETRY_NS
        self._served_until_ns = 0
        self.ready = False
        self.life = 0
        self.epoch = 0

    @property
    def pid(self) -> int | None:
        """Process id of the mover of now; None when there is none, or it is a thread."""
        return self._mover.pid if self._mover else None

    @property
    def leaves_sockets(self) -> bool:
        """Whether what a mover has posted may still arrive at a peer after its death: NIXL may send it over TCP."""
        return self._transport == "nixl"

    @property
    def wants_write(self) -> bool:
        """Whether messages wait for room in its socket."""
        return self._mover is not None and self._mover.wants_write

    def fileno(self) -> int | None:
        """The socket to poll; None while there is no mover."""
        return self._mover.fileno() if self._mover else None

    def begin(self, transport: str, *, fallback: bool, closing: Callable[[], bool]) -> str:
        """Start the first mover and wait for it; the transport it uses, ``shm`` if NIXL fails and ``fallback``.

        Raises `ConfigError` when it cannot start.
        """
        self._transport = transport
        reason = self._begin_once(closing)
        if reason is not None and transport == "nixl" and fallback:
            self.without_nixl = reason
            log.warning("NIXL cannot start (%s): using shared memory, which reaches this host only", reason)
            self._transport = "shm"
            reason = self._begin_once(closing)
        if reason is not None:
            raise ConfigError(f"transport {self._transport} cannot start: {reason}; try --transport shm on one host")
        return self._transport

    def _begin_once(self, closing: Callable[[], bool]) -> str | None:
        self._spawn()
        assert self._mover is not None
        readable = select.poll()
        readable.register(self._mover.fileno(), select.POLLIN)
        until_s = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < until_s and not closing():
            readable.poll(200)
            messages, alive = self._mover.receive()
            for message in messages:
                if isinstance(message, Ready):
                    self._on_ready(message)
                    return None
                if isinstance(message, Broken):
                    self.stop()
                    return message.reason
            if not alive:
                cause = self._mover.reap()
                self._mover = None
                return f"the mover ended at once (its error is above): {cause}"
        self.stop()
        return f"the mover was not ready within {_READY_TIMEOUT_S:.0f} s"

    def send(self, message: ToMover) -> None:
        """Queue a message for a mover that is ``ready``."""
        if self._mover is not None:
            self._mover.send(message)

    def receive(self) -> tuple[list[Ended], bool]:
        """(what it reported, whether it has died); a dead one is replaced at once."""
        if self._mover is None:
            return [], False
        self._mover.flush()
        messages, alive = self._mover.receive()
        ended: list[Ended] = []
        for message in messages:
            match message:
                case Ended():
                    ended.append(message)
                case Ready():
                    self._on_ready(message)
                case Broken(reason=reason):
                    log.error("the mover cannot start: %s", reason)
        if not alive:
            log.error("the mover ended by itself (%s); a new one is started", self._mover.reap())
            self._after_death(at_once=self.ready)
        return ended, not alive

    def restart(self) -> None:
        """Kill it (after this nothing of it can write) and start the next one."""
        if self._mover is not None:
            self._mover.kill()
            self._after_death(at_once=True)

    def _after_death(self, *, at_once: bool) -> None:
        self._mover = None
        self.ready = False
        self._stats.mover_restarts += 1
        if at_once:
            self._retry_ns = _FIRST_RETRY_NS
            self._try_spawn()
        else:
            self._schedule_retry()

    def _schedule_retry(self) -> None:
        self._retry_at_ns = self._now_ns() + self._retry_ns
        self._retry_ns = min(2 * self._retry_ns, _LONGEST_RETRY_NS)

    def _try_spawn(self) -> None:
        try:
            self._spawn()
        except OSError as error:
            log.error("the mover cannot be started: %s", error)
            self._schedule_retry()

    def tick(self, now_ns: int) -> None:
        """Start a mover that is due."""
        if self._retry_at_ns is not None and now_ns >= self._retry_at_ns:
            self._retry_at_ns = None
            self._try_spawn()

    def next_ns(self) -> int | None:
        """When `tick` is wanted next."""
        return self._retry_at_ns

    def describe(self) -> tuple[PeerMemory, int]:
        """(what a peer needs to read from here, its epoch)."""
        memory = PeerMemory(
            geometry=self._memory.geometry,
            num_slots=self._memory.num_slots,
            shm=self._shm_offer() if self._transport == "shm" else None,
            nixl=self._nixl,
        )
        return memory, self.epoch

    def _shm_offer(self) -> ShmOffer:
        assert isinstance(self._memory.pool, SharedMemory), "the shm transport refuses any other pool"
        return shm_offer(self._memory.pool, self._memory.slots)

    def serve_until(self, until_ns: int | None, now_ns: int) -> None:
        """Have the mover help readers until then (None: there are none)."""
        if not self.ready:
            return
        if until_ns is None:
            if self._served_until_ns > now_ns:
                self.send(Serve(for_ns=0))
            self._served_until_ns = 0
        elif until_ns > self._served_until_ns:
            # The slack lets many renewals of many leases go by without a message each.
            self._served_until_ns = until_ns + _SERVE_SLACK_NS
            self.send(Serve(for_ns=self._served_until_ns - now_ns))

    def stop(self) -> None:
        """End the mover; no new one is started."""
        self._retry_at_ns = None
        self.ready = False
        if self._mover is not None:
            self._mover.kill()
            self._mover = None

    def _spawn(self) -> None:
        self.life += 1
        self._served_until_ns = 0
        agent = f"pdkv-{uuid.uuid4().hex}"
        self._mover = (
            MoverThread(self._transport, agent, self._memory) if self._kind == "thread" else self._new_process(agent)
        )

    def _new_process(self, agent: str) -> MoverProcess:
        memory = self._memory
        assert isinstance(memory.pool, SharedMemory), "no other process can reach GPU memory"
        return MoverProcess(
            Start(
                transport=self._transport,
                agent=agent,
                pool_fd=memory.pool.fd,
                slots_fd=memory.slots.fd,
                geometry=memory.geometry,
                num_slots=memory.num_slots,
            )
        )

    def _on_ready(self, message: Ready) -> None:
        self.ready = True
        self._retry_ns = _FIRST_RETRY_NS
        if self.epoch == 0 or message.offer != self._nixl:
            self.epoch += 1
        self._nixl = message.offer
