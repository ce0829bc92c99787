"""Backwards and side by side: solutions are checked by planning them, and by trying everything that is smaller."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.models import CONFIGS, planned

from pdkv.errors import ConfigError, PdkvError
from pdkv.plan import svg
from pdkv.plan.compare import compare, parse_dimensions
from pdkv.plan.curves import concurrency_by_length
from pdkv.plan.options import PlanOptions
from pdkv.plan.page import page
from pdkv.plan.planner import make_plan, size_planned
from pdkv.plan.sizing import Sized
from pdkv.plan.solve import Solution, SolveReport, Target, solve
from pdkv.source import PlannedModel
from pdkv.units import GIB, cdiv


def solved(model: PlannedModel, target: Target, **options: Any) -> SolveReport:
    return solve(model.spec, PlanOptions(**options), target, lambda changed: size_planned(model, changed))


def sized(model: PlannedModel, solution: Solution, target: Target, **options: Any) -> Sized:
    return size_planned(
        model,
        PlanOptions(
            tensor_parallel_size=solution.tensor_parallel_size,
            pipeline_parallel_size=solution.pipeline_parallel_size,
            decode_context_parallel_size=solution.decode_context_parallel_size,
            kv_cache_dtype=solution.kv_cache_dtype,
            max_model_len=target.tokens,
            **options,
        ),
    )


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(CONFIGS)),
    st.integers(1, 300),
    st.integers(100, 100_000),
    st.integers(2, 40),
)
def test_a_solution_holds_what_it_says_and_nothing_smaller_does(name: str, count: int, tokens: int, gib: int) -> None:
    model = planned(name)
    target = Target(concurrency=count, tokens=tokens, max_gpus=16)
    memory = {"kv_cache_memory_bytes": gib * GIB}
    report = solved(model, target, **memory)
    for one in (report.best, *report.others):
        if one is None:
            continue
        found = sized(model, one, target, **memory)
        assert one.gpus == found.options.ranks * one.data_parallel_size <= 16
        assert one.requests == one.data_parallel_size * found.whole_requests(tokens) >= count
        each = cdiv(count, one.data_parallel_size)
        assert found.whole_requests(one.longest_tokens) >= each
        assert one.longest_tokens == model.spec.max_model_len or found.whole_requests(one.longest_tokens + 1) < each
    if report.unquantized is not None:
        assert report.best is not None
        assert report.unquantized.kv_cache_dtype == "auto"
        assert report.unquantized.gpus >= report.best.gpus
        assert report.best.kv_cache_dtype == "auto" or report.best.gpus < report.unquantized.gpus
    fewest = report.best.gpus if report.best else 17
    fewest_own = report.unquantized.gpus if report.unquantized else 17
    for tensor, pipeline, context, kind in itertools.product(
        (1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 4, 8, 16), ("auto", "fp8")
    ):
        engines = ((fewest_own if kind == "auto" else fewest) - 1) // (tensor * pipeline)
        if tensor % context or not engines:
            continue
        smaller = Solution(
            gpus=0, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, decode_context_parallel_size=context,
            data_parallel_size=engines, kv_cache_dtype=kind, requests=0, longest_tokens=0,
        )  # fmt: skip
        try:
            found = sized(model, smaller, target, **memory)
        except PdkvError:
            continue
        assert engines * found.whole_requests(tokens) < count


def test_what_cannot_be_met_says_what_comes_nearest() -> None:
    report = solved(
        planned("dense"), Target(concurrency=1000, tokens=131072, max_gpus=2), kv_cache_memory_bytes=20 * GIB
    )
    assert report.best is None
    assert report.others == ()
    assert report.nearest is not None
    assert 0 < report.nearest.requests < 1000
    assert report.nearest.gpus == 2
    assert report.nearest.longest_tokens > 0
    asked = solved(
        planned("dense"), Target(concurrency=1, tokens=1000), kv_cache_memory_bytes=GIB, kv_cache_dtype="fp8"
    )
    assert asked.best is not None
    assert {one.kv_cache_dtype for one in (asked.best, *asked.others)} == {"fp8"}
    assert asked.unquantized == asked.best


def test_a_checkpoint_that_asks_for_8_bits_is_kept_in_them() -> None:
    quantized = planned("dense", quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"})
    assert quantized.spec.kv_dtype is not None
    report = solved(quantized, Target(concurrency=100, tokens=8192), kv_cache_memory_bytes=4 * GIB)
    assert report.best is not None
    assert report.unquantized == report.best
    assert {one.kv_cache_dtype for one in (report.best, *report.others)} == {"auto"}


def test_sizes_that_were_given_are_said_to_be_unused() -> None:
    target = Target(concurrency=1, tokens=1000)
    report = solved(planned("dense"), target, kv_cache_memory_bytes=GIB, tensor_parallel_size=4)
    assert any("--tensor-parallel-size 4 was not used" in warning for warning in report.warnings)


@pytest.mark.parametrize("changes", [{"concurrency": 0}, {"tokens": 0}, {"max_gpus": 0}])
def test_targets_that_cannot_be(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        Target(**{"concurrency": 1, "tokens": 1, **changes})


def test_engines_that_may_not_run_as_many_are_named() -> None:
    target = Target(concurrency=300, tokens=64)
    for seqs, said in ((299, ["give --max-num-seqs 300,"]), (300, [])):
        report = solved(planned("dense"), target, kv_cache_memory_bytes=40 * GIB, max_num_seqs=seqs)
        assert report.best is not None
        assert report.best.gpus == 1
        found = [warning for warning in report.warnings if "--max-num-seqs" in warning]
        assert len(found) == len(said)
        assert all(text in warning for text, warning in zip(said, found, strict=True))


def test_no_memory_is_an_error_for_a_solution_too() -> None:
    with pytest.raises(ConfigError, match="how much memory"):
        solved(planned("dense"), Target(concurrency=1, tokens=1))


# ------------------------------------------------------------------------------------------------------- comparison


def test_every_cell_is_a_plan() -> None:
    model, options = planned("windowed"), PlanOptions(kv_cache_memory_bytes=20 * GIB)
    dimensions = parse_dimensions(
        "kv_cache_dtype=auto:fp8,--tensor-parallel-size=1:2:3,max-model-len=8K:64k,enable_prefix_caching=true:false",
        model.spec,
        options,
    )
    assert dimensions == {
        "kv_cache_dtype": ("auto", "fp8"),
        "tensor_parallel_size": (1, 2, 3),
        "max_model_len": (8192, 64_000),
        "enable_prefix_caching": (True, False),
    }
    table = compare(dimensions, options, lambda changed: size_planned(model, changed))
    assert len(table.cells) == 2 * 3 * 2 * 2
    for cell, combination in zip(table.cells, itertools.product(*dimensions.values()), strict=True):
        assert tuple(cell.settings.values()) == combination
        if cell.settings["tensor_parallel_size"] == 3:
            assert cell.refused is not None
            assert "32 attention heads" in cell.refused
            assert cell.num_blocks is None
            continue
        plan = make_plan(model, replace(options, **cell.settings))
        assert cell.refused is None
        assert (cell.num_blocks, cell.kv_cache_size_tokens) == (
            plan.capacity.num_blocks,
            plan.capacity.kv_cache_size_tokens,
        )
        assert (cell.max_concurrency, cell.bytes_per_token) == (plan.capacity.max_concurrency, plan.kv.bytes_per_token)
        assert cell.gpus == plan.deployment.gpus


def test_usual_values() -> None:
    latent, dense = planned("latent"), planned("dense")
    options = PlanOptions(kv_cache_memory_bytes=GIB)
    types = parse_dimensions("kv_cache_dtype", latent.spec, options)["kv_cache_dtype"]
    assert types[0] == "auto"
    assert "fp8" in types
    assert "nvfp4" not in types
    assert "nvfp4" in parse_dimensions("kv_cache_dtype", dense.spec, options)["kv_cache_dtype"]
    only = parse_dimensions("kv_cache_dtype", dense.spec, replace(options, attention_backend="FLASH_ATTN"))
    assert only["kv_cache_dtype"] == ("auto", "fp8")
    assert parse_dimensions("max_model_len", dense.spec, options)["max_model_len"] == (4096, 8192, 32768, 131072)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "name what to compare"),
        ("colour", "--compare colour: there are"),
        ("kv_transfer", "--compare kv_transfer: there are"),
        ("attention_backend", "give its values"),
        ("kv_cache_dtype=", "a value is missing"),
        ("tensor_parallel_size=1::2", "a value is missing"),
        ("block_size=16,block_size=32", "named twice"),
        ("tensor_parallel_size=1:two", "'two'"),
        (
            "max_model_len=" + ":".join(map(str, range(1, 80))) + ",max_num_seqs=" + ":".join(map(str, range(1, 80))),
            "6,241",
        ),
    ],
)
def test_comparisons_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_dimensions(text, planned("dense").spec, PlanOptions())


# ------------------------------------------------------------------------------------------------------------- page


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_page_is_whole_and_shows_the_plan(name: str) -> None:
    model, options = planned(name), PlanOptions(kv_cache_memory_bytes=3 * GIB, pipeline_parallel_size=2)

    def resize(changed: PlanOptions) -> Sized:
        return size_planned(model, changed)

    plan = make_plan(model, options, served_as="<&>")
    by_type = compare(parse_dimensions("kv_cache_dtype", model.spec, options), options, resize)
    table = compare(parse_dimensions("tensor_parallel_size=1:3", model.spec, options), options, resize)
    text = page(plan, by_type, concurrency_by_length(resize, options), table)
    assert "http" not in text.replace("http-equiv", "")
    assert "<script" not in text
    assert len(text) < 60_000
    body = text[text.index("<body>") : text.index("</html>")].replace("&rarr;", "")
    tree = ET.fromstring(body)
    assert len(tree.findall(".//svg")) == 3
    words = " ".join(tree.itertext())
    assert "&<" not in words
    assert "<&>" in words
    assert f"{plan.capacity.kv_cache_size_tokens:,}" in words
    for cell in by_type.cells:
        if cell.refused is None:
            assert f"{cell.kv_cache_size_tokens:,}" in words
    assert "rank 1" in words


def test_curves_are_the_concurrency_of_plans() -> None:
    model, options = planned("dense"), PlanOptions(kv_cache_memory_bytes=3 * GIB, data_parallel_size=2)
    curves = concurrency_by_length(lambda changed: size_planned(model, changed), options)
    assert curves[0].name == "auto"
    for curve in curves:
        for length, requests in zip(curve.lengths, curve.requests, strict=True):
            plan = make_plan(model, replace(options, kv_cache_dtype=curve.name, max_model_len=length))
            assert requests == (2 * plan.capacity.max_concurrency if plan.capacity.fits else 0)


def test_charts_of_nothing() -> None:
    assert "Nothing fits" in svg.lines([svg.Line("a", (1.0,), (svg.Mark("x", 0, "0"),))], "x", "y")
    one = svg.lines([svg.Line("a", (8192.0,), (svg.Mark("x", 1, "1"),))], "x", "y")
    ET.fromstring(one)
    assert [svg.short(tokens) for tokens in (512, 1024, 131072, 1 << 20, 1500)] == ["512", "1K", "128K", "1M", "1500"]
