"""READs and WRITEs between instances of different block sizes and numbers of ranks, with real movers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from benchmarks.transfer_half import Half
from tests.nixl_here import needs_nixl
from tests.runtime.kv_model import laid_out, meant

from pdkv.runtime.geometry import Geometry

TOKENS = 192  # of each pool


def pool(ranks: int, block_size: int, **changes: int) -> Geometry:
    """Four KV heads of 32 bytes in three layers, unless ``changes`` say otherwise."""
    shape = {"layers": 3, "vectors": 2, "heads": 4, "head_bytes": 32, **changes}
    return Geometry(ranks=ranks, num_blocks=TOKENS // block_size, block_size=block_size, **shape)


LATENT = {"vectors": 1, "heads": 1, "head_bytes": 36}
CASES = {
    "TP 1 to 2": (pool(1, 16), pool(2, 16)),
    "TP 2 to 1": (pool(2, 16), pool(1, 16)),
    "TP 2 to 2": (pool(2, 16), pool(2, 16)),
    "blocks of 16 to 32": (pool(1, 16), pool(1, 32)),
    "blocks of 32 to 16": (pool(1, 32), pool(1, 16)),
    "blocks of 8 to 16": (pool(1, 8), pool(1, 16)),
    "TP 1 to 2, blocks of 32 to 16": (pool(1, 32), pool(2, 16)),
    "TP 2 to 1, blocks of 8 to 16": (pool(2, 8), pool(1, 16)),
    "TP 2 to 2, blocks of 16 to 32": (pool(2, 16), pool(2, 32)),
    "replicated, TP 4 to 2": (pool(4, 16, heads=2), pool(2, 16, heads=2)),
    "replicated, TP 1 to 4": (pool(1, 16, heads=2), pool(4, 16, heads=2)),
    "MLA latent, TP 1 to 2": (pool(1, 16, **LATENT), pool(2, 16, **LATENT)),
    "MLA latent, TP 2 to 1, blocks of 32 to 16": (pool(2, 32, **LATENT), pool(1, 16, **LATENT)),
}


class Halves:
    """Started as they are asked for, by role and geometry."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.started: dict[tuple[str, Geometry], Half] = {}

    def get(self, role: str, geometry: Geometry) -> Half:
        if (role, geometry) not in self.started:
            name = f"{role}-{len(self.started)}"
            self.started[role, geometry] = Half(
                name, transport=self.transport, mover="thread", geometry=geometry
            ).start()
        return self.started[role, geometry]

    def close(self) -> None:
        for half in self.started.values():
            half.close()


@pytest.fixture(scope="module", params=["shm", pytest.param("nixl", marks=needs_nixl)])
def halves(request: pytest.FixtureRequest) -> Iterator[Halves]:
    made = Halves(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("way", ["read", "written"])
@pytest.mark.parametrize("case", CASES)
def test_kv_arrives_on_every_rank(halves: Halves, case: str, way: str) -> None:
    theirs, ours = CASES[case]
    producer, consumer = halves.get("producer", theirs), halves.get("consumer", ours)
    rng = np.random.default_rng(5)
    kv, wanted = meant(theirs, rng), meant(ours, rng)
    producer.blocks[:] = laid_out(kv, theirs).reshape(producer.blocks.shape)
    consumer.blocks[:] = laid_out(wanted, ours).reshape(consumer.blocks.shape)
    unit = min(theirs.block_size, ours.block_size)
    remote = tuple(rng.permutation(TOKENS // unit)[: TOKENS // unit // 2].tolist())
    local = tuple(rng.permutation(TOKENS // unit)[: len(remote)].tolist())
    for at, to in zip(remote, local, strict=True):
        (block, part), (own_block, own_part) = (
            divmod(index * unit, side.block_size) for index, side in ((at, theirs), (to, ours))
        )
        wanted[own_block, :, :, own_part : own_part + unit] = kv[block, :, :, part : part + unit]

    if way == "read":
        ended = consumer.read(producer.grant((1, 2)), local, remote)
    else:
        ended = producer.write(consumer, consumer.write_grant(local), remote)
    assert ended.error is None
    assert ended.moved_bytes == len(local) * ours.nbytes * unit // TOKENS
    assert np.array_equal(consumer.blocks, laid_out(wanted, ours).reshape(consumer.blocks.shape))


def test_units_that_a_pool_does_not_have_are_refused(halves: Halves) -> None:
    theirs, ours = CASES["TP 1 to 2, blocks of 32 to 16"]
    producer, consumer = halves.get("producer", theirs), halves.get("consumer", ours)
    source = producer.grant((1,))
    assert "remote block ids 12..12 outside the peer's 12 blocks" in str(consumer.read(source, (0,), (12,)).error)
    assert "local block ids 12..12 outside the pool's 12 blocks" in str(consumer.read(source, (12,), (0,)).error)
    assert consumer.read(source, (11,), (11,)).error is None


@pytest.mark.parametrize(
    ("theirs", "ours", "text"),
    [
        (pool(1, 24), pool(1, 16), "it has 24 tokens a block, we have 16"),
        (pool(1, 16), msgspec.structs.replace(pool(1, 16), layers=4), "its KV pool has 3 layers, ours 4"),
        (pool(3, 16, heads=6), pool(2, 16, heads=6), "it has 3 tensor-parallel ranks, we have 2"),
    ],
    ids=["block sizes", "layers", "ranks"],
)
def test_a_peer_whose_kv_does_not_fit_ours_is_refused_by_name(theirs: Geometry, ours: Geometry, text: str) -> None:
    producer = Half("producer", transport="shm", geometry=theirs).start()
    consumer = Half("consumer", transport="shm", geometry=ours).start()
    try:
        ended = consumer.read(producer.grant((1,)), (1,))
        assert ended.slot is None
        assert text in str(ended.error)
        assert "refused the handshake" in str(ended.error)
    finally:
        consumer.close()
        producer.close()
