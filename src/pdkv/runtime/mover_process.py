"""A mover that is a process of its own: what CPU pools get, because killing a process is a fence that cannot fail."""

from __future__ import annotations

import subprocess

from pdkv.runtime.child_process import spawn
from pdkv.runtime.mover_channel import MoverChannel
from pdkv.runtime.wire import Start

_REAP_S = 0.5


class MoverProcess(MoverChannel):
    """One life of a mover. Must be started, used and killed by one thread: the mover dies with that thread."""

    def __init__(self, start: Start) -> None:
        self._process, ours = spawn(
            "pdkv.runtime.mover",
            pass_fds=(start.pool_fd, start.slots_fd),
            environ={"OPENBLAS_NUM_THREADS": "1"},  # it computes nothing
        )
        super().__init__(ours)
        self.send(start)

    @property
    def name(self) -> str:
        return f"mover process {self.pid}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def reap(self) -> str:
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        return f"exit code {self._process.returncode}"

    def kill(self) -> None:
        """SIGKILL it and wait until it is gone: after this nothing of it can write anywhere."""
        self._process.kill()
        self._process.wait()
        self._sock.close()
