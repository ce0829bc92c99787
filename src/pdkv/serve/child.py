"""The child's side of the supervisor: what it is told on its command line, and how it reports back."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from pdkv.errors import PdkvError
from pdkv.runtime.parent_death import die_with_parent
from pdkv.serve.options import InstanceOptions, RouterOptions

Options = TypeVar("Options", InstanceOptions, RouterOptions)


@dataclass(frozen=True, kw_only=True)
class ChildTask(Generic[Options]):
    """What a child process is started with: its options, its bound socket, the pipe to report on, its parent."""

    options: Options
    socket_fd: int
    report_fd: int
    parent_pid: int

    def to_argument(self) -> str:
        """The task as one command line argument (JSON)."""
        return msgspec.json.encode(self).decode()

    def socket(self) -> socket.socket:
        """The listening-to-be socket that the parent bound."""
        return socket.socket(fileno=self.socket_fd)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One line on the pipe: ``kind`` is progress, ready or failed. ``facts`` are those of the ready line."""

    kind: str
    text: str = ""
    facts: dict[str, Any] = {}


class Reporter:
    """Tells the supervisor how far the start has come; without one (fd ``None``) the ready line goes to stdout."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def progress(self, text: str) -> None:
        """A line of the start-up log: how far it has come. Alone, the log itself shows it."""
        if self._fd is not None:
            self._send(Report(kind="progress", text=text))

    def ready(self, line: str, facts: dict[str, Any]) -> None:
        """Serving now. ``line`` is for people, ``facts`` for the supervisor."""
        if self._fd is None:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        else:
            self._send(Report(kind="ready", text=line, facts=facts))

    def failed(self, text: str) -> None:
        """It will not start, for a reason that a person can change."""
        assert self._fd is not None
        self._send(Report(kind="failed", text=text))

    def _send(self, report: Report) -> None:
        assert self._fd is not None
        try:
            os.write(self._fd, msgspec.json.encode(report) + b"\n")
        except BrokenPipeError:  # the supervisor is gone; the kernel is about to end this process too
            pass


def run_child(task: ChildTask[Options], serve: Callable[[Options, Reporter, socket.socket], int]) -> int:
    """Run ``serve`` for a supervisor; errors for people go up the pipe too. Returns the exit code."""
    die_with_parent(task.parent_pid)
    reporter = Reporter(task.report_fd)

    def stop_before_serving(_number: int, _frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop_before_serving)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's, which then stops its children
    try:
        return serve(task.options, reporter, task.socket())
    except PdkvError as error:
        sys.stderr.write(f"{error}\n")
        reporter.failed(str(error))
        return 2
