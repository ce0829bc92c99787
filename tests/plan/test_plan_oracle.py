"""`pdkv plan` against the recordings of vLLM 0.32 (tests/data/capacity.jsonl.gz): the answer of the planner itself."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pdkv.models.families import spec_from_config
from pdkv.plan.planner import PlanOptions, make_plan
from pdkv.source import PlannedModel

DATA = Path(__file__).resolve().parents[1] / "data" / "capacity.jsonl.gz"
# Recorded with a backend that does not take the type, or without the layers that `vllm serve` adds.
UNLIKE_SERVE = ("fp8_e5m2", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")


def rows() -> list[Any]:
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    return [
        pytest.param(row, id=row["id"])
        for row in found
        if row["engine_args"]["kv_cache_dtype"] not in UNLIKE_SERVE or row["engine_args"]["kv_cache_dtype_skip_layers"]
    ]


@pytest.mark.parametrize("row", rows())
def test_the_planner_gives_the_recorded_numbers(row: dict[str, Any]) -> None:
    given, expected = row["engine_args"], row["expected"]
    options = PlanOptions(
        kv_cache_memory_bytes=row["available_bytes"],
        num_gpu_blocks_override=given["num_gpu_blocks_override"],
        block_size=given["requested_block_size"],
        max_model_len=given["max_model_len"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        async_scheduling=given["async_scheduling"],
        enable_prefix_caching=given["enable_prefix_caching"] is not False,
        dtype=given["model_dtype"],
        kv_cache_dtype=given["kv_cache_dtype"],
        kv_cache_dtype_skip_layers=tuple(given["kv_cache_dtype_skip_layers"] or ()),
        attention_backend=given["attention_backend"],
        disable_hybrid_kv_cache_manager=bool(given["disable_hybrid_kv_cache_manager"]),
        tensor_parallel_size=given["tp"],
        pipeline_parallel_size=given["pp"],
    )
    report = make_plan(PlannedModel(spec_from_config(row["config"], name=row["model"])), options)
    assert report.capacity.num_blocks == expected["num_blocks"]
    assert report.capacity.kv_cache_size_tokens == expected["kv_tokens"]
    assert report.capacity.max_concurrency == expected["max_concurrency"]
    assert len(report.kv.groups) == len(expected["groups"])
    assert report.kv.bytes_per_block in {worker["bytes_per_block"] for worker in expected["workers"]}
    # The same without naming the backend, where it is the one that is taken by itself.
    if given["attention_backend"] in ("FLASH_ATTN", "FLASHMLA", "FLASHMLA_SPARSE"):
        assert (
            make_plan(
                PlannedModel(spec_from_config(row["config"], name=row["model"])),
                PlanOptions(
                    **{name: getattr(options, name) for name in options.__slots__ if name != "attention_backend"}
                ),
            ).capacity
            == report.capacity
        )
