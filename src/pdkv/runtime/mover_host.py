"""The mover as the control thread sees it: one life after the other, always one that can be killed."""

from __future__ import annotations

import logging
import select
import time
import uuid
from collections.abc import Callable

from pdkv.errors import ConfigError
from pdkv.runtime.doorkeeper import TransferMemory
from pdkv.runtime.mover_process import MoverProcess
from pdkv.runtime.transfer_stats import TransferStats
from pdkv.runtime.transports.shm import shm_offer
from pdkv.runtime.wire import Broken, Ended, NixlOffer, PeerMemory, Ready, Serve, Start, ToMover

log = logging.getLogger("pdkv.control")

_READY_TIMEOUT_S = 90.0
_FIRST_RETRY_NS = 250_000_000
_LONGEST_RETRY_NS = 30 * 10**9
_SERVE_SLACK_NS = 2 * 10**9


class MoverHost:
    """Starts, restarts and stops the mover. Used by the control thread only.

    ``life`` counts the processes, ``epoch`` the changes of what peers must know to read from here.
    """

    def __init__(self, memory: TransferMemory, stats: TransferStats, now_ns: Callable[[], int]) -> None:
        self._memory = memory
        self._stats = stats
        self._now_ns = now_ns
        self._process: MoverProcess | None = None
        self._transport = "shm"
        self._nixl: NixlOffer | None = None
        self._retry_at_ns: int | None = None
        self._retry_ns = _FIRST_RETRY_NS
        self._served_until_ns = 0
        self.ready = False
        self.life = 0
        self.epoch = 0

    @property
    def pid(self) -> int | None:
        """Process id of the mover of now."""
        return self._process.pid if self._process else None

    @property
    def wants_write(self) -> bool:
        """Whether messages wait for room in its socket."""
        return self._process is not None and self._process.wants_write

    def fileno(self) -> int | None:
        """The socket to poll; None while there is no process."""
        return self._process.fileno() if self._process else None

    def begin(self, transport: str, *, fallback: bool, closing: Callable[[], bool]) -> str:
        """Start the first mover and wait for it; the transport it uses, ``shm`` if NIXL fails and ``fallback``.

        Raises `ConfigError` when it cannot start.
        """
        self._transport = transport
        reason = self._begin_once(closing)
        if reason is not None and transport == "nixl" and fallback:
            log.warning("NIXL cannot start (%s): using shared memory, which reaches this host only", reason)
            self._transport = "shm"
            reason = self._begin_once(closing)
        if reason is not None:
            raise ConfigError(f"transport {self._transport} cannot start: {reason}; try --transport shm on one host")
        return self._transport

    def _begin_once(self, closing: Callable[[], bool]) -> str | None:
        self._spawn()
        assert self._process is not None
        until_s = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < until_s and not closing():
            select.select([self._process.fileno()], [], [], 0.2)
            messages, alive = self._process.receive()
            for message in messages:
                if isinstance(message, Ready):
                    self._on_ready(message)
                    return None
                if isinstance(message, Broken):
                    self.stop()
                    return message.reason
            if not alive:
                code = self._process.reap()
                self._process = None
                return f"the mover ended at once with exit code {code} (its error is above)"
        self.stop()
        return f"the mover was not ready within {_READY_TIMEOUT_S:.0f} s"

    def send(self, message: ToMover) -> None:
        """Queue a message for a mover that is ``ready``."""
        if self._process is not None:
            self._process.send(message)

    def receive(self) -> tuple[list[Ended], bool]:
        """(what it reported, whether it has died); a dead one is replaced at once."""
        if self._process is None:
            return [], False
        self._process.flush()
        messages, alive = self._process.receive()
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
            code = self._process.reap()
            log.error("the mover ended by itself (exit code %d); a new one is started", code)
            self._after_death(at_once=self.ready)
        return ended, not alive

    def restart(self) -> None:
        """Kill it (after this nothing of it can write) and start the next one."""
        if self._process is not None:
            self._process.kill()
            self._after_death(at_once=True)

    def _after_death(self, *, at_once: bool) -> None:
        self._process = None
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
            bytes_per_block=self._memory.bytes_per_block,
            num_blocks=self._memory.num_blocks,
            num_slots=self._memory.num_slots,
            shm=shm_offer(self._memory.pool, self._memory.slots) if self._transport == "shm" else None,
            nixl=self._nixl,
        )
        return memory, self.epoch

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
        """Kill the mover; no new one is started."""
        self._retry_at_ns = None
        self.ready = False
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _spawn(self) -> None:
        memory = self._memory
        self.life += 1
        self._served_until_ns = 0
        self._process = MoverProcess(
            Start(
                transport=self._transport,
                agent=f"pdkv-{uuid.uuid4().hex}",
                pool_fd=memory.pool.fd,
                slots_fd=memory.slots.fd,
                bytes_per_block=memory.bytes_per_block,
                num_blocks=memory.num_blocks,
                num_slots=memory.num_slots,
            )
        )

    def _on_ready(self, message: Ready) -> None:
        self.ready = True
        self._retry_ns = _FIRST_RETRY_NS
        if self.epoch == 0 or message.offer != self._nixl:
            self.epoch += 1
        self._nixl = message.offer
