"""Vectors of block-pool.md for windows, hybrids, retention and copies on write; refusals; events; residency."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.core.helpers import counting_prompt, make_engine, new_request, step

from pdkv.core.blocks.groups import (
    ChunkedGroup,
    CrossGroup,
    FullGroup,
    Group,
    ReferenceWindowGroup,
    RingGroup,
    StateGroup,
    WindowGroup,
    granularity,
)
from pdkv.core.blocks.hashing import raw_sha256
from pdkv.core.blocks.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.blocks.residency import Residency
from pdkv.core.config import EngineConfig
from pdkv.core.scheduler.request import Request, Status
from pdkv.errors import ConfigError


def manager_of(
    num_blocks: int, *groups: Group, retention: int | None = None, unit: int | None = None, in_flight: int = 4096
) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=num_blocks,
        groups=groups,
        sizes=granularity(groups, hash_tokens=unit, enable_caching=True),
        max_model_len=4096,
        max_in_flight_tokens=in_flight,
        retention_interval=retention,
    )


def request_of(manager: KVCacheManager, name: str, length: int, start: int = 0) -> Request:
    new = new_request(name, counting_prompt(length, start))
    request = Request(new, arrival_ns=0, sequence=0, hash_tokens=manager.sizes.hash_tokens)
    request.extend_hashes(raw_sha256)
    return request


def compute(manager: KVCacheManager, request: Request, tokens: int | None = None) -> None:
    """Compute ``tokens`` more, all of what is known by default, behind what is cached."""
    fresh = request.status is not Status.RUNNING
    hit = manager.lookup(request) if fresh else None
    start = request.num_computed + (hit.tokens if hit else 0)
    tokens = request.num_tokens - start if tokens is None else tokens
    assert manager.allocate_slots(request, tokens, hit=hit) is not None
    request.num_computed = start + tokens
    if fresh:
        request.move_to(Status.RUNNING)


def hashed_entries(manager: KVCacheManager, name: str, group: int) -> list[int]:
    table = manager.blocks_of(name, group)
    return [i for i, block in enumerate(table.tolist()) if block and manager.pool.ledger.hashed(table[i : i + 1])[0]]


def test_window_vector() -> None:
    """Section 11: SWA(32) alone, bs 16, prompt 64 then 40 decoded tokens: table [0,0,0,0,1,5,4]."""
    manager = manager_of(12, WindowGroup(block_size=16, window=32), retention=0)
    request = request_of(manager, "r", 64)
    compute(manager, request)
    for token in range(40):
        request.append(np.asarray([token], dtype=np.int32))
        request.extend_hashes(raw_sha256)
        compute(manager, request, 1)
    assert manager.blocks_of("r").tolist() == [0, 0, 0, 0, 1, 5, 4]
    assert manager.num_blocks_of("r") == 3
    manager.check()


@pytest.mark.parametrize(("retention", "kept", "hit"), [(0, [7, 8], 0), (None, list(range(10)), 96)])
def test_retention_vector(retention: int | None, kept: list[int], hit: int) -> None:
    """Section 4: full + SWA(32), prompt 160: with 0 only window blocks 7 and 8 carry a hash, with None all ten."""
    manager = manager_of(64, FullGroup(block_size=16), WindowGroup(block_size=16, window=32), retention=retention)
    compute(manager, request_of(manager, "r", 160))
    assert hashed_entries(manager, "r", 0) == list(range(10))
    assert hashed_entries(manager, "r", 1) == kept
    found = manager.lookup(request_of(manager, "prefix", 100))
    assert found.tokens == hit
    assert found.boundary == (0 if hit else 96)  # full attention has 96: a prefix worth keeping from now on
    if hit:
        assert found.blocks[1].tolist()[:4] == [0, 0, 0, 0]
    assert manager.lookup(request_of(manager, "resend", 160)).tokens == 144


def test_a_shared_prefix_is_kept_once_it_was_seen() -> None:
    manager = manager_of(64, FullGroup(block_size=16), WindowGroup(block_size=16, window=32), retention=0)
    compute(manager, request_of(manager, "first", 160))
    second = request_of(manager, "second", 100)
    second.shared_boundary = manager.lookup(second).boundary
    compute(manager, second)
    assert manager.lookup(request_of(manager, "third", 100)).tokens == 96
    assert manager.lookup(request_of(manager, "longer", 110)).tokens == 96


def test_retention_interval_keeps_a_run_every_so_many_tokens() -> None:
    manager = manager_of(64, WindowGroup(block_size=16, window=32), retention=64)
    compute(manager, request_of(manager, "r", 200))
    assert hashed_entries(manager, "r", 0) == [2, 3, 6, 7, 10, 11]


def test_chunked_hits_count_former_chunks_as_there() -> None:
    manager = manager_of(64, FullGroup(block_size=16), ChunkedGroup(block_size=16, chunk=64))
    compute(manager, request_of(manager, "r", 128))
    hit = manager.lookup(request_of(manager, "again", 112))
    assert hit.tokens == 96
    assert hit.blocks[1].tolist()[:4] == [0, 0, 0, 0]
    assert all(hit.blocks[1].tolist()[4:])


def test_window_blocks_come_back_before_the_new_ones_are_counted() -> None:
    """Section 6.6: also when the call then fails."""
    manager = manager_of(8, WindowGroup(block_size=4, window=4), in_flight=16)
    request = request_of(manager, "r", 60)
    compute(manager, request, 28)  # all seven blocks
    assert manager.pool.num_free == 0
    compute(manager, request, 4)  # six of them lie behind the window of token 28
    assert manager.pool.num_free == 5
    assert manager.allocate_slots(request, 28) is None
    assert manager.pool.num_free == 6


def test_admission_gate_counts_what_a_window_holds_at_once() -> None:
    manager = manager_of(12, WindowGroup(block_size=4, window=5), in_flight=16)
    request = request_of(manager, "r", 400)
    assert manager.allocate_slots(request, 16, full_sequence_must_fit=True) is not None  # (4 + 16) // 4 + 1 = 6 blocks
    other = request_of(manager, "o", 400, start=1000)
    assert manager.allocate_slots(other, 16, full_sequence_must_fit=True, has_scheduled=True) is not None
    third = request_of(manager, "t", 400, start=2000)
    assert manager.allocate_slots(third, 16, full_sequence_must_fit=True) is None


def test_blocks_for_external_tokens_behind_the_window_are_not_taken() -> None:
    manager = manager_of(20, FullGroup(block_size=4), WindowGroup(block_size=4, window=5))
    request = request_of(manager, "r", 33)
    got = manager.allocate_slots(request, 0, external_tokens=32, delay_cache=True)
    assert got is not None
    assert [len(blocks) for blocks in got] == [0, 0]
    assert np.count_nonzero(manager.blocks_of("r", 0)) == 8
    assert np.flatnonzero(manager.blocks_of("r", 1)).tolist() == [7]
    manager.check()


def test_a_hit_inside_a_block_is_copied_on_write() -> None:
    groups = (FullGroup(block_size=16), StateGroup(block_size=16, aligned=True))
    manager = manager_of(20, *groups, unit=4, retention=0)
    first = request_of(manager, "first", 27)
    compute(manager, first, 16)
    compute(manager, first, 8)  # ends at the prompt's last hash boundary: 24
    manager.new_step()
    second = request_of(manager, "second", 26)
    hit = manager.lookup(second)
    assert hit.tokens == 24
    tails = [int(blocks[-1]) for blocks in hit.blocks]
    assert tails == [int(manager.blocks_of("first", group)[1]) for group in (0, 1)]
    compute(manager, second)
    copies, owners = manager.take_copies()
    own = [int(manager.blocks_of("second", group)[1]) for group in (0, 1)]
    assert copies.tolist() == [[tails[0], own[0]], [tails[1], own[1]]]
    manager.check()
    manager.release("second")
    assert not set(own) & set(manager.pool.free_order().tolist()), "the copy's target went before the copy has run"
    for owner in owners:
        manager.release(owner)
    manager.release("first")
    assert manager.pool.num_free == 19
    manager.check()


def test_a_state_is_not_hit_in_the_step_that_computes_it() -> None:
    manager = manager_of(20, FullGroup(block_size=4), StateGroup(block_size=4, aligned=True))
    compute(manager, request_of(manager, "first", 8), 8)
    second = request_of(manager, "second", 10)
    hit = manager.lookup(second)
    assert hit.tokens == 8
    assert manager.allocate_slots(second, 2, hit=hit) is None
    manager.new_step()
    assert manager.allocate_slots(second, 2, hit=hit) is not None


def test_deferred_frees_come_back_last_group_first() -> None:
    orders = []
    for joined in (False, True):
        manager = manager_of(9, FullGroup(block_size=4), FullGroup(block_size=4))
        compute(manager, request_of(manager, "r", 8))
        manager.release("r", joined=joined)
        orders.append(manager.pool.free_order().tolist())
    assert orders == [[5, 6, 7, 8, 2, 1, 4, 3], [5, 6, 7, 8, 4, 3, 2, 1]]


@pytest.mark.parametrize(
    ("groups", "more", "message"),
    [
        ((WindowGroup(block_size=4, window=0),), {}, "window is 0"),
        ((FullGroup(block_size=-4),), {}, "block_size is -4"),
        (
            (FullGroup(block_size=4), ChunkedGroup(block_size=8, chunk=16)),
            {},
            r"one block size for all groups.*\[4, 8\]",
        ),
        ((ChunkedGroup(block_size=8, chunk=12),), {}, "no multiple"),
        ((FullGroup(block_size=4),), {"prefix_cache_retention_interval": 8}, "would change nothing"),
        ((WindowGroup(block_size=8, window=9),), {"prefix_cache_retention_interval": 12}, "multiple of .* 8 tokens"),
        ((FullGroup(block_size=6), FullGroup(block_size=4)), {"prefix_match_unit": 4}, r"\[6, 4\]"),
        ((FullGroup(block_size=4),), {"kv_metrics_sample": 0.0}, r"\(0, 1\]"),
        ((RingGroup(block_size=4),), {}, "nothing to cache"),
        ((FullGroup(block_size=4), CrossGroup(block_size=4, encoder_tokens=9)), {}, "CrossGroup .* prefix caching off"),
        ((ReferenceWindowGroup(block_size=4, window=9),), {}, "ReferenceWindowGroup .* prefix caching off"),
        ((CrossGroup(block_size=4, encoder_tokens=0),), {"enable_prefix_caching": False}, "encoder_tokens is 0"),
        (tuple(StateGroup(block_size=size, aligned=True) for size in (4, 8)), {}, r"one block size.*\[4, 8\]"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups: tuple[Group, ...], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(num_blocks=10, block_size=4, max_model_len=64, groups=groups, **more)


def test_kv_events_of_an_engine() -> None:
    engine = make_engine(num_blocks=7, kv_events=True)
    step(engine, 0, [new_request("a", counting_prompt(9), 1)])
    (stored,) = engine.take_kv_events()
    assert isinstance(stored, BlockStored)
    assert (len(stored.hashes), stored.parent, stored.tokens.tolist()) == (2, None, list(range(8)))
    step(engine, 1, [new_request("b", counting_prompt(20, 100), 1)])
    removed, *rest = engine.take_kv_events()
    assert removed == BlockRemoved(group=0, key=stored.hashes[1])  # the deepest block went first
    assert len(rest) == 1
    assert engine.manager.pool.reset_prefix_cache()
    assert isinstance(engine.take_kv_events()[-1], AllBlocksCleared)
    assert engine.take_kv_events() == ()


def test_residency_of_sampled_blocks() -> None:
    now = [0]
    residency = Residency(1.0, 1, lambda: now[0])
    blocks = np.asarray([3, 4], dtype=np.int32)
    residency.allocated(blocks)
    for time in (10, 30, 60, 100, 150):
        now[0] = time
        residency.accessed(blocks[:1])
    now[0] = 200
    residency.allocated(blocks)
    first, second = residency.take()
    assert (first.lifetime_ns, first.idle_ns, first.gaps_ns) == (200, 50, (30, 40, 50))
    assert (second.lifetime_ns, second.idle_ns, second.gaps_ns) == (200, 200, ())
    assert residency.take() == ()


def test_residency_draws_its_share_and_can_be_repeated() -> None:
    many = np.arange(20_000, dtype=np.int32)
    runs = []
    for seed in (1, 1, 2):
        residency = Residency(0.01, seed, lambda: 0)
        residency.allocated(many)
        residency.evicted(many)
        runs.append(len(residency.take()))
    assert runs[0] == runs[1]
    assert all(120 <= count <= 280 for count in runs)
