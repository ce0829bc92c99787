"""WRITEs between the transfer halves of two instances, with real movers: what moves, and what fences it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from benchmarks.transfer_half import Half
from tests.nixl_here import needs_nixl

from pdkv.core.ports import GrantsFenced, MoverRestarted, PostWrite, Revoked, WriteEnded
from pdkv.runtime.transports import grant_locks

TRANSPORTS = ["shm", pytest.param("nixl", marks=needs_nixl)]
_BIG_BLOCK = 8 << 20


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Half, Half]]:
    """(producer, consumer), shared by the tests that break neither."""
    producer = Half("producer", transport=request.param).start()
    consumer = Half("consumer", transport=request.param).start()
    yield producer, consumer
    consumer.close()
    producer.close()


def test_a_write_moves_exactly_the_right_blocks(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    producer.fill(1)
    consumer.fill(2)
    expected, source = consumer.blocks.copy(), producer.blocks.copy()
    ended = producer.write(consumer, consumer.write_grant((5, 6, 7, 20, 0)), (1, 2, 3, 9, 63))
    assert ended.error is None
    assert ended.moved_bytes == 5 * 4096
    assert ended.seconds > 0
    for remote, local in zip((5, 6, 7, 20, 0), (1, 2, 3, 9, 63), strict=True):
        expected[remote] = producer.blocks[local]
    assert np.array_equal(consumer.blocks, expected)
    assert np.array_equal(producer.blocks, source)


def test_many_writes_at_once_each_end_once(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    producer.fill(3)
    handles = {}
    for i in range(20):
        grant = consumer.write_grant((2 * i, 2 * i + 1), grant_id=100 + i, slot=i)
        handles[producer.post_write(consumer, grant, (i, i + 1))] = i
    for _ in range(20):
        ended = producer.wait(WriteEnded)
        assert isinstance(ended, WriteEnded)
        assert ended.error is None
        i = handles.pop(ended.handle)
        assert np.array_equal(consumer.blocks[2 * i : 2 * i + 2], producer.blocks[i : i + 2])


def test_reads_and_writes_share_a_mover(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    producer.fill(4)
    grant = consumer.write_grant((1, 2, 3))
    write = producer.post_write(consumer, grant, (11, 12, 13))
    read = consumer.read(producer.grant((21, 22)), (4, 5))
    assert read.error is None
    ended = producer.wait(WriteEnded)
    assert isinstance(ended, WriteEnded)
    assert (ended.handle, ended.error) == (write, None)
    assert np.array_equal(consumer.blocks[1:4], producer.blocks[11:14])
    assert np.array_equal(consumer.blocks[4:6], producer.blocks[21:23])


@pytest.mark.parametrize("odd", ["another life", "blocks beyond the pool", "a slot that is not there"])
def test_what_cannot_be_written_moves_nothing(pair: tuple[Half, Half], odd: str) -> None:
    producer, consumer = pair
    consumer.fill(5)
    before = consumer.blocks.copy()
    grant = consumer.write_grant((1, 2))
    change = {
        "another life": {"nonce": grant.nonce + 1},
        "blocks beyond the pool": {"block_ids": (1, 64)},
        "a slot that is not there": {"slot": 64},
    }[odd]
    ended = producer.write(consumer, msgspec.structs.replace(grant, **change), (3, 4))
    assert ended.error is not None
    assert {
        "another life": "another life",
        "blocks beyond the pool": "outside the peer's 64 blocks",
        "a slot that is not there": "slot 64",
    }[odd] in ended.error
    assert np.array_equal(consumer.blocks, before)


def test_a_write_to_nobody_fails() -> None:
    producer = Half("producer", transport="shm").start()
    consumer = Half("consumer", transport="shm").start()
    grant, peer = consumer.write_grant((1,)), consumer.peer
    consumer.close()
    producer.handles += 1
    blocks = np.array([1], np.int32)
    producer.submit(writes=(PostWrite(1, peer, grant, blocks, blocks),))
    ended = producer.wait(WriteEnded)
    assert isinstance(ended, WriteEnded)
    assert "consumer" in str(ended.error)
    producer.close()


def test_a_cancelled_write_ends(shared: tuple[Half, Half]) -> None:
    producer, consumer = shared
    handle = producer.post_write(consumer, consumer.write_grant(tuple(range(20))), tuple(range(20)))
    producer.submit(cancels=(handle,))
    ended = producer.wait(WriteEnded)
    assert isinstance(ended, WriteEnded)
    assert ended.error == "cancelled" or ended.moved_bytes == 20 * _BIG_BLOCK


# ------------------------------------------------------------------------------------------ fences of shared memory


@pytest.fixture
def shared() -> Iterator[tuple[Half, Half]]:
    halves = [
        Half(name, transport="shm", num_blocks=24, bytes_per_block=_BIG_BLOCK).start()
        for name in ("producer", "consumer")
    ]
    yield halves[0], halves[1]
    for half in reversed(halves):
        half.close()


def take_back(consumer: Half, slot: int, grant_id: int, **more: object) -> None:
    """What the engine does when it gives a grant up: the words first."""
    consumer.slot_words[slot, 1] = 0
    consumer.submit(revoked=(Revoked(grant_id, slot),), **more)


def test_nothing_is_written_under_a_grant_that_was_taken_back(shared: tuple[Half, Half]) -> None:
    producer, consumer = shared
    producer.fill(1)
    grant = consumer.write_grant((1, 2))
    take_back(consumer, grant.slot, grant.grant_id)
    assert consumer.wait(GrantsFenced) == GrantsFenced((grant.grant_id,)), "nobody was writing"
    ended = producer.write(consumer, grant, (3, 4))
    assert "the grant is over" in str(ended.error)
    assert not consumer.blocks.any()
    quiet_for(consumer, 0.1)  # fenced once, though the engine still names it


def stopped_in_a_slice(producer: Half, consumer: Half) -> int:
    """P's mover, by SIGSTOP in the middle of a slice that it writes; its pid. The grant is that of `write_grant`."""
    for attempt in range(50):
        grant = consumer.write_grant(tuple(range(20)), grant_id=9 + attempt)
        handle = producer.post_write(consumer, grant, tuple(range(20)))
        pid = producer.control.mover_pid
        assert pid is not None
        until = time.monotonic() + 5
        while time.monotonic() < until and grant_locks.passed(consumer.slots, grant.slot):
            pass
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
        if not grant_locks.passed(consumer.slots, grant.slot):
            return pid
        os.kill(pid, signal.SIGCONT)
        ended = producer.wait(WriteEnded)
        assert isinstance(ended, WriteEnded)
        assert ended.handle == handle
    pytest.fail("it was never stopped in the middle of a slice")


def quiet_for(consumer: Half, seconds: float) -> None:
    """No fence passes meanwhile."""
    time.sleep(seconds)
    while not consumer.inbox.empty():
        assert not isinstance(consumer.inbox.get(), GrantsFenced)


def test_a_producer_stopped_in_a_slice_keeps_the_quarantine_until_it_goes_on(shared: tuple[Half, Half]) -> None:
    producer, consumer = shared
    producer.fill(2)
    pid = stopped_in_a_slice(producer, consumer)
    grant_id = int(consumer.slot_words[5, 1])
    take_back(consumer, 5, grant_id)
    quiet_for(consumer, 0.5)
    os.kill(pid, signal.SIGCONT)
    assert consumer.wait(GrantsFenced, 5.0) == GrantsFenced((grant_id,))
    reused = consumer.blocks.copy()
    ended = producer.wait(WriteEnded)
    assert isinstance(ended, WriteEnded)
    assert "the grant is over" in str(ended.error)
    assert np.array_equal(consumer.blocks, reused), "not a byte after the fence"


def test_the_last_resort_ends_a_producer_that_stands_still_in_a_slice(shared: tuple[Half, Half]) -> None:
    producer, consumer = shared
    producer.fill(3)
    pid = stopped_in_a_slice(producer, consumer)
    grant_id = int(consumer.slot_words[5, 1])
    take_back(consumer, 5, grant_id)
    quiet_for(consumer, 0.2)
    take_back(consumer, 5, grant_id, evict=(grant_id,))
    assert consumer.wait(GrantsFenced, 10.0) == GrantsFenced((grant_id,))
    reused = consumer.blocks.copy()
    restarted = producer.wait(MoverRestarted)
    assert isinstance(restarted, MoverRestarted)
    assert len(restarted.handles) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert np.array_equal(consumer.blocks, reused), "not a byte after the fence"
    grant = consumer.write_grant((1, 2), grant_id=77)
    assert producer.write(consumer, grant, (3, 4)).error is None, "its instance has started another"


def test_who_does_not_write_is_not_ended(shared: tuple[Half, Half]) -> None:
    producer, consumer = shared
    grant = consumer.write_grant((1, 2))
    assert producer.write(consumer, grant, (3, 4)).error is None
    assert grant_locks.evict(consumer.slots, grant.slot) == []
    assert grant_locks.evict(consumer.slots, grant.slot + 1) == []
    assert producer.write(consumer, grant, (5, 6)).error is None


# -------------------------------------------------------------------------------------------------- fences of NIXL


@needs_nixl
def test_the_end_of_our_mover_fences_what_nixl_may_write() -> None:
    producer = Half("producer", transport="nixl", num_blocks=24, bytes_per_block=_BIG_BLOCK).start()
    consumer = Half("consumer", transport="nixl", num_blocks=24, bytes_per_block=_BIG_BLOCK).start()
    producer.fill(6)
    grant = consumer.write_grant(tuple(range(1, 21)))
    producer.post_write(consumer, grant, tuple(range(20)))
    until = time.monotonic() + 20
    while not consumer.blocks[1, 0] and time.monotonic() < until:
        pass
    take_back(consumer, grant.slot, grant.grant_id, evict=(grant.grant_id,))
    assert consumer.wait(GrantsFenced, 20.0) == GrantsFenced((grant.grant_id,))
    reused = consumer.blocks.copy()
    ended = producer.wait(WriteEnded)
    assert isinstance(ended, WriteEnded)
    time.sleep(0.5)
    assert np.array_equal(consumer.blocks, reused), "a byte after the fence"
    assert ended.error is not None, "it was in the middle"
    consumer.close()
    producer.close()


@needs_nixl
def test_a_grant_does_not_survive_the_mover_that_it_was_given_with() -> None:
    """Its cancellation got lost, its memory went to somebody else, and only then does P begin to write."""
    producer, consumer = Half("producer", transport="nixl").start(), Half("consumer", transport="nixl").start()
    producer.fill(7)
    grant, epoch = consumer.write_grant((1, 2)), consumer.control.epoch
    take_back(consumer, grant.slot, grant.grant_id, evict=(grant.grant_id,))
    assert consumer.wait(GrantsFenced, 20.0) == GrantsFenced((grant.grant_id,))
    until = time.monotonic() + 30
    while consumer.control.epoch == epoch and time.monotonic() < until:
        time.sleep(0.05)
    blocks = np.array([1, 2], np.int32)
    producer.submit(writes=(PostWrite(1, consumer.peer, grant, blocks, blocks, epoch),))
    ended = producer.wait(WriteEnded)
    assert isinstance(ended, WriteEnded)
    assert "a mover that is no more" in str(ended.error)
    assert not consumer.blocks.any()
    consumer.close()
    producer.close()
