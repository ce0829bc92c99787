"""Two instances' transfer halves on loopback, without engines: for the transfer benchmark and tests/runtime."""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from benchmarks.plain_pool import plain

from pdkv.core.engine import Identity
from pdkv.core.ports import Batch, Keepalive, Plan, PostRead, PostWrite, ReadEnded, WriteEnded
from pdkv.core.transfer.messages import Grant, Peer, RemoteSource, WriteGrant
from pdkv.core.transfer.proof import lease_token, proof_key, prove
from pdkv.errors import FenceLost
from pdkv.runtime.control import Control, PeerIdentity, TransferMemory
from pdkv.runtime.device_memory import DeviceMemory
from pdkv.runtime.geometry import Geometry
from pdkv.runtime.mover_host import MoverKind
from pdkv.runtime.shared_memory import SharedMemory

LEASE_NS = 30 * 10**9
FACTS = {"model": "m@1", "dtype": "float32", "block_size": "16"}
_EMPTY = np.zeros(0, np.int32)


def empty_plan(step_id: int = 0, **fields: object) -> Plan:
    """A plan without a batch."""
    batch = Batch((), _EMPTY, _EMPTY, _EMPTY, np.zeros(0, bool), np.zeros((0, 0), np.int32), np.zeros(0, bool))
    return Plan(step_id=step_id, batch=batch, **fields)  # type: ignore[arg-type]


def make_grant(
    identity: Identity,
    peer: Peer,
    slot_words: Any,
    blocks: tuple[int, ...],
    *,
    block_size: int,
    lease_id: int = 7,
    slot: int = 3,
) -> RemoteSource:
    """A lease of ``blocks``: named in its slot (a row of ``slot_words``, uint64[n, 2]), and proved."""
    slot_words[slot] = (identity.nonce, lease_id)
    grant = Grant(
        block_ids=blocks,
        block_size=block_size,
        num_tokens=16 * len(blocks),
        slot=slot,
        nonce=identity.nonce,
        lease_id=lease_id,
        token=lease_token(identity.secret, lease_id),
        proof=b"",
    )
    proved = msgspec.structs.replace(grant, proof=prove(proof_key(identity.secret), grant, b""))
    return RemoteSource(peer=peer, request_id="r", grant=proved)


def make_write_grant(
    identity: Identity, slot_words: Any, blocks: tuple[int, ...], *, block_size: int, grant_id: int = 9, slot: int = 5
) -> WriteGrant:
    """What an engine does to have its ``blocks`` written: name the grant in a slot (a row of ``slot_words``)."""
    slot_words[slot] = (identity.nonce, grant_id)
    return WriteGrant(
        nonce=identity.nonce,
        grant_id=grant_id,
        slot=slot,
        block_ids=blocks,
        block_size=block_size,
        num_tokens=16 * len(blocks),
        first_token=0,
        prompt_digest=bytes(16),
    )


def _pool(device: str, geometry: Geometry) -> tuple[SharedMemory | DeviceMemory, Any]:
    shape = geometry.ranks * geometry.num_blocks, geometry.bytes_per_block
    if device == "cpu":
        pool = SharedMemory(geometry.nbytes)
        return pool, pool.array(np.uint8, shape)
    import torch

    tensor = torch.zeros(shape, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    return DeviceMemory(tensor), tensor


class Half:
    """One instance without an engine: a pool of numbered ``blocks`` of bytes (a NumPy view; on CUDA a tensor), and a
    Control. Each is what the block consists of on one rank, in memory's order, if the pool has a ``geometry``."""

    def __init__(
        self,
        name: str,
        *,
        transport: str,
        mover: MoverKind | None = None,
        device: str = "cpu",
        num_blocks: int = 64,
        bytes_per_block: int = 4096,
        geometry: Geometry | None = None,
        facts: dict[str, str] | None = None,
        lease_ns: int = LEASE_NS,
        port: int = 0,
        secret: bytes | None = None,
        engine_age_s: Callable[[], float] = lambda: 0.0,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.geometry = geometry or plain(num_blocks, bytes_per_block)
        self.pool, self.blocks = _pool(device, self.geometry)
        self.slots = SharedMemory(64 * 16)
        self.slot_words = self.slots.array(np.uint64, (64, 2))
        self.identity = Identity(engine_id=name, nonce=secrets.randbits(63), secret=secrets.token_bytes(32))
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.failures: list[FenceLost] = []
        self.handles = 0
        self.control = Control(
            PeerIdentity(self.identity, dict(facts or FACTS)),
            TransferMemory(self.pool, self.slots, self.geometry, 64),
            port=port,
            transport=transport,
            mover=mover,
            lease_ns=lease_ns,
            secret=secret,
            deliver=self.inbox.put,
            last_step_ns=lambda: now_ns() - int(engine_age_s() * 1e9),
            now_ns=now_ns,
            on_failure=self.failures.append,
        )

    def start(self) -> Half:
        self.control.start()
        return self

    def close(self) -> None:
        self.control.close()
        del self.blocks, self.slot_words
        self.pool.close()
        self.slots.close()

    @property
    def peer(self) -> Peer:
        return Peer(self.identity.engine_id, "127.0.0.1", self.control.port)

    def fill(self, seed: int) -> None:
        """Every block gets bytes that no other block has."""
        rng = np.random.default_rng(seed)
        self.blocks[:] = rng.integers(1, 255, self.blocks.shape, dtype=np.uint8)

    def grant(self, blocks: tuple[int, ...], *, lease_id: int = 7, slot: int = 3) -> RemoteSource:
        """What the engine does: name the lease in its slot, prove the grant."""
        return make_grant(
            self.identity,
            self.peer,
            self.slot_words,
            blocks,
            block_size=self.geometry.block_size,
            lease_id=lease_id,
            slot=slot,
        )

    def plan_read(self, source: RemoteSource, local: tuple[int, ...], remote: tuple[int, ...] | None = None) -> Plan:
        """The plan that posts one read, under the next handle."""
        self.handles += 1
        remote_blocks = np.asarray(remote if remote is not None else source.grant.block_ids, np.int32)
        return empty_plan(reads=(PostRead(self.handles, source, remote_blocks, np.asarray(local, np.int32)),))

    def post(self, source: RemoteSource, local: tuple[int, ...], remote: tuple[int, ...] | None = None) -> int:
        """Submit one read; its handle."""
        self.control.submit(self.plan_read(source, local, remote))
        return self.handles

    def write_grant(self, blocks: tuple[int, ...], *, grant_id: int = 9, slot: int = 5) -> WriteGrant:
        """Of our ``blocks``, named in a slot."""
        size = self.geometry.block_size
        return make_write_grant(self.identity, self.slot_words, blocks, block_size=size, grant_id=grant_id, slot=slot)

    def post_write(self, to: Half, grant: WriteGrant, local: tuple[int, ...]) -> int:
        """Submit the write of our ``local`` blocks into the blocks of ``to``'s grant; its handle."""
        self.handles += 1
        remote_blocks, local_blocks = np.asarray(grant.block_ids, np.int32), np.asarray(local, np.int32)
        epoch = to.control.epoch
        self.submit(writes=(PostWrite(self.handles, to.peer, grant, remote_blocks, local_blocks, epoch),))
        return self.handles

    def write(self, to: Half, grant: WriteGrant, local: tuple[int, ...]) -> WriteEnded:
        """Post and wait."""
        handle = self.post_write(to, grant, local)
        ended = self.wait(WriteEnded)
        assert isinstance(ended, WriteEnded)
        assert ended.handle == handle
        return ended

    def submit(self, **fields: object) -> None:
        self.control.submit(empty_plan(**fields))

    def keep(self, peer: Peer, *tokens: bytes) -> None:
        self.submit(keepalives=(Keepalive(peer, tokens),))

    def wait(self, kind: type, timeout_s: float = 30.0) -> object:
        """The next inbox item of ``kind``; others are dropped."""
        until = time.monotonic() + timeout_s
        while True:
            item = self.inbox.get(timeout=max(0.01, until - time.monotonic()))
            if isinstance(item, kind):
                return item

    def read(self, source: RemoteSource, local: tuple[int, ...], remote: tuple[int, ...] | None = None) -> ReadEnded:
        """Post and wait."""
        handle = self.post(source, local, remote)
        ended = self.wait(ReadEnded)
        assert isinstance(ended, ReadEnded)
        assert ended.handle == handle
        return ended
