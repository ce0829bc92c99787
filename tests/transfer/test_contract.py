"""What a mover promises to the core, the same tests for all of them: simulated, shared memory, NIXL.

Where a fault meets a READ at an unknown moment the READ may have been quicker: the tests then check what must hold in
either case, and try again until they have seen the fault win.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest
from benchmarks.transfer_half import empty_plan
from tests.nixl_here import needs_nixl
from tests.transfer.duo import BLOCKS, TAIL_BLOCKS, Duo, Producer, ProducerProcess, RealDuo, Report, SimulatedDuo

from pdkv.core.ports import MoverRestarted, ReadEnded
from pdkv.core.transfer.messages import Peer, RemoteSource

ALL = tuple(range(BLOCKS))
RNG = np.random.default_rng(0)
SHAPES: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "one": ((5,), (9,)),
    "contiguous": (range(10, 60), range(100, 150)),
    "contiguous on one side": (range(10, 20), (3, 1, 4, 15, 9, 2, 6, 5, 35, 8)),
    "a few anywhere": ((5, 6, 7, 20, 0), (1, 2, 3, 9, BLOCKS - 1)),
    "one byte more than a slice": (range(TAIL_BLOCKS), range(TAIL_BLOCKS)),
    "all, scattered": (RNG.permutation(BLOCKS).tolist(), RNG.permutation(BLOCKS).tolist()),
    "one block twice": ((7, 7), (8, 9)),
}
TRIES = 8


def _nixl(mover: str, tls: str | None = None) -> Callable[[], Iterator[Duo]]:
    def opened() -> Iterator[Duo]:
        with pytest.MonkeyPatch.context() as patch:
            if tls is not None:
                patch.setenv("UCX_TLS", tls)
            yield from _real("nixl", mover)

    return opened


def _real(transport: str, mover: str) -> Iterator[Duo]:
    duo = RealDuo(transport, mover)
    try:
        yield duo
    finally:
        duo.close()


def _simulated(seed: int) -> Iterator[Duo]:
    yield SimulatedDuo(seed)


#: Over TCP a READ needs the producer's mover, as it does between hosts; on one host the kernel copies without it.
KINDS = [
    *(pytest.param(lambda seed=seed: _simulated(seed), id=f"simulated-{seed}") for seed in range(3)),
    *(pytest.param(lambda mover=mover: _real("shm", mover), id=f"shm-{mover}") for mover in ("process", "thread")),
    *(pytest.param(_nixl(mover), id=f"nixl-{mover}", marks=needs_nixl) for mover in ("process", "thread")),
    pytest.param(_nixl("process", "tcp,self"), id="nixl-tcp", marks=needs_nixl),
]


class Pair:
    """A consumer and a producer, put in its place when a test has killed it."""

    def __init__(self, duo: Duo) -> None:
        self.duo = duo
        self._producer: Producer | None = None

    def producer(self) -> Producer:
        """One that lives, its blocks full, and a READ from it has been made."""
        if self._producer is None or self._producer.killed:
            self._producer = self.duo.start_producer()
            self.duo.fill(self._producer)
            assert self.duo.read(self._producer.grant((0,)), (0,), (0,)).error is None
        return self._producer


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Shared by all tests."""
    for duo in request.param():
        yield Pair(duo)


@pytest.fixture
def duo(pair: Pair) -> Iterator[Duo]:
    """Of the pair; afterwards no report is left over: none came twice, none for what nobody posted."""
    yield pair.duo
    assert pair.duo.pending() == []


@pytest.fixture
def producer(pair: Pair, duo: Duo) -> Producer:
    """Of the pair; the consumer's blocks are empty."""
    producer = pair.producer()
    duo.blocks[:] = 0
    return producer


def check_whole(duo: Duo, producer: Producer, ended: Report, source: RemoteSource, *pairs: Sequence[int]) -> None:
    """It ended well: the slot names the lease, every byte is there, none anywhere else. ``pairs``: remote, local."""
    remote, local = (list(side) for side in pairs)
    assert isinstance(ended, ReadEnded)
    assert (ended.error, ended.slot) == (None, (source.grant.nonce, source.grant.lease_id))
    assert ended.moved_bytes == len(remote) * duo.block_bytes
    assert ended.seconds > 0
    assert np.array_equal(duo.blocks[local], producer.blocks[remote])
    others = np.setdiff1d(np.arange(BLOCKS), local)
    assert not duo.blocks[others].any()


def check_ended(duo: Duo, producer: Producer, ended: Report, source: RemoteSource, *pairs: Sequence[int]) -> None:
    """Well, or with a reason and without a slot."""
    assert isinstance(ended, ReadEnded)
    if ended.error is None:
        check_whole(duo, producer, ended, source, *pairs)
    else:
        assert ended.slot is None
        assert ended.moved_bytes <= len(pairs[0]) * duo.block_bytes


def check_untouched(duo: Duo, seconds: float = 0.1) -> None:
    """What is over writes nothing any more."""
    duo.blocks[:] = 0
    duo.pause(seconds)
    assert not duo.blocks.any()


def begin(duo: Duo, source: RemoteSource) -> int:
    """A READ of everything, backwards, of which the first blocks have arrived."""
    duo.blocks[:] = 0
    (handle,) = duo.post((source, ALL, ALL[::-1]))
    for _ in range(100_000):
        if duo.arrived():
            return handle
        duo.pause(0)
    raise AssertionError("nothing arrives")


# ----------------------------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("shape", SHAPES)
def test_data_arrive_exactly_and_only_where_asked(duo: Duo, producer: Producer, shape: str) -> None:
    remote, local = SHAPES[shape]
    source = producer.grant(sorted(set(remote)), lease_id=11, slot=5)
    check_whole(duo, producer, duo.read(source, remote, local), source, remote, local)


def test_an_empty_read_still_reads_the_slot(duo: Duo, producer: Producer) -> None:
    ended = duo.read(producer.grant((1,)), (), ())
    assert (ended.slot, ended.moved_bytes, ended.error) == ((producer.identity.nonce, 7), 0, None)
    assert not duo.blocks.any()


def test_only_what_is_asked_of_a_grant_is_read(duo: Duo, producer: Producer) -> None:
    source = producer.grant((1, 2, 3, 4))
    check_whole(duo, producer, duo.read(source, (3, 4), (10, 11)), source, (3, 4), (10, 11))


def test_many_reads_at_once_each_end_once_with_their_own_slot(duo: Duo, producer: Producer) -> None:
    sources = [producer.grant((i, i + 1), lease_id=100 + i, slot=i) for i in range(20)]
    handles = duo.post(*((source, (i, i + 1), (2 * i, 2 * i + 1)) for i, source in enumerate(sources)))
    ended = {report.handle: report for report in duo.reports(20) if isinstance(report, ReadEnded)}
    assert sorted(ended) == sorted(handles)
    for i, handle in enumerate(handles):
        assert ended[handle].slot == (producer.identity.nonce, 100 + i)
        assert np.array_equal(duo.blocks[2 * i : 2 * i + 2], producer.blocks[i : i + 2])


def test_a_big_read_does_not_hold_back_small_ones(duo: Duo, producer: Producer) -> None:
    """They are posted behind it, in one plan: who serves in order ends it first, every time."""
    source = producer.grant(ALL)
    small = range(BLOCKS - 8, BLOCKS)
    firsts = []
    for _ in range(4):
        handles = duo.post((source, ALL[:-8], ALL[:-8]), *((source, (block,), (block,)) for block in small))
        reports = duo.reports(len(handles))
        assert sorted(report.handle for report in reports if isinstance(report, ReadEnded)) == list(handles)
        firsts.append(reports[0] is not None and reports[0].handle == handles[0])  # type: ignore[union-attr]
    assert not all(firsts)
    assert np.array_equal(duo.blocks, producer.blocks)


# -------------------------------------------------------------------------------------------------------- the lease


@pytest.mark.parametrize("words", ["cleared", "another lease"])
def test_a_lease_that_ended_before_the_read_is_seen(duo: Duo, producer: Producer, words: str) -> None:
    source = producer.grant((1, 2), lease_id=55, slot=9)
    now = (0, 0) if words == "cleared" else (producer.identity.nonce, 56)
    producer.slots[9] = now
    ended = duo.read(source, (1, 2), (4, 5))
    assert (ended.slot, ended.error) == (now, None)


def test_a_lease_that_ends_while_data_still_arrive_is_seen(duo: Duo, producer: Producer) -> None:
    """The slot is read after the data: whatever has not arrived when it is cleared, arrives before it is read."""
    seen = 0
    for _ in range(TRIES):
        source = producer.grant(ALL)
        begin(duo, source)
        producer.slots[3] = 0
        missing = duo.arrived() < BLOCKS
        (ended,) = duo.reports(1)
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


def test_what_the_producer_has_not_granted_moves_nothing(duo: Duo, producer: Producer) -> None:
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
        ended = duo.read(forged, (1, 3), (4, 5))
        assert ended.slot is None
        assert "did not give this grant" in str(ended.error)
    another_life = duo.read(forge(source, nonce=source.grant.nonce ^ 1), (1,), (4,))
    assert another_life.slot is None
    assert "another life" in str(another_life.error)
    assert not duo.blocks.any()


def test_a_peer_that_is_not_there_fails_the_read(duo: Duo, producer: Producer) -> None:
    source = producer.grant((1,))
    for peer in (
        Peer("nobody", "127.0.0.1", 1),
        Peer("producer-before", producer.peer.host, producer.peer.port),  # another life answers there
    ):
        ended = duo.read(msgspec.structs.replace(source, peer=peer), (1,), (4,))
        assert ended.slot is None
        assert ended.error
    assert not duo.blocks.any()


@pytest.mark.parametrize(
    ("remote", "local"),
    [((BLOCKS,), (1,)), ((-1,), (1,)), ((1,), (BLOCKS,)), ((1,), (-1,)), ((1, 2, BLOCKS), (1, 2, 3))],
)
def test_blocks_outside_either_pool_are_refused(
    duo: Duo, producer: Producer, remote: Sequence[int], local: Sequence[int]
) -> None:
    ended = duo.read(producer.grant((1,)), remote, local)
    assert ended.slot is None
    assert "outside" in str(ended.error)
    assert not duo.blocks.any()


# ----------------------------------------------------------------------------------------- cancelling and restarting


def test_a_read_cancelled_at_once_ends_once(duo: Duo, producer: Producer) -> None:
    source = producer.grant(ALL)
    (handle,) = duo.post((source, ALL, ALL), cancel=True)
    cancel(duo, handle, handle, 999_999)
    (ended,) = duo.reports(1)
    assert isinstance(ended, ReadEnded)
    assert ended.handle == handle
    assert ended.error in (None, "cancelled")
    check_ended(duo, producer, ended, source, ALL, ALL)
    check_untouched(duo)


def test_a_cancel_in_the_middle_stops_what_is_left(duo: Duo, producer: Producer) -> None:
    source = producer.grant(ALL)
    for _ in range(TRIES):
        handle = begin(duo, source)
        cancel(duo, handle)
        (ended,) = duo.reports(1)
        assert isinstance(ended, ReadEnded)
        assert ended.handle == handle
        check_ended(duo, producer, ended, source, ALL, ALL[::-1])
        check_untouched(duo)
        if ended.error is not None:
            assert ended.error == "cancelled"
            assert ended.moved_bytes < BLOCKS * duo.block_bytes
            return
    raise AssertionError("every READ was quicker")


def cancel(duo: Duo, *handles: int) -> None:
    """In a plan of its own."""
    duo.submit(empty_plan(cancels=handles))


def test_cancels_that_mean_nothing_do_no_harm(duo: Duo, producer: Producer) -> None:
    """Of a handle that nobody posted, and of one that is over."""
    source = producer.grant((1, 2))
    cancel(duo, 999_999)
    ended = duo.read(source, (1, 2), (4, 5))
    cancel(duo, ended.handle, ended.handle)
    check_whole(duo, producer, ended, source, (1, 2), (4, 5))
    assert duo.read(source, (1, 2), (4, 5)).error is None


def test_a_restart_fences_what_is_under_way(duo: Duo, producer: Producer) -> None:
    """Each handle is reported or fenced, never both, and nothing of it is written afterwards. What is posted with the
    restart is the new mover's."""
    source = producer.grant(ALL)
    for _ in range(TRIES):
        handle = begin(duo, source)
        (after,) = duo.post((source, (), ()), restart=True)
        fenced = take_restart(duo, {handle})
        check_untouched(duo)
        (ended,) = duo.reports(1)
        assert isinstance(ended, ReadEnded)
        assert (ended.handle, ended.error) == (after, None)
        if fenced:
            break
    assert fenced, "every READ was quicker"
    check_whole(duo, producer, duo.read(source, ALL, ALL), source, ALL, ALL)


def take_restart(duo: Duo, handles: set[int]) -> set[int]:
    """All reports about ``handles`` up to the restart, and those that follow; which of them it has fenced."""
    ended: set[int] = set()
    while True:
        (report,) = duo.reports(1)
        if isinstance(report, MoverRestarted):
            break
        assert report.handle in handles - ended
        ended.add(report.handle)
    fenced = set(report.handles)
    assert len(fenced) == len(report.handles)
    assert fenced <= handles
    assert not fenced & ended
    return fenced


def test_a_mover_that_dies_by_itself_is_a_restart(duo: Duo, producer: Producer) -> None:
    if not duo.has_process:
        pytest.skip("a thread does not die alone")
    source = producer.grant(ALL)
    handle = begin(duo, source)
    duo.kill_mover()
    take_restart(duo, {handle})
    check_untouched(duo)
    check_whole(duo, producer, duo.read(source, ALL, ALL), source, ALL, ALL)


def test_every_handle_ends_once_whatever_is_done(duo: Duo, producer: Producer) -> None:
    """Posts, cancels and one restart at random: a report for each handle, or the restart's word that it is fenced."""
    rng = random.Random(3)
    source = producer.grant(ALL)
    handles: list[int] = []
    reports: list[Report] = []
    for step in range(40):
        blocks = rng.sample(ALL, rng.choice((0, 1, 5, 60)))
        handles += duo.post((source, blocks, blocks), cancel=rng.random() < 0.2, restart=step == 20)
        if rng.random() < 0.3:
            cancel(duo, rng.choice(handles))
        if rng.random() < 0.3:
            duo.pause(0)
    while not isinstance(report := duo.reports(1)[0], MoverRestarted):
        reports.append(report)
    fenced = report.handles
    reports += duo.reports(len(handles) - len(fenced) - len(reports))
    ended = [report.handle for report in reports if isinstance(report, ReadEnded)]
    assert sorted([*ended, *fenced]) == handles
    for report in reports:
        assert isinstance(report, ReadEnded)
        assert (report.slot is None) == (report.error is not None)
        assert report.error in (None, "cancelled")


# --------------------------------------------------------------------------------------- the producer dies or stops


def test_a_new_mover_of_the_producer_costs_one_read_at_most(duo: Duo, producer: Producer) -> None:
    if not isinstance(producer, ProducerProcess):
        pytest.skip("a simulated producer's mover takes no part in being read")
    source = producer.grant(ALL)
    handle = begin(duo, source)
    producer.kill_mover()
    (ended,) = duo.reports(1)
    assert isinstance(ended, ReadEnded)
    assert ended.handle == handle
    check_ended(duo, producer, ended, source, ALL, ALL[::-1])
    duo.blocks[:] = 0
    check_whole(duo, producer, duo.read(source, ALL, ALL), source, ALL, ALL)


def test_a_stopped_producer_is_not_reported_while_it_may_still_write(duo: Duo, producer: Producer) -> None:
    """Cancelled or not: either the READ needed nothing of the producer, or only the restart ends it for certain."""
    source = producer.grant(ALL)
    producer.stop()
    (handle,) = duo.post((source, ALL, ALL))
    duo.pause(0.5)
    cancel(duo, handle)
    duo.pause(0.5)
    reported = duo.pending()
    if reported:
        check_ended(duo, producer, reported[0], source, ALL, ALL)
    duo.post(restart=True)
    assert take_restart(duo, {handle} if not reported else set()) == ({handle} if not reported else set())
    duo.blocks[:] = 0
    producer.resume()
    check_untouched(duo, 0.3)
    check_whole(duo, producer, duo.read(source, ALL, ALL), source, ALL, ALL)


def test_a_mover_of_ours_that_stands_still_reads_the_lease_of_then(duo: Duo, producer: Producer) -> None:
    """Stopped between the post and the first byte; the lease ends meanwhile, and one READ is cancelled."""
    if not isinstance(duo, RealDuo) or not duo.has_process:
        pytest.skip("only a process can be stopped by itself")
    source, other = producer.grant(ALL), producer.grant((1,), lease_id=8, slot=4)
    os.kill(duo.mover_pid, signal.SIGSTOP)
    try:
        (cancelled,) = duo.post((source, ALL, ALL), cancel=True)
        (read,) = duo.post((other, (1,), (1,)))
        duo.pause(0.3)  # all of it has been said to the mover
        assert duo.pending() == []
        producer.slots[4] = 0
    finally:
        os.kill(duo.mover_pid, signal.SIGCONT)
    ended = {report.handle: report for report in duo.reports(2) if isinstance(report, ReadEnded)}
    assert (ended[cancelled].error, ended[cancelled].moved_bytes) == ("cancelled", 0)
    assert (ended[read].slot, ended[read].error) == ((0, 0), None)
    assert not duo.blocks[np.setdiff1d(np.arange(BLOCKS), [1])].any()


def test_a_producer_killed_during_and_before_a_read(duo: Duo, producer: Producer) -> None:
    """One report. (Through shared memory what it had lives on: that READ may well be whole.)"""
    source = producer.grant(ALL)
    handle = begin(duo, source)
    producer.kill()
    (ended,) = duo.reports(1)
    assert isinstance(ended, ReadEnded)
    assert ended.handle == handle
    check_ended(duo, producer, ended, source, ALL, ALL[::-1])
    check_untouched(duo)
    again = duo.read(source, (1,), (1,))  # killed before the READ
    assert again.slot is None
    assert again.error
    assert not duo.blocks.any()
