"""The side channel's listening socket: what peers ask, and what they are told. Used by the control thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from pdkv.core.ports import FromConsumer, InboxItem, Reply
from pdkv.core.transfer.messages import Announce, Gone, Heartbeat, Register, RegisterWrite, ToProducer
from pdkv.errors import ConfigError
from pdkv.runtime.doorkeeper import Doorkeeper
from pdkv.runtime.peer_auth import Door
from pdkv.runtime.peer_link import endpoint
from pdkv.runtime.transfer_stats import TransferStats
from pdkv.runtime.wire import (
    MAX_FRAME_BYTES,
    SEAL_BYTES,
    Answer,
    BadFrame,
    Hello,
    Opened,
    Question,
    Refused,
    encode,
)

log = logging.getLogger("pdkv.control")

FRAMES_PER_TURN = 64
"""One noisy socket must not keep the thread from the others."""

_MAX_DEFERRED = 1024  # questions kept while the mover starts


def bind(context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> zmq.Socket[bytes]:
    """The socket, listening; ``port`` 0 takes a free one (`port_of`). Raises `ConfigError` with what to change."""
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + SEAL_BYTES)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.IPV6, int(":" in host))
    try:
        router.bind(endpoint(host, port if port else "*"))
    except (zmq.ZMQError, OverflowError) as error:
        raise ConfigError(
            f"the KV side channel cannot listen on {host}:{port} ({error}): "
            "stop what uses it, or choose another address with --side-channel-host / --side-channel-port"
        ) from error
    return router


def port_of(router: zmq.Socket[bytes]) -> int:
    """Where it listens."""
    return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


@dataclass
class SideChannel:
    """Answers what the `Doorkeeper` can answer, passes on what the engine must hear, and sends what the engine replies.

    Whoever asks has been let in by the ``door`` (`peer_auth`).
    """

    router: zmq.Socket[bytes]
    door: Door
    doorkeeper: Doorkeeper
    stats: TransferStats
    deliver: Callable[[InboxItem], None]
    now_ns: Callable[[], int]
    _deferred: list[tuple[bytes, Hello]] = field(default_factory=list)

    def turn(self, *, mover_ready: bool) -> None:
        """Take what has arrived, `FRAMES_PER_TURN` at most; handshakes wait until the mover is ready."""
        for _ in range(FRAMES_PER_TURN):
            try:
                parts = self.router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                if len(parts) != 2:
                    raise BadFrame(f"{len(parts) - 1} parts")
                question = self.door.receive(parts[0], parts[1])
            except BadFrame as error:
                self.stats.dropped_frames += 1
                log.debug("side channel: dropped a frame: %s", error)
                continue
            if isinstance(question, Opened | Refused):
                self.stats.refusals += isinstance(question, Refused)
                self._send_frame(parts[0], encode(question))
                continue
            if isinstance(question, Hello) and not mover_ready:
                if len(self._deferred) < _MAX_DEFERRED:
                    self._deferred.append((parts[0], question))  # what can be read is not known before
                continue
            self._answer(parts[0], question)

    def answer_deferred(self) -> None:
        """The mover is ready: answer the handshakes that have waited for it."""
        deferred, self._deferred = self._deferred, []
        for sender, question in deferred:
            self._answer(sender, question)

    def reply(self, replies: tuple[Reply, ...]) -> None:
        """To consumers that have registered; one whose connection is gone registers again."""
        for reply in replies:
            sent = self._send(reply.origin, reply.message)
            self.stats.lost_messages += not sent
            self.stats.announcements_sent += sent and isinstance(reply.message, Announce)
            self.stats.gone_sent += sent and isinstance(reply.message, Gone)

    def _answer(self, sender: bytes, question: Question) -> None:
        now_ns = self.now_ns()
        answer = self.doorkeeper.answer(question)
        self.stats.refusals += isinstance(answer, Refused)
        if isinstance(answer, ToProducer):
            self.stats.heartbeats_received += isinstance(answer, Heartbeat)
            self.stats.registrations_received += isinstance(answer, Register | RegisterWrite)
            self.deliver(FromConsumer(answer, now_ns, sender))
        else:
            self._send(sender, answer)

    def _send(self, sender: bytes, answer: Answer) -> bool:
        """Whether the socket took it."""
        try:
            return self._send_frame(sender, self.door.frame(sender, answer))
        except BadFrame as error:
            log.debug("side channel: an answer was not sent: %s", error)
            return False

    def _send_frame(self, sender: bytes, frame: bytes) -> bool:
        try:
            self.router.send_multipart([sender, frame], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            log.debug("side channel: an answer was not sent: %s", error)
            return False
        return True
