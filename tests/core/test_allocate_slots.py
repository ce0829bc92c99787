"""Vectors of block-pool.md sections 2, 5, 6.1 and 11, as vLLM gives them."""

from __future__ import annotations

import numpy as np
import pytest
from tests.core.helpers import counting_prompt, new_request

from pdkv.core.blocks.groups import FullGroup, granularity
from pdkv.core.blocks.hashing import raw_sha256
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.ledger import Account
from pdkv.core.scheduler.request import Request, Status


def manager_of(
    num_blocks: int, *, watermark: float = 0.0, caching: bool = True, max_model_len: int = 4096
) -> KVCacheManager:
    groups = (FullGroup(block_size=16),)
    return KVCacheManager(
        num_blocks=num_blocks,
        groups=groups,
        sizes=granularity(groups, hash_tokens=None, enable_caching=caching),
        max_model_len=max_model_len,
        watermark=watermark,
        enable_caching=caching,
    )


def request_of(name: str, length: int, start: int = 0) -> Request:
    request = Request(new_request(name, counting_prompt(length, start)), arrival_ns=0, sequence=0, hash_tokens=16)
    request.extend_hashes(raw_sha256)
    return request


def compute(manager: KVCacheManager, request: Request) -> None:
    hit = manager.lookup(request)
    assert manager.allocate_slots(request, request.num_tokens - hit.tokens, hit=hit) is not None
    request.num_computed = request.num_tokens
    request.move_to(Status.RUNNING)


def load(manager: KVCacheManager, request: Request, external: int, **more: int) -> list[int] | None:
    """An asynchronous load, as the scheduler asks for it."""
    got = manager.allocate_slots(
        request, 0, hit=manager.lookup(request), external_tokens=external, delay_cache=True, **more
    )
    return None if got is None else got[0].tolist()


def test_async_load_vectors() -> None:
    manager = manager_of(11)
    a, b, c = request_of("a", 40), request_of("b", 40), request_of("c", 64, start=5000)
    assert load(manager, a, 40) == []  # an empty list although it now holds memory
    assert manager.blocks_of("a").tolist() == [1, 2, 3]
    assert manager.pool.usage == pytest.approx(0.3)
    assert manager.pool.ledger.num_hashed == 0
    assert manager.lookup(b).blocks[0].tolist() == []  # blocks being loaded cannot be hit
    manager.cache_blocks(a, 40)
    assert manager.pool.ledger.hashed(np.asarray([1, 2, 3])).tolist() == [True, True, False]
    assert manager.lookup(b).blocks[0].tolist() == [1, 2]
    assert load(manager, b, 8) == []
    assert manager.blocks_of("b").tolist() == [1, 2, 4]
    assert manager.pool.num_free == 6
    assert load(manager, c, 64, reserved_blocks=3) is None
    assert load(manager, c, 64, reserved_blocks=2) == []
    assert manager.blocks_of("c").tolist() == [5, 6, 7, 8]
    manager.check()
    assert manager.release("a") == 3
    assert manager.release("b") == 3
    assert manager.pool.free_order().tolist() == [4, 3, 9, 10, 2, 1]
    manager.check()


def test_watermark_vector() -> None:
    """101-block pool, watermark 0.1: a 91-block request is refused while something runs, admitted when nothing does."""
    manager = manager_of(101, watermark=0.1)
    assert manager.watermark_blocks == 10
    big = request_of("big", 91 * 16)
    for full in (True, False):
        assert manager.allocate_slots(big, 91 * 16, full_sequence_must_fit=full, has_scheduled=True) is None
    assert manager.num_blocks_of("big") == 0
    got = manager.allocate_slots(big, 91 * 16, full_sequence_must_fit=True, has_scheduled=False)
    assert got is not None
    assert len(got[0]) == 91


def test_watermark_counts_from_all_blocks_and_binds_waiting_requests_only() -> None:
    assert [manager_of(n, watermark=0.1).watermark_blocks for n in (9, 10, 19, 20)] == [0, 1, 1, 2]
    manager = manager_of(11, watermark=0.5)
    request = request_of("r", 5 * 16)
    compute(manager, request)
    request.append(np.arange(16, dtype=np.int32))
    request.extend_hashes(raw_sha256)
    assert manager.allocate_slots(request, 16, has_scheduled=True) is not None  # running: no watermark
    request.move_to(Status.PREEMPTED)
    manager.release("r")
    other = request_of("o", 16 * 6, start=900)
    for status in (Status.WAITING, Status.PREEMPTED, Status.LOADED):
        other.status = status
        assert manager.allocate_slots(other, 16 * 6, has_scheduled=True) is None


def test_free_order_of_one_request() -> None:
    """Section 2.3: blocks 1..4, the 4th partial: after free head = 4, tail = 3, 2, 1."""
    manager = manager_of(8)
    compute(manager, request_of("r", 56))
    manager.release("r")
    assert manager.pool.free_order().tolist() == [4, 5, 6, 7, 3, 2, 1]


def test_without_caching_all_go_to_the_head() -> None:
    manager = manager_of(8, caching=False)
    request = Request(new_request("r", counting_prompt(56)), arrival_ns=0, sequence=0, hash_tokens=16)
    assert manager.allocate_slots(request, 56) is not None
    manager.release("r")
    assert manager.pool.free_order().tolist() == [4, 3, 2, 1, 5, 6, 7]
    assert manager.pool.ledger.num_hashed == 0


def test_exact_resend_loses_its_last_block() -> None:
    manager = manager_of(20)
    compute(manager, request_of("r", 49))
    assert manager.lookup(request_of("again", 48)).tokens == 32
    assert manager.lookup(request_of("longer", 49)).tokens == 48


def test_a_hit_takes_free_capacity() -> None:
    """Section 6.7: touched blocks that nobody held count as needed."""
    manager = manager_of(7)
    compute(manager, request_of("r", 64))
    manager.release("r")
    again = request_of("again", 96 + 1)  # 7 blocks of which 4 are hit: 3 new + 4 touched > 6 free
    hit = manager.lookup(again)
    assert hit.tokens == 64
    assert manager.allocate_slots(again, again.num_tokens - 64, hit=hit) is None
    smaller = request_of("smaller", 96)
    hit = manager.lookup(smaller)
    got = manager.allocate_slots(smaller, 32, hit=hit)
    assert got is not None
    assert got[0].tolist() == [5, 6]
    assert manager.pool.num_free == 0


def test_allocation_does_not_evict_its_own_hit() -> None:
    manager = manager_of(6)
    compute(manager, request_of("r", 80))
    manager.release("r")  # five blocks cached; the queue hands out the deepest first
    again = request_of("again", 70)
    hit = manager.lookup(again)
    assert hit.blocks[0].tolist() == [1, 2, 3, 4]
    got = manager.allocate_slots(again, 6, hit=hit)
    assert got is not None
    assert got[0].tolist() == [5]
    assert manager.blocks_of("again").tolist() == [1, 2, 3, 4, 5]


def test_full_sequence_gate_looks_at_the_whole_known_sequence() -> None:
    manager = manager_of(6)
    request = request_of("r", 16 * 6)
    assert manager.allocate_slots(request, 16, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(request, 16, full_sequence_must_fit=False) is not None


def test_reserved_blocks_do_not_enter_the_full_sequence_gate() -> None:
    manager = manager_of(6)
    request = request_of("r", 16 * 5)
    got = manager.allocate_slots(request, 16, full_sequence_must_fit=True, reserved_blocks=4)
    assert got is not None
    assert got[0].tolist() == [1]


def test_never_beyond_the_model_length() -> None:
    manager = manager_of(20, max_model_len=40)
    request = request_of("r", 39)
    got = manager.allocate_slots(request, 39, lookahead_tokens=100)
    assert got is not None
    assert got[0].tolist() == [1, 2, 3]


def test_asking_for_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no new, external or cached tokens"):
        manager_of(4).allocate_slots(request_of("r", 16), 0)


def test_duplicates_keep_two_blocks() -> None:
    """Section 2.7: two requests that compute the same content keep two physical blocks; the first inserted is hit."""
    manager = manager_of(9)
    a, b = request_of("a", 33), request_of("b", 33)
    for request in (a, b):
        assert manager.allocate_slots(request, 33) is not None
    assert manager.blocks_of("a").tolist() == [1, 2, 3]
    assert manager.blocks_of("b").tolist() == [4, 5, 6]
    assert manager.lookup(request_of("c", 33)).blocks[0].tolist() == [1, 2]
    manager.release("a")
    assert manager.lookup(request_of("c", 33)).blocks[0].tolist() == [1, 2]
    assert manager.pool.take(5, Account.RUNNING).tolist() == [3, 7, 8, 2, 1]  # a's content is evicted ...
    assert manager.lookup(request_of("c", 33)).blocks[0].tolist() == [4, 5]  # ... and b's is found


def test_reset_is_refused_while_anything_is_held() -> None:
    manager = manager_of(6)
    compute(manager, request_of("r", 33))
    assert manager.pool.reset_prefix_cache() is False
    assert len(manager.lookup(request_of("again", 33)).blocks[0]) == 2
    manager.release("r")
    assert manager.pool.reset_prefix_cache() is True
    assert len(manager.lookup(request_of("again", 33)).blocks[0]) == 0
    assert manager.pool.ledger.as_dict()["free"] == 5
    manager.check()
