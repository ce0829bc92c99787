"""Capacity against numbers that vLLM itself printed (shared/oracle, part A): the rows of uniform full attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.layout.capacity import Capacity, size_pool
from pdkv.layout.dtypes import resolve_kv_dtype
from pdkv.layout.groups import RankLayout, group_layers
from pdkv.layout.pages import check_tensor_parallel, stage_layers
from pdkv.models.families import spec_from_config


def rows(shared: Path) -> list[dict[str, Any]]:
    path = shared / "oracle" / "capacity.open.jsonl"
    if not path.is_file():
        pytest.skip(f"no recorded capacities: {path} does not exist")
    return [json.loads(line) for line in path.read_text().splitlines()]


def layouts_of(row: dict[str, Any]) -> list[RankLayout]:
    """One layout per pipeline stage. Raises ConfigError for what is not sized."""
    given = row["engine_args"]
    spec = spec_from_config(row["config"], name=row["model"])
    dtype = resolve_kv_dtype(given["kv_cache_dtype"], given["model_dtype"])
    check_tensor_parallel(spec, given["tp"])
    return [
        group_layers(
            spec.layers[stage.start : stage.stop],
            first=stage.start,
            block_size=given["requested_block_size"],
            dtype=dtype,
            tensor_parallel=given["tp"],
        )
        for stage in stage_layers(len(spec.layers), given["pp"])
    ]


def check_small_budget(budget: dict[str, Any], layouts: list[RankLayout], length: int) -> None:
    def capacity(max_model_len: int | None) -> Capacity:
        available = [budget["available_bytes"]] * len(layouts)
        return size_pool(layouts, available, max_model_len=max_model_len, model_limit=length)

    asked, auto, expected = capacity(length), capacity(None), budget["auto_fit"]
    assert asked.fits == (budget["error"] is None)
    assert asked.estimated_max_model_len == min(budget["estimated_max_model_len_per_worker"])
    assert auto.max_model_len == expected["max_model_len"]
    assert auto.num_blocks == expected["num_blocks"]
    assert auto.kv_cache_size_tokens == expected["kv_tokens"]
    assert auto.max_concurrency == expected["max_concurrency"]


def test_uniform_full_attention_rows_are_equal_to_the_digit(shared: Path) -> None:
    compared = 0
    for row in rows(shared):
        kinds = {spec["kind"] for worker in row["layer_specs_per_worker"] for spec in worker["specs"]}
        try:
            layouts = layouts_of(row)
        except ConfigError:
            continue
        assert kinds == {"full_attention"}, f"{row['id']}: sized as full attention, but vLLM has {kinds}"
        compared += 1
        given, expected = row["engine_args"], row["expected"]
        length = given["max_model_len"]
        capacity = size_pool(
            layouts,
            [row["available_bytes"]] * len(layouts),
            max_model_len=length,
            model_limit=length,
            num_blocks_override=given["num_gpu_blocks_override"],
        )
        assert capacity.num_blocks == expected["num_blocks"], row["id"]
        assert capacity.kv_cache_size_tokens == expected["kv_tokens"], row["id"]
        assert capacity.max_concurrency == expected["max_concurrency"], row["id"]
        assert capacity.blocks_per_max_len_request == expected["groups"][0]["blocks_per_max_len_request"], row["id"]
        assert [rank.bytes_per_block for rank in layouts] == [w["bytes_per_block"] for w in expected["workers"]], row[
            "id"
        ]
        assert [len(rank.groups[0].layers) for rank in layouts] == expected["groups"][0]["layers_per_worker"], row["id"]
        for budget in row.get("small_budgets", ()):
            check_small_budget(budget, layouts, length)
    assert compared >= 20
