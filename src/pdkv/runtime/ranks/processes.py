"""The other ranks of an instance, as rank 0 has them: started, told what to do, watched, ended."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from pdkv.core.ports import Batch
from pdkv.errors import PdkvError, RankFailed
from pdkv.runtime.child_process import LAST_LINES, ending, last_words, spawn
from pdkv.runtime.kv_pool import KvPool
from pdkv.runtime.ranks.group import LOAD_TIMEOUT_S, STEP_TIMEOUT_S, RankGroup
from pdkv.runtime.ranks.messages import (
    Begin,
    Failed,
    FromRank,
    Here,
    MakePool,
    Measured,
    Profile,
    ToRank,
    error_of,
    from_rank,
    step_of,
)
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.wire import FrameBuffer, pack

log = logging.getLogger("pdkv.ranks")

_EXPLAIN_S = 2.0  # a rank that broke the connection has this long to be seen dead
_STOP_GRACE_S = 2.0

Message = TypeVar("Message", bound=FromRank)


class _Rank:
    """One process, our end of its socket, and what it wrote last."""

    def __init__(self, begin: Begin, ended: Callable[[_Rank], None]) -> None:
        self.number = begin.rank
        self.process, self.sock = spawn(
            "pdkv.runtime.ranks.worker",
            environ={"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,  # ours is for the ready line alone
            stderr=subprocess.STDOUT,
        )
        self.sock.settimeout(STEP_TIMEOUT_S)
        self.frames = FrameBuffer()
        self.inbox: deque[FromRank] = deque()
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._ended = ended
        self.thread = threading.Thread(target=self._watch, name=f"pdkv-rank-{self.number}", daemon=True)
        self.thread.start()
        self.send(begin)

    def _watch(self) -> None:
        """Pass its log on to ours, until it ends."""
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                self.last_lines.append(line)
                sys.stderr.write(f"{line}\n")
        self.process.wait()
        self._ended(self)

    def send(self, message: ToRank, descriptor: int | None = None) -> None:
        """Say something. Raises OSError when it is gone, or takes nothing any more."""
        data = pack(message)
        if descriptor is None:
            self.sock.sendall(data)
        else:
            sent = socket.send_fds(self.sock, [data], [descriptor])
            self.sock.sendall(data[sent:])

    def receive(self) -> bool:
        """Take in what it has said, waiting for something; False at its end of file."""
        try:
            data = self.sock.recv(1 << 16)
        except OSError:
            return False
        self.inbox.extend(from_rank(frame) for frame in self.frames.feed(data))
        return bool(data)

    def how_it_ended(self) -> str:
        """One clause, after `process` has ended."""
        return f"rank {self.number} (pid {self.process.pid}) {ending(self.process.returncode)}"


class RankProcesses:
    """Ranks 1 to N-1, each a process that dies with the *thread* that makes this; rank 0 is who holds it.

    Rank 0 loads its share with ``group`` (`load_model`); then come the methods up to `step`, in this order. Whatever
    fails because of another rank is raised as `RankFailed` naming it, or as the error for people that it had.
    """

    def __init__(self, begin: Begin, devices: list[str]) -> None:
        """Start them. ``begin`` is for all, with the number and ``devices[rank]`` put in for each."""
        self.size = begin.ranks
        self._device = torch.device(devices[0])
        self._directory = tempfile.TemporaryDirectory(prefix="pdkv-ranks-")
        rendezvous = Path(self._directory.name) / "meet"
        self.group = RankGroup(0, self.size, rendezvous, self._device, self._all_here)
        self._closing = False
        self._on_failure: Callable[[RankFailed], None] | None = None
        self._lock = threading.Lock()
        self._others: list[_Rank] = []
        begin = msgspec.structs.replace(begin, rendezvous=str(rendezvous))
        try:
            for rank in range(1, self.size):
                own = msgspec.structs.replace(begin, rank=rank, device=devices[rank])
                self._others.append(_Rank(own, self._ended))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and on."""
        return tuple(rank.process.pid for rank in self._others)

    def begin_profile(self, profile: Profile) -> None:
        """Have them measure; rank 0 must do the same now, for the passes go through all ranks."""
        for rank in self._others:
            self._send(rank, profile)

    def measured(self) -> list[Measured]:
        """What ranks 1 and on have for KV."""
        return self._collect(Measured, LOAD_TIMEOUT_S)

    def make_pools(self, pool: KvPool) -> None:
        """Have them take their part of ``pool``'s memory, or memory of their own GPU."""
        shape = tuple(pool.tensor.shape)
        assert len(shape) == 6
        descriptor = pool.memory.fd if isinstance(pool.memory, SharedMemory) else None
        for rank in self._others:
            self._send(rank, MakePool(shape=shape), descriptor)

    def watch(self, on_failure: Callable[[RankFailed], None]) -> None:
        """From now on tell at once, on another thread, when one ends. One that has ended is told now."""
        with self._lock:
            self._on_failure = on_failure
        for rank in self._others:
            if rank.process.poll() is not None:
                self._fail(rank)

    def step(self, batch: Batch) -> None:
        """Have them run ``batch``; rank 0 must do the same now."""
        step = step_of(batch)
        for rank in self._others:
            self._send(rank, step)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """What fails inside because of another rank says which one, and why."""
        try:
            yield
        except RankFailed as error:
            raise self._explanation(str(error)) from error

    def close(self) -> None:
        """End them all; none is left when this returns."""
        with self._lock:
            self._closing = True
        for rank in self._others:
            with contextlib.suppress(OSError):
                rank.sock.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _STOP_GRACE_S
        for rank in self._others:
            try:
                rank.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            rank.thread.join()
            rank.sock.close()
        self._directory.cleanup()

    # ------------------------------------------------------------------------------------------------------- failures

    def _all_here(self) -> None:
        """All are about to connect."""
        self._collect(Here, LOAD_TIMEOUT_S)

    def _send(self, rank: _Rank, message: ToRank, descriptor: int | None = None) -> None:
        try:
            rank.send(message, descriptor)
        except OSError as error:
            raise self._explanation(f"rank {rank.number} takes no more messages ({error})") from error

    def _collect(self, kind: type[Message], timeout_s: float) -> list[Message]:
        """The next message of every rank, which must be of ``kind``."""
        deadline = time.monotonic() + timeout_s
        while waiting := [rank for rank in self._others if not rank.inbox]:
            readable = _readable([rank.sock for rank in waiting], deadline - time.monotonic())
            if not readable:
                late = ", ".join(f"rank {rank.number} (pid {rank.process.pid})" for rank in waiting)
                raise RankFailed(f"{late} did not come within {timeout_s:.0f} s; see this instance's log")
            for rank in waiting:
                if rank.sock.fileno() in readable and not rank.receive() and not rank.inbox:
                    raise self._explanation(f"rank {rank.number} closed its connection")
        messages = [rank.inbox.popleft() for rank in self._others]
        for rank, message in zip(self._others, messages, strict=True):
            if isinstance(message, Failed):
                raise error_of(message, rank.number)
        return [message for message in messages if isinstance(message, kind)]

    def _explanation(self, text: str) -> PdkvError:
        """The error to raise for a failure that first looked like ``text``."""
        until = time.monotonic() + _EXPLAIN_S
        while time.monotonic() < until and all(rank.process.poll() is None for rank in self._others):
            time.sleep(0.01)
        for rank in self._others:
            if rank.process.poll() is None:
                continue
            while not rank.inbox and rank.receive():
                pass
            told = rank.inbox[0] if rank.inbox else None
            return error_of(told, rank.number) if isinstance(told, Failed) else self._died(rank)
        alive = ", ".join(f"rank {rank.number} (pid {rank.process.pid})" for rank in self._others)
        return RankFailed(f"{text}. Alive, but perhaps hanging: {alive}; restart this instance")

    def _died(self, rank: _Rank) -> RankFailed:
        return RankFailed(
            f"tensor-parallel {rank.how_it_ended()}, and an instance of {self.size} ranks cannot go on without it; "
            "restart it (its last lines are in this instance's log)"
        )

    def _ended(self, rank: _Rank) -> None:
        """A rank's process is over: called once, by the thread that watched it."""
        with self._lock:
            if self._closing:
                return
        log.error("%s. Its last log lines:%s", rank.how_it_ended(), last_words(rank.last_lines))
        self._fail(rank)

    def _fail(self, rank: _Rank) -> None:
        """Tell, once, that this rank is gone."""
        with self._lock:
            on_failure, self._on_failure = self._on_failure, None
            if self._closing or on_failure is None:
                return
        if self._device.type == "cuda":
            self.group.abort()  # NCCL does not notice by itself
        on_failure(self._died(rank))


def _readable(socks: list[socket.socket], timeout_s: float) -> set[int]:
    """Descriptors of those that have something to say. (Not select(): in an instance's process they pass 1024.)"""
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(timeout_s, 0) * 1000)}
