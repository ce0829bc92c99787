"""What a mover that writes, and the memory it writes to, promise to the core: simulated, shared memory, NIXL alike.

As in `test_contract`, a WRITE may be quicker than what a test does to it: then both ends are checked, and it is tried
again until the other has been seen.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from tests.nixl_here import needs_nixl
from tests.transfer.pairs import real_pair, simulated_kinds, simulated_pair
from tests.transfer.sides import ALL, BLOCKS, SHAPES, RealSide, Report, Side

from pdkv.core.ports import GrantsFenced, MoverRestarted, PostWrite, ReadEnded, Revoked, WriteEnded
from pdkv.core.transfer.messages import Peer, WriteGrant

TRIES = 20
_grant_ids = itertools.count(1)  # they never recur


@contextmanager
def simulated(seed: int, *, shared_memory: bool, over_tcp: bool = False) -> Iterator[tuple[Side, Side]]:
    yield simulated_pair(seed, shared_memory=shared_memory, over_tcp=over_tcp)


KINDS = [
    *simulated_kinds(simulated),
    *(
        pytest.param(lambda s=seed: simulated(s, shared_memory=False, over_tcp=True), id=f"simulated-tcp-{seed}")
        for seed in range(2)
    ),
    pytest.param(lambda: real_pair("shm", "process"), id="shm"),
    *(
        pytest.param(lambda m=mover: real_pair("nixl", m), id=f"nixl-{mover}", marks=needs_nixl)
        for mover in ("process", "thread")
    ),
    pytest.param(lambda: real_pair("nixl", "process", "tcp,self"), id="nixl-tcp", marks=needs_nixl),
]


@pytest.fixture(scope="module", params=KINDS)
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    """P, its blocks full, and D, shared by all tests."""
    with request.param() as pair:
        pair[0].fill()
        yield pair


@pytest.fixture
def p(sides: tuple[Side, Side]) -> Iterator[Side]:
    """It writes. Afterwards no report is left over."""
    yield sides[0]
    assert sides[0].pending() == []


@pytest.fixture
def d(sides: tuple[Side, Side]) -> Iterator[Side]:
    """It is written to; its blocks are empty. Afterwards no report is left over."""
    sides[1].blocks[:] = 0
    yield sides[1]
    assert sides[1].pending() == []


def grant_of(d: Side, blocks: Sequence[int], *, slot: int = 5) -> WriteGrant:
    """One more."""
    return d.write_grant(blocks, grant_id=next(_grant_ids), slot=slot)


def check_whole(p: Side, d: Side, ended: Report, local: Sequence[int], remote: Sequence[int]) -> None:
    """It ended well: every byte is there, none anywhere else."""
    assert isinstance(ended, WriteEnded)
    assert ended.error is None
    assert ended.moved_bytes == len(remote) * d.block_bytes
    assert ended.seconds > 0
    assert np.array_equal(d.blocks[list(remote)], p.blocks[list(local)])
    assert not d.blocks[np.setdiff1d(np.arange(BLOCKS), list(remote))].any()


def check_untouched(p: Side, d: Side) -> None:
    """No WRITE that is over writes anything any more."""

    def write() -> Sequence[int]:
        for _ in range(2):
            assert p.write(d, grant_of(d, (0,), slot=63), (0,)).error is None
        return (0,)

    d.check_untouched(write)


def begin(p: Side, d: Side, grant: WriteGrant) -> int:
    """A WRITE of everything, backwards, of which the first blocks have arrived."""
    d.blocks[:] = 0
    handle = p.post_write(d, grant, ALL[::-1])
    d.await_first()
    return handle


def take_back(d: Side, *grants: WriteGrant) -> None:
    """What the engine does when it gives grants up: their words first; where locks do not tell, a new mover at last."""
    for grant in grants:
        d.slots[grant.slot, 1] = 0
    revoked = tuple(Revoked(grant.grant_id, grant.slot) for grant in grants)
    d.say(revoked=revoked, evict=tuple(grant.grant_id for grant in grants) if d.fenced_by_restart else ())


def take_fence(d: Side, *grants: WriteGrant) -> None:
    """All of ``grants``, given up in one plan, are fenced, each once; D's mover, if that was the fence, is another."""
    missing = sorted(grant.grant_id for grant in grants)
    restarts = 1 if d.fenced_by_restart else 0
    while missing or restarts:
        (report,) = d.reports(1)
        if isinstance(report, MoverRestarted):
            restarts -= 1
            continue
        assert isinstance(report, GrantsFenced)
        for grant_id in report.grant_ids:
            missing.remove(grant_id)


def ready_again(p: Side, d: Side, epoch: int) -> None:
    """D's mover is another, and may be written to."""
    until = time.monotonic() + 30
    while d.fenced_by_restart and d.epoch == epoch:
        assert time.monotonic() < until, "D's mover does not come back"
        d.pause(0.01)
    while p.write(d, grant_of(d, (0,), slot=63), (0,)).error is not None:
        assert time.monotonic() < until, "D cannot be written to any more"
        d.pause(0.01)
    d.blocks[:] = 0


def fence_sockets(p: Side, d: Side, grant: WriteGrant) -> None:
    """P's mover, which is no more, may have left something behind in sockets of D's mover: that ends with it."""
    if d.by_sockets:
        epoch = d.epoch
        take_back(d, grant)
        take_fence(d, grant)
        reused = d.blocks.copy()
        d.pause(0.02)
        assert np.array_equal(d.blocks, reused), "a byte after the fence"
        ready_again(p, d, epoch)


# ----------------------------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("shape", SHAPES)
def test_data_arrive_exactly_and_only_where_granted(p: Side, d: Side, shape: str) -> None:
    local, remote = SHAPES[shape]
    before = p.blocks.copy()
    check_whole(p, d, p.write(d, grant_of(d, remote), local), local, remote)
    assert np.array_equal(p.blocks, before)


def test_many_writes_at_once_each_end_once(p: Side, d: Side) -> None:
    handles = {}
    for i in range(20):
        handles[p.post_write(d, grant_of(d, (2 * i, 2 * i + 1), slot=i), (i, i + 1))] = i
    for ended in p.reports(20):
        assert isinstance(ended, WriteEnded)
        assert ended.error is None
        i = handles.pop(ended.handle)
        assert np.array_equal(d.blocks[2 * i : 2 * i + 2], p.blocks[i : i + 2])


def test_reads_and_writes_share_a_mover(p: Side, d: Side) -> None:
    write = p.post_write(d, grant_of(d, (1, 2, 3)), (11, 12, 13))
    read = d.read(p.grant((21, 22)), (21, 22), (4, 5))
    assert read.error is None
    (ended,) = p.reports(1)
    assert isinstance(ended, WriteEnded)
    assert (ended.handle, ended.error) == (write, None)
    assert np.array_equal(d.blocks[1:6], p.blocks[[11, 12, 13, 21, 22]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda grant: {"nonce": grant.nonce ^ 1}, "another life"),
        (lambda _: {"block_ids": (1, BLOCKS)}, f"outside the peer's {BLOCKS} blocks"),
        (lambda _: {"slot": 64}, "slot 64"),
        (lambda grant: {"block_size": 3 * grant.block_size}, "blocks of"),
    ],
    ids=["another life", "blocks beyond the pool", "a slot that is not there", "blocks of another size"],
)
def test_what_cannot_be_written_moves_nothing(
    p: Side, d: Side, change: Callable[[WriteGrant], dict[str, object]], words: str
) -> None:
    grant = grant_of(d, (1, 2))
    ended = p.write(d, msgspec.structs.replace(grant, **change(grant)), (3, 4))
    assert words in str(ended.error)
    assert ended.moved_bytes == 0
    assert not d.blocks.any()
    check_whole(p, d, p.write(d, grant, (3, 4)), (3, 4), (1, 2))


def test_a_consumer_that_is_not_there_fails_the_write(p: Side, d: Side) -> None:
    grant, blocks = grant_of(d, (1,)), np.array([1], np.int32)
    peers = (Peer("nobody", "127.0.0.1", 1), Peer("D-before", d.peer.host, d.peer.port))
    p.say(writes=tuple(PostWrite(-1 - i, peer, grant, blocks, blocks, d.epoch) for i, peer in enumerate(peers)))
    for ended in p.reports(2):
        assert isinstance(ended, WriteEnded)
        assert ended.error
    assert not d.blocks.any()


def test_under_words_of_another_grant_nothing_is_written(p: Side, d: Side) -> None:
    if d.fenced_by_restart:
        pytest.skip("NIXL looks at no slot: its fences are P's word and the epoch")
    grant = grant_of(d, (1, 2))
    grant_of(d, (3, 4), slot=grant.slot)
    ended = p.write(d, grant, (3, 4))
    assert "the grant is over" in str(ended.error)
    assert not d.blocks.any()


# ----------------------------------------------------------------------------------------- cancelling and restarting


def test_a_write_cancelled_at_once_ends_once(p: Side, d: Side) -> None:
    handle = p.post_write(d, grant_of(d, ALL), ALL, cancel=True)
    p.say(cancels=(handle, handle, 999_999))
    (ended,) = p.reports(1)
    assert isinstance(ended, WriteEnded)
    assert ended.handle == handle
    if ended.error is None:
        check_whole(p, d, ended, ALL, ALL)
    else:
        assert ended.error == "cancelled"
    p.say(cancels=(handle,))  # it is over
    check_untouched(p, d)


def test_a_cancel_in_the_middle_stops_what_is_left(p: Side, d: Side) -> None:
    for _ in range(TRIES):
        handle = begin(p, d, grant_of(d, ALL))
        p.say(cancels=(handle,))
        (ended,) = p.reports(1)
        assert isinstance(ended, WriteEnded)
        assert ended.handle == handle
        arrived = d.arrived()
        check_untouched(p, d)
        if ended.error is not None:
            assert ended.error == "cancelled"
            assert ended.moved_bytes < BLOCKS * d.block_bytes
            assert arrived < BLOCKS
            return
    raise AssertionError("every WRITE was quicker")


def test_a_restart_of_p_fences_what_it_writes(p: Side, d: Side) -> None:
    """What is posted with the restart is the new mover's."""
    for _ in range(TRIES):
        grant = grant_of(d, ALL)
        handle = begin(p, d, grant)
        after = p.post_write(d, grant_of(d, (), slot=6), (), restart=True)
        fenced = p.take_restart({handle})
        (ended,) = p.reports(1)
        assert isinstance(ended, WriteEnded)
        assert (ended.handle, ended.error) == (after, None)
        fence_sockets(p, d, grant)
        check_untouched(p, d)
        if fenced:
            break
    assert fenced, "every WRITE was quicker"
    check_whole(p, d, p.write(d, grant_of(d, ALL), ALL), ALL, ALL)


def test_a_mover_of_p_that_dies_by_itself_is_a_restart(p: Side, d: Side) -> None:
    if not p.has_process:
        pytest.skip("a thread does not die alone")
    grant = grant_of(d, ALL)
    handle = begin(p, d, grant)
    p.kill_mover()
    p.take_restart({handle})
    fence_sockets(p, d, grant)
    check_untouched(p, d)
    check_whole(p, d, p.write(d, grant_of(d, ALL), ALL), ALL, ALL)


def test_every_handle_ends_once_whatever_is_done(p: Side, d: Side) -> None:
    """Posts, cancels and one restart at random: a report for each handle, or the restart's word that it is fenced."""
    rng = random.Random(3)
    handles: list[int] = []
    for step in range(40):
        blocks = rng.sample(ALL, rng.choice((0, 1, 5, 60)))
        grant = grant_of(d, blocks, slot=step)
        handles.append(p.post_write(d, grant, blocks, cancel=rng.random() < 0.2, restart=step == 20))
        if rng.random() < 0.3:
            p.say(cancels=(rng.choice(handles),))
        if rng.random() < 0.3:
            p.pause(0)
    ended: list[int] = []
    fenced: tuple[int, ...] | None = None
    while fenced is None or len(ended) + len(fenced) < len(handles):
        (report,) = p.reports(1)
        if isinstance(report, MoverRestarted):
            assert fenced is None
            fenced = report.handles
            continue
        assert isinstance(report, WriteEnded)
        assert report.error in (None, "cancelled")
        ended.append(report.handle)
    assert sorted([*ended, *fenced]) == handles
    fence_sockets(p, d, grant)


def test_what_a_dead_mover_of_p_has_left_in_sockets_ends_with_d_s_mover(p: Side, d: Side) -> None:
    """D's stands still while P's dies, so it has not read all of it yet. (Without the fence it would, now.)"""
    if not (d.by_sockets and isinstance(d, RealSide)):
        pytest.skip("no kernel that goes on sending")
    grant, epoch = grant_of(d, ALL), d.epoch
    handle = begin(p, d, grant)
    os.kill(d.mover_pid, signal.SIGSTOP)
    p.kill_mover()
    assert p.take_restart({handle}), "every WRITE was quicker"
    take_back(d, grant)
    take_fence(d, grant)
    reused = d.blocks.copy()
    ready_again(p, d, epoch)
    assert 0 < np.count_nonzero(reused[:, 0]) < BLOCKS
    check_untouched(p, d)


# ----------------------------------------------------------------------------------------------- grants taken back


def test_nothing_is_written_under_a_grant_that_was_taken_back(p: Side, d: Side) -> None:
    """Also where its cancellation got lost on its way, and only then P begins."""
    grant, epoch = grant_of(d, (1, 2)), d.epoch
    take_back(d, grant)
    take_fence(d, grant)
    ready_again(p, d, epoch)
    ended = p.write(d, grant, (3, 4), epoch=epoch)
    assert ("a mover that is no more" if d.fenced_by_restart else "the grant is over") in str(ended.error)
    assert not d.blocks.any()
    check_whole(p, d, p.write(d, grant_of(d, (1, 2)), (3, 4)), (3, 4), (1, 2))


def check_fenced(p: Side, d: Side, grant: WriteGrant, handle: int, epoch: int) -> WriteEnded:
    """D's fence comes, and no byte of the WRITE after it; how that ended for P."""
    take_fence(d, grant)
    reused = d.blocks.copy()
    (ended,) = p.reports(1)
    assert np.array_equal(d.blocks, reused), "a byte after the fence"
    assert isinstance(ended, WriteEnded)
    assert ended.handle == handle
    ready_again(p, d, epoch)
    check_untouched(p, d)
    return ended


def test_not_a_byte_comes_after_the_fence_of_what_is_being_written(p: Side, d: Side) -> None:
    seen, wanted = 0, 1 if isinstance(d, RealSide) else 12  # virtual time is cheap: also in the middle of a slice
    for _ in range(wanted * TRIES):
        grant, epoch = grant_of(d, ALL), d.epoch
        handle = begin(p, d, grant)
        take_back(d, grant)
        report = check_fenced(p, d, grant, handle, epoch)
        if report.error is not None:
            assert report.moved_bytes < BLOCKS * d.block_bytes
            seen += 1
        if seen == wanted:
            return
    raise AssertionError("every WRITE was quicker")


def test_a_fence_is_reported_once_though_the_engine_still_names_it(p: Side, d: Side) -> None:
    """Several are given up at once: NIXL's are fenced by one new mover."""
    grants, epoch = [grant_of(d, (block,), slot=block) for block in (1, 2)], d.epoch
    take_back(d, *grants)
    take_fence(d, *grants)
    d.say(revoked=tuple(Revoked(grant.grant_id, grant.slot) for grant in grants), cancels=(999_999,))
    assert d.pending() == []
    ready_again(p, d, epoch)


def test_a_mover_of_d_that_dies_by_itself_ends_what_is_written_to_it(p: Side, d: Side) -> None:
    """With NIXL; through shared memory it takes no part, and the WRITE is whole."""
    if not d.has_process:
        pytest.skip("a thread does not die alone")
    grant, epoch = grant_of(d, ALL), d.epoch
    handle = begin(p, d, grant)
    d.kill_mover()
    (restarted,) = d.reports(1)
    assert restarted == MoverRestarted((), cut_off=d.fenced_by_restart)
    (ended,) = p.reports(1)
    assert isinstance(ended, WriteEnded)
    assert ended.handle == handle
    assert ended.error is None or d.fenced_by_restart
    ready_again(p, d, epoch)
    check_untouched(p, d)


def test_a_mover_of_d_that_dies_by_itself_fences_what_was_given_up(p: Side, d: Side) -> None:
    """Nobody asked for a new one, P has not answered: the end of the old one is the fence."""
    if not d.fenced_by_restart:
        pytest.skip("through shared memory locks are the fence, whatever D's mover does")
    grant, epoch = grant_of(d, ALL), d.epoch
    handle = begin(p, d, grant)
    d.slots[grant.slot, 1] = 0
    nobody = msgspec.structs.replace(p.grant((0,)), peer=Peer("nobody", "127.0.0.1", 1))
    d.post((nobody, (0,), (0,)), revoked=(Revoked(grant.grant_id, grant.slot),))
    (read,) = d.reports(1)
    assert isinstance(read, ReadEnded)  # its plan has been carried out, and nothing is fenced yet
    d.kill_mover()
    check_fenced(p, d, grant, handle, epoch)
    assert d.pending() == []
