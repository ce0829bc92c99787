"""WRITE push: D and P do not wait for each other, for memory granted there and leased here."""

from __future__ import annotations

from typing import Any

from tests.core.helpers import NS, assert_all_free, finished_of, new_request
from tests.core.write_pair import ID, LEASE_NS, PROMPT, D, Pair, accounts, decode, prefill

from pdkv.core.ports import FromConsumer
from pdkv.core.transfer.messages import (
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
