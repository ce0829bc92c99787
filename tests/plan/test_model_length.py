"""Lengths beyond the model's own: an answer everywhere, and everywhere with what vLLM says to them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.plan.models import planned

from pdkv.plan.compare import compare, parse_dimensions
from pdkv.plan.model_length import BEYOND_MODEL_LENGTH
from pdkv.plan.options import PlanOptions
from pdkv.plan.planner import make_plan, size_planned
from pdkv.plan.solve import Target, solve
from pdkv.plan.vllm_args import parse_command
from pdkv.units import GIB

OWN = planned("dense").spec.max_model_len
LONG = OWN + 1


def plan(**settings: Any) -> Any:
    return make_plan(planned("dense"), PlanOptions(kv_cache_memory_bytes=200 * GIB, **settings))


def beyond(warnings: tuple[str, ...]) -> list[str]:
    return [warning for warning in warnings if warning.startswith(f"{BEYOND_MODEL_LENGTH}: ")]


def test_a_plan_answers_and_says_first_that_vllm_refuses() -> None:
    report = plan(max_model_len=LONG)
    assert report.capacity.fits
    assert report.capacity.max_model_len == LONG
    assert beyond(report.warnings) == [report.warnings[0]]
    refusal = f"refuses to start with --max-model-len {LONG} unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set"
    for said in (f"{OWN:,} tokens", f"{LONG:,} were", refusal):
        assert said in report.warnings[0]


@pytest.mark.parametrize("length", [None, "auto", 1, OWN])
def test_no_warning_for_lengths_that_the_model_was_made_for(length: Any) -> None:
    report = plan(max_model_len=length)
    assert not beyond(report.warnings)
    assert "VLLM_ALLOW_LONG" not in report.command


def test_rope_scaling_moves_the_limit() -> None:
    scaled = planned("dense", rope_scaling={"rope_type": "linear", "factor": 2.0})
    options = PlanOptions(kv_cache_memory_bytes=200 * GIB, max_model_len=2 * OWN)
    assert not beyond(make_plan(scaled, options).warnings)
    assert beyond(make_plan(planned("dense"), options).warnings)


def test_the_command_says_what_vllm_needs_and_is_read_back() -> None:
    report = plan(max_model_len=LONG)
    assert report.command.startswith("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve ")
    back = parse_command(report.command)
    assert back.warnings == ()
    assert make_plan(planned("dense"), back.options) == report


def test_a_comparison_warns_for_its_longest_row() -> None:
    model, options = planned("dense"), PlanOptions(kv_cache_memory_bytes=200 * GIB)

    def warned(text: str) -> list[str]:
        table = compare(parse_dimensions(text, model.spec, options), options, lambda one: size_planned(model, one))
        return beyond(table.warnings)

    assert warned(f"max_model_len={OWN}:1024,tensor_parallel_size=1:3") == []
    [warning] = warned(f"max_model_len={LONG}:{2 * OWN}:1024")
    assert f"--max-model-len {2 * OWN} " in warning


def test_a_solution_warns_and_holds_what_was_asked_for() -> None:
    model, options = planned("dense"), PlanOptions(kv_cache_memory_bytes=200 * GIB)

    def solved(tokens: int) -> Any:
        target = Target(concurrency=3, tokens=tokens)
        return solve(model.spec, options, target, lambda one: size_planned(model, one))

    assert not beyond(solved(OWN).warnings)
    report = solved(LONG)
    assert len(beyond(report.warnings)) == 1
    assert report.best.longest_tokens >= LONG
