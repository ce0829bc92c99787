"""Requests that decode are served together; what comes of it is what single calls come to, to the last block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.core.group_cache import GroupCache
from tests.core.helpers import assert_all_free, make_engine, new_request, step
from tests.core.test_groups_engine import GROUPS, random_request

from pdkv.core.blocks import growth
from pdkv.core.blocks.groups import FullGroup, WindowGroup
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.blocks.tables import BlockTable, TableStore
from pdkv.core.engine import Engine
from pdkv.core.events import Preempted
from pdkv.core.ports import Abort, InboxItem, NewRequest, Outputs, Plan
from pdkv.core.scheduler.running import RunningSet

CASES = GROUPS | {"full": ((FullGroup(block_size=4),), None)}


def state(engine: Engine) -> dict[str, Any]:
    """Everything in which the two ways could differ."""
    manager, pool = engine.manager, engine.manager.pool
    return {
        "tables": {
            key: [hold.table.ids.tolist() for hold in holder.groups] for key, holder in manager._holders.items()
        },
        "marks": {
            key: [(hold.num_hashed, hold.num_dropped) for hold in holder.groups]
            for key, holder in manager._holders.items()
        },
        "free": pool.free_order().tolist(),
        "contents": [index.contents() for index in pool.indexes],
        "accounts": pool.ledger.as_dict(),
        # what comes and goes within one step counts for single calls only
        "peaks": pool.ledger.peaks_as_dict() if not any(kind.recycles for kind in manager.kinds) else None,
        "requests": {
            key: (r.status, r.tokens.tolist(), r.num_computed, r.placeholders, r.in_flight_tokens, r.last_step)
            for key, r in engine.requests.items()
        },
        "running": [request.request_id for request in engine.scheduler.running],
    }


class Side:
    """An engine and its device; ``together`` as usual, else every request is served by a single call."""

    def __init__(self, together: bool, **config: Any) -> None:
        self.engine = make_engine(**config)
        self.cache = GroupCache(config["num_blocks"], self.engine.config.groups)
        self.plans: list[tuple[Plan, Outputs]] = []
        self.together = together

    @contextmanager
    def way(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            if not self.together:
                patch.setattr(KVCacheManager, "grow_by_one", lambda *_: 0)
            yield

    def step(self, number: int, inbox: list[InboxItem]) -> list[Any]:
        engine = self.engine
        for item in inbox:
            if isinstance(item, NewRequest):
                self.cache.add(item)
        plan = engine.schedule(number, inbox)
        self.plans.append((plan, self.cache.run(plan.batch)))
        events: list[Any] = [*plan.events]
        if len(self.plans) == engine.config.max_outstanding_plans or not engine.requests:
            done, outputs = self.plans.pop(0)
            events += engine.complete(done.step_id, outputs, number)
        if number % 4 == 0:
            engine.check()
        batch = plan.batch
        arrays = (batch.num_scheduled, batch.num_computed, batch.tokens, batch.pending, batch.samples)
        tables = [table.tolist() for table in batch.group_tables]
        kv = [(type(event).__name__, getattr(event, "group", 0)) for event in engine.take_kv_events()]
        return [batch.request_ids, [array.tolist() for array in arrays], tables, batch.copies.tolist(), events, kv]


@pytest.mark.parametrize("kv_events", [False, True])
@pytest.mark.parametrize("outstanding", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_together_as_one_by_one(name: str, outstanding: int, kv_events: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, unit = CASES[name]
    rng = np.random.default_rng([len(name), outstanding, kv_events])
    config = {
        "groups": groups, "prefix_match_unit": unit, "num_blocks": int(rng.integers(41, 60)), "kv_events": kv_events,
        "prefix_cache_retention_interval": None if rng.random() < 0.5 else 0, "max_outstanding_plans": outstanding,
        "enable_prefix_caching": name != "whole-life state", "max_num_batched_tokens": 24,
        "priority_scheduling": bool(rng.random() < 0.3),
    }  # fmt: skip
    stems = [rng.integers(0, 50, 40) for _ in range(2)]
    sides = [Side(together, **config) for together in (True, False)]
    seen: Counter[str] = Counter()
    for number in range(160):
        inbox: list[InboxItem] = []
        if number < 70 and rng.random() < 0.4:
            inbox.append(random_request(rng, number, stems))
        if number < 70 and rng.random() < 0.05 and sides[0].engine.requests:
            inbox.append(Abort(str(rng.choice(sorted(sides[0].engine.requests)))))
        results = []
        for side in sides:
            with side.way(monkeypatch):
                results.append(side.step(number, inbox))
        assert results[0] == results[1], f"step {number}"
        assert state(sides[0].engine) == state(sides[1].engine), f"step {number}"
        seen.update(type(event).__name__ for event in results[0][4])
    assert seen["Finished"] > 10
    assert not sides[0].engine.requests
    for side in sides:
        for done, outputs in side.plans:
            side.engine.complete(done.step_id, outputs, 160)
        assert_all_free(side.engine)


def test_the_workloads_serve_together_and_preempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would prove nothing: both ways out of `grow_by_one` are taken, and both kinds of row."""
    answers: Counter[bool] = Counter()  # whether all were served
    grow = KVCacheManager.grow_by_one

    def counted(self: KVCacheManager, running: RunningSet, first: int = 0, count: int | None = None) -> int:
        answer = grow(self, running, first, count)
        answers[answer == (len(running) if count is None else count)] += 1
        return answer

    monkeypatch.setattr(KVCacheManager, "grow_by_one", counted)
    rng = np.random.default_rng(3)
    side, events = Side(True, groups=CASES["full"][0], num_blocks=24), []
    stems = [rng.integers(0, 50, 40) for _ in range(2)]
    for number in range(120):
        events += side.step(number, [random_request(rng, number, stems)] if number < 40 else [])[4]
    assert answers[True] > 20
    assert answers[False] > 3
    assert any(isinstance(event, Preempted) for event in events)


def test_rows_of_a_left_column_are_not_taken_for_the_next_one_s() -> None:
    """An abort frees a column while a plan is under way; the next request that comes in stands in the same one."""
    engine = make_engine(max_outstanding_plans=2)
    first = engine.schedule(0, [new_request("old", 8, 20)])
    column = engine.requests["old"].column
    second = engine.schedule(0, [Abort("old"), new_request("new", 8, 20)])
    assert engine.requests["new"].column == column
    engine.complete(first.step_id, Outputs(tokens=np.asarray([5], dtype=np.int32)), 0)
    engine.check()
    assert engine.requests["new"].num_outputs == 0
    engine.complete(second.step_id, Outputs(tokens=np.asarray([6], dtype=np.int32)), 0)
    assert engine.requests["new"].tokens[-1] == 6


@pytest.mark.parametrize("others", [0, 1])
def test_a_left_row_of_tables_is_empty(others: int) -> None:
    """A shorter table that comes into it must not be shown with the longer one's blocks behind its end."""
    store, tables = TableStore(0), [BlockTable() for _ in range(1 + others)]
    for row, table in enumerate(tables):
        table.extend(np.arange(1, 6) + 10 * row)
        table.seat(store, row)
    tables[0].unseat()
    assert tables[0].ids.tolist() == [1, 2, 3, 4, 5]
    assert not store.blocks[0].any()
    assert store.lengths[0] == 0
    assert [table.ids.tolist() for table in tables[1:]] == [[11, 12, 13, 14, 15]] * others


def test_a_stop_token_of_another_request_ends_nobody() -> None:
    engine = make_engine()
    stops = {"a": frozenset({7}), "b": frozenset({8})}
    step(engine, inbox=[new_request(key, 6, 9, stop_token_ids=stop) for key, stop in stops.items()])
    step(engine, token=lambda _: 8)
    assert set(engine.requests) == {"a"}
    step(engine, token=lambda _: 8)
    assert set(engine.requests) == {"a"}
    step(engine, token=lambda _: 7)
    assert not engine.requests


def test_a_window_block_of_two_requests_is_free_once_both_have_passed_it() -> None:
    """Both hit the same prefix and decode in step, so both let the same block go in the same step."""
    groups = (FullGroup(block_size=4), WindowGroup(block_size=4, window=8))
    engine = make_engine(groups=groups, prefix_cache_retention_interval=None)
    prompt = np.arange(17, dtype=np.int32)
    step(engine, inbox=[new_request("first", prompt, 1)])
    step(engine, inbox=[new_request("a", prompt, 20), new_request("b", prompt, 20)])
    shared = engine.manager.blocks_of("a", 1)[2]
    assert shared == engine.manager.blocks_of("b", 1)[2] != 0
    for _ in range(8):
        step(engine)
    assert engine.manager.blocks_of("a", 1)[2] == engine.manager.blocks_of("b", 1)[2] == 0
    assert shared in engine.manager.pool.free_order()


def test_a_wrong_order_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: what one request gives back never goes to the next one of the same step."""
    honest = growth.pair_up
    monkeypatch.setattr(growth, "pair_up", lambda givers, takers: (honest([], takers)[0], honest(givers, [])[1]))
    with pytest.raises(AssertionError, match="step"):
        for outstanding in (1, 2):
            test_together_as_one_by_one("full+window", outstanding, False, monkeypatch)
