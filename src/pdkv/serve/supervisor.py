"""`pdkv serve MODEL`: a prefill instance, a decode instance and the router as child processes, one start, one stop.

No child outlives this process: each dies with its parent (the kernel's death signal), and a stop ends whole process
groups. A child that dies takes the others with it, and is named with its last log lines.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from pdkv.errors import ConfigError, PdkvError
from pdkv.serve.child import ChildTask
from pdkv.serve.options import InstanceOptions, RouterOptions, ServeOptions
from pdkv.serve.processes import Child, Notice
from pdkv.serve.progress import Progress, open_progress
from pdkv.serve.web import bind, url_of

STOPPED_BY_SIGNAL = "signal"


class ChildDied(PdkvError):
    """A child process ended without being told to; the text names it and shows its last log lines."""


class Stopped(BaseException):
    """SIGINT or SIGTERM came. No `Exception`: code that turns whatever goes wrong into an error must let it pass."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process to run: its name, its module, its options, and the bound socket it is to serve on."""

    name: str
    module: str
    options: InstanceOptions | RouterOptions
    sock: socket.socket

    def command(self, report_fd: int) -> list[str]:
        """The command line, reporting on ``report_fd``."""
        task: ChildTask[Any] = ChildTask(
            options=self.options, socket_fd=self.sock.fileno(), report_fd=report_fd, parent_pid=os.getpid()
        )
        return [sys.executable, "-m", self.module, task.to_argument()]


class Cluster:
    """The three processes. Use as a context manager on the main thread: leaving it stops and kills all of them.

    ``facts`` has, after `start`, the ready facts of every part by name.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.facts: dict[str, dict[str, Any]] = {}
        self.children: list[Child] = []
        self._notices: queue.SimpleQueue[Notice | str] = queue.SimpleQueue()
        self._public: socket.socket | None = None
        self._at_once = False
        self._own_logs = options.log_dir is None
        self.log_dir = Path(tempfile.mkdtemp(prefix="pdkv-") if options.log_dir is None else options.log_dir)

    def __enter__(self) -> Cluster:
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir {self.log_dir}: cannot be written ({error.strerror or error})") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        if self._public is not None:
            self._public.close()
        if self._own_logs and not isinstance(error, ChildDied):
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def interrupt(self) -> None:
        """Make `prepare`, `start` or `wait` raise `Stopped`. Called from a signal handler, on the main thread."""
        if self._at_once:
            raise Stopped
        self._notices.put(STOPPED_BY_SIGNAL)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, an interrupt raises `Stopped` wherever the main thread is: for code that reads no notices."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def keep_logs(self) -> None:
        """Do not remove the log directory at the end: somebody was told to look into it."""
        self._own_logs = False

    # ------------------------------------------------------------------------------------------------------- starting

    def prepare(self) -> None:
        """Take the public port, find the model, and convert its weights if that was never done (with its own bar).

        Raises `ConfigError` for a port in use and for whatever options and config.json alone decide, `Stopped`.
        """
        from pdkv.runtime.precheck import check

        self._public = bind(self.options.host, self.options.port)
        with self.interruptible():
            check(self.options.prefill)
            check(self.options.decode)

    def start(self, progress: Progress | None = None) -> str:
        """Start everything (after `prepare`) and wait until it serves; returns the ready line.

        Raises `ConfigError` for what a child cannot start with, `ChildDied`, `Stopped`.
        """
        assert self._public is not None, "prepare() comes first"
        options = self.options
        instances = share_machine(options.prefill, options.decode)
        parts = [Part(o.role, "pdkv.serve.instance_main", o, bind(o.host, o.port)) for o in instances]
        router = RouterOptions(
            prefill=(url_of(parts[0].sock),),
            decode=(url_of(parts[1].sock),),
            host=options.host,
            port=options.port,
            prefill_fallback=options.prefill_fallback,
            transfer_mode=options.transfer_mode,
            instance_timeout_s=options.instance_timeout_s,
            bidirectional_kv_xfer=options.decode.bidirectional_kv_xfer,
            decoder_kv_blocks_ttl_s=options.decode.decoder_kv_blocks_ttl_s,
        )
        parts.append(Part("router", "pdkv.serve.router_main", router, self._public))
        self._public = None
        self.launch(parts)
        self.await_ready(progress or Progress(), options.start_timeout_s)
        return self.ready_line()

    def launch(self, parts: Sequence[Part]) -> None:
        """Start the processes of ``parts`` without waiting for them; their sockets are theirs alone afterwards."""
        try:
            for part in parts:
                child = Child(part.name, self.log_dir / f"{part.name}.log", self._notices.put)
                self.children.append(child)
                child.start(part.command, pass_fds=(part.sock.fileno(),))
        finally:
            for part in parts:
                part.sock.close()

    def await_ready(self, progress: Progress, timeout_s: float) -> None:
        """Wait until every child has reported ready. Raises as `start` does, `ConfigError` after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while len(self.facts) < len(self.children):
            notice = self._next_notice(deadline - time.monotonic())
            if notice is None:
                late = ", ".join(child.name for child in self.children if child.name not in self.facts)
                self.keep_logs()
                raise ConfigError(f"not ready after {timeout_s:.0f} s: {late}; see the logs in {self.log_dir}")
            name, report = notice.child.name, notice.report
            if report is None:
                raise ChildDied(notice.child.how_it_ended())
            if report.kind == "failed":
                raise ConfigError(f"the {name} process cannot start: {report.text}")
            if report.kind == "ready":
                self.facts[name] = report.facts
                progress.done(name, "ready")
            else:
                progress.update(name, report.text)

    def ready_line(self) -> str:
        """URL, model, transport and pools on one line."""
        prefill, decode, router = (self.facts[name] for name in ("prefill", "decode", "router"))
        ranks = [facts["tensor_parallel_size"] for facts in (prefill, decode)]
        divided = f" prefill_ranks={ranks[0]} decode_ranks={ranks[1]}" if max(ranks) > 1 else ""
        return (
            f"pdkv ready: {router['url']} model={decode['model']} transport={decode['transport']} "
            f"prefill_blocks={prefill['num_blocks']} decode_blocks={decode['num_blocks']}{divided}"
        )

    def warnings(self) -> list[str]:
        """What a person should know of a start that went well, for the terminal."""
        return [
            f"the {name} instance uses shared memory, which reaches this host only: NIXL cannot start ({reason})"
            for name, facts in self.facts.items()
            if (reason := facts.get("without_nixl")) is not None
        ]

    # -------------------------------------------------------------------------------------------------------- running

    def wait(self) -> None:
        """Return never but by an exception: `Stopped`, or `ChildDied` when one ends by itself."""
        while True:
            notice = self._next_notice(None)
            if notice is not None and notice.report is None:
                raise ChildDied(notice.child.how_it_ended())

    def check(self) -> None:
        """Raises `ChildDied` when a child has ended. For callers that do not `wait`."""
        for child in self.children:
            if not child.alive:
                child.wait(1.0)
                raise ChildDied(child.how_it_ended())

    def _next_notice(self, timeout_s: float | None) -> Notice | None:
        try:
            notice = self._notices.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(notice, str):
            raise Stopped
        return notice

    def stop(self) -> None:
        """Stop the router, so that nothing new comes in, then the instances; kill what is left after the grace time.

        A second interrupt during this ends the waiting.
        """
        deadline = time.monotonic() + self.options.stop_grace_s
        routers = [child for child in self.children if child.name == "router"]
        try:
            for group in (routers, [child for child in self.children if child not in routers]):
                for child in group:
                    child.terminate()
                for child in group:
                    while not child.wait(0.05) and time.monotonic() < deadline:
                        self._raise_if_interrupted()
        except Stopped:
            pass
        finally:
            for child in self.children:
                child.kill_group()

    def _raise_if_interrupted(self) -> None:
        while not self._notices.empty():
            if self._notices.get() == STOPPED_BY_SIGNAL:
                raise Stopped


def share_machine(
    prefill: InstanceOptions, decode: InstanceOptions, cores: int | None = None
) -> tuple[InstanceOptions, InstanceOptions]:
    """Both options with each instance's part of memory and cores, where nothing else was asked for."""
    available = cores if cores is not None else len(os.sched_getaffinity(0))
    threads = max(1, available // 2)
    same_device = prefill.device == decode.device

    def shared(options: InstanceOptions) -> InstanceOptions:
        share = options.memory_share / 2 if same_device else options.memory_share
        return replace(options, memory_share=share, threads=options.threads or threads)

    return shared(prefill), shared(decode)


@contextmanager
def interrupted_by_signals(cluster: Cluster) -> Iterator[None]:
    """SIGINT, SIGTERM, SIGHUP and SIGQUIT interrupt ``cluster`` instead of ending this process without its clean-up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        cluster.interrupt()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_cluster(options: ServeOptions, use: Callable[[Cluster], None], *, stopped_code: int) -> int:
    """Call ``use`` with a prepared cluster, and stop that afterwards however it ends. Returns the exit code.

    0, ``stopped_code`` after Ctrl-C or SIGTERM, 1 after a child died (its last log lines go to stderr). Raises
    `ConfigError` for what cannot be started, and whatever else ``use`` raises.
    """
    cluster = Cluster(options)
    with interrupted_by_signals(cluster), cluster:
        try:
            cluster.prepare()
            use(cluster)
        except Stopped:
            sys.stderr.write("\npdkv: stopping\n")
            return stopped_code
        except ChildDied as error:
            cluster.keep_logs()
            sys.stderr.write(f"\npdkv: {error}\npdkv: stopping the others\n")
            return 1
    return 0


def run(options: ServeOptions) -> int:
    """`run_cluster` until Ctrl-C or SIGTERM, the usual end (exit code 0). Prints one ready line on stdout."""

    def serve(cluster: Cluster) -> None:
        with open_progress(sys.stderr) as progress:
            line = cluster.start(progress)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        for warning in cluster.warnings():
            sys.stderr.write(f"pdkv: {warning}\n")
        sys.stderr.write(f"pdkv: logs are in {cluster.log_dir}; Ctrl-C stops everything\n")
        cluster.wait()

    return run_cluster(options, serve, stopped_code=0)
