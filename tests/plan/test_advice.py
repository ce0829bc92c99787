"""Advice and levers: each effect is what planning again with the change applied gives."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from tests.plan.models import planned

from pdkv.plan.kv_transfer import parse_kv_transfer
from pdkv.plan.options import PlanOptions
from pdkv.plan.planner import make_plan
from pdkv.plan.report import PlanReport
from pdkv.units import GIB, MIB

LMCACHE = parse_kv_transfer({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})
NIXL = parse_kv_transfer({"kv_connector": "NixlConnector", "kv_role": "kv_consumer"})

# model, settings, and the advice that must come, in order.
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("dense", {"kv_cache_memory_bytes": 40 * GIB}, ["kv-cache-dtype"]),
    ("dense", {"kv_cache_memory_bytes": 40 * GIB, "kv_cache_dtype": "fp8"}, []),
    (
        "dense",
        {"kv_cache_memory_bytes": 2 * GIB},
        ["max-model-len", "kv-cache-memory-bytes", "kv-cache-dtype"],
    ),
    ("dense", {"kv_cache_memory_bytes": 5 * GIB}, ["max-model-len", "kv-cache-memory-bytes", "kv-cache-dtype"]),
    ("dense", {"kv_cache_memory_bytes": MIB}, ["kv-cache-memory-bytes", "kv-cache-dtype"]),
    ("dense", {"kv_cache_memory_bytes": MIB, "kv_cache_dtype": "fp8"}, ["max-model-len", "kv-cache-memory-bytes"]),
    ("dense", {"num_gpu_blocks_override": 10}, ["max-model-len"]),
    (
        "dense",
        {"kv_cache_memory_bytes": 40 * GIB, "tensor_parallel_size": 32},
        ["kv-cache-dtype", "decode-context-parallel-size"],
    ),
    ("latent", {"kv_cache_memory_bytes": 40 * GIB, "tensor_parallel_size": 1}, ["kv-cache-dtype"]),
    (
        "latent",
        {"kv_cache_memory_bytes": 40 * GIB, "tensor_parallel_size": 8},
        ["kv-cache-dtype", "decode-context-parallel-size"],
    ),
    ("windowed", {"kv_cache_memory_bytes": 40 * GIB}, ["kv-cache-dtype", "max-num-batched-tokens"]),
    ("windowed", {"kv_cache_memory_bytes": 40 * GIB, "max_num_batched_tokens": 512}, ["kv-cache-dtype"]),
    (
        "windowed",
        {"kv_cache_memory_bytes": 40 * GIB, "disable_hybrid_kv_cache_manager": True},
        ["hybrid-manager", "kv-cache-dtype"],
    ),
    ("windowed", {"kv_cache_memory_bytes": 40 * GIB, "kv_transfer": LMCACHE}, ["connector", "kv-cache-dtype"]),
    (
        "windowed",
        {"kv_cache_memory_bytes": 40 * GIB, "kv_transfer": NIXL, "vllm_version": "0.21", "max_num_batched_tokens": 512},
        ["hybrid-manager", "kv-cache-dtype"],
    ),
    ("states", {"kv_cache_memory_bytes": 40 * GIB}, ["kv-cache-dtype", "mamba-ssm-cache-dtype"]),
    ("states", {"kv_cache_memory_bytes": 40 * GIB, "mamba_ssm_cache_dtype": "bfloat16"}, ["kv-cache-dtype"]),
]


@pytest.mark.parametrize(("name", "settings", "expected"), CASES)
def test_every_piece_of_advice_does_what_it_says(name: str, settings: dict[str, Any], expected: list[str]) -> None:
    model, options = planned(name), PlanOptions(**settings)
    report = make_plan(model, options)
    assert [advice.id for advice in report.advice] == expected
    for advice in report.advice:
        assert advice.changes.keys() <= {field.name for field in fields(PlanOptions)}
        again = make_plan(model, replace(options, **advice.changes))
        assert_effect(advice.effect, report, again)


def assert_effect(effect: str, before: PlanReport, after: PlanReport) -> None:
    """The sentence's numbers are those of the two plans."""
    if tokens := re.search(r"(\d+) tokens instead of (\d+)", effect):
        assert int(tokens[1]) == after.capacity.kv_cache_size_tokens
        assert int(tokens[2]) == before.capacity.kv_cache_size_tokens
        assert int(tokens[1]) > int(tokens[2])
    if fits := re.search(r"one request of (\d+) tokens fits", effect):
        assert after.capacity.fits
        assert not before.capacity.fits
        assert after.capacity.max_model_len == int(fits[1])
    if longest := re.search(r"the longest that fits has (\d+) tokens, not (\d+)", effect):
        assert int(longest[1]) == after.capacity.estimated_max_model_len
        assert int(longest[2]) == before.capacity.estimated_max_model_len
    assert tokens or fits or longest


def test_a_connector_without_hybrid_support_is_priced() -> None:
    model = planned("windowed")
    memory = 40 * GIB
    free = make_plan(model, PlanOptions(kv_cache_memory_bytes=memory)).capacity.kv_cache_size_tokens
    report = make_plan(model, PlanOptions(kv_cache_memory_bytes=memory, kv_transfer=LMCACHE))
    held = report.capacity.kv_cache_size_tokens
    assert not report.deployment.hybrid_manager
    [price] = [
        warning for warning in report.warnings if "LMCacheConnectorV1 switches the hybrid manager off" in warning
    ]
    assert f"{held:,} tokens instead of {free:,} ({1 - held / free:.0%} less)" in price
    # NIXL supports it; before 0.22 no connector left it on unless asked to.
    for version, explicit, on in (("0.32", None, True), ("0.21", None, False), ("0.21", False, True)):
        options = PlanOptions(
            kv_cache_memory_bytes=memory,
            kv_transfer=NIXL,
            vllm_version=version,
            disable_hybrid_kv_cache_manager=explicit,
        )
        assert make_plan(model, options).deployment.hybrid_manager is on


# ---------------------------------------------------------------------------------------------------- long requests


@pytest.mark.parametrize("name", ["dense", "windowed", "latent", "states"])
def test_every_lever_of_a_long_request_is_a_plan(name: str) -> None:
    model = planned(name)
    options = PlanOptions(kv_cache_memory_bytes=20 * GIB, max_model_len=1 << 20, tensor_parallel_size=2)
    report = make_plan(model, options)
    long = report.long_context
    assert long is not None
    assert (long.tokens, long.longest) == (1 << 20, report.capacity.estimated_max_model_len)
    assert long.request_bytes == report.capacity.blocks_per_max_len_request * report.capacity.bytes_per_block
    assert long.request_bytes_all_ranks == 2 * long.request_bytes
    ids = [lever.id for lever in long.levers]
    assert {"kv-cache-dtype fp8", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"} <= set(ids)
    assert len(set(ids)) == len(ids)
    for lever in long.levers:
        if lever.request_bytes is None:
            continue
        again = make_plan(model, replace(options, **lever.changes)).capacity
        assert lever.request_bytes == again.blocks_per_max_len_request * again.bytes_per_block
        assert lever.longest == again.estimated_max_model_len
        assert (lever.concurrency or 0) == pytest.approx(
            again.max_concurrency * lever.changes.get("data_parallel_size", 1) if again.fits else 0
        )
    assert any("was made for 131,072 tokens" in warning for warning in report.warnings)
    assert "no longer request fit" in long.host_tier


def test_levers_do_what_they_are_known_to_do() -> None:
    def effects(name: str, **settings: Any) -> dict[str, int]:
        options = PlanOptions(kv_cache_memory_bytes=20 * GIB, max_model_len=1 << 20, **settings)
        long = make_plan(planned(name), options).long_context
        assert long is not None
        return {"now": long.request_bytes} | {one.id: one.request_bytes for one in long.levers if one.request_bytes}

    dense = effects("dense")
    assert dense["kv-cache-dtype fp8"] * 2 == dense["tensor-parallel-size"] * 2 == dense["now"]
    assert dense["data-parallel-size"] == dense["now"]
    latent = effects("latent", tensor_parallel_size=4)
    assert latent["tensor-parallel-size"] == latent["now"]
    assert latent["decode-context-parallel-size"] * 4 == latent["now"]
    windowed = effects("windowed")
    assert windowed["max-num-batched-tokens"] < windowed["now"]


def test_sharing_half_of_a_long_prompt() -> None:
    """8192 blocks a request, 4096 of them shared: 5 * 4096 blocks hold four, and two without sharing."""
    report = make_plan(planned("dense"), PlanOptions(num_gpu_blocks_override=5 * 4096 + 1, max_model_len=131072))
    assert report.long_context is not None
    assert report.long_context.shared_prefix_requests == 4
    assert int(report.capacity.max_concurrency) == 2
    short = planned("dense", max_position_embeddings=256)
    assert make_plan(short, PlanOptions(kv_cache_memory_bytes=GIB)).long_context is None


# -------------------------------------------------------------------------------------------------- estimated budgets


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"gpu": "h100"}, ["kv-cache-dtype", "gpu-memory-utilization"]),
        ({"gpu": "h100", "gpu_memory_utilization": 0.95}, ["kv-cache-dtype"]),
        (
            {"gpu": "h100", "gpu_memory_utilization": 0.17},
            ["max-model-len", "kv-cache-dtype", "gpu-memory-utilization", "enforce-eager", "tensor-parallel-size"],
        ),
        ({"gpu": "h100", "gpu_memory_utilization": 0.05}, ["gpu-memory-utilization"]),
    ],
)
def test_advice_where_the_budget_is_estimated(settings: dict[str, Any], expected: list[str]) -> None:
    model, options = planned("dense", vocab_size=32000, intermediate_size=14336), PlanOptions(**settings)
    report = make_plan(model, options)
    assert [advice.id for advice in report.advice] == expected
    for advice in report.advice:
        assert_effect(advice.effect, report, make_plan(model, replace(options, **advice.changes)))


def test_a_host_tier_is_said_to_keep_copies_only() -> None:
    """1,024 tokens of the dense model are 64 MiB."""
    options = PlanOptions(kv_cache_memory_bytes=20 * GIB, max_model_len=1024)
    with_tier = make_plan(planned("dense"), replace(options, kv_offloading_bytes=GIB))
    without = make_plan(planned("dense"), options)
    [said] = [warning for warning in with_tier.warnings if warning.startswith("--kv-offloading-size: ")]
    assert "makes no longer request fit" in said
    assert said.endswith("1.00 GiB would keep 16.00 requests of this length ready to be read back")
    assert with_tier.capacity == without.capacity
    assert not any("offloading" in warning for warning in without.warnings)
    long = make_plan(planned("dense"), replace(options, kv_offloading_bytes=GIB, max_model_len=128_000))
    assert long.long_context is not None
    assert "1.00 GiB would keep 0.13 requests" in long.long_context.host_tier
    assert not any("offloading" in warning for warning in long.warnings)
