"""D's side: policies, shared loads, deadlines, fences, and every way in which a request with a source can end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.core.helpers import (
    NS,
    PEER,
    arrived,
    assert_all_free,
    counting_prompt,
    failed,
    finished_of,
    make_engine,
    new_request,
    source_for,
    step,
)

from pdkv.core.config import STRICT, VLLM
from pdkv.core.engine import Engine
from pdkv.core.events import Admitted, Fenced, FinishReason, LoadFailed, LoadFinished, Preempted, Quarantined
from pdkv.core.ports import Abort, Decline, MoverRestarted, NewRequest, Plan, ReadEnded
from pdkv.core.transfer.messages import Done


def loading(name: str = "r", length: int = 20, lease_id: int = 1, **more: Any) -> NewRequest:
    return new_request(name, counting_prompt(length, more.pop("start", 0)), more.pop("max_tokens", 4),
                       source=source_for(more.pop("tokens", length), 4, lease_id=lease_id), **more)  # fmt: skip


def dones(plan: Plan) -> list[int]:
    """Lease ids (as `source_for` makes their tokens) that the plan says are needed no longer."""
    return [int.from_bytes(m.message.token, "little") for m in plan.messages if isinstance(m.message, Done)]


def run_out(engine: Engine, now_ns: int = 0) -> None:
    for _ in range(200):
        if not engine.requests:
            break
        step(engine, now_ns)
    assert not engine.requests


def test_a_load_from_arrival_to_the_end() -> None:
    engine = make_engine()
    plan, events = step(engine, 0, [loading()])
    assert [(k.peer, k.tokens) for k in plan.keepalives] == [(PEER, (source_for(20, 4).grant.token,))]
    assert plan.reads[0].remote_blocks.tolist() == [1, 2, 3, 4, 5]
    assert plan.reads[0].local_blocks.tolist() == engine.manager.blocks_of("r").tolist()
    assert plan.next_deadline_ns == 60 * NS
    assert engine.memory().accounts["loading"] == 5
    admitted = next(event for event in events if isinstance(event, Admitted))
    assert (admitted.local_tokens, admitted.external_tokens) == (0, 20)
    plan, events = step(engine, NS, [arrived(plan)])
    assert any(isinstance(event, LoadFinished) for event in events)
    assert dones(plan) == [1]
    assert plan.keepalives == ()
    assert plan.batch.num_computed.tolist() == [19]  # only the last token is computed again, to sample from it
    assert plan.batch.num_scheduled.tolist() == [1]
    assert engine.memory().accounts["running"] == 5
    run_out(engine)
    assert_all_free(engine)


def test_heartbeats_start_at_arrival_long_before_a_block_is_held() -> None:
    engine = make_engine(num_blocks=9)
    step(engine, 0, [new_request("x", 20, 12)])
    plan, _ = step(engine, 0, [loading(length=28)])
    assert plan.reads == ()
    assert len(plan.keepalives) == 1
    assert engine.manager.num_blocks_of("r") == 0
    plan, _ = step(engine, 0, [Abort("r")])
    assert dones(plan) == [1]
    assert plan.keepalives == ()


def test_keepalives_name_every_lease_by_peer() -> None:
    engine = make_engine()
    plan, _ = step(engine, 0, [loading(f"r{i}", lease_id=i, start=100 * i) for i in (1, 2, 3)])
    assert len(plan.keepalives) == 1
    assert len(plan.keepalives[0].tokens) == 3


def test_a_local_hit_trims_both_lists() -> None:
    engine = make_engine()
    step(engine, 0, [new_request("old", counting_prompt(9), 1)])
    plan, events = step(engine, 0, [loading()])
    read = plan.reads[0]
    assert read.remote_blocks.tolist() == [3, 4, 5]
    assert read.local_blocks.tolist() == engine.manager.blocks_of("r").tolist()[2:]
    admitted = next(event for event in events if isinstance(event, Admitted))
    assert (admitted.local_tokens, admitted.external_tokens) == (8, 12)


def test_a_full_local_hit_reads_nothing_and_tells_p() -> None:
    engine = make_engine()
    step(engine, 0, [new_request("old", counting_prompt(20), 1)])
    plan, _ = step(engine, 0, [loading(length=17, tokens=16)])
    assert plan.reads == ()
    assert dones(plan) == [1]
    assert plan.batch.num_computed.tolist() == [16]


def test_a_partly_covered_prompt_is_computed_from_there() -> None:
    engine = make_engine()
    plan, _ = step(engine, 0, [loading(length=20, tokens=10)])
    assert plan.reads[0].remote_blocks.tolist() == [1, 2, 3]
    plan, _ = step(engine, 0, [arrived(plan)])
    assert (plan.batch.num_computed.tolist(), plan.batch.num_scheduled.tolist()) == ([10], [10])


@pytest.mark.parametrize("slot", [(99, 0), (99, 2), (98, 1), (0, 0)])
def test_data_is_never_used_when_the_slot_names_another_lease(slot: tuple[int, int]) -> None:
    engine = make_engine()
    plan, _ = step(engine, 0, [loading()])
    plan, events = step(engine, 0, [ReadEnded(handle=plan.reads[0].handle, slot=slot)])
    cause = next(event.cause for event in events if isinstance(event, LoadFailed))
    assert "the lease ended before the data had arrived" in cause
    assert plan.batch.num_scheduled.tolist() == [20]  # computed here, all of it
    assert engine.manager.pool.ledger.num_hashed == 5


def test_failure_policies() -> None:
    for policy, outcome in (("recompute", None), ("fail", FinishReason.ERROR)):
        engine = make_engine(transfer=replace(STRICT, load_failure=policy))
        plan, _ = step(engine, 0, [loading()])
        plan, events = step(engine, 0, [failed(plan.reads[0].handle)])
        finished = finished_of(events).get("r")
        assert (finished.reason if finished else None) is outcome
        assert dones(plan) == [1]
        if finished:
            assert "the network broke" in str(finished.error)
            assert_all_free(engine)
        else:
            assert plan.batch.num_scheduled.tolist() == [20]
            assert plan.reads == ()


# ------------------------------------------------------------------------------------------------- shared loads


def test_a_second_request_waits_for_the_first_load_and_then_hits() -> None:
    engine = make_engine()
    plan, _ = step(engine, 0, [loading("a", lease_id=1)])
    second, _ = step(engine, 0, [loading("b", lease_id=2), loading("other", start=500, lease_id=3)])
    assert [read.source.grant.lease_id for read in second.reads] == [3]  # others are not held up
    assert engine.requests["b"].wait_cause == "the same prefix is being loaded for a"
    assert engine.manager.num_blocks_of("b") == 0
    plan, events = step(engine, 0, [arrived(plan)])
    admitted = {event.request_id: event for event in events if isinstance(event, Admitted)}
    assert (admitted["b"].local_tokens, admitted["b"].external_tokens) == (16, 4)  # the tail of its own
    assert [read.remote_blocks.tolist() for read in plan.reads] == [[5]]


def test_the_second_loads_itself_when_the_first_fails() -> None:
    engine = make_engine(transfer=replace(STRICT, load_failure="fail"))
    plan, _ = step(engine, 0, [loading("a", lease_id=1)])
    step(engine, 0, [loading("b", lease_id=2)])
    plan, _ = step(engine, 0, [failed(plan.reads[0].handle)])
    assert [read.source.grant.lease_id for read in plan.reads] == [2]


def test_vllm_loads_both_copies() -> None:
    engine = make_engine(transfer=VLLM)
    plan, _ = step(engine, 0, [loading("a", lease_id=1), loading("b", lease_id=2)])
    assert [read.source.grant.lease_id for read in plan.reads] == [1, 2]


def test_another_salt_is_another_prefix() -> None:
    engine = make_engine()
    plan, _ = step(engine, 0, [loading("a", lease_id=1), loading("b", lease_id=2, cache_salt="x")])
    assert len(plan.reads) == 2


# ---------------------------------------------------------------------------------------------- deadlines, fences


def test_a_load_that_never_comes() -> None:
    engine = make_engine()
    plan, _ = step(engine, 0, [loading()])
    handle = plan.reads[0].handle
    plan, events = step(engine, 60 * NS - 1)
    assert not events
    plan, events = step(engine, 60 * NS)
    assert [type(event) for event in events if event.request_id == "r"][:2] == [LoadFailed, Quarantined]
    assert plan.cancels == (handle,)
    assert plan.batch.num_scheduled.tolist() == [20]
    assert engine.memory().accounts["quarantine"] == 5
    assert not plan.restart_mover
    assert plan.next_deadline_ns == 70 * NS
    plan, _ = step(engine, 70 * NS)
    assert plan.restart_mover  # a timer alone never frees: the mover is killed
    assert engine.memory().accounts["quarantine"] == 5
    plan, _ = step(engine, 71 * NS)
    assert not plan.restart_mover
    plan, events = step(engine, 72 * NS, [MoverRestarted((handle,))])
    assert [event.blocks for event in events if isinstance(event, Fenced)] == [5]
    assert engine.memory().accounts["quarantine"] == 0
    plan, events = step(engine, 73 * NS, [arrived_late(handle)])
    assert not any(isinstance(event, Fenced | LoadFinished) for event in events)
    run_out(engine, 73 * NS)
    assert_all_free(engine)


def arrived_late(handle: int) -> ReadEnded:
    return ReadEnded(handle=handle, slot=(99, 1))


def test_a_given_up_read_frees_its_blocks_when_it_ends() -> None:
    engine = make_engine()
    step(engine, 0, [new_request("old", counting_prompt(9), 1)])
    plan, _ = step(engine, 0, [loading()])
    handle = plan.reads[0].handle
    plan, events = step(engine, 0, [Abort("r")])
    assert finished_of(events)["r"].reason is FinishReason.ABORT
    assert (plan.cancels, dones(plan)) == ((handle,), [1])
    accounts = engine.memory().accounts
    assert (accounts["quarantine"], accounts["cached"]) == (3, 2)  # the hit was not written to: free at once
    _, events = step(engine, 0, [arrived_late(handle)])
    assert any(isinstance(event, Fenced) for event in events)
    assert not any(isinstance(event, LoadFinished) for event in events)
    assert_all_free(engine)


def test_a_killed_mover_s_other_reads_are_posted_again() -> None:
    engine = make_engine()
    plan, _ = step(engine, 0, [loading("a", lease_id=1), loading("b", lease_id=2, start=500)])
    old = {read.source.grant.lease_id: read for read in plan.reads}
    step(engine, 0, [Abort("a")])
    plan, events = step(engine, 0, [MoverRestarted((old[1].handle, old[2].handle))])
    assert [event.handle for event in events if isinstance(event, Fenced)] == [old[1].handle]
    assert [read.source.grant.lease_id for read in plan.reads] == [2]
    assert plan.reads[0].handle > old[2].handle
    assert plan.reads[0].local_blocks.tolist() == old[2].local_blocks.tolist()
    _, events = step(engine, 0, [arrived_late(old[2].handle)])  # of the dead: no news
    assert not events
    plan, events = step(engine, 0, [ReadEnded(handle=plan.reads[0].handle, slot=(99, 2))])
    assert plan.batch.request_ids == ("b",)


def test_reads_still_queued_survive_a_restart() -> None:
    engine = make_engine()
    plan, _ = step(engine, 0, [loading("a", lease_id=1), loading("b", lease_id=2, start=500)])
    first, second = plan.reads
    again, _ = step(engine, 0, [MoverRestarted((first.handle,))])
    assert [read.source.grant.lease_id for read in again.reads] == [1]
    plan, _ = step(engine, 0, [ReadEnded(handle=second.handle, slot=(99, 2))])
    assert plan.batch.request_ids == ("b",)


def test_a_read_queued_across_a_restart_gets_its_time_from_the_new_mover() -> None:
    """A given-up READ that was not handed over yet is reported by the new mover: that one is not killed at once."""
    engine = make_engine()
    plan, _ = step(engine, 0, [loading()])
    step(engine, 0, [Abort("r")])
    plan, _ = step(engine, 10 * NS)
    assert plan.restart_mover
    plan, _ = step(engine, 11 * NS, [MoverRestarted(())])
    assert not plan.restart_mover
    assert plan.next_deadline_ns == 21 * NS
    plan, _ = step(engine, 21 * NS)
    assert plan.restart_mover


def test_vllm_bounds_nothing() -> None:
    engine = make_engine(transfer=VLLM)
    plan, _ = step(engine, 0, [loading()])
    assert plan.next_deadline_ns is None
    plan, events = step(engine, 10**6 * NS)
    assert not events
    step(engine, 10**6 * NS, [Abort("r")])
    plan, _ = step(engine, 10**7 * NS)
    assert not plan.restart_mover
    assert engine.memory().accounts["quarantine"] == 5


# ------------------------------------------------------------------------------------ loaded, and no place to run


def two_loaded(**config: Any) -> Engine:
    """ "a" runs in the only slot; "b" and "c" have their KV and wait for a place."""
    engine = make_engine(max_num_seqs=1, **config)
    plan, _ = step(engine, 0, [loading(name, lease_id=i, start=500 * i, max_tokens=90) for i, name in enumerate("abc")])
    step(engine, 5 * NS, [ReadEnded(handle=read.handle, slot=(99, read.source.grant.lease_id)) for read in plan.reads])
    assert engine.memory().accounts["loaded_waiting"] == 10
    return engine


@pytest.mark.parametrize("caching", [True, False])
def test_a_loaded_request_without_a_place_gives_its_blocks_back_in_time(caching: bool) -> None:
    engine = two_loaded(enable_prefix_caching=caching)
    assert engine.next_deadline_ns() == 65 * NS
    assert {h.deadline_ns for h in engine.memory().holders if h.account == "loaded_waiting"} == {65 * NS}
    _, events = step(engine, 65 * NS - 1)
    assert not any(isinstance(event, Preempted) for event in events)
    plan, events = step(engine, 65 * NS)
    assert [event.request_id for event in events if isinstance(event, Preempted)] == ["c", "b"]
    accounts = engine.memory().accounts
    assert (accounts["loaded_waiting"], accounts["cached"]) == (0, 10 if caching else 0)
    assert plan.next_deadline_ns is None
    assert "no place" in engine.requests["b"].wait_cause
    plan, events = step(engine, 65 * NS, [Abort("a")])
    (again,) = [event for event in events if isinstance(event, Admitted)]
    assert (again.request_id, again.resumed) == ("b", True)  # still before "c", and not counted twice
    assert (plan.batch.num_computed[0], plan.batch.num_scheduled[0]) == ((16, 4) if caching else (0, 20))
    run_out(engine, 66 * NS)
    assert_all_free(engine)


def test_vllm_lets_a_loaded_request_hold_its_blocks_without_end() -> None:
    engine = two_loaded(transfer=VLLM)
    assert engine.next_deadline_ns() is None
    step(engine, 10**6 * NS)
    assert engine.memory().accounts["loaded_waiting"] == 10


# ------------------------------------------------------------------------------------------------------- ways out


def test_decline_tells_the_producer() -> None:
    plan, _ = step(make_engine(), 0, [Decline(source_for(20, 4, lease_id=6))])
    assert dones(plan) == [6]
    assert plan.messages[0].peer == PEER


def test_abort_of_an_unknown_request_is_no_news() -> None:
    _, events = step(make_engine(), 0, [Abort("nobody")])
    assert events == ()


def test_abort_behind_the_failure_that_ended_the_request() -> None:
    """Both in one inbox: the request has one outcome, and the engine lives."""
    engine = make_engine(transfer=replace(STRICT, load_failure="fail"))
    plan, _ = step(engine, 0, [loading()])
    _, events = step(engine, 0, [failed(plan.reads[0].handle), Abort("r"), Abort("r")])
    assert finished_of(events)["r"].reason is FinishReason.ERROR
    assert_all_free(engine)


def test_abort_of_a_loaded_request() -> None:
    engine = make_engine(max_num_seqs=1)
    step(engine, 0, [new_request("x", 4, 20)])
    plan, _ = step(engine, 0, [loading()])
    assert plan.reads == ()  # no running slot: admission is not reached
    engine = make_engine(max_num_seqs=1)
    plan, _ = step(engine, 0, [loading("a", lease_id=1), loading("b", lease_id=2, start=500)])
    step(engine, 0, [arrived(plan, 0), arrived(plan, 1)])
    assert engine.memory().accounts["loaded_waiting"] == 5
    step(engine, 0, [Abort("b")])
    assert engine.memory().accounts["loaded_waiting"] == 0
    run_out(engine)
    assert_all_free(engine)


def test_a_preempted_request_is_computed_here_and_gives_the_same_tokens() -> None:
    engine = make_engine(num_blocks=12)
    plan, _ = step(engine, 0, [loading("a", 16, 1, max_tokens=12), loading("b", 16, 2, start=500, max_tokens=12)])
    _, events = step(engine, 0, [arrived(plan, 0), arrived(plan, 1)], token=lambda name: ord(name))
    seen = list(events)
    for _ in range(60):
        plan, events = step(engine, 0, token=lambda name: ord(name))
        assert plan.reads == ()  # the producer's copy is gone
        seen += events
    assert any(isinstance(event, Preempted) for event in seen)
    resumed = [event for event in seen if isinstance(event, Admitted) and event.resumed]
    assert resumed
    assert all(event.external_tokens == 0 for event in resumed)
    assert {name: end.output_tokens for name, end in finished_of(seen).items()} == {"a": 12, "b": 12}
    assert_all_free(engine)


def test_priority_decides_who_comes_and_who_goes() -> None:
    engine = make_engine(num_blocks=11, max_num_seqs=2, priority_scheduling=True)
    first = [new_request("low", 16, 20, priority=5), new_request("high", 16, 20, priority=1)]
    plan, _ = step(engine, 0, [*first, new_request("mid", 16, 20, priority=3)])
    assert plan.batch.request_ids == ("high", "mid")
    lost: list[str] = []
    for _ in range(12):
        _, events = step(engine)
        lost += [event.request_id for event in events if isinstance(event, Preempted)]
    assert lost == ["mid"]


def test_a_victim_chosen_earlier_in_the_step_leaves_no_promise_behind() -> None:
    """Priority can take back what this very step gave: blocks it was to fill must not be hit by anybody."""
    engine = make_engine(
        num_blocks=9, priority_scheduling=True, max_num_batched_tokens=12, long_prefill_token_threshold=8
    )
    step(engine, 0, [new_request("late", counting_prompt(28), 3, priority=9)])  # 12 tokens: 3 blocks
    step(engine, 0, [new_request("soon", counting_prompt(4, 500), 3, priority=1)])  # 8 and 4: 5 and 1 blocks
    late = engine.requests["late"]
    plan, events = step(engine)  # late gets its last two blocks, then soon needs one
    assert [(event.request_id, event.lost_tokens) for event in events if isinstance(event, Preempted)] == [("late", 20)]
    assert plan.batch.request_ids == ("soon",)
    assert len(engine.manager.pool.indexes[0].lookup(late.hashes)) == 5  # not the sixth: nobody has written it


def test_a_step_that_only_preempted_is_followed_by_another_at_once() -> None:
    """Its batch is empty, yet the next step can admit: whoever waits for news or for a deadline must not sleep."""
    engine = make_engine(num_blocks=9, max_num_seqs=1)
    plan, _ = step(engine, 0, [loading("a", 16, 1), loading("b", 16, 2, start=500)])
    plan, _ = step(engine, 5, [arrived(plan, 0), arrived(plan, 1)])
    assert plan.batch.request_ids == ("a",)
    plan, events = step(engine, 7)
    assert [event.request_id for event in events if isinstance(event, Preempted)] == ["a"]
    assert len(plan.batch) == 0
    assert plan.next_deadline_ns == 7
    plan, _ = step(engine, 7)
    assert plan.batch.request_ids == ("b",)
    assert plan.next_deadline_ns is None
