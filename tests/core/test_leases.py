"""P's side: lease timelines of pd-transfer.md section 11 (pull), the slot, and the share that leases may pin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.core.helpers import NS, assert_all_free, counting_prompt, make_engine, new_request, step

from pdkv.core.engine import Engine
from pdkv.core.events import Event, Finished, FinishReason, LeaseReleased, LeaseRenewed
from pdkv.core.ports import Abort, FromConsumer, InboxItem, NewRequest, Outputs
from pdkv.core.transfer.lease import LeaseSlots
from pdkv.core.transfer.messages import Done, Grant, Heartbeat
from pdkv.core.transfer.proof import digest_tokens, is_proved, lease_token, proof_key


def produce(engine: Engine, name: str = "p", length: int = 10, now_ns: int = 0, **more: Any) -> Grant:
    """A prefill that finishes at ``now_ns``."""
    _, events = step(engine, now_ns, [new_request(name, length, more.pop("max_tokens", 1), produce=True, **more)])
    outcome = next(event for event in events if isinstance(event, Finished))
    assert outcome.lease is not None
    return outcome.lease


def beat(lease: Grant, at_s: float) -> FromConsumer:
    return FromConsumer(Heartbeat((lease.token,)), int(at_s * NS))


def released(events: tuple[Event, ...]) -> list[bool]:
    """``expired`` of every lease let go."""
    return [event.expired for event in events if isinstance(event, LeaseReleased)]


def freed_at(engine: Engine, messages: list[tuple[float, FromConsumer]], until_s: int = 200) -> tuple[float, bool]:
    """Step at every message and at every deadline; when the lease went, and whether it had expired."""
    times = sorted({*(at for at, _ in messages)})
    while True:
        deadline = engine.next_deadline_ns()
        assert deadline is not None
        now = min([deadline, *(int(at * NS) for at in times[:1])])
        inbox = [message for at, message in messages if int(at * NS) == now]
        times = [at for at in times if int(at * NS) > now]
        _, events = step(engine, now, inbox)
        if released(events):
            return now / NS, released(events)[0]
        assert now < until_s * NS


def test_d_admits_at_2_read_done_at_2_4() -> None:
    engine = make_engine()
    lease = produce(engine)
    assert freed_at(engine, [(1, beat(lease, 1)), (2.4, FromConsumer(Done(lease.token, "D"), 0))]) == (2.4, False)
    assert_all_free(engine)


def test_d_queued_100_s() -> None:
    """Deadline after beat t is max(30, t + 20): 30, 30, 33, ..., 118."""
    engine = make_engine()
    lease, deadlines = produce(engine), []
    for at in range(3, 99, 5):
        _, events = step(engine, at * NS, [beat(lease, at)])
        assert not released(events)
        deadlines.append(engine.next_deadline_ns() or 0)
        renewed = [event.deadline_ns for event in events if isinstance(event, LeaseRenewed)]
        assert renewed == ([(at + 20) * NS] if at + 20 > 30 else [])
        holder = next(iter(engine.memory().holders))
        assert (holder.account, holder.blocks, holder.deadline_ns) == ("retained", 3, deadlines[-1])
    assert [deadline // NS for deadline in deadlines] == [30, 30, *range(33, 119, 5)]
    assert freed_at(engine, [(101, FromConsumer(Done(lease.token, "D"), 0))]) == (101, False)


def test_d_crashes_right_after_beat_28() -> None:
    engine = make_engine()
    lease = produce(engine)
    assert freed_at(engine, [(at, beat(lease, at)) for at in (3, 8, 13, 18, 23, 28)]) == (48, True)


def test_d_crashes_at_4_after_one_beat_at_3() -> None:
    engine = make_engine()
    lease = produce(engine)
    assert freed_at(engine, [(3, beat(lease, 3))]) == (30, True)


def test_the_proxy_loses_the_response() -> None:
    engine = make_engine()
    produce(engine)
    assert engine.memory().accounts["retained"] == 3
    assert freed_at(engine, []) == (30, True)
    assert_all_free(engine)
    assert engine.next_deadline_ns() is None


def test_a_beat_counts_from_when_it_arrived_and_is_seen_before_the_sweep() -> None:
    engine = make_engine()
    lease = produce(engine)
    _, events = step(engine, 40 * NS, [beat(lease, 25)])  # the engine was busy from 25 to 40
    assert released(events) == []
    assert engine.next_deadline_ns() == 45 * NS


def test_lost_doubled_and_foreign_hints() -> None:
    engine = make_engine()
    lease = produce(engine)
    other = produce(engine, "q")
    foreign = FromConsumer(Done(b"x" * 16, "D"), 0)
    done = FromConsumer(Done(lease.token, "D"), 0)
    _, events = step(engine, NS, [foreign, FromConsumer(Heartbeat((b"y" * 16, other.token)), NS), done, done])
    assert released(events) == [False]
    _, events = step(engine, NS, [done, beat(lease, 1)])
    assert events == ()
    assert engine.memory().accounts["retained"] == 3
    _, events = step(engine, NS, [FromConsumer(Done(other.token, "D"), 0)])
    assert released(events) == [False]


def test_the_slot_names_the_lease_as_long_as_the_blocks_are_kept() -> None:
    slots = np.zeros((4, 2), dtype=np.uint64)
    owner = LeaseSlots(slots, nonce=7, secret=b"k", block_size=4)
    seen = set()
    prompt = counting_prompt(9)
    for _ in range(20):
        grant = owner.grant(((1, 2),), prompt, 4)
        assert slots[grant.slot].tolist() == [7, grant.lease_id]
        assert grant.lease_id not in seen
        seen.add(grant.lease_id)
        assert (grant.block_ids, grant.num_tokens, grant.nonce, grant.cached_tokens) == ((1, 2), 9, 7, 4)
        assert grant.token == lease_token(b"k", grant.lease_id)
        assert is_proved(proof_key(b"k"), grant, digest_tokens(prompt))
        owner.clear(grant.slot)
        assert slots[grant.slot].tolist() == [7, 0]
    assert owner.num_free == 4


def test_the_slot_is_cleared_before_the_blocks_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    lease = produce(engine)
    real = engine.manager.release

    def release(key: str) -> int:
        assert not key.startswith("lease:") or int(engine.producer._slots._slots[lease.slot, 1]) == 0
        return real(key)

    monkeypatch.setattr(engine.manager, "release", release)
    assert released(step(engine, 30 * NS)[1]) == [True]


def test_a_grant_covers_the_computed_tokens_only() -> None:
    engine = make_engine()
    lease = produce(engine, length=8)
    assert (lease.num_tokens, len(lease.block_ids)) == (8, 2)
    lease = produce(engine, "q", length=9)
    assert (lease.num_tokens, len(lease.block_ids)) == (9, 3)
    engine = make_engine()
    step(engine, 0, [new_request("r", 8, 3, produce=True)])
    step(engine)
    _, events = step(engine)
    outcome = next(event for event in events if isinstance(event, Finished))
    assert outcome.lease is not None
    assert (outcome.lease.num_tokens, len(outcome.lease.block_ids)) == (10, 3)  # the third token was only sampled


def test_an_abort_keeps_nothing() -> None:
    engine = make_engine()
    step(engine, 0, [new_request("r", 8, 9, produce=True)])
    _, events = step(engine, 0, [Abort("r")])
    outcome = next(event for event in events if isinstance(event, Finished))
    assert (outcome.reason, outcome.lease) == (FinishReason.ABORT, None)
    assert_all_free(engine)


def test_an_abort_that_comes_after_the_end_takes_the_lease_back() -> None:
    """The client left during the step that finished its prefill: nobody will ever be told of the grant."""
    engine = make_engine()
    kept = produce(engine, "kept")
    produce(engine, "left")
    _, events = step(engine, 0, [Abort("left")])
    assert released(events) == [False]
    assert engine.memory().accounts["retained"] == len(kept.block_ids)
    for item in (Abort("left"), Abort("kept", FinishReason.STOP)):  # the front end's word on its own text: it is there
        _, events = step(engine, 0, [item])
        assert not released(events)


@pytest.mark.parametrize("outstanding", [1, 2])
def test_no_grant_of_kv_that_is_not_written_yet(outstanding: int) -> None:
    """The front end ends a request (a stop string) in the middle of its prefill, or while a plan still writes."""
    engine = make_engine(max_num_batched_tokens=8, max_outstanding_plans=outstanding)
    plan = engine.schedule(0, [new_request("r", 20, 9, produce=True)])
    if outstanding == 1:
        engine.complete(plan.step_id, Outputs(tokens=np.zeros(1, dtype=np.int32)), 0)
    stopped = engine.schedule(0, [Abort("r", FinishReason.STOP)])
    outcome = next(event for event in stopped.events if isinstance(event, Finished))
    assert outcome.lease is None
    if outstanding == 2:
        engine.complete(plan.step_id, Outputs(tokens=np.zeros(1, dtype=np.int32)), 0)
    engine.complete(stopped.step_id, Outputs(tokens=np.zeros(0, dtype=np.int32)), 0)
    engine.check()
    assert_all_free(engine)


def test_leases_pin_at_most_their_share() -> None:
    engine = make_engine(num_blocks=21, max_leased_fraction=0.5)  # 10 of 20 blocks
    first = produce(engine, "a", 20)
    produce(engine, "b", 20)
    plan, _ = step(engine, 0, [new_request("c", 4, 1, produce=True), new_request("local", 4, 2)])
    assert plan.batch.request_ids == ("local",)  # others are not held up
    assert "max-leased-fraction" in engine.requests["c"].wait_cause
    plan, _ = step(engine, NS, [FromConsumer(Done(first.token, "D"), NS)])
    assert "c" in plan.batch.request_ids


def test_running_prefills_count_towards_the_share() -> None:
    engine = make_engine(num_blocks=21, max_leased_fraction=0.5)
    plan, _ = step(engine, 0, [new_request(name, 16, 1, produce=True) for name in "abc"])
    assert plan.batch.request_ids == ("a", "b")


def test_a_prompt_beyond_the_share_is_let_in_alone() -> None:
    engine = make_engine(num_blocks=21, max_leased_fraction=0.2)
    assert len(produce(engine, "big", 32).block_ids) == 8


def test_prompts_of_one_answer_do_not_wait_for_each_others_leases() -> None:
    """None of them is read before all have ended: what has no room in the share is computed without a lease."""
    engine = make_engine(num_blocks=21, max_leased_fraction=0.5)
    kept: dict[str, bool] = {}
    inbox: list[InboxItem] = [new_request(name, 16, 1, produce=True, answer_id="one") for name in "abcd"]
    inbox.append(new_request("other", 16, 1, produce=True))
    for _ in range(4):
        _, events = step(engine, 0, inbox)
        kept |= {event.request_id: event.lease is not None for event in events if isinstance(event, Finished)}
        inbox = []
    assert kept == {"a": True, "b": True, "c": False, "d": False}
    assert "max-leased-fraction" in engine.requests["other"].wait_cause


def test_two_answers_of_many_prompts_do_not_wait_for_each_other() -> None:
    engine = make_engine(num_blocks=21, max_leased_fraction=0.5)
    names = ["a0", "b0", "a1", "b1"]
    inbox: list[InboxItem] = [new_request(name, 16, 1, produce=True, answer_id=name[0]) for name in names]
    ended: list[str] = []
    for _ in range(4):
        _, events = step(engine, 0, inbox)
        ended += [event.request_id for event in events if isinstance(event, Finished)]
        inbox = []
    assert sorted(ended) == sorted(names)


def test_without_a_free_slot_nobody_waits_for_ever() -> None:
    engine = make_engine(slots=1)
    lease = produce(engine)
    plan, _ = step(engine, 0, [new_request("next", 8, 1, produce=True)])
    assert len(plan.batch) == 0
    plan, events = step(engine, 1, [FromConsumer(Done(lease.token, "D"), 1)])
    assert any(isinstance(event, Finished) and event.lease is not None for event in events)


def test_a_leased_prompt_can_be_hit_and_is_counted_once() -> None:
    engine = make_engine()
    prompt = counting_prompt(13)
    step(engine, 0, [new_request("p", prompt, 1, produce=True)])
    step(engine, 0, [new_request("r", prompt, 5)])
    accounts = engine.memory().accounts
    assert (accounts["running"], accounts["retained"]) == (4, 1)  # three shared ones count as running
    step(engine, 0, [Abort("r")])
    assert engine.memory().accounts["retained"] == 4


def test_prefills_under_way_have_their_slots_kept() -> None:
    """Otherwise the second to finish would get no lease, and its consumer would compute the prompt again."""
    engine = make_engine(slots=1)
    plan, events = step(engine, 0, [new_request(name, 8, 1, produce=True) for name in "ab"])
    assert plan.batch.request_ids == ("a",)
    lease = next(event.lease for event in events if isinstance(event, Finished))
    assert lease is not None
    _, events = step(engine, 1, [FromConsumer(Done(lease.token, "D"), 1)])
    assert [event.lease is not None for event in events if isinstance(event, Finished)] == [True]


def test_no_prefill_for_a_peer_passes_one_that_waits_for_its_share() -> None:
    """A large prompt at the limit of the leases gets its turn although small ones keep coming."""
    engine = make_engine(
        num_blocks=101, block_size=16, max_model_len=1024, max_leased_fraction=0.5, max_num_batched_tokens=4096
    )
    now = 0
    done: list[str] = []
    leases: list[tuple[int, bytes]] = []

    def go(inbox: list[InboxItem]) -> None:
        nonlocal now
        now += 1_000_000
        plan = engine.schedule(now, inbox)
        events = engine.complete(plan.step_id, Outputs(np.ones(len(plan.batch), dtype=np.int32)), now)
        for event in events:
            if isinstance(event, Finished):
                done.append(event.request_id)
                assert event.lease is not None
                leases.append((now + 3_000_000, event.lease.token))

    go([NewRequest(request_id="s0", prompt=np.arange(16 * 10, dtype=np.int32), max_tokens=1, produce=True)])
    big = NewRequest(request_id="big", prompt=np.arange(16 * 45, dtype=np.int32) + 7, max_tokens=1, produce=True)
    for number in range(1, 40):
        small = NewRequest(
            request_id=f"s{number}", prompt=np.arange(160, dtype=np.int32) + 1000 * number, max_tokens=1, produce=True
        )
        ended = [FromConsumer(Done(token, "d"), now) for at, token in leases if at <= now]
        leases = [(at, token) for at, token in leases if at > now]
        go([*([big] if number == 1 else []), small, *ended])
    assert "big" in done
    assert done.index("big") < 12
