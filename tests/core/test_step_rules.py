"""What bounds one step: active requests, scheduled tokens, the long-prefill cap, pauses, paced prefills, adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.core.helpers import NS, arrived, assert_all_free, finished_of, make_engine, new_request, source_for, step

from pdkv.core.blocks.extra_keys import LoraAdapter
from pdkv.core.blocks.groups import StateGroup
from pdkv.core.config import STRICT, VLLM, EngineConfig, TransferPolicy
from pdkv.core.engine import Engine
from pdkv.core.events import FinishReason
from pdkv.core.ports import Abort, GrammarReady, NewRequest, Outputs, Plan
from pdkv.core.scheduler.limits import PauseState, long_prefill_threshold
from pdkv.core.speculation import Speculation
from pdkv.errors import ConfigError


def shares(plan: Plan) -> dict[str, int]:
    """Tokens of the step by request."""
    return dict(zip(plan.batch.request_ids, plan.batch.num_scheduled.tolist(), strict=True))


def test_fewer_requests_are_active_than_there_are_slots() -> None:
    engine = make_engine(max_num_seqs=4, max_num_active_seqs=2)
    plan, _ = step(engine, 0, [new_request(name, 4, max_tokens=3) for name in "abc"])
    assert plan.batch.request_ids == ("a", "b")
    assert engine.quiet_steps(10) == 1, "the one who waits cannot come in while two run"
    for _ in range(3):
        plan, _ = step(engine)
    assert plan.batch.request_ids == ("c",)


@pytest.mark.parametrize("name", ["max_num_active_seqs", "max_num_scheduled_tokens"])
@pytest.mark.parametrize("value", [0, 1000])
def test_limits_that_cannot_be_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be at least 1 and at most max_num"):
        make_engine(**{name: value})


def test_scheduled_tokens_and_the_drafters_rows_are_two_budgets() -> None:
    drafter = Speculation(num_tokens=2, lookahead_tokens=2, drafting_slots=1)
    for more, expected in (({}, [15, 15]), ({"max_num_scheduled_tokens": 20}, [15, 5])):
        engine = make_engine(max_num_batched_tokens=32, speculation=drafter, num_blocks=65, **more)
        plan, _ = step(engine, 0, [new_request(name, 15) for name in "ab"])
        assert plan.batch.num_scheduled.tolist() == expected
    plan = make_engine(max_num_scheduled_tokens=10).schedule(0, [new_request("a", 15)])
    assert plan.batch.num_scheduled.tolist() == [10]


def test_a_chunk_that_must_end_at_a_block_leaves_the_drafter_its_row() -> None:
    """A block of 16 tokens fits no step of 16 with the drafter's row: it is advanced inside."""
    drafter = Speculation(num_tokens=1, drafting_slots=1)
    groups = (StateGroup(block_size=16, aligned=True),)
    engine = make_engine(max_num_batched_tokens=16, speculation=drafter, groups=groups, block_size=16)
    plans = [step(engine, 0, [new_request("a", 40, max_tokens=1)])[0]]
    while engine.requests and len(plans) < 9:
        plans.append(step(engine)[0])
    assert not engine.requests
    assert sum(shares(plan).get("a", 0) for plan in plans) == 40


def test_who_waits_for_a_larger_share_of_a_step_is_not_short_of_memory() -> None:
    engine = make_engine(max_model_len=32, enable_chunked_prefill=False)
    plan, _ = step(engine, 0, [new_request("a", 20, max_tokens=9), new_request("b", 20)])
    assert plan.batch.request_ids == ("a",)
    assert "whole prompt does not fit this step's token budget" in engine.requests["b"].wait_cause
    assert not engine.scheduler.short_of_memory
    full = make_engine(max_model_len=32, num_blocks=9)
    step(full, 0, [new_request("a", 20, max_tokens=9), new_request("b", 20)])
    assert full.scheduler.short_of_memory


@pytest.mark.parametrize(
    "more",
    [
        {"max_num_scheduled_tokens": 30},
        {"max_num_batched_tokens": 32, "speculation": Speculation(num_tokens=1, drafting_slots=2)},
    ],
)
def test_without_chunks_the_longest_prompt_must_fit_a_step_of_its_own(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"a prompt of up to 31 tokens .* at most 30 of it"):
        make_engine(max_model_len=32, enable_chunked_prefill=False, **more)
    fits = {"max_num_scheduled_tokens": 31}
    engine = make_engine(max_model_len=32, enable_chunked_prefill=False, **fits)
    assert step(engine, 0, [new_request("a", 31)])[0].batch.num_scheduled.tolist() == [31]


def test_the_adaptive_threshold_is_a_fair_share() -> None:
    def config(**more: Any) -> EngineConfig:
        values = {"num_blocks": 9, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4} | more
        return EngineConfig(max_num_batched_tokens=32, **values)

    fixed, adaptive = {"long_prefill_token_threshold": 6}, {"long_prefill_token_threshold_adaptive": True}
    for requests, capped, fair in ((1, 0, 0), (2, 6, 16), (5, 6, 6), (6, 6, 6)):
        assert long_prefill_threshold(config(**fixed), requests) == capped
        assert long_prefill_threshold(config(**fixed, **adaptive), requests) == fair
        assert long_prefill_threshold(config(**adaptive), requests) == 0, "it only lifts a threshold"
    engine = make_engine(**fixed, **adaptive, max_num_batched_tokens=32, num_blocks=65)
    plan, _ = step(engine, 0, [new_request(name, 30) for name in "abc"])
    assert shares(plan) == {"a": 10, "b": 10, "c": 10}
    alone = make_engine(**fixed, **adaptive, max_num_batched_tokens=32)
    assert step(alone, 0, [new_request("a", 30)])[0].batch.num_scheduled.tolist() == [30]


# ------------------------------------------------------------------------------------------------------------ pauses


def test_paused_for_all_nothing_is_computed_and_nobody_comes_in() -> None:
    engine = make_engine()
    step(engine, 0, [new_request("a", 4, max_tokens=3)])
    engine.pause(PauseState.PAUSED_ALL)
    assert engine.quiet_steps(5) == 0
    plan, _ = step(engine, 0, [new_request("b", 4)])
    assert len(plan.batch) == 0
    assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (1, 1)
    assert engine.scheduler.num_unfinished == 0
    engine.pause(PauseState.UNPAUSED)
    assert engine.scheduler.num_unfinished == 2
    assert step(engine)[0].batch.request_ids == ("a", "b")


def test_paused_for_new_ones_those_with_memory_go_on_to_their_end() -> None:
    engine = make_engine()
    plan, _ = step(engine, 0, [new_request("a", 4, max_tokens=2), new_request("l", 8, source=source_for(8, 4))])
    assert plan.batch.request_ids == ("a",)
    engine.pause(PauseState.PAUSED_NEW)
    step(engine, 0, [arrived(plan), new_request("b", 4)])
    assert [request.request_id for request in engine.scheduler.running] == ["l"], "what was loading is let in"
    assert engine.scheduler.num_unfinished == 1
    assert engine.quiet_steps(2) == 2, "b cannot come in, so it decides nothing"
    events = [event for _ in range(3) for event in step(engine)[1]]
    assert finished_of(events).keys() == {"l"}
    assert engine.scheduler.num_unfinished == 0
    assert len(engine.scheduler.waiting) == 1
    engine.pause(PauseState.UNPAUSED)
    assert step(engine)[0].batch.request_ids == ("b",)


def test_a_pause_lets_go_of_nobody_and_a_load_goes_on_meanwhile() -> None:
    engine = make_engine()
    plan, _ = step(engine, 0, [new_request("l", 8, max_tokens=1, source=source_for(8, 4))])
    engine.pause(PauseState.PAUSED_ALL)
    step(engine, 0, [arrived(plan)])
    assert engine.manager.pool.ledger.as_dict()["loaded_waiting"] == 2
    step(engine, 61 * NS)
    assert engine.manager.pool.ledger.as_dict()["loaded_waiting"] == 0, "its bound in time holds in a pause too"
    engine.pause(PauseState.UNPAUSED)
    step(engine, 62 * NS)
    assert_all_free(engine)


# ------------------------------------------------------------------------------------------------------ paced prefills


def paced(interval: int = 4, **more: Any) -> Engine:
    values: dict[str, Any] = {"num_blocks": 129, "max_num_batched_tokens": 16, "max_num_seqs": 8} | more
    return make_engine(prefill_schedule_interval=interval, **values)


def test_prompts_wait_for_the_next_aligned_step_while_somebody_decodes() -> None:
    engine = paced()
    step(engine, 0, [new_request("a", 4, max_tokens=40)])  # step 0: aligned
    plans = [step(engine, 0, [new_request(f"b{number}", 4)] if number == 0 else ())[0] for number in range(4)]
    assert [len(plan.batch) for plan in plans] == [1, 1, 1, 2]


def test_a_part_of_a_prompt_waits_too_even_its_last_token() -> None:
    engine = paced(max_num_batched_tokens=10)
    step(engine, 0, [new_request("a", 4, max_tokens=40)])
    for _ in range(3):
        step(engine)
    plan, _ = step(engine, 0, [new_request("b", 10)])  # step 4: 9 of its 10 tokens beside a's one
    assert shares(plan) == {"a": 1, "b": 9}
    assert [shares(step(engine)[0]) for _ in range(4)] == [{"a": 1}] * 3 + [{"a": 1, "b": 1}]


def test_prompts_are_not_paced_while_nobody_decodes_nor_where_they_pile_up() -> None:
    engine = paced(max_num_seqs=2)
    step(engine, 0, [new_request("a", 4, max_tokens=40)])
    engine.schedule(0)  # step 1 of an instance where only a decodes ...
    engine.complete(1, Outputs(tokens=np.asarray([5], dtype=np.int32)), 0)
    for _ in range(3):
        plan, _ = step(engine, 0, [new_request(f"w{len(engine.requests)}", 4, max_tokens=2)])
    assert plan.batch.request_ids == ("a", "w1"), "step 4 lets one in; two more stay without a slot"
    step(engine)  # w1 ends with step 5
    assert step(engine)[0].batch.request_ids == ("a", "w2"), "step 6: who could not be let in is not paced"
    fresh = paced()
    plan, _ = step(fresh, 0, [new_request("a", 30, max_tokens=2)])
    assert [shares(step(fresh)[0]) for _ in range(2)] == [{"a": 14}, {"a": 1}], "alone, a prompt is not cut up"


def test_steps_count_anew_after_an_idle_time_and_strides_count_as_steps() -> None:
    engine = paced()
    for _ in range(3):
        step(engine, 0, [new_request("a", 4, max_tokens=1)] if not engine.requests else ())
    assert shares(step(engine, 0, [new_request("b", 4)])[0]) == {"b": 4}
    strided, plain = paced(), paced()
    for one in (strided, plain):
        step(one, 0, [new_request("a", 4, max_tokens=40)])
    assert strided.quiet_steps(6) == 6
    strided.advance(np.full((6, 1), 5, dtype=np.int32), 0)
    for _ in range(6):
        step(plain)
    for one in (strided, plain):
        assert shares(step(one, 0, [new_request("b", 4)])[0]) == {"a": 1}
        assert shares(step(one)[0]) == {"a": 1, "b": 4}, "step 8 is aligned"


# ---------------------------------------------------------------------------------------------- adapters and grammars


def adapted(name: str, lora: str | None, **more: Any) -> NewRequest:
    return new_request(name, 4, lora=None if lora is None else LoraAdapter(lora, f"/{lora}"), **more)


def test_a_step_has_so_many_adapters_and_others_pass_who_waits_for_one() -> None:
    engine = make_engine(max_loras=1)
    inbox = [adapted("a", "x", max_tokens=2), adapted("b", "y"), adapted("c", "x"), adapted("d", None)]
    plan, _ = step(engine, 0, inbox)
    assert plan.batch.request_ids == ("a", "c", "d")
    assert "max_loras" in engine.requests["b"].wait_cause
    assert engine.quiet_steps(3) == 0, "b may come in at any step"
    for _ in range(3):
        plan, _ = step(engine)
        assert "b" not in plan.batch.request_ids
    assert step(engine)[0].batch.request_ids == ("b",), "y is used once nobody computes with x"
    with pytest.raises(ConfigError, match="max_loras is 0"):
        make_engine(max_loras=0)


@pytest.mark.parametrize(("policy", "most"), [(STRICT, 1), (VLLM, 2)])
def test_who_is_left_out_of_a_step_keeps_its_adapter(policy: TransferPolicy, most: int) -> None:
    """x computes its prompt in every fourth step only; y, whose KV is loaded, could come in between."""
    engine = paced(max_loras=1, long_prefill_token_threshold=8, transfer=policy)
    x = new_request("x", 40, lora=LoraAdapter("x", "/x"))
    y = new_request("y", 8, max_tokens=30, lora=LoraAdapter("y", "/y"), source=source_for(8, 4))
    loading, _ = step(engine, 0, [new_request("d", 4, max_tokens=60), y, x])
    assert shares(loading) == {"d": 4, "x": 8}
    plans = [step(engine, 0, [arrived(loading)])[0], *(step(engine)[0] for _ in range(8))]
    assert max(len({"x", "y"} & shares(plan).keys()) for plan in plans) == most


def test_a_request_waits_for_its_grammar_without_memory_and_holds_up_nobody() -> None:
    engine = make_engine()
    plan, _ = step(engine, 0, [new_request("g", 4, awaits_grammar=True), new_request("a", 4)])
    assert plan.batch.request_ids == ("a",)
    plan, _ = step(engine, 0, [GrammarReady("g")])
    assert plan.batch.request_ids == ("a", "g")
    step(engine, 0, [new_request("bad", 4, awaits_grammar=True)])
    _, events = step(engine, 0, [GrammarReady("bad", "unbalanced brackets"), GrammarReady("nobody")])
    finished = finished_of(events)["bad"]
    assert finished.reason is FinishReason.ERROR
    assert finished.error == "its grammar cannot be compiled: unbalanced brackets"


@pytest.mark.parametrize("policy", [STRICT, VLLM])
def test_a_grammar_that_never_comes_does_not_keep_a_producer_waiting_for_ever(policy: TransferPolicy) -> None:
    engine = make_engine(transfer=policy, grammar_timeout_ns=20 * NS)
    plan, _ = step(engine, 0, [new_request("gone", 8, awaits_grammar=True)])
    step(engine, NS, [new_request("g", 8, awaits_grammar=True, source=source_for(8, 4))])
    plan, _ = step(engine, 2 * NS, [Abort("gone")])
    assert len(plan.keepalives) == 1
    assert plan.next_deadline_ns == (21 * NS if policy is STRICT else None)
    _, events = step(engine, 21 * NS - 1)
    assert not finished_of(events)
    plan, events = step(engine, 21 * NS)
    if policy is VLLM:
        assert len(plan.keepalives) == 1
        return
    assert finished_of(events)["g"].error == "its grammar was not compiled within 20 s"
    assert not plan.keepalives
    assert [type(one.message).__name__ for one in plan.messages] == ["Done"]
    plan, _ = step(engine, 22 * NS, [GrammarReady("g")])
    assert not engine.requests
    assert plan.next_deadline_ns is None
