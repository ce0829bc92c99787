"""Child processes that are never left behind: own process group, logs kept, death noticed and explained."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pdkv.runtime.child_process import LAST_LINES, ending, last_words
from pdkv.serve.child import Report


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a child did: a `Report` came, or (``report`` None) it ended."""

    child: Child
    report: Report | None


@dataclass(eq=False)
class Child:
    """One child process. ``tell`` is called with its `Notice`s, from other threads.

    ``command`` is completed with the number of the report pipe's write end by `start`. Its output goes to ``log_path``
    line by line, and the last 20 lines are kept at hand.
    """

    name: str
    log_path: Path
    tell: Callable[[Notice], None]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    process: subprocess.Popen[bytes] | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, command: Callable[[int], Sequence[str]], pass_fds: Sequence[int] = ()) -> None:
        """Start ``command(report_fd)`` in a session of its own. To be called on the main thread.

        (The kernel's death signal of the child follows the *thread* that started it.)
        """
        read_fd, write_fd = os.pipe()
        try:
            self.process = subprocess.Popen(
                list(command(write_fd)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(*pass_fds, write_fd),
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        for target, args in ((self._read_log, ()), (self._read_reports, (read_fd,)), (self._watch, ())):
            thread = threading.Thread(target=target, args=args, name=f"pdkv-{self.name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _read_log(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        with self.log_path.open("ab") as log, self.process.stdout as output:
            for line in output:
                log.write(line)
                log.flush()
                self.last_lines.append(line.decode(errors="replace").rstrip())

    def _read_reports(self, read_fd: int) -> None:
        decoder = msgspec.json.Decoder(Report)
        with open(read_fd, "rb") as pipe:
            for line in pipe:
                with contextlib.suppress(msgspec.DecodeError):  # cut off by the child's death, which is told below
                    self.tell(Notice(self, decoder.decode(line)))

    def _watch(self) -> None:
        assert self.process is not None
        self.process.wait()
        for thread in self._threads[:2]:  # what it said last, before that it ended; a grandchild may keep pipes open
            thread.join(timeout=1.0)
        self.tell(Notice(self, None))

    @property
    def alive(self) -> bool:
        """It was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def terminate(self) -> None:
        """Ask it to stop (SIGTERM)."""
        if self.alive:
            assert self.process is not None
            self.process.terminate()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, waiting up to ``timeout_s``."""
        if self.process is None:
            return True
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill_group(self) -> None:
        """End it and whatever it started, at once. Nothing of its process group is left."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # all of the group ended by themselves
            pass
        self.process.wait()

    def how_it_ended(self) -> str:
        """For people: exit code or signal, and the last lines of its log."""
        assert self.process is not None
        how, lines = ending(self.process.returncode), last_words(self.last_lines)
        return f"the {self.name} process (pid {self.process.pid}) {how}. Its last log lines ({self.log_path}):{lines}"
