"""The control thread's end of a mover, whatever runs at the other: messages that never block, and a certain end."""

from __future__ import annotations

import abc
import logging
import socket
from collections import deque

from pdkv.runtime.wire import BadFrame, FrameBuffer, FromMover, ToMover, decode_from_mover, pack

log = logging.getLogger("pdkv.control")


class MoverChannel(abc.ABC):
    """One life of a mover, seen from the control thread, which alone may use it."""

    def __init__(self, sock: socket.socket) -> None:
        """``sock`` is our end of a stream socket pair; it is closed with the mover."""
        sock.setblocking(False)
        self._sock = sock
        self._out: deque[memoryview] = deque()
        self._frames = FrameBuffer()

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What runs at the other end, for the log."""

    @property
    @abc.abstractmethod
    def pid(self) -> int | None:
        """Process id of the mover; None when it has no process of its own."""

    @abc.abstractmethod
    def reap(self) -> str:
        """How a mover ended that has closed its socket (one that is still there is killed). Raises `FenceLost`."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it: after this nothing of it can write anywhere. Raises `FenceLost` when that cannot be promised."""

    def fileno(self) -> int:
        """The socket to poll for `receive` (and for writing while `wants_write`)."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether messages wait for room in the socket."""
        return bool(self._out)

    def send(self, message: ToMover) -> None:
        """Queue a message and send what the socket takes now. Never blocks; a dead mover is noticed by `receive`."""
        self._out.append(memoryview(pack(message)))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._out:
            try:
                sent = self._sock.send(self._out[0])
            except BlockingIOError:
                return
            except OSError:
                self._out.clear()  # it is gone
                return
            if sent == len(self._out[0]):
                self._out.popleft()
            else:
                self._out[0] = self._out[0][sent:]

    def receive(self) -> tuple[list[FromMover], bool]:
        """(messages that have arrived, whether the mover still lives). Never blocks."""
        messages: list[FromMover] = []
        while True:
            try:
                data = self._sock.recv(1 << 18)
            except BlockingIOError:
                return messages, True
            except OSError:
                return messages, False
            if not data:
                return messages, False
            try:
                messages.extend(decode_from_mover(frame) for frame in self._frames.feed(data))
            except BadFrame as error:
                log.error("the %s talks nonsense, it is replaced: %s", self.name, error)
                return messages, False
