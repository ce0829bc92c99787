"""Engines over groups of every kind under random traffic: no row ever reads what is not its own, and none starves."""

from __future__ import annotations

import numpy as np
import pytest
from tests.core.group_cache import GroupCache
from tests.core.helpers import assert_all_free, finished_of, make_engine, new_request, reference_output, tokens_of

from pdkv.core.blocks.groups import ChunkedGroup, FullGroup, Group, StateGroup, WindowGroup
from pdkv.core.ports import Abort, InboxItem, NewRequest

FULL, STATE = FullGroup(block_size=4), StateGroup(block_size=4, aligned=True)
WIDE_FULL, WIDE_STATE = FullGroup(block_size=8), StateGroup(block_size=8, aligned=True)
GROUPS: dict[str, tuple[tuple[Group, ...], int | None]] = {
    "window": ((WindowGroup(block_size=4, window=6),), None),
    "full+window": ((FULL, WindowGroup(block_size=4, window=9)), None),
    "two windows": ((FULL, WindowGroup(block_size=4, window=9), WindowGroup(block_size=8, window=5)), None),
    "replayed window": ((FULL, WindowGroup(block_size=4, window=8, replayed=True)), None),
    "two replayed windows": (
        (
            FULL,
            WindowGroup(block_size=8, window=11, replayed=True),
            WindowGroup(block_size=4, window=11, replayed=True),
        ),
        4,
    ),
    "chunked": ((FULL, ChunkedGroup(block_size=4, chunk=12)), None),
    "state": ((STATE,), None),
    "full+state": ((FULL, STATE, STATE), None),
    "hits inside blocks": ((WIDE_FULL, WIDE_STATE), 2),
    "all": ((WIDE_FULL, WindowGroup(block_size=4, window=7), WIDE_STATE), 4),
    "whole-life state": ((FULL, StateGroup(block_size=128, aligned=False)), None),
}


def random_request(rng: np.random.Generator, number: int, stems: list[np.ndarray]) -> NewRequest:
    """A prompt that often starts like another."""
    stem = stems[int(rng.integers(len(stems)))][: int(rng.integers(1, 40))]
    tail = rng.integers(0, 50, int(rng.choice([0, 0, 1, 5, 12])))
    prompt = np.concatenate((stem, tail)).astype(np.int32)
    return new_request(f"r{number}", prompt, int(rng.integers(1, 14)), cache_salt="s" if rng.random() < 0.1 else None)


@pytest.mark.parametrize("interval", [0, None])
@pytest.mark.parametrize("outstanding", [1, 2])
@pytest.mark.parametrize("name", GROUPS)
def test_random_traffic(name: str, outstanding: int, interval: int | None) -> None:
    groups, unit = GROUPS[name]
    rng = np.random.default_rng(len(name) * 10 + outstanding)
    engine = make_engine(
        groups=groups, prefix_match_unit=unit, prefix_cache_retention_interval=interval, num_blocks=41,
        max_outstanding_plans=outstanding, enable_prefix_caching=name != "whole-life state",
        full_sequence_must_fit=True, max_num_batched_tokens=24,
    )  # fmt: skip
    stems = [rng.integers(0, 50, 40) for _ in range(2)]
    cache = GroupCache(41, groups)
    sent: dict[str, NewRequest] = {}
    events, plans, hits = [], [], 0
    for step in range(260):
        inbox: list[InboxItem] = []
        if step < 90 and rng.random() < 0.4:
            new = random_request(rng, step, stems)
            sent[new.request_id] = new
            cache.add(new)
            inbox.append(new)
        if step < 90 and rng.random() < 0.05 and engine.requests:
            inbox.append(Abort(str(rng.choice(sorted(engine.requests)))))
        plan = engine.schedule(step, inbox)
        engine.check()
        events += plan.events
        plans.append((plan, cache.run(plan.batch)))
        if len(plans) == outstanding or not engine.requests:
            done, outputs = plans.pop(0)
            events += engine.complete(done.step_id, outputs, step)
            engine.check()
    while plans:
        done, outputs = plans.pop(0)
        events += engine.complete(done.step_id, outputs, 260)
    outcomes, tokens = finished_of(events), tokens_of(events)
    assert set(outcomes) == set(sent), "a request starved"
    for request_id, outcome in outcomes.items():
        hits += outcome.cached_tokens
        expected = reference_output(sent[request_id], engine.config.max_model_len)
        got = tokens.get(request_id, [])
        assert got == (expected if outcome.reason.value != "abort" else expected[: len(got)])
    assert hits > 0 or not engine.config.enable_prefix_caching
    assert_all_free(engine)


def test_a_preempted_request_that_outgrew_the_gate_still_ends() -> None:
    """Decoding it needs 3 blocks, but the gate would ask for 23 of 12: it comes back in small chunks."""
    groups = (WindowGroup(block_size=4, window=6),)
    engine = make_engine(groups=groups, num_blocks=13, max_num_batched_tokens=96, enable_prefix_caching=False)
    cache = GroupCache(13, groups)
    new = new_request("r", 30, 90)
    cache.add(new)
    events = []
    for step in range(200):
        if step == 60:  # as a shortage would
            assert engine.manager.num_blocks_of("r") <= 3
            assert engine.manager.outgrown(engine.requests["r"])
            engine.scheduler._preempt(engine.requests["r"])
        plan = engine.schedule(step, [new] if step == 0 else [])
        events += [*plan.events, *engine.complete(plan.step_id, cache.run(plan.batch), step)]
        engine.check()
    assert tokens_of(events)["r"] == reference_output(new, engine.config.max_model_len)
    assert finished_of(events)["r"].output_tokens == 90
