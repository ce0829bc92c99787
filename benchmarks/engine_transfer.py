"""Child process: what moves KV, without any model. pdkv's READ beside a bare NIXL READ and a plain memory copy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from nixl_target import NixlEnd
from transfer_half import Half, empty_plan
from workload import answer_commands

from pdkv.core.ports import Keepalive, ReadEnded
from pdkv.core.transfer.messages import RemoteSource

_BLOCK_BYTES = 737_280  # 16 tokens of SmolLM2-135M in fp32: all layers, K and V
_NUM_BLOCKS = 256
_TIMEOUT_S = 60.0
_SUBMIT_INTERVAL_S = 0.001


def _half(name: str, transport: str) -> Half:
    half = Half(name, transport=transport, num_blocks=_NUM_BLOCKS, bytes_per_block=_BLOCK_BYTES)
    half.blocks[:] = 1  # pages are committed before anything is timed
    return half.start()


class Transfers:
    """Moves the same scattered blocks in three ways. All figures are bytes per wall second of the caller."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.consumer = _half("d", config["transport"])
        self.count = -(-config["bytes"] // _BLOCK_BYTES)
        rng = np.random.default_rng(0)
        self.remote = tuple(int(b) for b in rng.permutation(np.arange(1, _NUM_BLOCKS))[: self.count])
        self.local = tuple(int(b) for b in rng.permutation(np.arange(1, _NUM_BLOCKS))[: self.count])
        self.source, self.producers_pool = self._start_producer(config["transport"])
        self.scratch = np.ones(self.count * _BLOCK_BYTES, dtype=np.uint8)
        self.target = np.ones_like(self.scratch)
        self.nixl: NixlEnd | None = None
        if self.consumer.control.transport == "nixl":
            self._start_nixl()

    def _start_producer(self, transport: str) -> tuple[RemoteSource, str]:
        """(what to read, the file of the pool it is in). P is a process of its own, as it is in `serve`: its control
        thread must not share our interpreter."""
        self.producer = subprocess.Popen(
            [sys.executable, "engine_transfer.py", "--producer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.producer.stdin is not None
        assert self.producer.stdout is not None
        self.producer.stdin.write(msgspec.json.encode((transport, self.remote)) + b"\n")
        self.producer.stdin.flush()
        return msgspec.json.decode(self.producer.stdout.readline(), type=tuple[RemoteSource, str])

    def _start_nixl(self) -> None:
        self.other = subprocess.Popen(
            [sys.executable, "nixl_target.py", self.producers_pool, str(_NUM_BLOCKS * _BLOCK_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.other.stdout is not None
        address, metadata = self.other.stdout.readline().split()
        self.nixl = NixlEnd("bench-reader", self.consumer.pool)
        self.nixl.connect(bytes.fromhex(metadata.decode()), int(address))

    def facts(self) -> dict[str, Any]:
        """What is moved and by what."""
        return {
            "transport": self.consumer.control.transport,
            "bytes": self.count * _BLOCK_BYTES,
            "descriptors": self.count,
            "descriptor_bytes": _BLOCK_BYTES,
        }

    def pdkv(self) -> float:
        """From `Control.submit` to the delivered `ReadEnded`: slices, lease slot and reports included."""
        plan = self.consumer.plan_read(self.source, self.local)
        began = time.perf_counter()
        self.consumer.control.submit(plan)
        self._wait()
        return self.count * _BLOCK_BYTES / (time.perf_counter() - began)

    def bare_nixl(self) -> float | None:
        """One READ of the same blocks by a bare agent; ``None`` where NIXL is not."""
        if self.nixl is None:
            return None
        began = time.perf_counter()
        self.nixl.read(self.remote, self.local, _BLOCK_BYTES)
        return self.count * _BLOCK_BYTES / (time.perf_counter() - began)

    def memcpy(self) -> float:
        """One contiguous copy of as many bytes within this process."""
        began = time.perf_counter()
        np.copyto(self.target, self.scratch)
        return self.count * _BLOCK_BYTES / (time.perf_counter() - began)

    def submits(self, reads: int) -> list[float]:
        """Milliseconds of every `Control.submit` made, each millisecond, while READs are in flight."""
        keepalive = (Keepalive(self.source.peer, (self.source.grant.token,)),)
        times_ms: list[float] = []
        for _ in range(reads):
            plan = self.consumer.plan_read(self.source, self.local)
            began = time.perf_counter()
            self.consumer.control.submit(plan)
            times_ms.append((time.perf_counter() - began) * 1e3)
            while self.consumer.inbox.empty():
                plan = empty_plan(keepalives=keepalive)
                began = time.perf_counter()
                self.consumer.control.submit(plan)
                times_ms.append((time.perf_counter() - began) * 1e3)
                time.sleep(_SUBMIT_INTERVAL_S)
            self._wait()
        return times_ms

    def _wait(self) -> None:
        ended = self.consumer.wait(ReadEnded, _TIMEOUT_S)
        if ended.error is not None:
            raise RuntimeError(f"the READ failed: {ended.error}")

    def close(self) -> None:
        """Stop movers and the bare NIXL target."""
        if self.nixl is not None:
            assert self.other.stdin is not None
            self.other.stdin.close()
            self.other.wait(10)
        self.consumer.close()
        assert self.producer.stdin is not None
        self.producer.stdin.close()
        self.producer.wait(20)


def _start(config: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    engine = Transfers(config)
    return {name: getattr(engine, name) for name in ("facts", "pdkv", "bare_nixl", "memcpy", "submits", "close")}


def _produce() -> None:
    """The producer's process: grants once, then only its control thread and mover work."""
    transport, blocks = msgspec.json.decode(sys.stdin.readline(), type=tuple[str, tuple[int, ...]])
    half = _half("p", transport)
    pool_file = f"/proc/{os.getpid()}/fd/{half.pool.fd}"
    sys.stdout.buffer.write(msgspec.json.encode((half.grant(blocks), pool_file)) + b"\n")
    sys.stdout.flush()
    sys.stdin.read()
    half.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["--producer"]:
        _produce()
    else:
        answer_commands(_start)
