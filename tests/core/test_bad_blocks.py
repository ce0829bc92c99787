"""Loads of which single blocks turn out bad (scenario S3 of spec scheduler 11), under both failure policies."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.core.helpers import (
    NS,
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

from pdkv.core.blocks.groups import ChunkedGroup, FullGroup, Group, WindowGroup
from pdkv.core.config import STRICT, VLLM, TransferPolicy
from pdkv.core.engine import Engine
from pdkv.core.events import Event, FinishReason
from pdkv.core.ports import Outputs, Plan
from pdkv.core.scheduler.limits import PauseState
from pdkv.core.scheduler.request import Status
from pdkv.errors import ConfigError

RECOMPUTE = dataclasses.replace(VLLM, load_failure="recompute")


def loading(policy: TransferPolicy, tokens: int = 165) -> tuple[Engine, Plan]:
    """S3: 165 tokens in 11 blocks, on their way; a pool of 100 usable blocks."""
    engine = make_engine(
        num_blocks=101, block_size=16, max_model_len=512, max_num_batched_tokens=512, max_num_seqs=4, transfer=policy
    )
    plan, _ = step(engine, 0, [new_request("r", tokens, max_tokens=4, source=source_for(tokens, 16))])
    assert engine.manager.pool.num_free == 89
    return engine, plan


def report(engine: Engine, *blocks: int, inbox: Any = ()) -> tuple[Plan, tuple[Event, ...]]:
    """A step whose outputs say that ``blocks`` are bad."""
    plan = engine.schedule(0, list(inbox))
    outputs = Outputs(tokens=np.full(len(plan.batch), 5, dtype=np.int32), invalid_blocks=blocks)
    events = engine.complete(plan.step_id, outputs, 0)
    engine.check()
    return plan, (*plan.events, *events)


def test_fail_ends_the_request_at_once_and_keeps_its_blocks_until_the_slowest_rank_is_done() -> None:
    engine, plan = loading(VLLM)
    _, events = report(engine, 4)
    finished = finished_of(events)["r"]
    assert finished.reason is FinishReason.ERROR
    assert finished.error is not None
    assert "blocks did not arrive" in finished.error
    assert engine.manager.pool.num_free == 89
    step(engine, 0, [failed(plan.reads[0].handle)])
    assert engine.manager.pool.num_free == 100
    assert_all_free(engine)


def test_recompute_keeps_what_lies_before_the_first_bad_block() -> None:
    engine, plan = loading(RECOMPUTE)
    report(engine, 9, 4)
    assert engine.requests["r"].num_computed == 48
    plan, _ = step(engine, 0, [arrived(plan)])
    assert plan.batch.num_computed.tolist() == [48]
    assert plan.batch.num_scheduled.tolist() == [117]
    assert engine.manager.pool.num_free == 89, "its blocks are those of before"


@pytest.mark.parametrize("policy", [RECOMPUTE, STRICT])
def test_recompute_starts_afresh_when_the_load_fails_as_a_whole_in_the_end(policy: TransferPolicy) -> None:
    engine, plan = loading(policy)
    report(engine, 4)
    plan, _ = step(engine, 0, [failed(plan.reads[0].handle)])
    assert plan.batch.num_computed.tolist() == [0]
    assert plan.batch.num_scheduled.tolist() == [165]


def test_a_load_whose_first_block_is_bad_is_good_for_nothing() -> None:
    engine, plan = loading(RECOMPUTE)
    report(engine, 1)
    assert engine.requests["r"].num_computed == 0
    plan, _ = step(engine, 0, [arrived(plan)])
    assert plan.batch.num_computed.tolist() == [0]


def test_blocks_of_nobody_hurt_nobody() -> None:
    engine, plan = loading(VLLM)
    report(engine, 60)
    plan, _ = step(engine, 0, [arrived(plan)])
    assert plan.batch.num_computed.tolist() == [164]


def running(policy: TransferPolicy, **more: Any) -> Engine:
    """Two requests with a prefix of two blocks in common, both decoding."""
    engine = make_engine(num_blocks=41, transfer=policy, max_num_batched_tokens=64, **more)
    shared = np.arange(8, dtype=np.int32)
    step(engine, 0, [new_request("a", np.append(shared, [20, 21]).astype(np.int32), max_tokens=30)])
    step(engine, 0, [new_request("b", np.append(shared, [30, 31]).astype(np.int32), max_tokens=30)])
    assert engine.manager.blocks_of("a")[:2].tolist() == engine.manager.blocks_of("b")[:2].tolist()
    step(engine)
    return engine


@pytest.mark.parametrize(("policy", "hashed"), [(VLLM, 2), (dataclasses.replace(STRICT, load_failure="fail"), 1)])
def test_fail_ends_running_requests_and_their_bad_blocks_are_hit_no_more(policy: TransferPolicy, hashed: int) -> None:
    """vLLM leaves what b computed behind a's bad block in the cache, where it is found once a good block comes."""
    engine = running(policy)
    second = int(engine.manager.blocks_of("a")[1])
    _, events = report(engine, second)
    assert {key: one.reason for key, one in finished_of(events).items()} == dict.fromkeys("ab", FinishReason.ERROR)
    assert engine.manager.pool.ledger.num_hashed == hashed
    assert_all_free(engine)


@pytest.mark.parametrize("policy", [RECOMPUTE, STRICT])
def test_recompute_computes_a_shared_bad_block_once_and_drops_what_was_sampled_on_it(policy: TransferPolicy) -> None:
    engine = running(policy)
    outputs = {key: request.num_outputs for key, request in engine.requests.items()}
    report(engine, int(engine.manager.blocks_of("a")[1]))
    assert {key: request.num_outputs for key, request in engine.requests.items()} == outputs
    plan, _ = step(engine)
    known = {key: request.num_tokens - 1 for key, request in engine.requests.items()}
    assert all(request.num_outputs == outputs[key] + 1 for key, request in engine.requests.items())
    rows = {
        key: (start, start + count)
        for key, start, count in zip(
            plan.batch.request_ids, plan.batch.num_computed.tolist(), plan.batch.num_scheduled.tolist(), strict=True
        )
    }
    again = 4 if policy is STRICT else known["b"] - 1  # strict: b does not go on before its prefix is good again
    assert rows == {"a": (4, known["a"]), "b": (again, known["b"])}
    assert len(engine.manager.lookup(engine.requests["a"]).blocks[0]) == 3, "computed again, it can be hit"


def test_strict_forgets_what_a_running_request_is_to_compute_again() -> None:
    for policy, left in ((RECOMPUTE, 3), (STRICT, 1)):
        engine = running(policy)
        report(engine, int(engine.manager.blocks_of("a")[1]))
        hit = engine.manager.lookup(engine.requests["a"])
        assert len(hit.blocks[0]) == left


def test_a_plan_under_way_on_bad_blocks_counts_for_nothing() -> None:
    engine = make_engine(num_blocks=41, transfer=STRICT, max_outstanding_plans=2)
    first = engine.schedule(0, [new_request("a", 10, max_tokens=30)])
    second = engine.schedule(0)
    assert second.batch.pending.tolist() == [True]
    engine.complete(first.step_id, Outputs(tokens=np.asarray([5], dtype=np.int32)), 0)
    third = engine.schedule(0)
    bad = int(engine.manager.blocks_of("a")[1])
    engine.complete(second.step_id, Outputs(tokens=np.asarray([6], dtype=np.int32), invalid_blocks=(bad,)), 0)
    engine.check()
    assert engine.requests["a"].num_outputs == 1
    fourth = engine.schedule(0)
    assert (fourth.batch.num_computed.tolist(), fourth.batch.num_scheduled.tolist()) == ([4], [7])
    engine.complete(third.step_id, Outputs(tokens=np.asarray([7], dtype=np.int32)), 0)
    engine.check()
    assert engine.requests["a"].num_outputs == 1, "what the plan after it sampled counts for nothing either"
    engine.complete(fourth.step_id, Outputs(tokens=np.asarray([8], dtype=np.int32)), 0)
    engine.check()
    assert engine.requests["a"].tokens[-2:].tolist() == [5, 8]


def loaded_behind_one_that_runs(policy: TransferPolicy) -> Engine:
    """l has loaded four blocks, and waits for the one place, where a runs."""
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=64, transfer=policy)
    plan, _ = step(engine, 0, [new_request("l", 16, max_tokens=2, source=source_for(16, 4))])
    step(engine, 0, [new_request("a", 4, max_tokens=20)])
    step(engine, 0, [arrived(plan)])
    assert engine.requests["l"].status is Status.LOADED
    return engine


LATE_FREES = dataclasses.replace(STRICT, failure_frees_at_once=False)


@pytest.mark.parametrize("state", [PauseState.UNPAUSED, PauseState.PAUSED_ALL])
@pytest.mark.parametrize("policy", [STRICT, LATE_FREES])
def test_a_loaded_request_whose_first_block_is_bad_starts_over(policy: TransferPolicy, state: PauseState) -> None:
    engine = loaded_behind_one_that_runs(policy)
    request = engine.requests["l"]
    engine.pause(state)
    report(engine, int(engine.manager.blocks_of("l")[0]))
    assert request.num_computed == 0
    assert (engine.manager.num_blocks_of("l") == 0) is policy.failure_frees_at_once
    assert engine.scheduler.next_deadline_ns() is None
    step(engine, 61 * NS)
    engine.pause(PauseState.UNPAUSED)
    events = [event for _ in range(25) for event in step(engine, 62 * NS)[1]]
    assert {key: one.reason for key, one in finished_of(events).items()} == dict.fromkeys("al", FinishReason.LENGTH)
    assert finished_of(events)["l"].cached_tokens == 0
    assert_all_free(engine)


def test_a_loaded_request_keeps_what_lies_before_the_first_bad_block_and_its_deadline() -> None:
    engine = loaded_behind_one_that_runs(STRICT)
    report(engine, int(engine.manager.blocks_of("l")[2]))
    assert (engine.requests["l"].status, engine.requests["l"].num_computed) == (Status.LOADED, 8)
    step(engine, 61 * NS)
    assert engine.manager.num_blocks_of("l") == 0, "there was no place for it in time"


def test_a_load_that_had_hit_the_bad_block_here_leaves_nothing_to_be_hit() -> None:
    engine = make_engine(transfer=STRICT)
    step(engine, 0, [new_request("a", counting_prompt(8), max_tokens=1)])
    plan, _ = step(engine, 0, [new_request("l", counting_prompt(17), max_tokens=1, source=source_for(17, 4))])
    assert engine.requests["l"].num_computed == 17
    report(engine, int(engine.manager.blocks_of("l")[1]))
    later, _ = step(engine, 0, [new_request("c", counting_prompt(9), max_tokens=1)])
    assert later.batch.num_computed.tolist() == [4]
    plan, _ = step(engine, 0, [arrived(plan)])
    assert plan.batch.num_computed.tolist() == [4]


@pytest.mark.parametrize("bad", [slice(None), slice(1, 2)])
def test_what_an_ended_request_left_behind_a_bad_block_is_not_hit(bad: slice) -> None:
    """Not even once another request has computed the bad block again."""
    engine = make_engine(transfer=STRICT)
    prompt = counting_prompt(17)
    plan, _ = step(engine, 0, [new_request("a", prompt, max_tokens=1)])
    assert_all_free(engine)
    report(engine, *plan.batch.block_tables[0, :4][bad].tolist())
    plan, _ = step(engine, 0, [new_request("c", prompt[:9], max_tokens=1)])
    assert plan.batch.num_computed.tolist() == [0]
    plan, _ = step(engine, 0, [new_request("d", prompt, max_tokens=1)])
    assert plan.batch.num_computed.tolist() == [8], "of c's blocks alone"


def test_tokens_of_a_plan_that_is_void_already_were_never_computed() -> None:
    engine = make_engine(transfer=STRICT, max_outstanding_plans=2, long_prefill_token_threshold=8, num_blocks=65)
    plans = [engine.schedule(0, [new_request("a", 100)]), engine.schedule(0)]
    table = engine.manager.blocks_of("a").tolist()
    for inbox, bad, computed in (([new_request("other", 4)], table[0], 0), ([], table[8], 8)):
        plan = plans.pop(0)
        tokens = np.full(len(plan.batch), 5, dtype=np.int32)
        engine.complete(plan.step_id, Outputs(tokens=tokens, invalid_blocks=(bad,)), 0)
        assert engine.requests["a"].num_computed == computed
        plans.append(engine.schedule(0, inbox))
        engine.check()
    starts = [plan.batch.num_computed[list(plan.batch.request_ids).index("a")] for plan in plans]
    assert starts == [0, 8]


@pytest.mark.parametrize("group", [WindowGroup(block_size=4, window=8), ChunkedGroup(block_size=4, chunk=8)])
def test_blocks_of_groups_that_give_some_back_are_refused(group: Group) -> None:
    engine = make_engine(groups=(group,), transfer=STRICT)
    step(engine, 0, [new_request("a", 42, max_tokens=30)])
    step(engine)
    with pytest.raises(ConfigError, match=rf"{type(group).__name__} what lies in front.*ReadEnded"):
        report(engine, int(engine.manager.blocks_of("a")[-2]))


def test_models_of_several_groups_are_refused() -> None:
    engine = make_engine(groups=(FullGroup(block_size=4), WindowGroup(block_size=4, window=8)))
    with pytest.raises(ConfigError, match=r"2 KV groups.*ReadEnded"):
        report(engine, 3)
