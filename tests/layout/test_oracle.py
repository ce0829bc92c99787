"""Capacity against what vLLM itself printed (shared/oracle, part A), in both ways of `tests.conformance.capacity`."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.capacity import (
    CapacityMismatch,
    is_capacity_row,
    replay_capacity,
    replay_config,
    replay_specs,
)
from tests.conformance.replay import main

DATA = Path(__file__).resolve().parents[1] / "data" / "capacity.jsonl.gz"


def packed_rows() -> list[dict[str, Any]]:
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


ROWS = packed_rows()


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in ROWS])
def test_from_the_rows_layer_specs(row: dict[str, Any]) -> None:
    replay_specs(row)


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in ROWS])
def test_from_the_rows_config(row: dict[str, Any]) -> None:
    """Every step is ours here: no row may be refused, and none may differ."""
    replay_config(row)


def test_the_rows_that_come_along_are_the_open_ones(shared: Path) -> None:
    path = shared / "oracle" / "capacity.open.jsonl"
    if not path.is_file():
        pytest.skip(f"no recorded capacities: {path} does not exist")
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS


def _find(prefix: str) -> dict[str, Any]:
    return copy.deepcopy(next(row for row in ROWS if row["model"].startswith(prefix)))


def _bump(path: tuple[Any, ...]) -> Callable[[dict[str, Any]], None]:
    def alter(row: dict[str, Any]) -> None:
        at: Any = row
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = at[path[-1]] + 1

    return alter


@pytest.mark.parametrize(
    "path",
    [
        ("expected", "num_blocks"),
        ("expected", "kv_tokens"),
        ("expected", "groups", 0, "blocks_per_max_len_request"),
        ("expected", "groups", 1, "block_size"),
        ("expected", "workers", 0, "bytes_per_block"),
        ("expected", "workers", 0, "tensors", 1, "block_stride"),
        ("expected", "hash_block_size"),
        ("small_budgets", 0, "estimated_max_model_len_per_worker", 0),
        ("small_budgets", 1, "auto_fit", "num_blocks"),
        ("layer_specs_per_worker", 0, "specs", 0, "page_size_bytes"),
    ],
)
def test_an_altered_number_is_found(path: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = _find("google/gemma-4")
    assert is_capacity_row(row)
    assert replay_capacity(row) is None
    _bump(path)(row)
    with pytest.raises(CapacityMismatch, match="ours .*, reference"):
        replay_capacity(row)
    file = tmp_path / "altered.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert main([str(file)]) == 1
    assert "0 passed, 1 failed" in capsys.readouterr().out


def test_a_row_that_the_reference_refuses(tmp_path: Path) -> None:
    row = _find("meta-llama/Meta-Llama-3.1-8B")
    row["expected"] = {"error": "To serve at least one request ..."}
    with pytest.raises(CapacityMismatch, match="the reference refuses"):
        replay_specs(row)
    row["available_bytes"] = 1 << 20
    replay_specs(row)
    replay_config(row)


def test_a_config_that_is_refused_does_not_hide_the_rest() -> None:
    row = _find("Qwen/Qwen3-8B")
    row["config"]["is_encoder_decoder"] = True
    refusal = replay_capacity(row)
    assert refusal is not None
    assert "encoder-decoder" in refusal
    row["expected"]["num_blocks"] += 1
    with pytest.raises(CapacityMismatch, match="num_blocks"):
        replay_capacity(row)
