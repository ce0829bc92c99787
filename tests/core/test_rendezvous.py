"""Late push: registrations, announcements, withdrawals; nobody holds memory while waiting or waits for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.core.helpers import assert_all_free, counting_prompt, finished_of, make_engine, new_request, step

from pdkv.core.config import STRICT, VLLM
from pdkv.core.engine import Engine
from pdkv.core.events import Announced, LoadFailed
from pdkv.core.ports import Abort, Decline, FromConsumer, FromProducer, Keepalive, NewRequest, PeerLost, Plan, Reply
from pdkv.core.transfer.messages import Announce, Awaited, Gone, Peer, Register, ToProducer, Withdraw
from pdkv.core.transfer.rendezvous import Announcements

NS = 1_000_000_000
P = Peer("P", "127.0.0.1", 5600)
ID = "transfer-1"
PROMPT = counting_prompt(10)


def producer() -> Engine:
    return make_engine(engine_id="P", lease_ns=6 * NS)


def consumer(**config: Any) -> Engine:
    return make_engine(engine_id="D", lease_ns=6 * NS, push_registration_timeout_ns=20 * NS, **config)


def prefill() -> NewRequest:
    return NewRequest(request_id="p", prompt=PROMPT, max_tokens=1, produce=True, transfer_id=ID)


def decode(transfer_id: str = ID) -> NewRequest:
    return NewRequest(request_id="d", prompt=PROMPT, max_tokens=2, awaited=Awaited(peer=P, transfer_id=transfer_id))


def heard(message: ToProducer, now_ns: int = 0, origin: bytes = b"D") -> FromConsumer:
    return FromConsumer(message, now_ns, origin)


def announcement(plan: Plan) -> Announce:
    (reply,) = plan.replies
    assert isinstance(reply.message, Announce)
    return reply.message


def sent(plan: Plan) -> list[ToProducer]:
    assert all(message.peer == P for message in plan.messages)
    return [message.message for message in plan.messages]


# --------------------------------------------------------------------------------------------------------------- P


def test_registered_before_the_prefill_has_finished() -> None:
    engine = producer()
    step(engine, 0, [heard(Register(ID, "P"))])  # before its request has come, even
    plan, events = step(engine, 0, [prefill()])
    assert plan.replies == ()
    lease = finished_of(events)["p"].lease
    plan, _ = step(engine, 1)
    assert plan.replies == (Reply(b"D", Announce(ID, "p", lease)),)
    assert step(engine, 2)[0].replies == (), "told once"


def test_registered_after_it_has_finished_and_again() -> None:
    engine = producer()
    _, events = step(engine, 0, [prefill()])
    for origin in (b"D", b"D again"):
        plan, _ = step(engine, 1, [heard(Register(ID, "P"), 1, origin)])
        assert plan.replies == (Reply(origin, Announce(ID, "p", finished_of(events)["p"].lease)),)


def test_a_late_registration_is_answered_and_not_parked() -> None:
    """The reference parks it for good (spec pd-transfer 9, last row)."""
    engine = producer()
    step(engine, 0, [prefill()])
    step(engine, 6 * NS)
    assert_all_free(engine)
    plan, _ = step(engine, 7 * NS, [heard(Register(ID, "P"), 7 * NS)])
    assert plan.replies == (Reply(b"D", Gone(ID, "its lease has expired")),)


def test_who_waits_is_told_when_nothing_will_come() -> None:
    engine = producer()
    step(engine, 0, [replace(prefill(), prompt=counting_prompt(100)), heard(Register(ID, "P"))])
    plan, _ = step(engine, 1, [Abort("p")])
    assert plan.replies == (Reply(b"D", Gone(ID, "the prefill ended (abort)")),)


def test_who_waits_for_another_life_is_told() -> None:
    plan, _ = step(producer(), 0, [heard(Register(ID, "P before"))])
    assert plan.replies == (Reply(b"D", Gone(ID, "engine 'P before' is not here")),)


@pytest.mark.parametrize("when", ["before it runs", "while it is kept"])
def test_a_withdrawn_prefill_is_not_kept(when: str) -> None:
    engine = producer()
    inbox = [prefill(), heard(Withdraw(ID))] if when == "before it runs" else [prefill()]
    step(engine, 0, inbox)
    if when == "while it is kept":
        assert engine.memory().accounts["retained"] == 3
        step(engine, 1, [heard(Withdraw(ID), 1)])
    assert_all_free(engine)


def test_a_withdrawal_of_what_is_not_known_is_nothing() -> None:
    plan, events = step(producer(), 0, [heard(Withdraw("unheard of"))])
    assert (plan.replies, events) == ((), ())


def test_a_withdrawal_may_come_before_the_request() -> None:
    """Both legs begin at once: D may have needed nothing before P has heard of the request."""
    engine = producer()
    step(engine, 0, [heard(Register(ID, "P")), heard(Withdraw(ID))])
    _, events = step(engine, 1, [prefill()])
    assert finished_of(events)["p"].lease is None
    assert_all_free(engine)
    plan, _ = step(engine, 2, [heard(Register(ID, "P"), 2)])
    assert plan.replies == (Reply(b"D", Gone(ID, "withdrawn by its consumer")),)


def test_silent_and_too_many_registrations_are_dropped() -> None:
    engine = producer()
    step(engine, 0, [heard(Register(ID, "P"))])
    _, events = step(engine, 7 * NS, [prefill()])
    assert finished_of(events)["p"].lease is not None
    assert step(engine, 8 * NS)[0].replies == (), "it has not been repeated for a whole lease"
    announcements: Announcements = engine.producer.announcements
    for number in range(5000):
        announcements.on_register(Register(f"r{number}", "P"), b"D")
    assert len(announcements._registered) == 4096


# --------------------------------------------------------------------------------------------------------------- D


def test_a_request_waits_without_memory_and_registers_until_it_is_answered() -> None:
    engine = consumer()
    plan, _ = step(engine, 0, [decode()])
    assert sent(plan) == [Register(ID, "P")]
    assert_all_free(engine)
    assert plan.next_deadline_ns == NS, "a sixth of a lease"
    assert sent(step(engine, NS // 2)[0]) == []
    assert sent(step(engine, NS)[0]) == [Register(ID, "P")]
    (shown,) = engine.memory().awaiting
    assert (shown.request_id, shown.producer, shown.since_ns, shown.deadline_ns) == ("d", "P", 0, 20 * NS)
    assert "announce" in shown.cause


def test_it_is_announced_and_read_under_the_lease() -> None:
    p, d = producer(), consumer()
    step(d, 0, [decode()])
    step(p, 0, [prefill(), heard(Register(ID, "P"))])
    told = announcement(step(p, 1)[0])
    assert step(d, 1)[0].keepalives == (Keepalive(P, (), awaited=True),), "so that the handshake is made beforehand"
    plan, events = step(d, 2, [FromProducer(told, P)])
    assert [event.waited_ns for event in events if isinstance(event, Announced)] == [2]
    (read,) = plan.reads
    assert read.source.grant == told.grant
    assert (read.source.request_id, len(read.local_blocks)) == ("p", 3)
    assert plan.keepalives == (Keepalive(P, (told.grant.token,)),)
    assert d.memory().awaiting == ()
    assert sent(plan) == [], "neither registered again nor withdrawn"


def test_others_pass_one_that_waits() -> None:
    engine = consumer()
    plan, _ = step(engine, 0, [decode(), new_request("other", 5)])
    assert plan.batch.request_ids == ("other",)


def test_a_prompt_that_is_cached_does_not_wait() -> None:
    engine = consumer()
    step(engine, 0, [NewRequest(request_id="before", prompt=PROMPT, max_tokens=1)])
    plan, _ = step(engine, 1, [decode()])
    assert plan.batch.request_ids == ("d",)
    assert sent(plan) == [Register(ID, "P"), Withdraw(ID)]


@pytest.mark.parametrize("first_leaves", [False, True])
def test_a_second_request_of_one_id_is_computed_here(first_leaves: bool) -> None:
    """It would never hear anything: the one announcement is the first one's, and so is the withdrawal."""
    engine = consumer()
    step(engine, 0, [decode()])
    plan, _ = step(engine, 1, [replace(decode(), request_id="second", cache_salt="a cache of its own")])
    assert plan.batch.request_ids == ("second",)
    assert sent(plan) == []
    plan, _ = step(engine, 2, [Abort("d" if first_leaves else "second")])
    assert sent(plan) == ([Withdraw(ID)] if first_leaves else [])
    assert ("d" in engine.requests) is not first_leaves
    if not first_leaves:
        _, events = step(engine, 3, [FromProducer(Gone(ID, "it died"), P)])
        assert [event.request_id for event in events if isinstance(event, LoadFailed)] == ["d"]


def test_what_others_cached_meanwhile_is_found_when_it_registers_again() -> None:
    engine = consumer()
    step(engine, 0, [decode()])
    step(engine, 1, [NewRequest(request_id="same", prompt=PROMPT, max_tokens=1)])
    assert step(engine, NS - 1)[0].batch.request_ids == ()
    plan, _ = step(engine, NS)
    assert plan.batch.request_ids == ("d",)
    assert sent(plan) == [Register(ID, "P"), Withdraw(ID)]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("how", ["gone", "too late", "no peer for us", "another prompt's"])
def test_what_does_not_come(policy: str, how: str) -> None:
    engine = consumer(transfer=replace(STRICT, load_failure=policy))
    step(engine, 0, [decode()])
    if how == "gone":
        now_ns, inbox, words = 1, [FromProducer(Gone(ID, "it died"), P)], "it died"
    elif how == "no peer for us":
        now_ns, inbox, words = 1, [PeerLost(P, "nobody listens there")], "nobody listens"
    elif how == "too late":
        now_ns, inbox, words = 20 * NS, [], "not announced within 20 s"
    else:
        p = producer()
        step(p, 0, [replace(prefill(), prompt=counting_prompt(40)), heard(Register(ID, "P"))])
        step(p, 0)
        now_ns, inbox, words = 1, [FromProducer(announcement(step(p, 1)[0]), P)], "for a prompt of 10 tokens"
    plan, events = step(engine, now_ns, inbox)
    (failure,) = [event for event in events if isinstance(event, LoadFailed)]
    assert words in failure.cause
    told = [message for message in sent(plan) if isinstance(message, Withdraw)]
    assert len(told) == (0 if how == "gone" else 1)
    if policy == "recompute":
        assert plan.batch.request_ids == ("d",)
    else:
        assert words in str(finished_of(events)["d"].error)
        assert_all_free(engine)


def test_vllm_waits_for_ever() -> None:
    engine = consumer(transfer=VLLM)
    step(engine, 0, [decode()])
    plan, events = step(engine, 10_000 * NS)
    assert len(plan.batch) == 0
    assert events == ()
    assert plan.next_deadline_ns == 10_001 * NS


def test_an_abort_withdraws() -> None:
    engine = consumer()
    step(engine, 0, [decode()])
    assert sent(step(engine, 1, [Abort("d")])[0]) == [Withdraw(ID)]
    assert step(engine, 2, [FromProducer(Gone(ID, "late"), P)])[1] == ()


def test_a_promise_that_was_refused_is_withdrawn() -> None:
    """The request around it never became one."""
    plan, _ = step(consumer(), 0, [Decline(Awaited(peer=P, transfer_id=ID))])
    assert sent(plan) == [Withdraw(ID)]


def test_another_peer_that_is_lost_concerns_nobody() -> None:
    engine = consumer()
    step(engine, 0, [decode()])
    _, events = step(engine, 1, [PeerLost(Peer("Q", "127.0.0.1", 5600), "gone")])
    assert events == ()
    assert engine.requests["d"].awaited is not None


def test_only_the_producer_asked_is_believed() -> None:
    engine = consumer()
    step(engine, 0, [decode()])
    _, events = step(engine, 1, [FromProducer(Gone(ID, "forged"), Peer("Q", "127.0.0.1", 5600))])
    assert events == ()
    assert engine.requests["d"].awaited is not None
