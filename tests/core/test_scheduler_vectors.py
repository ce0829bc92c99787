"""Scenario vectors S1-S5 of scheduler.md section 11, driven through the engine under policy `vllm`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.core.helpers import counting_prompt, failed, make_engine, new_request, source_for, step

from pdkv.core.config import VLLM
from pdkv.core.engine import Engine
from pdkv.core.events import Finished, FinishReason, LoadFailed, Preempted
from pdkv.core.ports import Abort, Outputs, Plan, ReadEnded
from pdkv.core.scheduler.request import Status


def vllm_engine(**config: Any) -> Engine:
    values: dict[str, Any] = {
        "num_blocks": 101, "block_size": 16, "max_model_len": 4096, "max_num_seqs": 16, "max_num_batched_tokens": 8192,
        "transfer": VLLM,
    } | config  # fmt: skip
    return make_engine(**values)


def loading(name: str, length: int, number: int, max_tokens: int = 100) -> Any:
    prompt = counting_prompt(length, 10_000 * number)
    return new_request(name, prompt, max_tokens, source=source_for(length, 16, lease_id=number))


def handles_of(plan: Plan) -> dict[str, int]:
    return {
        event.request_id: event.handle for event in plan.events if hasattr(event, "tokens") and hasattr(event, "handle")
    }


def good(handle: int, number: int) -> ReadEnded:
    return ReadEnded(handle=handle, slot=(99, number))


def state(engine: Engine) -> tuple[list[str], list[str], list[str], int]:
    scheduler = engine.scheduler
    return (
        [request.request_id for request in scheduler.running],
        [request.request_id for request in scheduler.holding],
        [request.request_id for request in scheduler.waiting],
        engine.manager.pool.num_free,
    )


def names(*numbers: int) -> list[str]:
    return [f"r{number}" for number in numbers]


def test_s1_loads_fill_the_pool() -> None:
    engine = vllm_engine(max_num_seqs=2)
    plan, _ = step(engine, inbox=[loading(f"r{i}", 160, i + 1) for i in range(12)])
    handles = handles_of(plan)
    assert state(engine) == ([], names(*range(10)), names(10, 11), 0)
    plan, _ = step(engine, inbox=[good(handles[f"r{i}"], i + 1) for i in range(3)])
    assert state(engine)[:3] == (names(0, 1), names(*range(2, 10)), names(10, 11))
    assert plan.batch.num_scheduled.tolist() == [1, 1]
    assert [r.request_id for r in engine.scheduler.holding if r.status is Status.LOADED] == ["r2"]
    plan, events = step(engine)  # both decode the token after the prompt: an 11th block each
    assert [event.request_id for event in events if isinstance(event, Preempted)] == ["r1"]
    assert plan.batch.request_ids == ("r0",)
    for _ in range(2):
        step(engine)
    running, holding, waiting, free = state(engine)
    assert (running, holding, waiting, free) == (names(0, 2), names(*range(3, 10)), names(1, 10, 11), 8)
    step(engine, inbox=[Abort("r5")])
    assert "r5" not in engine.requests
    for _ in range(3):
        step(engine)
        assert engine.manager.pool.num_free == 8  # r5's blocks are still held, for its READ may write
    view = {holder.request_id: holder for holder in engine.memory().holders}
    assert (view["r5"].account, view["r5"].blocks, view["r5"].deadline_ns) == ("quarantine", 10, None)
    assert state(engine)[0] == names(0, 2)
    engine.schedule(0, [good(handles["r5"], 6)])
    # as in vLLM 18 are free now; r1 (10 blocks, all of them still cached or free) comes back only with a running slot
    assert engine.manager.pool.num_free == 18
    assert "r5" not in {holder.request_id for holder in engine.memory().holders}


def test_s2_watermark_against_a_loaded_request() -> None:
    engine = vllm_engine(watermark=0.1)
    step(engine, inbox=[new_request("x", counting_prompt(799), 1000)])
    plan, _ = step(engine, inbox=[loading("y", 624, 2)])
    assert engine.manager.num_blocks_of("y") == 39
    while engine.manager.pool.num_free > 8:
        step(engine)
    step(engine, inbox=[good(plan.reads[0].handle, 2), new_request("z", counting_prompt(80, 70_000))])
    for _ in range(5):
        step(engine)
        assert state(engine)[:3] == (["x"], ["y"], ["z"])  # 0 + 10 > 8; and z behind y (S5)
        assert engine.requests["y"].status is Status.LOADED
    view = {holder.request_id: holder for holder in engine.memory().holders}
    assert (view["y"].account, view["y"].blocks) == ("loaded_waiting", 39)
    step(engine, inbox=[Abort("x")])
    assert "y" in state(engine)[0]


def test_s2_had_free_been_ten() -> None:
    engine = vllm_engine(watermark=0.1)
    step(engine, inbox=[new_request("x", counting_prompt(799), 1000)])
    plan, _ = step(engine, inbox=[loading("y", 624, 2)])
    while engine.manager.pool.num_free > 10:
        step(engine)
    step(engine, inbox=[good(plan.reads[0].handle, 2)])
    assert state(engine)[0] == ["x", "y"]


def test_s2_strict_lets_the_loaded_request_run() -> None:
    engine = vllm_engine(watermark=0.1, transfer=replace(VLLM, loaded_skips_watermark=True))
    step(engine, inbox=[new_request("x", counting_prompt(799), 1000)])
    plan, _ = step(engine, inbox=[loading("y", 624, 2)])
    while engine.manager.pool.num_free > 8:
        step(engine)
    step(engine, inbox=[good(plan.reads[0].handle, 2)])
    assert state(engine)[0] == ["x", "y"]


def test_s3_failed_load_under_fail() -> None:
    engine = vllm_engine()
    plan, _ = step(engine, inbox=[loading("r", 165, 1)])
    assert engine.manager.pool.num_free == 89
    plan, events = step(engine, inbox=[failed(plan.reads[0].handle)])
    outcome = next(event for event in events if isinstance(event, Finished))
    assert outcome.reason is FinishReason.ERROR
    assert outcome.error is not None
    assert "the network broke" in outcome.error
    assert engine.manager.pool.num_free == 100
    assert not engine.requests


def test_s3_failed_load_under_recompute() -> None:
    engine = vllm_engine(transfer=replace(VLLM, load_failure="recompute"))
    plan, _ = step(engine, inbox=[loading("r", 165, 1)])
    plan, events = step(engine, inbox=[failed(plan.reads[0].handle)])
    assert [event.cause for event in events if isinstance(event, LoadFailed)] == ["the network broke"]
    assert dict(zip(plan.batch.request_ids, plan.batch.num_scheduled.tolist(), strict=True)) == {"r": 165}
    assert plan.reads == ()
    assert engine.manager.pool.num_free == 89


@pytest.mark.parametrize("prefix", [0, 2])
def test_s4_deferred_free_stalls_instead_of_preempting(prefix: int) -> None:
    """20 usable blocks, two plans outstanding; p and q hold 10 blocks each and both need an 11th."""
    engine = vllm_engine(num_blocks=21, max_outstanding_plans=2)
    inbox = [new_request(name, counting_prompt(160 - prefix, 1000 * i), 50) for i, name in enumerate("pq")]
    plan = engine.schedule(0, inbox)
    ahead = [plan]
    for _ in range(prefix):
        ahead.append(engine.schedule(0))
        done = ahead.pop(0)
        engine.complete(done.step_id, Outputs(tokens=np.full(len(done.batch), 5, dtype=np.int32)), 0)
    assert (engine.manager.num_blocks_of("p"), engine.manager.num_blocks_of("q")) == (10, 10)
    stalled = engine.schedule(0)
    assert len(stalled.batch) == 0
    assert not any(isinstance(event, Preempted) for event in stalled.events)
    engine.check()
    done = ahead.pop(0)
    engine.complete(done.step_id, Outputs(tokens=np.full(2, 5, dtype=np.int32)), 0)
    plan = engine.schedule(0)
    assert [event.request_id for event in plan.events if isinstance(event, Preempted)] == ["q"]
    assert plan.batch.request_ids == ("p",)
    assert engine.manager.pool.num_free == 9
    engine.check()


def test_s5_a_holding_request_that_does_not_fit_stops_admission() -> None:
    """y is loaded in part (half its prompt); the rest does not fit while x runs, and z behind it is not tried."""
    engine = vllm_engine(num_blocks=31, transfer=replace(VLLM, load_failure="recompute"))
    step(engine, inbox=[new_request("x", counting_prompt(160), 400)])
    y = new_request("y", counting_prompt(320, 5000), 4, source=source_for(160, 16, lease_id=3))
    # its whole sequence does not fit beside x from x's first decode on: 20 + 11 > 30
    plan, _ = step(engine, inbox=[y])
    assert len(plan.reads) == 0
    assert state(engine)[2] == ["y"]
    step(engine, inbox=[new_request("z", counting_prompt(16, 9000), 4)])
    assert state(engine)[2] == ["y", "z"]


def test_one_preemption_freezes_admission_for_the_step() -> None:
    engine = vllm_engine(num_blocks=21)
    step(engine, inbox=[new_request(name, counting_prompt(160, 1000 * i), 50) for i, name in enumerate("pq")])
    plan, events = step(engine, inbox=[new_request("tiny", counting_prompt(3, 7000), 4)])
    assert [event.request_id for event in events if isinstance(event, Preempted)] == ["q"]
    assert plan.batch.request_ids == ("p",)
    assert state(engine)[2] == ["q", "tiny"]
    plan, _ = step(engine)
    assert state(engine)[2] == ["q", "tiny"]  # q (11 blocks) does not fit beside p: the head blocks


def test_loads_take_no_budget_and_no_running_slot() -> None:
    engine = vllm_engine(max_num_seqs=1, max_num_batched_tokens=16)
    plan, _ = step(engine, inbox=[*(loading(f"r{i}", 160, i + 1) for i in range(3)), new_request("x", 16)])
    assert len(plan.reads) == 3
    assert plan.batch.request_ids == ("x",)


def test_reserved_blocks_hold_back_a_load_but_not_a_prefill() -> None:
    """A chunked prefill under way keeps what it still needs from later loads (spec 3.2.5)."""
    engine = vllm_engine(num_blocks=31, max_num_batched_tokens=64, max_num_seqs=8, long_prefill_token_threshold=16)
    step(engine, inbox=[new_request("x", counting_prompt(320), 4)])  # 20 blocks known, 4 held
    plan, _ = step(engine, inbox=[loading("y", 192, 2)])  # 12 > 30 - 5 held by x - 15 that x still needs
    assert plan.reads == ()
    plan, _ = step(engine, inbox=[Abort("y"), loading("z", 160, 3)])  # 10 = 30 - 6 - 14
    assert [read.source.grant.lease_id for read in plan.reads] == [3]
