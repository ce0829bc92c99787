"""What a mover promises to the core, the same tests for all of them: simulated, shared memory, NIXL.

Where a fault meets a READ at an unknown moment the READ may have been quicker: the tests then check what must hold in
either case, and try again until they have seen the fault win.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
from tests.nixl_here import needs_nixl
from tests.transfer.producers import Producer, ProducerProcess, real, simulated
from tests.transfer.reading import Pair, begin, check_ended, check_untouched, check_whole
from tests.transfer.sides import ALL, BLOCKS, SHAPES, RealSide, Report, Side

from pdkv.core.ports import MoverRestarted, ReadEnded
from pdkv.core.transfer.messages import Peer, RemoteSource

TRIES = 8
#: Shared memory is moved by processes only (CPU pools), NIXL by threads also (those of GPU pools). Over TCP a READ
#: needs the producer's mover, as it does between hosts; on one host the kernel copies without it.
KINDS = [
    *(pytest.param(lambda seed=seed: simulated(seed), id=f"simulated-{seed}") for seed in range(3)),
    pytest.param(lambda: real("shm", "process"), id="shm"),
    *(
        pytest.param(lambda mover=mover: real("nixl", mover), id=f"nixl-{mover}", marks=needs_nixl)
        for mover in ("process", "thread")
    ),
    pytest.param(lambda: real("nixl", "process", "tcp,self"), id="nixl-tcp", marks=needs_nixl),
]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Shared by all tests."""
    with request.param() as (consumer, start):
        yield Pair(consumer, start)


@pytest.fixture
def consumer(pair: Pair) -> Iterator[Side]:
    """Of the pair; afterwards no report is left over: none came twice, none for what nobody posted."""
    yield pair.consumer
    assert pair.consumer.pending() == []


@pytest.fixture
def producer(pair: Pair, consumer: Side) -> Producer:
    """Of the pair; the consumer's blocks are empty."""
    producer = pair.producer()
    consumer.blocks[:] = 0
    return producer


# ----------------------------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("shape", SHAPES)
def test_data_arrive_exactly_and_only_where_asked(consumer: Side, producer: Producer, shape: str) -> None:
    remote, local = SHAPES[shape]
    source = producer.grant(sorted(set(remote)), lease_id=11, slot=5)
    check_whole(consumer, producer, consumer.read(source, remote, local), source, remote, local)


def test_an_empty_read_still_reads_the_slot(consumer: Side, producer: Producer) -> None:
    ended = consumer.read(producer.grant((1,)), (), ())
    assert (ended.slot, ended.moved_bytes, ended.error) == ((producer.identity.nonce, 7), 0, None)
    assert not consumer.blocks.any()


def test_only_what_is_asked_of_a_grant_is_read(consumer: Side, producer: Producer) -> None:
    source = producer.grant((1, 2, 3, 4))
    check_whole(consumer, producer, consumer.read(source, (3, 4), (10, 11)), source, (3, 4), (10, 11))


def test_many_reads_at_once_each_end_once_with_their_own_slot(consumer: Side, producer: Producer) -> None:
    sources = [producer.grant((i, i + 1), lease_id=100 + i, slot=i) for i in range(20)]
    handles = consumer.post(*((source, (i, i + 1), (2 * i, 2 * i + 1)) for i, source in enumerate(sources)))
    ended = {report.handle: report for report in consumer.reports(20) if isinstance(report, ReadEnded)}
    assert sorted(ended) == sorted(handles)
    for i, handle in enumerate(handles):
        assert ended[handle].slot == (producer.identity.nonce, 100 + i)
        assert np.array_equal(consumer.blocks[2 * i : 2 * i + 2], producer.blocks[i : i + 2])


def test_a_big_read_does_not_hold_back_small_ones(consumer: Side, producer: Producer) -> None:
    """They are posted behind it, in one plan: who serves in order ends it first, every time."""
    source = producer.grant(ALL)
    small = range(BLOCKS - 8, BLOCKS)
    firsts = []
    for _ in range(4):
        handles = consumer.post((source, ALL[:-8], ALL[:-8]), *((source, (block,), (block,)) for block in small))
        reports = consumer.reports(len(handles))
        assert sorted(report.handle for report in reports if isinstance(report, ReadEnded)) == list(handles)
        firsts.append(reports[0] is not None and reports[0].handle == handles[0])  # type: ignore[union-attr]
    assert not all(firsts)
    assert np.array_equal(consumer.blocks, producer.blocks)


# -------------------------------------------------------------------------------------------------------- the lease


@pytest.mark.parametrize("words", ["cleared", "another lease"])
def test_a_lease_that_ended_before_the_read_is_seen(consumer: Side, producer: Producer, words: str) -> None:
    source = producer.grant((1, 2), lease_id=55, slot=9)
    now = (0, 0) if words == "cleared" else (producer.identity.nonce, 56)
    producer.slots[9] = now
    ended = consumer.read(source, (1, 2), (4, 5))
    assert (ended.slot, ended.error) == (now, None)


def test_a_lease_that_ends_while_data_still_arrive_is_seen(consumer: Side, producer: Producer) -> None:
    """The slot is read after the data: whatever has not arrived when it is cleared, arrives before it is read."""
    seen = 0
    for _ in range(TRIES):
        source = producer.grant(ALL)
        begin(consumer, source)
        producer.slots[3] = 0
        missing = consumer.arrived() < BLOCKS
        (ended,) = consumer.reports(1)
        assert isinstance(ended, ReadEnded)
        assert ended.error is None
        if missing:
            assert ended.slot == (0, 0)
            seen += 1
        if seen == 2:
            return
    assert seen, "every READ was quicker"


def forge(source: RemoteSource, **changes: object) -> RemoteSource:
    """The grant with other facts under the old proof."""
    return msgspec.structs.replace(source, grant=msgspec.structs.replace(source.grant, **changes))


def test_what_the_producer_has_not_granted_moves_nothing(consumer: Side, producer: Producer) -> None:
    source = producer.grant((1, 2))
    crossed = producer.grant((3, 4), lease_id=8, slot=4)
    for forged in (
        forge(source, block_ids=(1, 3)),
        forge(source, proof=secrets.token_bytes(16)),
        forge(source, proof=b""),
        forge(source, proof=crossed.grant.proof),
        forge(source, slot=4, lease_id=8),
        forge(source, token=crossed.grant.token),
        forge(source, num_tokens=31),
        msgspec.structs.replace(source, prompt_digest=b"another prompt's"),
    ):
        ended = consumer.read(forged, (1, 3), (4, 5))
        assert ended.slot is None
        assert "did not give this grant" in str(ended.error)
    another_life = consumer.read(forge(source, nonce=source.grant.nonce ^ 1), (1,), (4,))
    assert another_life.slot is None
    assert "another life" in str(another_life.error)
    assert not consumer.blocks.any()


def test_a_peer_that_is_not_there_fails_the_read(consumer: Side, producer: Producer) -> None:
    source = producer.grant((1,))
    for peer in (
        Peer("nobody", "127.0.0.1", 1),
        Peer("producer-before", producer.peer.host, producer.peer.port),  # another life answers there
    ):
        ended = consumer.read(msgspec.structs.replace(source, peer=peer), (1,), (4,))
        assert ended.slot is None
        assert ended.error
    assert not consumer.blocks.any()


@pytest.mark.parametrize(
    ("remote", "local"),
    [((BLOCKS,), (1,)), ((-1,), (1,)), ((1,), (BLOCKS,)), ((1,), (-1,)), ((1, 2, BLOCKS), (1, 2, 3))],
)
def test_blocks_outside_either_pool_are_refused(
    consumer: Side, producer: Producer, remote: Sequence[int], local: Sequence[int]
) -> None:
    ended = consumer.read(producer.grant((1,)), remote, local)
    assert ended.slot is None
    assert "outside" in str(ended.error)
    assert not consumer.blocks.any()


# ----------------------------------------------------------------------------------------- cancelling and restarting


def test_a_read_cancelled_at_once_ends_once(consumer: Side, producer: Producer) -> None:
    source = producer.grant(ALL)
    (handle,) = consumer.post((source, ALL, ALL), cancel=True)
    cancel(consumer, handle, handle, 999_999)
    (ended,) = consumer.reports(1)
    assert isinstance(ended, ReadEnded)
    assert ended.handle == handle
    assert ended.error in (None, "cancelled")
    check_ended(consumer, producer, ended, source, ALL, ALL)
    check_untouched(consumer, producer)


def test_a_cancel_in_the_middle_stops_what_is_left(consumer: Side, producer: Producer) -> None:
    source = producer.grant(ALL)
    for _ in range(TRIES):
        handle = begin(consumer, source)
        cancel(consumer, handle)
        (ended,) = consumer.reports(1)
        assert isinstance(ended, ReadEnded)
        assert ended.handle == handle
        check_ended(consumer, producer, ended, source, ALL, ALL[::-1])
        check_untouched(consumer, producer)
        if ended.error is not None:
            assert ended.error == "cancelled"
            assert ended.moved_bytes < BLOCKS * consumer.block_bytes
            return
    raise AssertionError("every READ was quicker")


def cancel(consumer: Side, *handles: int) -> None:
    """In a plan of its own."""
    consumer.say(cancels=handles)


def test_cancels_that_mean_nothing_do_no_harm(consumer: Side, producer: Producer) -> None:
    """Of a handle that nobody posted, and of one that is over."""
    source = producer.grant((1, 2))
    cancel(consumer, 999_999)
    ended = consumer.read(source, (1, 2), (4, 5))
    cancel(consumer, ended.handle, ended.handle)
    check_whole(consumer, producer, ended, source, (1, 2), (4, 5))
    assert consumer.read(source, (1, 2), (4, 5)).error is None


def test_a_restart_fences_what_is_under_way(consumer: Side, producer: Producer) -> None:
    """Each handle is reported or fenced, never both, and nothing of it is written afterwards. What is posted with the
    restart is the new mover's."""
    source = producer.grant(ALL)
    for _ in range(TRIES):
        handle = begin(consumer, source)
        (after,) = consumer.post((source, (), ()), restart=True)
        fenced = consumer.take_restart({handle})
        (ended,) = consumer.reports(1)
        assert isinstance(ended, ReadEnded)
        assert (ended.handle, ended.error) == (after, None)
        check_untouched(consumer, producer)
        if fenced:
            break
    assert fenced, "every READ was quicker"
    check_whole(consumer, producer, consumer.read(source, ALL, ALL), source, ALL, ALL)


def test_a_mover_that_dies_by_itself_is_a_restart(consumer: Side, producer: Producer) -> None:
    if not consumer.has_process:
        pytest.skip("a thread does not die alone")
    source = producer.grant(ALL)
    handle = begin(consumer, source)
    consumer.kill_mover()
    consumer.take_restart({handle})
    check_untouched(consumer, producer)
    check_whole(consumer, producer, consumer.read(source, ALL, ALL), source, ALL, ALL)


def test_every_handle_ends_once_whatever_is_done(consumer: Side, producer: Producer) -> None:
    """Posts, cancels and one restart at random: a report for each handle, or the restart's word that it is fenced."""
    rng = random.Random(3)
    source = producer.grant(ALL)
    handles: list[int] = []
    reports: list[Report] = []
    for step in range(40):
        blocks = rng.sample(ALL, rng.choice((0, 1, 5, 60)))
        handles += consumer.post((source, blocks, blocks), cancel=rng.random() < 0.2, restart=step == 20)
        if rng.random() < 0.3:
            cancel(consumer, rng.choice(handles))
        if rng.random() < 0.3:
            consumer.pause(0)
    while not isinstance(report := consumer.reports(1)[0], MoverRestarted):
        reports.append(report)
    fenced = report.handles
    reports += consumer.reports(len(handles) - len(fenced) - len(reports))
    ended = [report.handle for report in reports if isinstance(report, ReadEnded)]
    assert sorted([*ended, *fenced]) == handles
    for report in reports:
        assert isinstance(report, ReadEnded)
        assert (report.slot is None) == (report.error is not None)
        assert report.error in (None, "cancelled")


# --------------------------------------------------------------------------------------- the producer dies or stops


def test_a_new_mover_of_the_producer_costs_one_read_at_most(consumer: Side, producer: Producer) -> None:
    if not isinstance(producer, ProducerProcess):
        pytest.skip("a simulated producer's mover takes no part in being read")
    source = producer.grant(ALL)
    handle = begin(consumer, source)
    producer.kill_mover()
    (ended,) = consumer.reports(1)
    assert isinstance(ended, ReadEnded)
    assert ended.handle == handle
    check_ended(consumer, producer, ended, source, ALL, ALL[::-1])
    consumer.blocks[:] = 0
    check_whole(consumer, producer, consumer.read(source, ALL, ALL), source, ALL, ALL)


def test_a_stopped_producer_is_not_reported_while_it_may_still_write(consumer: Side, producer: Producer) -> None:
    """Cancelled or not: either the READ needed nothing of the producer, or only the restart ends it for certain."""
    source = producer.grant(ALL)
    producer.stop()
    (handle,) = consumer.post((source, ALL, ALL))
    consumer.pause(0.25)
    cancel(consumer, handle)
    consumer.pause(0.25)
    reported = consumer.pending()
    if reported:
        check_ended(consumer, producer, reported[0], source, ALL, ALL)
    consumer.post(restart=True)
    assert consumer.take_restart({handle} if not reported else set()) == ({handle} if not reported else set())
    consumer.blocks[:] = 0
    producer.resume()
    check_untouched(consumer, producer)
    check_whole(consumer, producer, consumer.read(source, ALL, ALL), source, ALL, ALL)


def test_a_mover_of_ours_that_stands_still_reads_the_lease_of_then(consumer: Side, producer: Producer) -> None:
    """Stopped between the post and the first byte; the lease ends meanwhile, and one READ is cancelled."""
    if not isinstance(consumer, RealSide) or not consumer.has_process:
        pytest.skip("only a process can be stopped by itself")
    source, other = producer.grant(ALL), producer.grant((1,), lease_id=8, slot=4)
    os.kill(consumer.mover_pid, signal.SIGSTOP)
    try:
        (cancelled,) = consumer.post((source, ALL, ALL), cancel=True)
        (read,) = consumer.post((other, (1,), (1,)))
        consumer.pause(0.3)  # all of it has been said to the mover
        assert consumer.pending() == []
        producer.slots[4] = 0
    finally:
        os.kill(consumer.mover_pid, signal.SIGCONT)
    ended = {report.handle: report for report in consumer.reports(2) if isinstance(report, ReadEnded)}
    assert (ended[cancelled].error, ended[cancelled].moved_bytes) == ("cancelled", 0)
    assert (ended[read].slot, ended[read].error) == ((0, 0), None)
    assert not consumer.blocks[np.setdiff1d(np.arange(BLOCKS), [1])].any()


def test_a_producer_killed_during_and_before_a_read(consumer: Side, producer: Producer) -> None:
    """One report. (Through shared memory what it had lives on: that READ may well be whole.)"""
    source = producer.grant(ALL)
    handle = begin(consumer, source)
    producer.kill()
    (ended,) = consumer.reports(1)
    assert isinstance(ended, ReadEnded)
    assert ended.handle == handle
    check_ended(consumer, producer, ended, source, ALL, ALL[::-1])
    check_untouched(consumer, producer)
    again = consumer.read(source, (1,), (1,))  # killed before the READ
    assert again.slot is None
    assert again.error
    assert not consumer.blocks.any()
