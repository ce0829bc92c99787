"""What fences WRITEs through shared memory whose writer is stopped in the middle of a slice.

What all transports promise is in `tests.transfer.test_write_contract`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from benchmarks.transfer_half import Half

from pdkv.core.ports import GrantsFenced, MoverRestarted, Revoked, WriteEnded
from pdkv.runtime.transports import grant_locks

_BIG_BLOCK = 8 << 20


@pytest.fixture
def shared() -> Iterator[tuple[Half, Half]]:
    """(producer, consumer) with large blocks."""
    producer, consumer = (
        Half(name, transport="shm", mover=mover, num_blocks=24, bytes_per_block=_BIG_BLOCK).start()
        for name, mover in (("producer", "process"), ("consumer", "thread"))
    )
    producer.blocks[:] = np.arange(1, 25, dtype=np.uint8)[:, None]
    yield producer, consumer
    consumer.close()
    producer.close()


def take_back(consumer: Half, slot: int, grant_id: int, **more: object) -> None:
    """What the engine does when it gives a grant up: the words first."""
    consumer.slot_words[slot, 1] = 0
    consumer.submit(revoked=(Revoked(grant_id, slot),), **more)


def stopped_in_a_slice(producer: Half, consumer: Half) -> int:
    """P's mover, by SIGSTOP in the middle of a slice that it writes; its pid. The grant is that of `write_grant`."""
    for attempt in range(50):
        grant = consumer.write_grant(tuple(range(20)), grant_id=9 + attempt)
        handle = producer.post_write(consumer, grant, tuple(range(20)))
        pid = producer.control.mover_pid
        assert pid is not None
        until = time.monotonic() + 5
        while time.monotonic() < until and not consumer.blocks[0, 0]:
            pass
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
        if not grant_locks.passed(consumer.slots, grant.slot):
            return pid
        os.kill(pid, signal.SIGCONT)
        ended = producer.wait(WriteEnded)
        assert isinstance(ended, WriteEnded)
        assert ended.handle == handle
        consumer.blocks[0, 0] = 0
    pytest.fail("it was never stopped in the middle of a slice")


def quiet_for(consumer: Half, seconds: float) -> None:
    """No fence passes meanwhile."""
    time.sleep(seconds)
    while not consumer.inbox.empty():
        assert not isinstance(consumer.inbox.get(), GrantsFenced)


def test_a_producer_stopped_in_a_slice_keeps_the_quarantine_until_it_goes_on(shared: tuple[Half, Half]) -> None:
    producer, consumer = shared
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
