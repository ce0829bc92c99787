"""Child processes of a benchmark: each in a process group of its own, told to stand still while another measures."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, Any

_HERE = Path(__file__).parent
PYTHONPATH = os.pathsep.join((str(_HERE.parent / "src"), str(_HERE.parent)))
"""Of children that run pdkv."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_STOP_TIMEOUT_S = 20.0


class ChildFailed(RuntimeError):
    """A child could not do what it was asked to; the text holds its last log lines."""


def _die_with_parent() -> None:
    """Also a stopped child must not be left behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Group:
    """A process and what it starts. Paused groups use no CPU: only the one being measured runs."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], log_dir: Path, *, pipes: bool) -> None:
        self.name = name
        self.log_path = log_dir / f"{name}.log"
        self._log: IO[bytes] = self.log_path.open("wb")
        pipe = subprocess.PIPE if pipes else subprocess.DEVNULL
        self.process = subprocess.Popen(
            argv,
            stdin=pipe,
            stdout=pipe if pipes else self._log,
            stderr=self._log,
            env={**os.environ, **env},
            cwd=_HERE,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    def pause(self) -> None:
        """Stop every process of the group where it stands."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the group run."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the group: first politely, then for certain."""
        self.resume()
        self._signal(signal.SIGINT)
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        self._signal(signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def failure(self, what: str) -> ChildFailed:
        """``what`` happened, with the end of the log."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-12:]
        return ChildFailed(f"{self.name}: {what}\n" + "\n".join(f"  | {line}" for line in lines))

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass


class Engine(Group):
    """A child that answers commands (`workload.answer_commands`)."""

    def __init__(
        self, name: str, argv: list[str], env: dict[str, str], log_dir: Path, config: dict[str, Any], start_s: float
    ) -> None:
        super().__init__(name, argv, env, log_dir, pipes=True)
        try:
            self.facts = self._ask(config, start_s)
        except BaseException:
            self.close()
            raise

    def do(self, command: str, *, timeout_s: float = 300.0, **arguments: Any) -> Any:
        """Have ``command`` carried out and return its answer."""
        return self._ask({"do": command, **arguments}, timeout_s)

    def _ask(self, message: dict[str, Any], timeout_s: float) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self.failure("is gone") from error
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise self.failure(f"no answer to {message.get('do', 'the start')} in {timeout_s:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise self.failure("ended without an answer")
        reply = json.loads(line)
        if "error" in reply:
            raise self.failure(reply["error"])
        return reply["answer"]

    def close(self) -> None:
        """Closing its stdin ends a child that is well."""
        self.resume()
        if self.process.stdin is not None and not self.process.stdin.closed:
            try:
                self._ask({"do": "close"}, _STOP_TIMEOUT_S)
                self.process.stdin.close()
                self.process.wait(_STOP_TIMEOUT_S)
            except (ChildFailed, OSError, ValueError, subprocess.TimeoutExpired):
                pass
        super().close()


def wait_until(check: Any, group: Group, what: str, timeout_s: float) -> None:
    """Until ``check()`` is true. Raises `ChildFailed` when the group ends or takes too long."""
    until = time.monotonic() + timeout_s
    while not check():
        if group.process.poll() is not None:
            raise group.failure(f"ended while waiting for {what}")
        if time.monotonic() > until:
            raise group.failure(f"{what}: not in {timeout_s:.0f} s")
        time.sleep(0.5)
