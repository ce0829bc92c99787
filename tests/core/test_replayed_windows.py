"""Windows that are never hit: the end of a prefix hit is computed once more, for them only (bounded replay)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.helpers import arrived, counting_prompt, make_engine, new_request, source_for, step

from pdkv.core.blocks.groups import FullGroup, StateGroup, WindowGroup
from pdkv.core.engine import Engine
from pdkv.core.ports import Plan
from pdkv.core.transfer.messages import RemoteSource
from pdkv.errors import ConfigError

WINDOW = 8


def engine_of(**more: Any) -> Engine:
    groups = (FullGroup(block_size=4), WindowGroup(block_size=4, window=WINDOW, replayed=True))
    engine = make_engine(groups=groups, num_blocks=65, **({"max_num_batched_tokens": 64} | more))
    step(engine, 0, [new_request("first", counting_prompt(22), max_tokens=1)])
    return engine


def row(plan: Plan) -> tuple[int, int, int]:
    """(start, tokens, where the replay ends) of the plan's one row."""
    batch = plan.batch
    return int(batch.num_computed[0]), int(batch.num_scheduled[0]), int(batch.replay_ends[0])


def test_the_last_window_of_a_hit_is_computed_again_and_its_other_blocks_are_shared() -> None:
    engine = engine_of()
    plan, _ = step(engine, 0, [new_request("again", counting_prompt(25), max_tokens=9)])
    assert row(plan) == (20 - WINDOW, 13, 20)
    assert [(engine.manager.blocks_of("again", group) != 0).tolist() for group in (0, 1)] == [
        [True] * 7,
        [False] * 3 + [True] * 4,
    ]
    assert row(step(engine)[0]) == (25, 1, 0)


def test_a_small_step_ends_inside_the_replay_and_takes_no_block_beyond_the_hit() -> None:
    engine = engine_of(max_num_batched_tokens=8)
    for _ in range(3):
        step(engine)
    free = engine.manager.pool.num_free
    plan, _ = step(engine, 0, [new_request("again", counting_prompt(25), max_tokens=9)])
    assert row(plan) == (12, 8, 20)
    assert free - engine.manager.pool.num_free == 5 + 2, "the hit of five blocks, and two of the window"
    assert row(step(engine)[0]) == (20, 5, 0)


def test_a_hit_of_no_more_than_the_window_saves_nothing() -> None:
    engine = engine_of()
    plan, _ = step(engine, 0, [new_request("short", counting_prompt(11), max_tokens=1)])
    assert row(plan) == (0, 11, 0)


def test_a_load_brings_the_window() -> None:
    engine = engine_of()
    source = source_for(30, 4)
    spans = engine.manager.peer_spans(30)
    counts = [stop - first for first, stop in spans]
    grant = source.grant.__class__(
        **{
            **{field: getattr(source.grant, field) for field in source.grant.__struct_fields__},
            "block_ids": tuple(range(1, 1 + sum(counts))),
            "group_blocks": tuple(counts),
        }
    )
    loaded = RemoteSource(peer=source.peer, request_id=source.request_id, grant=grant)
    engine.validate = lambda new: None  # type: ignore[method-assign]  # the whole prompt, its last token too
    plan, _ = step(engine, 0, [new_request("load", counting_prompt(30), max_tokens=3, source=loaded)])
    assert engine.manager.peer_spans(30, 20) == ((5, 8), spans[1]), "what was hit does not have the window"
    plan, _ = step(engine, 0, [arrived(plan)])
    assert row(plan) == (29, 1, 0)


@pytest.mark.parametrize(
    ("others", "window", "says"),
    [
        ((WindowGroup(block_size=4, window=12, replayed=True),), 8, "must have one window; they have"),
        ((StateGroup(block_size=4, aligned=True),), 8, "does not go with StateGroup"),
        ((WindowGroup(block_size=4, window=6),), 8, "does not go with WindowGroup"),
        ((), 9, "the first token that is replayed, 9 before a hit's end"),
    ],
)
def test_windows_that_cannot_be_replayed_are_refused(others: tuple[Any, ...], window: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_engine(groups=(FullGroup(block_size=4), WindowGroup(block_size=4, window=window, replayed=True), *others))
