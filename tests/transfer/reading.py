"""A consumer that reads from a producer, and what must hold of a READ: for test_contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tests.transfer.producers import Producer
from tests.transfer.sides import ALL, BLOCKS, Report, Side

from pdkv.core.ports import ReadEnded
from pdkv.core.transfer.messages import RemoteSource


class Pair:
    """A consumer and a producer, put in its place when a test has killed it."""

    def __init__(self, consumer: Side, start: Callable[[], Producer]) -> None:
        self.consumer, self._start = consumer, start
        self._producer: Producer | None = None

    def producer(self) -> Producer:
        """One that lives, its blocks full, and a READ from it has been made."""
        if self._producer is None or self._producer.killed:
            self._producer = self._start()
            self._producer.fill()
            assert self.consumer.read(self._producer.grant((0,)), (0,), (0,)).error is None
        return self._producer


def check_whole(consumer: Side, producer: Producer, ended: Report, source: RemoteSource, *pairs: Sequence[int]) -> None:
    """It ended well: the slot names the lease, every byte is there, none anywhere else. ``pairs``: remote, local."""
    remote, local = (list(side) for side in pairs)
    assert isinstance(ended, ReadEnded)
    assert (ended.error, ended.slot) == (None, (source.grant.nonce, source.grant.lease_id))
    assert ended.moved_bytes == len(remote) * consumer.block_bytes
    assert ended.seconds > 0
    assert np.array_equal(consumer.blocks[local], producer.blocks[remote])
    others = np.setdiff1d(np.arange(BLOCKS), local)
    assert not consumer.blocks[others].any()


def check_ended(consumer: Side, producer: Producer, ended: Report, source: RemoteSource, *pairs: Sequence[int]) -> None:
    """Well, or with a reason and without a slot."""
    assert isinstance(ended, ReadEnded)
    if ended.error is None:
        check_whole(consumer, producer, ended, source, *pairs)
    else:
        assert ended.slot is None
        assert ended.moved_bytes <= len(pairs[0]) * consumer.block_bytes


def check_untouched(consumer: Side, producer: Producer) -> None:
    """No READ that is over writes anything any more."""

    def read() -> Sequence[int]:
        if producer.killed:
            consumer.pause(0.3)
            return ()
        for _ in range(2):
            assert consumer.read(producer.grant((0,), lease_id=99, slot=63), (0,), (0,)).error is None
        return (0,)

    consumer.check_untouched(read)


def begin(consumer: Side, source: RemoteSource) -> int:
    """A READ of everything, backwards, of which the first blocks have arrived."""
    consumer.blocks[:] = 0
    (handle,) = consumer.post((source, ALL, ALL[::-1]))
    consumer.await_first()
    return handle
