"""Starts processes of `pdkv serve` by forking one that has imported everything.

Importing torch and transformers is nearly all of an instance's start (4 s of a core), and these tests start dozens.
What runs in the fork is the command line as the shell would call it. `test_serve` and the demo's tests start theirs
anew.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 1 << 17


class Forked:
    """One of those processes: the leader of a process group of its own."""

    def __init__(self, pid: int, stdout_fd: int) -> None:
        self.pid = pid
        self._pidfd: int | None = os.pidfd_open(pid)
        self.stdout = open(stdout_fd, encoding="utf-8")  # noqa: SIM115

    def alive(self) -> bool:
        """Whether it runs, or stands still."""
        return self._pidfd is not None and not select.select([self._pidfd], [], [], 0)[0]

    def close(self) -> None:
        """Wait until it is gone; once."""
        assert self._pidfd is not None
        select.select([self._pidfd], [], [])
        self.stdout.close()
        os.close(self._pidfd)
        self._pidfd = None


class ForkServer:
    """Has imported everything when the first process is asked for; it and its forks end with this process."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen([sys.executable, "-m", __name__, str(fd)], pass_fds=(fd,), cwd=ROOT)

    def start(self, arguments: tuple[str, ...], environment: dict[str, str], log: Path) -> Forked:
        """`pdkv ARGUMENTS` with these variables beside the server's own; stderr is appended to ``log``."""
        reading, writing = os.pipe()
        request = json.dumps([arguments, environment]).encode()
        assert len(request) < _MESSAGE_BYTES
        with log.open("ab") as stderr:
            socket.send_fds(self._sock, [request], [writing, stderr.fileno()])
        os.close(writing)
        answer = self._sock.recv(_MESSAGE_BYTES)
        assert answer, f"the fork server has ended ({self._process.wait()})"
        return Forked(int(answer), reading)


@functools.cache
def fork_server() -> ForkServer:
    """The one of this process."""
    return ForkServer()


# ----------------------------------------------------------------------------------------------------- in the server


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(sock: socket.socket) -> None:
    """Import, then fork for every request until the socket closes."""
    _die_with_parent()
    import pdkv.cli.main
    import pdkv.runtime.boot
    import pdkv.serve.api
    import pdkv.serve.instance_main
    import pdkv.serve.router_main  # noqa: F401

    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    while True:
        request, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 2)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            sock.close()
            _become(*json.loads(request), *fds)
        for fd in fds:
            os.close(fd)
        sock.send(str(pid).encode())


def _become(arguments: list[str], environment: dict[str, str], stdout_fd: int, stderr_fd: int) -> NoReturn:
    code = 1
    try:
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for fd, number in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout_fd, 1), (stderr_fd, 2)):
            os.dup2(fd, number)
            os.close(fd)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(environment)
        sys.argv = ["pdkv", *arguments]
        from pdkv.cli.main import run

        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
