"""Child process: what moves KV, without any model. pdkv's READ beside a bare NIXL READ and a plain memory copy."""

from __future__ import annotations

import queue
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from nixl_target import NixlEnd
from workload import answer_commands

from pdkv.core.engine import Identity
from pdkv.core.ports import Batch, Keepalive, Peer, Plan, PostRead, ReadEnded, RemoteSource
from pdkv.core.transfer.lease import lease_token
from pdkv.runtime.control import Control, PeerIdentity, TransferMemory
from pdkv.runtime.shared_memory import SharedMemory

_BLOCK_BYTES = 737_280  # 16 tokens of SmolLM2-135M in fp32: all layers, K and V
_NUM_BLOCKS = 256
_NUM_SLOTS = 64
_LEASE_NS = 30 * 10**9
_TIMEOUT_S = 60.0
_SUBMIT_INTERVAL_S = 0.001
_EMPTY = np.zeros(0, np.int32)


class Half:
    """One instance's transfer half: pool, slots, control thread and mover, without an engine."""

    def __init__(self, name: str, transport: str) -> None:
        self.pool = SharedMemory(_NUM_BLOCKS * _BLOCK_BYTES)
        self.blocks = self.pool.array(np.uint8, (_NUM_BLOCKS, _BLOCK_BYTES))
        self.blocks[:] = 1  # pages are committed before anything is timed
        self.slots = SharedMemory(_NUM_SLOTS * 16)
        self.slot_words = self.slots.array(np.uint64, (_NUM_SLOTS, 2))
        self.identity = Identity(engine_id=name, nonce=secrets.randbits(63), secret=secrets.token_bytes(32))
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.control = Control(
            PeerIdentity(self.identity, {"model": "none"}),
            TransferMemory(self.pool, _BLOCK_BYTES, _NUM_BLOCKS, self.slots, _NUM_SLOTS),
            transport=transport,
            lease_ns=_LEASE_NS,
            deliver=self.inbox.put,
            last_step_ns=time.monotonic_ns,
        )
        self.control.start()

    def grant(self, blocks: tuple[int, ...]) -> RemoteSource:
        """What a producer's engine does: name the lease in its slot, make the token."""
        slot, lease_id, tokens = 1, 7, 16 * len(blocks)
        self.slot_words[slot] = (self.identity.nonce, lease_id)
        token = lease_token(
            self.identity.secret,
            lease_id=lease_id,
            slot=slot,
            block_ids=blocks,
            num_tokens=tokens,
            prompt_digest=b"",
        )
        return RemoteSource(
            peer=Peer(self.identity.engine_id, "127.0.0.1", self.control.port),
            request_id="r",
            block_ids=blocks,
            num_tokens=tokens,
            slot=slot,
            nonce=self.identity.nonce,
            lease_id=lease_id,
            token=token,
        )

    def ended(self) -> ReadEnded:
        """The next READ that ended; raises when it failed."""
        until = time.monotonic() + _TIMEOUT_S
        while True:
            item = self.inbox.get(timeout=max(until - time.monotonic(), 0.01))
            if isinstance(item, ReadEnded):
                if item.error is not None:
                    raise RuntimeError(f"the READ failed: {item.error}")
                return item


def _plan(**fields: Any) -> Plan:
    return Plan(
        step_id=0,
        batch=Batch((), _EMPTY, _EMPTY, _EMPTY, np.zeros(0, bool), np.zeros((0, 0), np.int32), np.zeros(0, bool)),
        **fields,
    )


class Transfers:
    """Moves the same scattered blocks in three ways. All figures are bytes per wall second of the caller."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.consumer = Half("d", config["transport"])
        self.count = -(-config["bytes"] // _BLOCK_BYTES)
        rng = np.random.default_rng(0)
        self.remote = tuple(int(b) for b in rng.permutation(np.arange(1, _NUM_BLOCKS))[: self.count])
        self.local = rng.permutation(np.arange(1, _NUM_BLOCKS))[: self.count].astype(np.int32)
        self.source = self._start_producer(config["transport"])
        self.handle = 0
        self.scratch = np.ones(self.count * _BLOCK_BYTES, dtype=np.uint8)
        self.target = np.ones_like(self.scratch)
        self.nixl: NixlEnd | None = None
        if self.consumer.control.transport == "nixl":
            self._start_nixl()

    def _start_producer(self, transport: str) -> RemoteSource:
        """P is a process of its own, as it is in `serve`: its control thread must not share our interpreter."""
        self.producer = subprocess.Popen(
            [sys.executable, "engine_transfer.py", "--producer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.producer.stdin is not None
        assert self.producer.stdout is not None
        self.producer.stdin.write(msgspec.json.encode((transport, self.remote)) + b"\n")
        self.producer.stdin.flush()
        return msgspec.json.decode(self.producer.stdout.readline(), type=RemoteSource)

    def _start_nixl(self) -> None:
        self.other = subprocess.Popen(
            [sys.executable, "nixl_target.py", str(_NUM_BLOCKS * _BLOCK_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.other.stdout is not None
        address, metadata = self.other.stdout.readline().split()
        self.nixl = NixlEnd("bench-reader", _NUM_BLOCKS * _BLOCK_BYTES)
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
        """From `Control.submit` to the delivered `ReadEnded`: claim, slices, lease slot and reports included."""
        began = time.perf_counter()
        self._post()
        self.consumer.ended()
        return self.count * _BLOCK_BYTES / (time.perf_counter() - began)

    def bare_nixl(self) -> float | None:
        """One READ of the same blocks by a bare agent; ``None`` where NIXL is not."""
        if self.nixl is None:
            return None
        began = time.perf_counter()
        self.nixl.read(self.remote, self.local.tolist(), _BLOCK_BYTES)
        return self.count * _BLOCK_BYTES / (time.perf_counter() - began)

    def memcpy(self) -> float:
        """One contiguous copy of as many bytes within this process."""
        began = time.perf_counter()
        np.copyto(self.target, self.scratch)
        return self.count * _BLOCK_BYTES / (time.perf_counter() - began)

    def submits(self, reads: int) -> list[float]:
        """Milliseconds of every `Control.submit` made, each millisecond, while READs are in flight."""
        keepalive = (Keepalive(self.source.peer, (self.source.token,)),)
        times_ms: list[float] = []
        for _ in range(reads):
            began = time.perf_counter()
            self._post()
            times_ms.append((time.perf_counter() - began) * 1e3)
            while self.consumer.inbox.empty():
                plan = _plan(keepalives=keepalive)
                began = time.perf_counter()
                self.consumer.control.submit(plan)
                times_ms.append((time.perf_counter() - began) * 1e3)
                time.sleep(_SUBMIT_INTERVAL_S)
            self.consumer.ended()
        return times_ms

    def _post(self) -> None:
        self.handle += 1
        read = PostRead(self.handle, self.source, np.asarray(self.remote, np.int32), self.local)
        self.consumer.control.submit(_plan(reads=(read,)))

    def close(self) -> None:
        """Stop movers and the bare NIXL target."""
        if self.nixl is not None:
            assert self.other.stdin is not None
            self.other.stdin.close()
            self.other.wait(10)
        self.consumer.control.close()
        assert self.producer.stdin is not None
        self.producer.stdin.close()
        self.producer.wait(20)


def _start(config: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    engine = Transfers(config)
    return {name: getattr(engine, name) for name in ("facts", "pdkv", "bare_nixl", "memcpy", "submits", "close")}


def _produce() -> None:
    """The producer's process: grants once, then only its control thread and mover work."""
    transport, blocks = msgspec.json.decode(sys.stdin.readline(), type=tuple[str, tuple[int, ...]])
    half = Half("p", transport)
    sys.stdout.buffer.write(msgspec.json.encode(half.grant(blocks)) + b"\n")
    sys.stdout.flush()
    sys.stdin.read()
    half.control.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["--producer"]:
        _produce()
    else:
        answer_commands(_start)
