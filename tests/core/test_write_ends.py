"""WRITE push: what becomes of a grant that is taken back, and of what P has of a write that does not end."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.core.helpers import NS, assert_all_free, finished_of, make_engine, step
from tests.core.write_pair import ID, LEASE_NS, Pair, accounts, decode, prefill, registrations

from pdkv.core.ports import Abort, FromConsumer, GrantsFenced, MoverRestarted
from pdkv.core.transfer.messages import (
    CancelGrant,
    Fenced,
    NotWritten,
    Withdraw,
    Written,
)

# --------------------------------------------------------------------------------------------------- taken back


@pytest.mark.parametrize("state", ["registered", "known", "writing", "written unheard"])
def test_an_abort_frees_nothing_before_p_has_stopped(state: str) -> None:
    pair = Pair()
    if state in ("registered", "known"):
        pair.step_d(decode())
        if state == "known":
            pair.step_p()
            pair.step_d()
    else:
        pair.writing()
        if state == "written unheard":
            pair.step_p(pair.written())
            pair.to_d.clear()
    slot = pair.d.consumer.grants._promises[1].grant.slot
    plan = pair.step_d(Abort("d"))
    assert accounts(pair.d) == {"quarantine": 3}
    assert [revoked.grant_id for revoked in plan.revoked] == [1]
    assert pair.d.producer._slots._slots[slot, 1] == 0, "the word goes before anything else"
    assert pair.to_p[-1] == CancelGrant(ID, "P", 8, 1)
    plan = pair.step_p()
    if state == "writing":
        assert plan.cancels == (pair.posts[0].handle,)
        pair.step_d()
        assert accounts(pair.d) == {"quarantine": 3}, "its handle has not ended"
        assert accounts(pair.p) == {"deferred": 3}, "nor may the sources go"
        pair.step_p(pair.written("cancelled"))
    pair.step_d()
    assert_all_free(pair.d)
    assert_all_free(pair.p)
    assert len(pair.named("Fenced")) == 1


def test_a_cancel_is_repeated_until_it_is_answered() -> None:
    pair = Pair()
    pair.step_d(decode())
    pair.to_p.clear()
    pair.step_d(Abort("d"))
    pair.to_p.clear()
    pair.now = 3 * NS
    pair.step_d()
    assert pair.to_p == [CancelGrant(ID, "P", 8, 1)]
    pair.settle(2)
    assert_all_free(pair.d)


def test_nothing_is_written_under_a_grant_that_was_cancelled() -> None:
    """The registration is overtaken by its cancellation, or comes once more after it."""
    pair = Pair()
    pair.step_d(decode())
    late = registrations(pair.to_p)
    pair.to_p.clear()
    pair.step_d(Abort("d"))
    pair.to_p = [message for message in pair.to_p if isinstance(message, CancelGrant)]
    pair.step_p(prefill())
    pair.step_d()
    assert_all_free(pair.d)
    pair.to_p += late
    pair.step_p()
    assert pair.posts == []


@pytest.mark.parametrize("left", [False, True])
def test_a_new_d_is_served_under_the_same_id(left: bool) -> None:
    """The router gave the first one up; its late cancellation concerns its own grant only."""
    pair = Pair()
    pair.step_d(decode())
    first = registrations(pair.to_p)[-1]
    pair.step_p()
    assert first.grant is not None
    second = msgspec.structs.replace(first, grant=msgspec.structs.replace(first.grant, nonce=99, grant_id=5))
    pair.to_p = [second, *([CancelGrant(ID, "P", 8, 1)] if left else [])]
    pair.step_p(prefill())
    pair.step_p()
    assert [(post.grant.nonce, post.grant.grant_id) for post in pair.posts] == [(99, 5)]


def test_both_of_two_that_wait_for_one_lease_are_written() -> None:
    pair = Pair()
    pair.step_p(prefill())
    pair.step_d(decode())
    first = registrations(pair.to_p)[-1]
    assert first.grant is not None
    pair.to_p.append(msgspec.structs.replace(first, grant=msgspec.structs.replace(first.grant, nonce=99)))
    pair.step_p()
    assert len(pair.posts) == 2
    pair.step_p(pair.written())
    assert accounts(pair.p) == {"deferred": 3}
    pair.posts.pop()
    pair.step_p(pair.written())
    assert_all_free(pair.p)


def test_an_overdue_fence_ends_whoever_may_still_write() -> None:
    pair = Pair(fence_timeout_ns=10 * NS)
    pair.writing()
    pair.step_d(Abort("d"))
    evicted = []
    for pair.now in range(NS, 25 * NS, NS):
        evicted += pair.step_d().evict
    assert evicted == [1, 1], "once in ten seconds"
    assert accounts(pair.d) == {"quarantine": 3}, "never on a timer alone"
    pair.step_d(GrantsFenced((1, 77)))
    assert_all_free(pair.d)


@pytest.mark.parametrize("aborted", [False, True])
def test_what_p_has_cut_off_is_fenced_by_d(aborted: bool) -> None:
    """Nothing more leaves P, but bytes may still lie in a socket, to be written by D's own mover."""
    pair = Pair()
    pair.writing()
    if aborted:
        pair.step_d(Abort("d"))
        pair.step_p()
    pair.step_p(replace(pair.written("the network broke"), cut_off=True))
    assert pair.to_d[-1] == (Fenced(8, 1, True) if aborted else NotWritten(8, 1, "the network broke", True))
    plan = pair.step_d()
    assert [revoked.grant_id for revoked in plan.revoked] == [1]
    assert plan.evict == (1,), "at once"
    assert accounts(pair.d).get("quarantine") == 3
    pair.step_p()  # what D has asked meanwhile is answered once more
    assert pair.step_d().evict == (), "once"
    assert accounts(pair.d).get("quarantine") == 3
    pair.step_d(GrantsFenced((1,)))
    pair.settle()
    assert_all_free(pair.d)
    assert_all_free(pair.p)
    assert "d" in finished_of(pair.events), "computed here, or aborted"


def check_fenced_by_d(pair: Pair) -> None:
    """What P has just said is that it can do no more about what was cut off."""
    answer = pair.to_d[-1]
    assert isinstance(answer, NotWritten | Fenced)
    assert answer.cut_off
    assert pair.step_d().evict == (1,)
    assert accounts(pair.d).get("quarantine") == 3
    pair.step_d(GrantsFenced((1,)))
    pair.settle()
    assert_all_free(pair.d)
    assert_all_free(pair.p)
    assert "d" in finished_of(pair.events)


def test_what_is_cut_off_is_not_asked_for_once_more() -> None:
    pair = Pair()
    pair.writing()
    pair.step_p(replace(pair.written("the network broke"), cut_off=True))
    pair.step_d()
    assert not any(isinstance(message, CancelGrant) for message in pair.to_p), "P has said all that it can say"


@pytest.mark.parametrize("aborted", [False, True])
def test_another_life_of_p_does_not_know_what_has_left_the_first(aborted: bool) -> None:
    """It listens where the first did, so it hears what D repeats; that was killed in the middle of the WRITE."""
    pair = Pair()
    pair.writing()
    pair.p = make_engine(engine_id="P again", nonce=9)
    if aborted:
        pair.step_d(Abort("d"))
    else:
        pair.now = LEASE_NS // 6
        pair.step_d()
    pair.step_p()
    assert isinstance(pair.to_d[-1], Fenced if aborted else NotWritten)
    check_fenced_by_d(pair)


def test_the_fence_of_a_grant_that_stands_frees_nothing() -> None:
    pair = Pair()
    pair.writing()
    pair.step_d(GrantsFenced((1,)))
    assert accounts(pair.d) == {"loading": 3}


# ------------------------------------------------------------------------------------------------------ P's sources


@pytest.mark.parametrize("how", ["expires", "withdrawn", "undelivered"])
def test_the_sources_outlive_their_lease(how: str) -> None:
    pair = Pair()
    pair.writing()
    pair.to_d.clear()
    pair.now = LEASE_NS if how == "expires" else 1
    inbox = {"expires": [], "withdrawn": [FromConsumer(Withdraw(ID), 1, b"D")], "undelivered": [Abort("p")]}[how]
    pair.step_p(*inbox)
    assert accounts(pair.p) == {"deferred": 3}
    pair.step_p(pair.written())
    assert_all_free(pair.p)
    assert pair.to_d[-1] == Written(8, 1, 1), "it is all there"


def test_p_gives_up_a_write_that_does_not_end_and_then_its_mover() -> None:
    pair = Pair(fence_timeout_ns=10 * NS)
    post = pair.writing()
    pair.now = 20 * NS
    plan = pair.step_p()
    assert plan.cancels == (post.handle,)
    assert not plan.restart_mover
    pair.now = 30 * NS
    assert pair.step_p().restart_mover
    assert not pair.step_p().restart_mover
    pair.step_p(MoverRestarted((post.handle,)))
    assert_all_free(pair.p)
    assert pair.to_d[-1] == NotWritten(8, 1, "not written within 20 s (--kv-load-timeout)", cut_off=True)


def test_a_new_mover_writes_again_what_has_left_nothing_behind() -> None:
    """Through shared memory."""
    pair = Pair()
    first = pair.writing()
    pair.step_p(MoverRestarted((first.handle,), cut_off=False))
    again = pair.posts[-1]
    assert again.handle != first.handle
    assert np.array_equal(again.remote_blocks, first.remote_blocks)
    pair.step_p(pair.written())
    pair.settle()
    assert "d" in finished_of(pair.events)


def test_a_new_mover_does_not_write_again_what_was_cut_off() -> None:
    """All would be there, D would use it and give the memory to somebody else: then the first attempt still comes."""
    pair = Pair()
    first = pair.writing()
    pair.step_p(MoverRestarted((first.handle,)))
    assert pair.posts == [first]
    assert len(pair.named("WriteFailed")) == 1
    check_fenced_by_d(pair)


def test_tombstones_are_bounded() -> None:
    pair = Pair()
    inbox = [FromConsumer(CancelGrant(ID, "P", 1, number), 0, b"D") for number in range(1, 20_000)]
    plan, _ = step(pair.p, 0, inbox)
    assert len(plan.replies) == len(inbox), "each is answered"
    assert len(pair.p.producer.writes._over) == 16384
