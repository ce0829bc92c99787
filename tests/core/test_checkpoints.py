"""States that a backend writes inside of a chunk, and chunks that end where prefixes part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.core.helpers import assert_all_free, counting_prompt, make_engine, new_request, step

from pdkv.core.blocks.groups import FullGroup, StateGroup
from pdkv.core.engine import Engine
from pdkv.core.speculation import Speculation
from pdkv.errors import ConfigError


def engine_of(*, checkpoint: int | None = 4, size: int = 16, unit: int = 4, **more: Any) -> Engine:
    state = StateGroup(
        block_size=size,
        aligned=True,
        checkpoint_blocks=0 if checkpoint is None else 1,
        checkpoint_alignment=checkpoint,
        speculative_blocks=1 if "speculation" in more else 0,
    )
    return make_engine(
        groups=(FullGroup(block_size=size), state), block_size=size, prefix_match_unit=unit, num_blocks=65,
        max_num_batched_tokens=128, **more,
    )  # fmt: skip


def chunks(engine: Engine, name: str, prompt: Any) -> list[tuple[int, int]]:
    """(start, tokens) of the chunks in which the prompt is computed, each with a check of everything."""
    found, inbox = [], [new_request(name, prompt, max_tokens=3)]
    while name in engine.requests or inbox:
        plan, _ = step(engine, 0, inbox)
        inbox = []
        if int(plan.batch.num_computed[0]) < len(prompt):
            found.append((int(plan.batch.num_computed[0]), int(plan.batch.num_scheduled[0])))
    return found


def test_a_prompt_is_not_cut_for_a_state_that_is_written_inside_its_chunk() -> None:
    prompt = counting_prompt(75)
    cut, whole = engine_of(checkpoint=None), engine_of()
    assert chunks(cut, "a", prompt) == [(0, 64), (64, 8), (72, 3)]
    assert chunks(whole, "a", prompt) == [(0, 75)]
    for engine in (cut, whole):
        assert chunks(engine, "again", prompt) == [(72, 3)], "both resume behind the last hash of the prompt"
        assert_all_free(engine)


def test_the_state_inside_takes_a_block_of_its_own_until_the_next_step() -> None:
    engine = engine_of()
    prompt = counting_prompt(75)
    step(engine, 0, [new_request("a", prompt, max_tokens=9)])
    table = engine.manager.blocks_of("a", 1)
    assert np.flatnonzero(table).tolist() == [3, 4], "entry 3 holds the state at 72, entry 4 the one at 75"
    step(engine)
    assert np.flatnonzero(engine.manager.blocks_of("a", 1)).tolist() == [4]
    assert engine.manager.lookup(engine.requests["a"]).tokens == 72


def test_a_chunk_that_the_backend_cannot_write_inside_is_cut_as_before() -> None:
    short = counting_prompt(15)
    assert chunks(engine_of(), "a", short) == [(0, 12), (12, 3)], "no column in front of the last one"
    prompt = counting_prompt(75)
    assert chunks(engine_of(checkpoint=16), "a", prompt) == [(0, 64), (64, 8), (72, 3)], "72 is no multiple of 16"


def test_chunks_end_where_prefixes_part_if_asked_for() -> None:
    drafter = Speculation(num_tokens=1, lookahead_tokens=1, prefill_lookahead_tokens=1, drop_groups=(0,))
    rng = np.random.default_rng(1)
    stem = rng.integers(0, 500, 52, dtype=np.int32)
    prompts = [np.append(stem, rng.integers(500, 900, 40, dtype=np.int32)).astype(np.int32) for _ in range(3)]
    hits = {}
    for asked in (False, True):
        engine = engine_of(checkpoint=None, speculation=drafter, shared_prefix_checkpoint=asked)
        assert engine.config.stops_at_junctions is asked
        for number, prompt in enumerate(prompts):
            hits[asked] = chunks(engine, f"r{number}", prompt)[0][0]
    assert hits == {False: 32, True: 44}, (
        "they share three whole blocks, of which the drafter must see the end computed"
    )


def test_alignments_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="checkpoint_alignment is 0"):
        engine_of(checkpoint=0)
