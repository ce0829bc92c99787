"""The control thread's end of a mover: start it, talk to it without ever blocking, kill it for certain."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path

import msgspec

import pdkv
from pdkv.runtime.wire import BadFrame, FrameBuffer, FromMover, Start, ToMover, from_mover_decoder, pack

log = logging.getLogger("pdkv.control")

_REAP_S = 0.5


class MoverProcess:
    """One life of a mover. Must be started, used and killed by one thread: the mover dies with that thread."""

    def __init__(self, start: Start) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(pdkv.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pdkv.runtime.mover", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(), start.pool_fd, start.slots_fd),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},  # it computes nothing
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._sock = ours
        self._out: deque[memoryview] = deque()
        self._frames = FrameBuffer()
        self.send(start)

    @property
    def pid(self) -> int:
        """Process id (tests stop and kill it)."""
        return self._process.pid

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
                messages.extend(from_mover_decoder.decode(frame) for frame in self._frames.feed(data))
            except (BadFrame, msgspec.DecodeError) as error:
                log.error("the mover (pid %d) talks nonsense, it is replaced: %s", self.pid, error)
                return messages, False

    def reap(self) -> int:
        """Exit code of a mover that has closed its end; killed if it is still there after a moment."""
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            pass
        return self.kill()

    def kill(self) -> int:
        """SIGKILL it and wait until it is gone: after this nothing of it can write anywhere. Returns its exit code."""
        self._process.kill()
        code = self._process.wait()
        self._sock.close()
        return code
