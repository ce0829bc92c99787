"""WRITE push: D and P do not wait for each other, for memory granted there and leased here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.core.helpers import NS, arrived, assert_all_free, counting_prompt, finished_of, new_request
from tests.core.write_pair import ID, LEASE_NS, PROMPT, D, P, Pair, accounts, decode, prefill

from pdkv.core.ports import FromConsumer, NewRequest
from pdkv.core.transfer.messages import (
    Announce,
    Awaited,
    CancelGrant,
    Register,
    Withdraw,
)


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
    assert pair.to_p == [CancelGrant(ID, "P", 8, 1)], "it is asked back"
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


def test_nobody_waits_for_the_prefix_that_an_idle_grant_is_to_bring() -> None:
    """Its prefill may wait behind the lease of the very request that waits for it, whose KV is there."""
    pair = Pair()
    pair.step_d(decode(), decode(request_id="second", transfer_id="transfer-2"))
    pair.step_p(prefill(request_id="p2", transfer_id="transfer-2"))
    for pair.now in range(0, LEASE_NS, NS):
        pair.settle(1)
        assert pair.d.requests["second"].wait_cause == "the same prefix is being loaded for d"
    pair.now = LEASE_NS
    pair.settle(2)
    assert [post.grant.grant_id for post in pair.posts] == [2]
    pair.step_p(pair.written())
    pair.settle()
    assert "second" in finished_of(pair.events)


def test_what_was_written_before_it_was_asked_back_is_used() -> None:
    """Both at the same time: P has let the KV go, so it is nowhere else."""
    pair = short_of_memory()
    pair.step_p(prefill())
    pair.step_p()
    pair.step_p(pair.written())
    pair.to_d.clear()
    pair.step_d()
    assert pair.to_p == [CancelGrant(ID, "P", 8, 1)]
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
    assert pair.to_p == [CancelGrant(ID, "P", 8, 1)], "asked again"
    pair.to_p.clear()
    pair.now += NS
    pair.step_d()
    assert accounts(pair.d) == {"quarantine": 3}
    pair.settle()
    assert list(finished_of(pair.events)) == ["other"]


def test_a_cancelled_write_leaves_the_kv_to_who_registers_again() -> None:
    pair = Pair()
    post = pair.writing()
    pair.step_p(FromConsumer(CancelGrant(ID, "P", 8, post.grant.grant_id), 0, b"D"))
    pair.step_p(pair.written("cancelled"))
    assert accounts(pair.p) == {"retained": 3}
    pair.step_p(FromConsumer(Register(ID, "P"), 0, b"D"))
    assert type(pair.to_d[-1]).__name__ == "Announce"
    pair.step_p(FromConsumer(Withdraw(ID), 0, b"D"))
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


def crossed(**both: Any) -> Pair:
    """P keeps the KV of two requests that D has no memory for: that is granted for a third, for which P has none."""
    pair = Pair(p={"num_blocks": 7, "max_leased_fraction": 1.0}, d={"num_blocks": 5}, max_num_batched_tokens=64, **both)
    prompts = {"one": PROMPT + 500, "two": PROMPT + 700, "granted": PROMPT}
    for name in ("granted", "one", "two"):
        pair.step_d(decode(request_id=f"d-{name}", transfer_id=name, prompt=prompts[name]))
    to_p, pair.to_p = pair.to_p, []
    for name in ("one", "two", "granted"):
        pair.step_p(prefill(request_id=f"p-{name}", transfer_id=name, prompt=prompts[name]))
    assert (accounts(pair.p), accounts(pair.d)) == ({"retained": 6}, {"loading": 3})
    pair.to_p = to_p
    return pair


def test_a_prefill_that_finds_no_room_for_leases_without_memory_has_them_announced() -> None:
    """Otherwise P waits for D's memory, and D's memory for P's, until a lease's time has passed."""
    pair = crossed()
    pair.step_p()
    assert [message.transfer_id for message in pair.to_d if isinstance(message, Announce)] == ["one", "two"]
    pair.step_d()
    assert CancelGrant("granted", "P", 8, 1) in pair.to_p, "asked back at once"
    for _ in range(30):
        plan = pair.step_d()
        for index in range(len(plan.reads)):
            pair.step_d(arrived(plan, index))
        if pair.step_p().writes:
            pair.step_p(pair.written())
    assert [name for name in finished_of(pair.events) if name.startswith("d")] == ["d-one", "d-granted", "d-two"]
    assert not pair.named("LoadFailed")
    assert pair.now == 0
    assert_all_free(pair.p)
    assert_all_free(pair.d)


def test_an_announcement_that_was_lost_comes_again() -> None:
    pair = crossed()
    pair.step_p()
    pair.to_d.clear()
    pair.now = pair.d.config.registration_ns
    pair.step_d()
    pair.step_p()
    assert {message.transfer_id for message in pair.to_d if isinstance(message, Announce)} == {"one", "two"}


def test_it_is_announced_again_although_its_registration_is_forgotten() -> None:
    """Whoever has been told of KV registers no more: only its lease is kept alive."""
    pair = crossed()
    pair.step_p()
    pair.to_d.clear()
    pair.now = pair.p.config.registration_ns - 1
    pair.step_p()
    assert pair.to_d == []
    pair.now += 1
    pair.step_p()
    assert [message.transfer_id for message in pair.to_d if isinstance(message, Announce)] == ["one", "two"]


def late_push(transfer_id: str, **more: Any) -> NewRequest:
    """D's leg of a request whose KV is to be announced and read."""
    return replace(decode(**more), awaited=Awaited(peer=P, transfer_id=transfer_id))


def test_what_was_announced_before_presses_too_and_gets_memory_before_more_is_granted() -> None:
    pair = Pair(p={"num_blocks": 6, "max_leased_fraction": 1.0}, d={"num_blocks": 5}, max_num_batched_tokens=64)
    pair.step_d(decode(request_id="d-granted", transfer_id="granted"))
    grant, pair.to_p = pair.to_p, []
    pair.step_d(decode(request_id="d-before", transfer_id="before", prompt=PROMPT + 700))
    pair.step_d(late_push("one", request_id="d-one", prompt=PROMPT + 500))
    pair.step_p(prefill(request_id="p-one", transfer_id="one", prompt=PROMPT + 500))
    pair.step_p(prefill(request_id="p-granted", transfer_id="granted"))
    pair.step_d()
    assert not pair.d.consumer.is_pressed(P), "announced, and there is no memory yet"
    pair.to_p = grant
    pair.step_p()
    assert [message.transfer_id for message in pair.to_d if isinstance(message, Announce)] == ["one"], "again"
    pair.step_d()
    assert CancelGrant("granted", "P", 8, 1) in pair.to_p
    pair.step_p()
    assert [read.source.request_id for read in pair.step_d().reads] == ["p-one"]
    assert not pair.d.consumer.is_pressed(P)


def test_ready_kv_does_not_wait_for_a_prefix_whose_prefill_may_wait_for_it() -> None:
    pair = Pair()
    pair.step_d(decode())
    pair.step_p(prefill(request_id="p-one", transfer_id="one", prompt=counting_prompt(14)))
    pair.step_d(late_push("one", request_id="d-one", prompt=counting_prompt(14)))
    pair.settle(1)
    plan = pair.step_d()
    assert [read.local_blocks.size for read in plan.reads] == [4], "though the first two would come with the grant, too"
