"""Child process: what moves KV, without any model. D's control thread and mover, and P's in a process of its own.

Beside pdkv's transfers, in either mode, it moves the same blocks by a bare NIXL READ and by a plain memory copy.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from nixl_target import NixlEnd
from transfer_half import Half, empty_plan
from workload import answer_commands

from pdkv.core.ports import FromProducer, Keepalive, ReadEnded, SendMessage
from pdkv.core.transfer.messages import Announce, Peer, Register, RegisterWrite, RemoteSource, Written
from pdkv.runtime.shared_memory import SharedMemory

_TIMEOUT_S = 60.0
_SLOTS = 64
_SUBMIT_INTERVAL_S = 0.001


@dataclass(frozen=True)
class Pairs:
    """Which of P's blocks goes into which of D's: ``remote[i]`` into ``local[i]``."""

    remote: tuple[int, ...]
    local: tuple[int, ...]


def pairs_of(shape: str, count: int, num_blocks: int) -> Pairs:
    """``scattered``: no order on either side; ``contiguous``: one run on both."""
    if shape == "contiguous":
        run = tuple(range(1, count + 1))
        return Pairs(run, run)
    rng = np.random.default_rng(0)
    remote, local = (rng.permutation(np.arange(1, num_blocks))[:count].tolist() for _ in range(2))
    return Pairs(tuple(remote), tuple(local))


@dataclass(frozen=True)
class Moved:
    """One transfer: seconds since the plan that began it, and since P's lease began."""

    transfer_s: float
    since_finish_s: float


class Helper:
    """A child that answers commands, in our process group: it stands still when we are told to.

    Raises `RuntimeError` when it refuses, ends, or does not answer in time; then it is killed, because its late answer
    would be taken for that to the next question.
    """

    def __init__(self, program: str, config: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.send(config)
        self.facts = self.answer()

    def send(self, message: dict[str, Any]) -> None:
        """Tell it, without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")

    def answer(self) -> Any:
        """To the oldest message without one."""
        assert self._process.stdout is not None
        # There is never more than one answer to come, so what has arrived is in the pipe and not in the file's buffer.
        if not select.select([self._process.stdout], [], [], _TIMEOUT_S)[0]:
            self._process.kill()
            raise RuntimeError(f"{self._process.args}: no answer within {_TIMEOUT_S:g} s")
        reply = json.loads(self._process.stdout.readline() or '{"error": "it has ended"}')
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["answer"]

    def ask(self, **message: Any) -> Any:
        """Tell it and wait."""
        self.send(message)
        return self.answer()

    def close(self) -> None:
        """End it."""
        self.ask(do="close")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


class Transfers:
    """Moves the same blocks in several ways. Rates are bytes per wall second of the caller."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.block_bytes, self.num_blocks = config["block_bytes"], config["num_blocks"]
        half = {key: config[key] for key in ("transport", "num_blocks")} | {"bytes_per_block": self.block_bytes}
        self.pairs = {s: pairs_of(s, config["count"], self.num_blocks) for s in ("scattered", "contiguous")}
        self.consumer = Half("d", **half)
        self.consumer.blocks[:] = 1  # pages are committed before anything is timed
        self.consumer.start()
        self.producer = Helper("transfer_producer.py", half)
        self.peer = msgspec.convert(self.producer.facts["peer"], Peer)
        self._map_producer(self.producer.facts["pool_file"])
        self.grants = 0
        self.nixl: NixlEnd | None = None
        if self.consumer.control.transport == "nixl" and config.get("bare_nixl"):
            self._start_nixl(self.producer.facts["pool_file"])

    def _map_producer(self, pool_file: str) -> None:
        pool = SharedMemory.attach(os.open(pool_file, os.O_RDONLY), self.num_blocks * self.block_bytes, writable=False)
        self.source_address = pool.address
        self.source_blocks = pool.array(np.uint8, (self.num_blocks, self.block_bytes))

    def _start_nixl(self, pool_file: str) -> None:
        self.other = subprocess.Popen(
            [sys.executable, "nixl_target.py", pool_file, str(self.num_blocks * self.block_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.other.stdout is not None
        address, metadata = self.other.stdout.readline().split()
        self.nixl = NixlEnd("bench-reader", self.consumer.pool)
        self.nixl.connect(bytes.fromhex(metadata.decode()), int(address))

    def facts(self) -> dict[str, Any]:
        """What is moved and by what."""
        count = len(self.pairs["scattered"].remote)
        return {
            "transport": self.consumer.control.transport,
            "bytes": count * self.block_bytes,
            "descriptors": count,
            "descriptor_bytes": self.block_bytes,
        }

    # ------------------------------------------------------------------------------------------------------- rates

    def pdkv(self, mode: str = "pull", shape: str = "scattered") -> float:
        """From the plan that begins it (pull: D's READ, push: P's announcement, write: P's WRITE) to D's word that all
        is there: slices, slots and reports included."""
        pairs = self.pairs[shape]
        return len(pairs.local) * self.block_bytes / MODES[mode](self, pairs).transfer_s

    def bare_nixl(self, shape: str = "scattered") -> float | None:
        """One READ of the same blocks by a bare agent; ``None`` where NIXL is not."""
        if self.nixl is None:
            return None
        pairs = self.pairs[shape]
        began = time.perf_counter()
        self.nixl.read(pairs.remote, pairs.local, self.block_bytes)
        return len(pairs.local) * self.block_bytes / (time.perf_counter() - began)

    def memcpy(self, shape: str = "scattered") -> float:
        """The same blocks out of P's pool, mapped here, into D's: one C call for each run of blocks, on one thread."""
        pairs, size = self.pairs[shape], self.block_bytes
        source, target = self.source_address, self.consumer.pool.address
        runs = [(target + local * size, source + remote * size, n * size) for remote, local, n in _runs(pairs)]
        copy = ctypes.memmove
        began = time.perf_counter()
        for to, from_, nbytes in runs:
            copy(to, from_, nbytes)
        return len(pairs.local) * size / (time.perf_counter() - began)

    def verify(self, mode: str, shape: str) -> None:
        """Move by ``mode`` and compare every byte of D's pool. Raises `RuntimeError` when one is wrong."""
        pairs, blocks = self.pairs[shape], self.consumer.blocks
        blocks[:] = 0
        MODES[mode](self, pairs)
        if not np.array_equal(blocks[list(pairs.local)], self.source_blocks[list(pairs.remote)]):
            raise RuntimeError(f"{mode}, {shape}: what has arrived is not what P has")
        blocks[list(pairs.local)] = 0
        if blocks.any():
            raise RuntimeError(f"{mode}, {shape}: bytes have arrived that nobody asked for")
        blocks[:] = 1

    # ----------------------------------------------------------------------------------------------------- latency

    def latency(self, mode: str, blocks: int, requests: int) -> list[float]:
        """Milliseconds from P's finish of each of so many prompts to D's first usable block, for all of ``blocks``."""
        pairs = Pairs(*(side[:blocks] for side in (self.pairs["scattered"].remote, self.pairs["scattered"].local)))
        return [MODES[mode](self, pairs).since_finish_s * 1e3 for _ in range(requests)]

    def submits(self, reads: int) -> list[float]:
        """Milliseconds of every `Control.submit` made, each millisecond, while READs are in flight."""
        pairs = self.pairs["scattered"]
        source = self._granted(pairs.remote)[0]
        keepalive = (Keepalive(source.peer, (source.grant.token,)),)
        times_ms: list[float] = []
        for _ in range(reads):
            plan = self.consumer.plan_read(source, pairs.local)
            began = time.perf_counter()
            self.consumer.control.submit(plan)
            times_ms.append((time.perf_counter() - began) * 1e3)
            while self.consumer.inbox.empty():
                plan = empty_plan(keepalives=keepalive)
                began = time.perf_counter()
                self.consumer.control.submit(plan)
                times_ms.append((time.perf_counter() - began) * 1e3)
                time.sleep(_SUBMIT_INTERVAL_S)
            self._wait(source)
        return times_ms

    # ------------------------------------------------------------------------------------------------------- modes

    def pull(self, pairs: Pairs) -> Moved:
        """P's grant comes by a pipe (in `serve`: by the router's two HTTP messages), then D reads."""
        source, finished_s = self._granted(pairs.remote)
        plan = self.consumer.plan_read(source, pairs.local)
        began_s = time.perf_counter()
        self.consumer.control.submit(plan)
        ended_s = self._wait(source)
        return Moved(ended_s - began_s, ended_s - finished_s)

    def push(self, pairs: Pairs) -> Moved:
        """D has registered before P finishes; P's announcement begins the READ."""
        transfer_id = secrets.token_hex(16)
        with self._finishing(Register(transfer_id, self.peer.engine_id), pairs) as (told, finished):
            if not isinstance(told.message, Announce):
                raise RuntimeError(f"P announces nothing: {told.message}")
            source = RemoteSource(peer=told.peer, request_id=told.message.request_id, grant=told.message.grant)
            self.consumer.control.submit(self.consumer.plan_read(source, pairs.local))
            ended_s = self._wait(source)
        return Moved(ended_s - finished["finished_s"], ended_s - finished["finished_s"])

    def write(self, pairs: Pairs) -> Moved:
        """D has granted its blocks before P finishes; P writes them and tells D."""
        self.grants += 1
        grant = self.consumer.write_grant(pairs.local, grant_id=self.grants, slot=self.grants % _SLOTS)
        message = RegisterWrite(
            transfer_id=secrets.token_hex(16), producer=self.peer.engine_id, consumer=self.consumer.peer, grant=grant
        )
        with self._finishing(message, pairs) as (told, finished):
            ended_s = time.perf_counter()
            if told.message != Written(grant.nonce, grant.grant_id, len(pairs.local) * self.block_bytes):
                raise RuntimeError(f"the WRITE failed: {told.message}")
        return Moved(ended_s - finished["finished_s"], ended_s - finished["finished_s"])

    @contextmanager
    def _finishing(
        self, message: Register | RegisterWrite, pairs: Pairs
    ) -> Iterator[tuple[FromProducer, dict[str, float]]]:
        """P finishes when it has heard ``message``: what it tells D then, and what it answers us, which is there
        afterwards (however that ends: the next question must not get this answer; `Helper.answer` has a limit)."""
        self.consumer.submit(
            messages=(SendMessage(self.peer, message),), keepalives=(Keepalive(self.peer, (), awaited=True),)
        )
        self.producer.send({"do": "finish", "blocks": pairs.remote, "transfer_id": message.transfer_id})
        finished: dict[str, float] = {}
        try:
            told = self.consumer.wait(FromProducer, _TIMEOUT_S)
            assert isinstance(told, FromProducer)
            yield told, finished
        finally:
            finished.update(self.producer.answer())

    def _granted(self, blocks: Sequence[int]) -> tuple[RemoteSource, float]:
        answer = self.producer.ask(do="finish", blocks=blocks)
        return msgspec.convert(answer["source"], RemoteSource), answer["finished_s"]

    def _wait(self, source: RemoteSource) -> float:
        """When the READ ended. Raises `RuntimeError` unless its data may be used: the slot names the lease."""
        ended = self.consumer.wait(ReadEnded, _TIMEOUT_S)
        ended_s = time.perf_counter()
        assert isinstance(ended, ReadEnded)
        if ended.slot != (source.grant.nonce, source.grant.lease_id):
            raise RuntimeError(f"the READ failed: {ended.error or f'the slot holds {ended.slot}'}")
        return ended_s

    def close(self) -> None:
        """Stop movers and the bare NIXL target."""
        if self.nixl is not None:
            assert self.other.stdin is not None
            self.other.stdin.close()
            self.other.wait(10)
        self.consumer.close()
        self.producer.close()


MODES: dict[str, Callable[[Transfers, Pairs], Moved]] = {
    "pull": Transfers.pull,
    "push": Transfers.push,
    "write": Transfers.write,
}
"""How KV gets from P to D; each moves ``pairs`` once."""


def _runs(pairs: Pairs) -> list[tuple[int, int, int]]:
    """(remote, local, blocks) of every run of neighbours on both sides."""
    runs: list[tuple[int, int, int]] = []
    for remote, local in zip(pairs.remote, pairs.local, strict=True):
        if runs and (remote, local) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((remote, local, 1))
    return runs


def _start(config: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    engine = Transfers(config)
    names = ("facts", "pdkv", "bare_nixl", "memcpy", "verify", "latency", "submits", "close")
    return {name: getattr(engine, name) for name in names}


if __name__ == "__main__":
    answer_commands(_start)
