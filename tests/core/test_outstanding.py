"""Two plans outstanding: the same tokens as with one and as without an engine, and no block reused before its fence."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from tests.core.helpers import (
    Cache,
    assert_all_free,
    counting_prompt,
    finished_of,
    make_engine,
    new_request,
    reference_output,
    tokens_of,
)

from pdkv.core.config import STRICT, VLLM
from pdkv.core.engine import Engine
from pdkv.core.events import Event, Preempted
from pdkv.core.ports import Abort, InboxItem, NewRequest, Outputs, Plan


def workload(seed: int, *, aborts: bool) -> tuple[dict[str, Any], list[tuple[int, InboxItem]]]:
    """A config and what arrives at which step. Prompts share prefixes, so hits and duplicates happen all the time."""
    rng = np.random.default_rng(seed)
    config = {
        "num_blocks": int(rng.integers(14, 30)),
        "block_size": 4,
        "max_model_len": 44,
        "max_num_seqs": int(rng.integers(1, 7)),
        "max_num_batched_tokens": int(rng.choice([8, 16, 48])),
        "long_prefill_token_threshold": int(rng.choice([0, 0, 5])),
        "watermark": float(rng.choice([0.0, 0.1])),
        "priority_scheduling": bool(rng.random() < 0.4),
        "enable_prefix_caching": bool(rng.random() < 0.85),
        "transfer": STRICT if rng.random() < 0.5 else VLLM,
    }
    families = [rng.integers(0, 50, 40, dtype=np.int32) for _ in range(2)]
    items: list[tuple[int, InboxItem]] = []
    for number in range(int(rng.integers(6, 16))):
        family = families[int(rng.integers(2))]
        prompt = family[: int(rng.integers(1, 36))].copy()
        if rng.random() < 0.3:
            prompt[-1] = 77
        new = NewRequest(
            request_id=f"r{number}",
            prompt=prompt,
            max_tokens=int(rng.integers(1, 25)),
            min_tokens=int(rng.integers(0, 4)),
            stop_token_ids=frozenset(rng.integers(0, 1000, 60).tolist()) if rng.random() < 0.5 else frozenset(),
            priority=int(rng.integers(0, 3)),
            cache_salt="s" if rng.random() < 0.1 else None,
        )
        at = int(rng.integers(0, 25))
        items.append((at, new))
        if aborts and rng.random() < 0.25:
            items.append((at + int(rng.integers(0, 20)), Abort(new.request_id)))
    items.sort(key=lambda item: item[0])
    return config, items


class Device:
    """Executes plans in order, up to ``depth`` of them behind the schedule, on a pool whose content is judged."""

    def __init__(self, engine: Engine, depth: int) -> None:
        self.engine, self.depth = engine, depth
        self.cache = Cache(engine.config.num_blocks, engine.config.block_size)
        self.queue: deque[Plan] = deque()
        self.events: list[Event] = []
        self.idle = 0

    def step(self, inbox: list[InboxItem], lag: bool) -> None:
        for item in inbox:
            if isinstance(item, NewRequest):
                self.cache.add(item)
        plan = self.engine.schedule(0, inbox)
        self.engine.check()
        self.idle = 0 if len(plan.batch) else self.idle + 1
        self.events += plan.events
        self.queue.append(plan)
        while len(self.queue) >= self.depth and self.queue:
            self.finish_one()
        if not lag:
            self.drain()

    def finish_one(self) -> None:
        plan = self.queue.popleft()
        outputs = self.cache.run(plan.batch)
        self.events += self.engine.complete(plan.step_id, outputs, 0)
        self.engine.check()

    def drain(self) -> None:
        while self.queue:
            self.finish_one()


def run(seed: int, depth: int, *, aborts: bool = False, config: dict[str, Any] | None = None) -> Device:
    base, items = workload(seed, aborts=aborts)
    device = Device(make_engine(**(base | (config or {}) | {"max_outstanding_plans": depth})), depth)
    rng = np.random.default_rng(seed + 1)
    pending, number = deque(items), 0
    while pending or device.engine.requests:
        inbox = []
        while pending and pending[0][0] <= number:
            inbox.append(pending.popleft()[1])
        device.step(inbox, lag=bool(rng.random() < 0.9))
        number += 1
        assert device.idle < 40, (
            f"seed {seed}: nothing moves: {[r.wait_cause for r in device.engine.requests.values()]}"
        )
    device.drain()
    assert_all_free(device.engine)
    return device


@pytest.mark.parametrize("seed", range(24))
def test_same_tokens_as_one_plan_and_as_no_engine(seed: int) -> None:
    config, items = workload(seed, aborts=False)
    two, one = run(seed, 2), run(seed, 1)
    expected = {
        new.request_id: reference_output(new, config["max_model_len"])
        for _, new in items
        if isinstance(new, NewRequest)
    }
    assert tokens_of(one.events) == expected
    assert tokens_of(two.events) == expected
    assert set(finished_of(two.events)) == set(expected)
    for request_id, outcome in finished_of(two.events).items():
        assert outcome.output_tokens == len(expected[request_id])


@pytest.mark.parametrize("seed", range(100, 122))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_aborts_at_any_time(seed: int, depth: int) -> None:
    config, items = workload(seed, aborts=True)
    device = run(seed, depth, aborts=True)
    produced, outcomes = tokens_of(device.events), finished_of(device.events)
    for _, item in items:
        if isinstance(item, NewRequest):
            expected = reference_output(item, config["max_model_len"])
            got = produced.get(item.request_id, [])
            assert got == expected[: len(got)]
            if outcomes[item.request_id].reason.value != "abort":
                assert got == expected


def test_workloads_do_what_they_are_for() -> None:
    """Enough of them preempt, or the tests above would prove little."""
    preempting = sum(any(isinstance(event, Preempted) for event in run(seed, 2).events) for seed in range(12))
    assert preempting >= 4


def test_a_skipped_fence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: blocks of a request that ends while a plan is in flight are freed at once."""
    from pdkv.core.scheduler.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "_in_flight", lambda self, request: False)
    caught = 0
    for seed in range(100, 118):
        try:
            run(seed, 3, aborts=True)
        except (AssertionError, KeyError):
            caught += 1
    assert caught >= 3


def test_rows_of_an_ended_request_are_ignored() -> None:
    """A stop token seen at plan n: plan n+1 has already a row for it, whose token is dropped, and holds its blocks."""
    engine = make_engine(max_outstanding_plans=2)
    new = new_request("r", counting_prompt(8), 20, stop_token_ids=frozenset({5}))
    first = engine.schedule(0, [new])
    second = engine.schedule(0)
    assert second.batch.pending.tolist() == [True]
    assert second.batch.tokens.tolist() == [0]
    assert second.batch.num_computed.tolist() == [8]
    events = engine.complete(first.step_id, Outputs(tokens=np.asarray([5], dtype=np.int32)), 0)
    assert finished_of(events)["r"].output_tokens == 1
    assert engine.memory().accounts["deferred"] == 3
    events = engine.complete(second.step_id, Outputs(tokens=np.asarray([9], dtype=np.int32)), 0)
    assert events == ()
    assert_all_free(engine)


def test_no_row_beyond_the_last_possible_token() -> None:
    engine = make_engine(max_outstanding_plans=3)
    first = engine.schedule(0, [new_request("r", counting_prompt(8), 2)])
    second, third = engine.schedule(0), engine.schedule(0)
    assert [len(plan.batch) for plan in (first, second, third)] == [1, 1, 0]


def test_plans_are_completed_in_order_and_counted() -> None:
    engine = make_engine(max_outstanding_plans=2)
    first = engine.schedule(0)
    second = engine.schedule(0)
    with pytest.raises(AssertionError, match="too many plans"):
        engine.schedule(0)
    with pytest.raises(AssertionError, match="out of order"):
        engine.complete(second.step_id, Outputs(tokens=np.zeros(0, dtype=np.int32)), 0)
    assert first.step_id == 0
