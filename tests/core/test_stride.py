"""quiet_steps and advance: k steps at once leave exactly the state of k single steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.core.group_cache import GroupCache
from tests.core.helpers import counting_prompt, make_engine, new_request, step
from tests.core.test_groups_engine import GROUPS, random_request
from tests.core.test_outstanding import workload

from pdkv.core.engine import Engine
from pdkv.core.events import Admitted, Finished, Preempted
from pdkv.core.ports import InboxItem, NewRequest


def snapshot(engine: Engine) -> dict[str, Any]:
    """Everything that decides what happens next."""
    manager, pool = engine.manager, engine.manager.pool
    holds = {key: holder.groups for key, holder in manager._holders.items()}
    return {
        "tables": {key: [hold.table.ids.tolist() for hold in groups] for key, groups in holds.items()},
        "registered": {key: [hold.num_hashed for hold in groups] for key, groups in holds.items()},
        "free": pool.free_order().tolist(),
        "indexes": [index.contents() for index in pool.indexes],
        "counts": pool.ledger.as_dict(),
        "peaks": pool.ledger.peaks_as_dict(),
        "requests": {
            key: (r.status, r.tokens.tolist(), r.num_computed, r.placeholders, list(r.hashes), r.last_step)
            for key, r in engine.requests.items()
        },
        "queues": [[r.request_id for r in q] for q in (engine.scheduler.running, engine.scheduler.waiting)],
        "step": (engine._next_step, engine.scheduler.completed_step),
    }


def single(engine: Engine, cache: GroupCache, inbox: list[InboxItem]) -> tuple[list[Any], np.ndarray, int]:
    """One step; returns events, the sampled tokens and the number of rows."""
    for item in inbox:
        if isinstance(item, NewRequest):
            cache.add(item)
    plan = engine.schedule(0, inbox)
    outputs = cache.run(plan.batch)
    events = [*plan.events, *engine.complete(plan.step_id, outputs, 0)]
    engine.check()
    return events, outputs.tokens, len(plan.batch)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("outstanding", [1, 2])
def test_k_at_once_equal_k_single_steps(seed: int, outstanding: int) -> None:
    config, items = workload(seed, aborts=False)
    news = [(at, replace(new, stop_token_ids=frozenset())) for at, new in items if isinstance(new, NewRequest)]
    play_twins(config | {"max_outstanding_plans": outstanding}, news, seed)


@pytest.mark.parametrize("name", GROUPS)
def test_k_at_once_equal_k_single_steps_for_several_groups(name: str) -> None:
    groups, unit = GROUPS[name]
    rng = np.random.default_rng([len(name), 7])
    stems = [rng.integers(0, 50, 40) for _ in range(2)]
    items = [(int(rng.integers(0, 60)), random_request(rng, number, stems)) for number in range(16)]
    config = {
        "groups": groups, "prefix_match_unit": unit, "num_blocks": int(rng.integers(41, 80)),
        "enable_prefix_caching": name != "whole-life state", "max_num_batched_tokens": 24,
        "prefix_cache_retention_interval": None if rng.random() < 0.5 else 0,
    }  # fmt: skip
    play_twins(config, sorted(items, key=lambda item: item[0]), len(name))


def play_twins(config: dict[str, Any], items: list[tuple[int, NewRequest]], seed: int) -> None:
    """Twin engines on one workload: `one` steps singly, `many` advances whatever it calls quiet.

    Every step that was called quiet must turn out quiet in the twin, and the states must agree after each stride.
    """
    rng = np.random.default_rng(seed)
    one, many = make_engine(**config), make_engine(**config)
    cache_one, cache_many = (GroupCache(one.config.num_blocks, one.config.groups) for _ in range(2))
    number = strides = 0
    for _ in range(3000):
        inbox: list[InboxItem] = [item for at, item in items if at == number]
        future = [at for at, _ in items if at > number]
        limit = min([int(rng.integers(1, 30)), *(at - number for at in future)])
        quiet = 0 if inbox else many.quiet_steps(limit)
        assert quiet <= limit
        if quiet:
            rows = []
            for _ in range(quiet):
                before = snapshot(one)["queues"]
                events, tokens, count = single(one, cache_one, [])
                assert not [e for e in events if isinstance(e, Admitted | Finished | Preempted)], "was not quiet"
                assert count == len(one.scheduler.running)
                assert snapshot(one)["queues"] == before
                rows.append(tokens)
            many.advance(np.asarray(rows, dtype=np.int32), 0)
            many.check()
            for plan_row in rows:
                for request, token in zip(many.scheduler.running, plan_row, strict=True):
                    cache_many.known[request.request_id].append(int(token))
            number += quiet
            strides += 1
        else:  # the advanced twin's pool never saw the writes of its strides; it has them now, as a device would
            cache_many.slots[:], cache_many.states[:] = cache_one.slots, cache_one.states
            a, b = single(one, cache_one, inbox), single(many, cache_many, inbox)
            assert a[0] == b[0]
            number += 1
        assert snapshot(one) == snapshot(many)
        if not future and not one.requests:
            break
    assert not one.requests
    assert strides > 0


def quiet_engine(**config: Any) -> Engine:
    engine = make_engine(**config)
    step(engine, inbox=[new_request(f"r{i}", counting_prompt(6, 100 * i), 20) for i in range(2)])
    return engine


def test_quiet_until_the_step_before_the_last_token() -> None:
    assert quiet_engine().quiet_steps(100) == 18  # 1 of 20 is there; the 20th ends the request
    assert quiet_engine().quiet_steps(7) == 7
    assert quiet_engine().quiet_steps(0) == 0


def test_quiet_while_free_blocks_cover_the_growth() -> None:
    engine = quiet_engine(num_blocks=8)  # 2 x 2 blocks held, 3 free: blocks 3, 4 of both need 4
    quiet = engine.quiet_steps(100)
    assert quiet == 6  # tokens 7, 8 are in block 2; 9..12 in block 3 (both), 13 needs two more with one free
    for _ in range(quiet):
        _, events = step(engine)
        assert not any(isinstance(event, Preempted) for event in events)
    _, events = step(engine)
    assert any(isinstance(event, Preempted) for event in events)


def test_not_quiet() -> None:
    assert make_engine().quiet_steps(5) == 0  # nothing runs
    engine = quiet_engine()
    engine.schedule(0)
    assert engine.quiet_steps(5) == 0  # a plan is outstanding
    engine = make_engine(max_num_batched_tokens=8)
    step(engine, inbox=[new_request("r", counting_prompt(20), 9)])
    assert engine.quiet_steps(5) == 0  # a prefill is under way


def test_advance_refuses_stop_tokens_and_too_many_steps() -> None:
    engine = make_engine()
    step(engine, inbox=[new_request("r", counting_prompt(6), 20, stop_token_ids=frozenset({3}))])
    with pytest.raises(AssertionError, match="stop token"):
        engine.advance(np.asarray([[7], [3]], dtype=np.int32), 0)
    with pytest.raises(AssertionError, match="beyond the quiet steps"):
        quiet_engine().advance(np.full((19, 2), 7, dtype=np.int32), 0)


def test_not_quiet_once_an_end_has_made_room() -> None:
    """A request did not fit in the last step; in that same step another one ended and gave its blocks back."""
    engine = make_engine(num_blocks=10)
    step(engine, inbox=[new_request("short", counting_prompt(14), 3), new_request("long", counting_prompt(6, 500), 24)])
    step(engine, inbox=[new_request("big", counting_prompt(16, 900), 9)])  # 4 blocks do not fit beside 4 + 2
    _, events = step(engine)
    assert [event.request_id for event in events if isinstance(event, Finished)] == ["short"]
    assert engine.quiet_steps(5) == 0
    _, events = step(engine)
    assert [event.request_id for event in events if isinstance(event, Admitted)] == ["big"]


def test_quiet_while_the_head_does_not_fit() -> None:
    engine = make_engine(num_blocks=10)
    step(engine, inbox=[new_request("long", counting_prompt(14), 20), new_request("two", counting_prompt(6, 500), 20)])
    step(engine, inbox=[new_request("big", counting_prompt(20, 900), 9)])
    assert engine.quiet_steps(100) > 3


def test_not_quiet_when_a_growing_request_lengthens_the_head_s_hit() -> None:
    """The head did not fit when `grow` took a block; once that block is full and registered, it is hit and fits."""
    engine = make_engine(num_blocks=9)
    grow = new_request("grow", counting_prompt(8), 20)
    step(engine, inbox=[grow], token=lambda _: 5)
    head = np.asarray([*range(8), *[5] * 23], dtype=np.int32)  # 8 blocks, the first two registered by `grow`
    step(engine, inbox=[new_request("head", head, 1)])
    quiet = engine.quiet_steps(100)
    for number in range(1, 12):
        _, events = step(engine)
        if any(isinstance(event, Admitted | Finished | Preempted) for event in events):
            assert quiet < number, f"{quiet} steps called quiet, but something is decided in step {number}"
            return
    pytest.fail("nothing was ever decided")
