"""WRITE push: D grants memory, P writes into it, in either order, and whatever gets lost on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.core.helpers import NS, assert_all_free, counting_prompt, finished_of, new_request
from tests.core.write_pair import ID, LEASE_NS, PROMPT, D, P, Pair, accounts, decode, prefill, registrations

from pdkv.core.config import STRICT, VLLM, TransferPolicy
from pdkv.core.ports import Abort, FromProducer, NewRequest, PeerLost
from pdkv.core.transfer.messages import (
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
    assert pair.to_d == [NotWritten(8, 1, "engine 'P before' is not here", cut_off=True)]


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
