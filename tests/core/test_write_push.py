"""WRITE push: D grants memory, P writes into it, in either order, and whatever gets lost on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.core.helpers import NS, assert_all_free, counting_prompt, finished_of, new_request, step
from tests.core.write_pair import ID, LEASE_NS, PROMPT, D, P, Pair, accounts, decode, prefill, registrations

from pdkv.core.config import STRICT, VLLM, TransferPolicy
from pdkv.core.ports import Abort, FromConsumer, FromProducer, GrantsFenced, MoverRestarted, NewRequest, PeerLost
from pdkv.core.transfer.messages import (
    CancelGrant,
    Gone,
    Noted,
    NotWritten,
    Peer,
    Register,
    RegisterWrite,
    Withdraw,
    WriteGrant,
    Written,
)

# ----------------------------------------------------------------------------------------------------- the good way


@pytest.mark.parametrize("first", ["P", "D"])
def test_registration_and_prefill_meet_in_either_order(first: str) -> None:
    pair = Pair()
    if first == "P":
        pair.step_p(prefill())
        assert accounts(pair.p) == {"retained": 3}
        pair.step_d(decode())
    else:
        pair.step_d(decode())
        assert accounts(pair.d) == {"loading": 3}
        pair.step_p()
        assert pair.to_d == [Noted(8, 1, False)]
        pair.step_d()
        pair.step_p(prefill())
    pair.settle(2)
    (post,) = pair.posts
    assert post.consumer == D
    assert np.array_equal(post.remote_blocks, pair.d.manager.blocks_of("d"))
    assert np.array_equal(post.local_blocks, pair.p.manager.blocks_of("lease:1"))
    (held,) = pair.d.memory().holders
    assert (held.account, held.cause, held.deadline_ns) == ("loading", "being written by P", 20 * NS)

    pair.step_p(pair.written())
    assert_all_free(pair.p)
    assert pair.to_d == [Written(8, 1, 1)]
    plan = pair.step_d()
    assert plan.batch.request_ids == ("d",)
    assert plan.batch.num_computed.tolist() == [9], "only the last token is computed here"
    assert pair.to_p == [], "nothing to withdraw"
    pair.settle(2)
    assert "d" in finished_of(pair.events)
    assert_all_free(pair.d)


def test_the_slot_names_the_grant_while_it_stands() -> None:
    pair = Pair()
    post = pair.writing()
    slots = pair.d.producer._slots._slots
    assert slots[post.grant.slot].tolist() == [8, post.grant.grant_id]
    pair.step_p(pair.written())
    pair.step_d()
    assert not slots[:, 1].any()


def test_a_partial_hit_asks_for_the_rest_only() -> None:
    pair = Pair()
    pair.step_d(new_request("before", np.append(PROMPT[:4], [900, 901, 902, 903]), 1))
    pair.step_d(decode())
    (message,) = registrations(pair.to_p)[-1:]
    assert message.grant is not None
    assert (message.grant.first_token, message.grant.num_tokens, len(message.grant.block_ids)) == (4, 10, 2)
    pair.step_p(prefill())
    pair.settle(1)
    (post,) = pair.posts
    assert np.array_equal(post.local_blocks, pair.p.manager.blocks_of("lease:1")[1:])
    assert np.array_equal(post.remote_blocks, pair.d.manager.blocks_of("d")[1:])


def test_a_prompt_that_is_cached_grants_nothing_and_is_not_kept() -> None:
    pair = Pair()
    pair.step_d(new_request("before", PROMPT, 1))
    pair.step_p(prefill())
    plan = pair.step_d(decode())
    assert plan.batch.request_ids == ("d",)
    assert [type(message) for message in pair.to_p] == [RegisterWrite, Withdraw]
    assert registrations(pair.to_p)[0].grant is None
    pair.step_p()
    assert_all_free(pair.p)


def test_requests_with_one_prefix_share_one_load() -> None:
    pair = Pair()
    pair.step_d(decode(), decode(request_id="second", transfer_id="transfer-2", prompt=counting_prompt(12)))
    granted = [message for message in registrations(pair.to_p) if message.grant is not None]
    assert [message.transfer_id for message in granted] == [ID]
    assert pair.d.requests["second"].wait_cause == "the same prefix is being loaded for d"
    pair.step_p(prefill(), prefill(request_id="p2", transfer_id="transfer-2", prompt=counting_prompt(12)))
    pair.step_p()
    pair.step_p(pair.written())
    plan = pair.step_d()
    assert set(plan.batch.request_ids) == {"d", "second"}, "what is left of the second is computed here"
    pair.settle()
    assert_all_free(pair.p)


def test_who_waits_for_memory_keeps_the_lease_alive() -> None:
    pair = Pair(d={"num_blocks": 12}, p={"max_num_batched_tokens": 64}, max_num_batched_tokens=64)
    pair.step_d(new_request("other", 33, 12))
    pair.step_p(prefill())
    pair.step_d(decode())
    assert accounts(pair.d) == {"running": 9}
    for pair.now in range(0, 5 * LEASE_NS, 3 * NS):
        pair.settle(1)
        for message in registrations(pair.to_p):
            assert message.grant is None
    assert accounts(pair.p) == {"retained": 3}
    pair.step_d(Abort("other"))
    pair.settle(2)
    assert len(pair.posts) == 1


def test_without_an_address_it_is_announced_and_read() -> None:
    pair = Pair()
    pair.d.consumer.grants.here = None
    pair.step_d(decode())
    assert pair.to_p == [Register(ID, "P")]
    pair.step_p(prefill())
    pair.step_p()
    assert len(pair.step_d().reads) == 1


def test_no_more_grants_than_slots() -> None:
    pair = Pair(d={"slots": 1})
    other = decode(request_id="e", transfer_id="transfer-2", prompt=counting_prompt(10, 500))
    pair.step_d(decode(), other)
    assert accounts(pair.d) == {"loading": 3}
    assert "slots" in pair.d.requests["e"].wait_cause
    pair.step_p(prefill())
    pair.step_p()
    pair.step_p(pair.written())
    pair.step_d()
    pair.step_d()
    assert pair.d.consumer.grants.find(pair.d.requests["e"]) is not None


# ------------------------------------------------------------------------------------------------ what does not come


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(
    "how", ["prefill aborted", "lease over", "never", "write failed", "peer lost", "write hangs", "another prompt"]
)
def test_what_does_not_come_is_told_or_has_a_deadline(policy: str, how: str) -> None:
    pair = Pair(transfer=replace(STRICT, load_failure=policy))
    inbox: list[Any] = []
    match how:
        case "prefill aborted":
            pair.step_d(decode())
            pair.step_p(prefill(prompt=counting_prompt(100)))
            pair.step_p(Abort("p"))
            words = "the prefill ended (abort)"
        case "lease over":
            pair.step_p(prefill())
            pair.now = LEASE_NS
            pair.step_p()
            pair.step_d(decode())
            pair.step_p()
            words = "its lease has expired"
        case "never":
            pair.step_d(decode())
            pair.to_p.clear()
            pair.now = 60 * NS
            words = "not written within 60 s"
        case "write failed":
            pair.writing()
            pair.step_p(pair.written("the network broke"))
            assert_all_free(pair.p)
            words = "the network broke"
        case "peer lost":
            pair.writing()
            inbox, words = [PeerLost(P, "nobody listens there")], "nobody listens"
        case "write hangs":
            pair.writing()
            pair.now = 20 * NS
            words = "not there 20 s after its WRITE was begun"
        case _:
            pair.step_d(decode())
            pair.step_p(prefill(prompt=counting_prompt(10, 1)))
            pair.step_p()
            assert pair.posts == []
            words = "both instances must turn the request into the same tokens"
    plan = pair.step_d(*inbox)
    (failure,) = pair.named("LoadFailed")
    assert words in failure.cause  # type: ignore[attr-defined]
    fenced = how not in ("never", "peer lost", "write hangs")
    assert ("quarantine" in accounts(pair.d)) is not fenced
    if policy == "recompute":
        assert plan.batch.request_ids == ("d",)
    else:
        assert words in str(finished_of(pair.events)["d"].error)
        assert fenced is (accounts(pair.d) == {})


def test_what_ends_while_d_is_queued_is_told() -> None:
    pair = Pair(d={"num_blocks": 4})
    pair.step_d(new_request("other", 9, 30))
    pair.step_d(decode())
    pair.step_p(prefill(prompt=counting_prompt(100)))
    pair.step_p(Abort("p"))
    assert pair.to_d == [Gone(ID, "the prefill ended (abort)")]
    pair.step_d()
    assert pair.d.requests["d"].awaited is None


def test_another_life_of_the_producer_says_so() -> None:
    pair = Pair()
    pair.step_d(decode())
    (message,) = registrations(pair.to_p)[-1:]
    pair.to_p = [msgspec.structs.replace(message, producer="P before")]
    pair.step_p()
    assert pair.to_d == [NotWritten(8, 1, "engine 'P before' is not here")]


@pytest.mark.parametrize("lost", ["registration", "noted", "written"])
def test_a_lost_message_costs_one_repetition(lost: str) -> None:
    pair = Pair()
    pair.step_p(prefill())
    pair.step_d(decode())
    if lost == "registration":
        pair.to_p.clear()
    pair.step_p()
    if lost == "noted":
        pair.to_d.clear()
    pair.step_d()
    if lost == "written":
        pair.step_p(pair.written())
        pair.to_d.clear()
    pair.now = NS
    pair.settle(2)
    assert len(pair.posts) == 1, "never twice"
    if lost != "written":
        pair.step_p(pair.written())
    assert pair.step_d().batch.request_ids == ("d",) or "d" in finished_of(pair.events)


def test_doubled_messages_change_nothing() -> None:
    pair = Pair()
    pair.step_d(decode())
    pair.to_p *= 3
    pair.step_p(prefill())
    pair.to_p += registrations(pair.to_p)
    for _ in range(3):
        pair.to_d *= 2
        pair.settle(1)
    assert len(pair.posts) == 1
    pair.step_p(pair.written(), pair.written())
    pair.to_d *= 3
    pair.settle()
    assert "d" in finished_of(pair.events)
    assert_all_free(pair.d)
    assert_all_free(pair.p)


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
    slot = pair.d.consumer.grants.promises()[0].grant.slot
    plan = pair.step_d(Abort("d"))
    assert accounts(pair.d) == {"quarantine": 3}
    assert [revoked.grant_id for revoked in plan.revoked] == [1]
    assert pair.d.producer._slots._slots[slot, 1] == 0, "the word goes before anything else"
    assert pair.to_p[-1] == CancelGrant(ID, 8, 1)
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
    assert pair.to_p == [CancelGrant(ID, 8, 1)]
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
    pair.to_p = [second, *([CancelGrant(ID, 8, 1)] if left else [])]
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
    assert pair.to_d[-1] == NotWritten(8, 1, "not written within 20 s (--kv-load-timeout)")


def test_a_new_mover_writes_again() -> None:
    pair = Pair()
    first = pair.writing()
    pair.step_p(MoverRestarted((first.handle,)))
    again = pair.posts[-1]
    assert again.handle != first.handle
    assert np.array_equal(again.remote_blocks, first.remote_blocks)
    pair.step_p(pair.written())
    pair.settle()
    assert "d" in finished_of(pair.events)


def test_tombstones_are_bounded() -> None:
    pair = Pair()
    inbox = [FromConsumer(CancelGrant(ID, 1, number), 0, b"D") for number in range(1, 20_000)]
    plan, _ = step(pair.p, 0, inbox)
    assert len(plan.replies) == len(inbox), "each is answered"
    assert len(pair.p.producer.writes._over) == 16384


# ------------------------------------------------------------------------------------------------- strangers' words


def test_only_the_producer_asked_is_believed_and_only_under_the_grant_s_own_numbers() -> None:
    pair = Pair()
    pair.writing()
    stranger = Peer("Q", "127.0.0.1", 5600)
    forged = [
        FromProducer(Written(8, 1, 1), stranger),
        FromProducer(NotWritten(8, 1, "no"), stranger),
        FromProducer(Written(9, 1, 1), P),
        FromProducer(Written(8, 2, 1), P),
    ]
    for item in forged:
        pair.step_d(item)
        assert accounts(pair.d) == {"loading": 3}
    pair.step_d(Abort("d"))
    for item in forged:
        pair.step_d(item)
        assert accounts(pair.d) == {"quarantine": 3}
    pair.step_d(FromProducer(Noted(8, 1, True), P))
    assert accounts(pair.d) == {"quarantine": 3}


@pytest.mark.parametrize(
    "odd",
    [
        {"num_tokens": 9}, {"num_tokens": 0}, {"num_tokens": -4}, {"num_tokens": 1 << 40},
        {"first_token": -4}, {"first_token": 3}, {"first_token": 10}, {"first_token": 1 << 40},
        {"block_ids": ()}, {"block_ids": (1, 2)}, {"block_ids": (0, 1, 2)}, {"block_ids": (1, 2, 1 << 31)},
        {"block_ids": (1, 2, -3)}, {"group_blocks": (1, 2)}, {"group_blocks": (4, -1)}, {"group_blocks": (-3,)},
        {"prompt_digest": b"x" * 16},
    ],
)  # fmt: skip
def test_an_odd_grant_is_refused(odd: dict[str, Any]) -> None:
    pair = Pair()
    pair.step_d(decode())
    (message,) = registrations(pair.to_p)[-1:]
    assert message.grant is not None
    bad: WriteGrant = msgspec.structs.replace(message.grant, **odd)
    pair.to_p = [msgspec.structs.replace(message, grant=bad)]
    pair.step_p(prefill())
    pair.step_p()
    assert pair.posts == []
    assert isinstance(pair.to_d[-1], NotWritten)
    assert accounts(pair.p) == {}, "nobody will read it: its consumer computes the prompt"


@pytest.mark.parametrize("policy", [STRICT, VLLM], ids=["strict", "vllm"])
def test_an_odd_grant_that_comes_after_the_prefill_pins_nothing(policy: TransferPolicy) -> None:
    """The reference has no answer to it, and keeps the lease to its end."""
    pair = Pair(transfer=policy)
    pair.step_d(decode())
    (message,) = registrations(pair.to_p)[-1:]
    assert message.grant is not None
    pair.to_p.clear()
    pair.step_p(prefill())
    pair.step_p()
    assert accounts(pair.p) == {"retained": 3}
    bad = msgspec.structs.replace(message.grant, prompt_digest=b"x" * 16)
    pair.to_p = [msgspec.structs.replace(message, grant=bad)] * 2
    pair.step_p()
    assert pair.posts == []
    assert accounts(pair.p) == ({} if policy is STRICT else {"retained": 3})
    assert [type(answer) for answer in pair.to_d] == ([NotWritten] * 2 if policy is STRICT else [])
    pair.step_p()
    assert len(pair.named("LeaseReleased")) == (1 if policy is STRICT else 0)


def test_two_requests_of_one_id_get_one_grant() -> None:
    pair = Pair()
    pair.step_d(decode())
    plan = pair.step_d(replace(decode(), request_id="second", cache_salt="a cache of its own"))
    assert plan.batch.request_ids == ("second",), "it computes its prompt itself"
    granted = {message.grant.grant_id for message in registrations(pair.to_p) if message.grant is not None}
    assert granted == {1}
    assert accounts(pair.d) == {"loading": 3, "running": 3}


def test_a_prompt_of_one_token_is_computed_here() -> None:
    pair = Pair()
    new: NewRequest = decode(prompt=counting_prompt(1))
    assert pair.step_d(new).batch.request_ids == ("d",)


# ------------------------------------------------------------------------------------------- the reference's strandings


def vllm(**more: Any) -> Pair:
    return Pair(transfer=VLLM, **more)


def assert_hangs(pair: Pair, account: str = "loading") -> None:
    """For an hour nothing moves: D's blocks are held, nobody is told, and there is no deadline to see."""
    for _ in range(60):
        pair.now += 60 * NS
        pair.settle(1)
    assert accounts(pair.d) == {account: 3}
    (held,) = pair.d.memory().holders
    assert held.deadline_ns is None


def test_vllm_registers_once_and_with_its_memory_only() -> None:
    pair = vllm()
    pair.step_d(decode())
    (message,) = pair.to_p
    assert isinstance(message, RegisterWrite)
    assert message.grant is not None
    pair.to_p.clear()
    assert_hangs(pair)
    assert len(pair.named("LoadOverdue")) == 1, "the watchdog warns, once, and does nothing"


@pytest.mark.parametrize("how", ["prefill aborted", "lease over", "write failed", "peer lost", "another prompt"])
def test_vllm_hangs_where_strict_is_told(how: str) -> None:
    pair = vllm()
    match how:
        case "prefill aborted":
            pair.step_d(decode())
            pair.step_p(prefill(prompt=counting_prompt(100)))
            pair.step_p(Abort("p"))
        case "lease over":
            pair.step_p(prefill())
            pair.now = LEASE_NS
            pair.step_p()
            pair.step_d(decode())
            pair.step_p()
            assert len(pair.p.producer.announcements._registered) == 1, "parked for good"
        case "write failed":
            pair.writing()
            pair.step_p(pair.written("the network broke"))
            assert accounts(pair.p) == {"retained": 3}, "P: by lease"
        case "peer lost":
            pair.writing()
            pair.step_d(PeerLost(P, "nobody listens there"))
        case _:
            pair.step_d(decode())
            pair.step_p(prefill(prompt=counting_prompt(10, 1)))
    assert_hangs(pair)
    assert accounts(pair.p) == ({"deferred": 3} if how == "peer lost" else {}), "a WRITE that does not end"


def test_vllm_fails_where_it_cannot_register() -> None:
    pair = vllm()
    pair.step_d(decode())
    pair.to_p.clear()
    pair.step_d(PeerLost(P, "nobody listens there"))
    assert finished_of(pair.events)["d"].error == "KV transfer failed: nobody listens there"


@pytest.mark.parametrize("ends", [False, True])
def test_vllm_gives_aborted_blocks_back_when_it_is_written_and_never_else(ends: bool) -> None:
    pair = vllm()
    pair.writing()
    pair.step_d(Abort("d"))
    assert pair.to_p == [], "nobody tells P"
    if ends:
        pair.step_p(pair.written())
        pair.step_d()
        assert_all_free(pair.d)
    else:
        pair.step_p(pair.written("the network broke"))
        assert_hangs(pair, "quarantine")


def test_vllm_does_not_renew_what_it_does_not_know() -> None:
    """Router and D cannot name P's request while both legs begin: P keeps a full local hit until its lease ends."""
    pair = vllm()
    pair.step_d(new_request("before", PROMPT, 1))
    pair.step_p(prefill())
    pair.step_d(decode())
    granted = registrations(pair.to_p)
    assert len(granted) == 1, "two blocks are there, the third is asked for"
    pair.to_p.clear()
    pair.now = LEASE_NS - 1
    pair.step_p()
    assert accounts(pair.p) == {"retained": 3}


def test_a_prefill_with_granted_memory_does_not_wait_for_its_share() -> None:
    """What pins the share may be waiting for that very memory, as D grants in its own order."""
    pair = Pair(p={"num_blocks": 9, "max_leased_fraction": 0.5})
    pair.step_p(prefill(request_id="unclaimed", transfer_id="transfer-0", prompt=PROMPT + 500))
    pair.step_p(prefill(request_id="without", transfer_id="transfer-2", prompt=PROMPT + 700), prefill())
    assert accounts(pair.p) == {"retained": 3}, "neither has a share left"
    pair.step_d(decode())
    pair.step_p()
    assert accounts(pair.p) == {"retained": 6}
    pair.step_p()
    assert [post.consumer for post in pair.posts] == [D]
    assert pair.p.requests["without"].wait_cause == "leases pin their share of the pool (--max-leased-fraction)"


def short_of_memory(**both: Any) -> Pair:
    """D has granted memory that another request needs, and a lease's time has passed without a prefill at P."""
    pair = Pair(d={"num_blocks": 8}, max_num_batched_tokens=64, **both)
    pair.step_d(decode())
    pair.step_d(new_request("other", 24, 2))
    assert accounts(pair.d) == {"loading": 3}
    pair.settle()
    pair.now = LEASE_NS - 1
    pair.settle(1)
    pair.step_d()
    assert accounts(pair.d) == {"loading": 3}
    assert not [message for message in pair.to_p if isinstance(message, CancelGrant)], "it was early"
    pair.now = LEASE_NS
    pair.to_p.clear()
    return pair


def test_an_idle_grant_gives_way_and_its_request_goes_on_by_late_push() -> None:
    pair = short_of_memory()
    pair.step_d()
    assert pair.to_p == [CancelGrant(ID, 8, 1)], "it is asked back"
    assert accounts(pair.d) == {"loading": 3}, "until P has given it back"
    pair.step_p()
    pair.step_d()
    assert Register(ID, "P") in pair.to_p
    assert not pair.named("Quarantined"), "nothing can write there any more"
    pair.settle()
    assert list(finished_of(pair.events)) == ["other"]
    assert pair.d.requests["d"].wait_cause == "waits for P to announce its prompt's KV"
    pair.step_p(prefill())
    pair.step_p()
    assert len(pair.step_d().reads) == 1
    assert not pair.named("LoadFailed")


def test_what_was_written_before_it_was_asked_back_is_used() -> None:
    """Both at the same time: P has let the KV go, so it is nowhere else."""
    pair = short_of_memory()
    pair.step_p(prefill())
    pair.step_p()
    pair.step_p(pair.written())
    pair.to_d.clear()
    pair.step_d()
    assert pair.to_p == [CancelGrant(ID, 8, 1)]
    pair.step_p()
    assert [type(message).__name__ for message in pair.to_d] == ["Written"], "and not that nothing was"
    pair.step_d()
    assert pair.named("LoadFinished")
    assert Withdraw(ID) in pair.to_p, "P may have kept it"
    pair.settle()
    assert list(finished_of(pair.events)) == ["p", "d", "other"]
    assert not pair.named("LoadFailed")


def test_a_grant_asked_back_in_vain_is_taken() -> None:
    pair = short_of_memory(fence_timeout_ns=2 * NS)
    pair.step_d()
    pair.to_p.clear()
    pair.now += NS
    pair.step_d()
    assert pair.to_p == [CancelGrant(ID, 8, 1)], "asked again"
    pair.to_p.clear()
    pair.now += NS
    pair.step_d()
    assert accounts(pair.d) == {"quarantine": 3}
    pair.settle()
    assert list(finished_of(pair.events)) == ["other"]


def test_a_cancelled_write_leaves_the_kv_to_who_registers_again() -> None:
    pair = Pair()
    post = pair.writing()
    pair.step_p(FromConsumer(CancelGrant(ID, 8, post.grant.grant_id), 0, b"D"))
    pair.step_p(pair.written("cancelled"))
    assert accounts(pair.p) == {"retained": 3}
    pair.step_p(FromConsumer(Register(ID, "P"), 0, b"D"))
    assert type(pair.to_d[-1]).__name__ == "Announce"
    pair.step_p(FromConsumer(Withdraw(ID), 0, b"D"))
    assert_all_free(pair.p)


def test_vllm_frees_what_a_failed_write_of_an_ended_lease_had() -> None:
    pair = vllm()
    pair.writing()
    pair.now = LEASE_NS
    pair.step_p()
    assert accounts(pair.p) == {"deferred": 3}
    pair.step_p(pair.written("the transfer broke"))
    assert_all_free(pair.p)


def test_memory_granted_by_who_is_silent_for_a_lease_counts_no_more() -> None:
    pair = Pair(p={"num_blocks": 9, "max_leased_fraction": 0.5})
    pair.step_d(decode())
    pair.step_p()
    pair.now = LEASE_NS
    pair.step_p(prefill(request_id="unclaimed", transfer_id="transfer-0", prompt=PROMPT + 500))
    pair.step_p(prefill())
    assert accounts(pair.p) == {"retained": 3}
    assert pair.p.requests["p"].wait_cause == "leases pin their share of the pool (--max-leased-fraction)"


def test_who_gave_way_goes_first_when_its_kv_is_announced() -> None:
    """Until then it stands behind the others, or its memory would come back to it."""
    pair = Pair(d={"num_blocks": 8}, max_num_batched_tokens=64)
    pair.step_d(decode())
    pair.step_d(new_request("other", 24, 3), new_request("third", 24, 2))
    pair.settle()
    pair.now = LEASE_NS
    pair.step_d()
    pair.step_p()
    pair.step_d()
    waiting = pair.d.scheduler.waiting
    assert [request.request_id for request in waiting] == ["third", "d"]
    pair.step_p(prefill())
    pair.step_p()
    pair.step_d()
    assert [request.request_id for request in waiting] == ["d", "third"]
    pair.settle()
    assert list(finished_of(pair.events)) == ["p", "other"]
    assert accounts(pair.d) == {"loading": 3}, "which leaves too little for the third"
