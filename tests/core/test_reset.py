"""Resetting the prefix cache: only in an idle pool, after running requests were preempted, never over a transfer."""

from __future__ import annotations

import pytest
from tests.core.helpers import (
    arrived,
    assert_all_free,
    counting_prompt,
    finished_of,
    make_engine,
    new_request,
    source_for,
    step,
)

from pdkv.core.blocks.kv_events import AllBlocksCleared
from pdkv.core.events import Preempted
from pdkv.errors import BlocksInUse


def test_an_idle_pool_forgets_and_a_busy_one_does_not() -> None:
    engine = make_engine(kv_events=True)
    step(engine, 0, [new_request("a", counting_prompt(12), max_tokens=3)])
    assert not engine.reset_prefix_cache(1)
    assert [request.request_id for request in engine.scheduler.running] == ["a"]
    while engine.requests:
        step(engine, 2)
    assert engine.memory().accounts["cached"] == 3
    engine.take_kv_events()
    assert engine.reset_prefix_cache(3)
    assert engine.take_kv_events() == (AllBlocksCleared(),)
    assert engine.memory().accounts["cached"] == 0
    plan, _ = step(engine, 4, [new_request("b", counting_prompt(12), max_tokens=1)])
    assert plan.batch.num_computed.tolist() == [0]


def test_running_requests_are_preempted_and_resume_in_order() -> None:
    engine = make_engine()
    step(engine, 0, [new_request(name, counting_prompt(9, 100 * i), max_tokens=6) for i, name in enumerate("abc")])
    step(engine, 1)
    assert engine.reset_prefix_cache(2, reset_running_requests=True)
    engine.check()
    assert_all_free(engine)
    plan, events = step(engine, 3)
    assert [event.request_id for event in plan.events if isinstance(event, Preempted)] == ["c", "b", "a"]
    assert plan.batch.request_ids == ("a", "b", "c")
    assert plan.batch.num_computed.tolist() == [0, 0, 0]
    assert plan.batch.num_scheduled.tolist() == [11, 11, 10]  # the step's budget of 32 tokens
    outcomes = finished_of(events)
    while engine.requests:
        outcomes |= finished_of(step(engine, 4)[1])
    assert {name: outcome.output_tokens for name, outcome in outcomes.items()} == {"a": 6, "b": 6, "c": 6}


def test_a_load_under_way_is_never_reset() -> None:
    engine = make_engine()
    plan, _ = step(engine, 0, [new_request("load", counting_prompt(8), source=source_for(8, 4)), new_request("b", 5)])
    with pytest.raises(BlocksInUse, match=r"2 blocks are still held, by load \(2, loading\)"):
        engine.reset_prefix_cache(1, reset_running_requests=True)
    engine.check()
    _, events = step(engine, 2, [arrived(plan)])
    outcomes = finished_of(events)
    while engine.requests:
        outcomes |= finished_of(step(engine, 3)[1])
    assert set(outcomes) == {"load", "b"}
    assert engine.reset_prefix_cache(4, reset_running_requests=True)
