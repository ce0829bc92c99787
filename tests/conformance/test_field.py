"""Numbers that running deployments printed (tests/data/field), and that the check of them can fail."""

from __future__ import annotations

import copy
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.field import Differs, NothingToCheck, check_row, main, read_rows
from tests.conformance.field_rows import known_model

DATA = Path(__file__).resolve().parents[1] / "data" / "field" / "startup_observations.jsonl.gz"
ROWS = list(read_rows(DATA))


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in ROWS])
def test_what_was_printed_is_what_the_rules_give(row: dict[str, Any]) -> None:
    try:
        check_row(row)
    except NothingToCheck:
        # Only a row that claims nothing exact may have nothing to check.
        assert not row["check"]["status"].startswith("exact")
        pytest.skip("it holds nothing that can be recomputed")


def test_all_given_rows(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The copy that comes along is the given file, and no row of it fails."""
    given = shared / "field" / "startup_observations.jsonl"
    assert gzip.decompress(DATA.read_bytes()) == given.read_bytes()
    assert main([str(given)]) == 0
    exact = sum(row["check"]["status"].startswith("exact") for row in ROWS)
    passed, failed = (int(number) for number in re.findall(r"\d+", capsys.readouterr().out.splitlines()[-1]))
    assert failed == 0
    assert passed >= exact


ALTERED = {
    "L068": ("bytes_per_block", "tokens_predicted", "blocks_per_max_len_request", "concurrency_predicted", "kv_groups"),
    "L121": ("tokens_predicted", "concurrency_predicted"),
    "L078": ("predicted_available_gib",),
    "L152": ("needed_gib_predicted",),
    "L165": ("tokens_predicted",),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in ALTERED.items() for key in keys])
def test_an_altered_row_fails(
    name: str, key: str, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = copy.deepcopy(next(row for row in ROWS if row["id"] == name))
    check_row(row)
    row["check"][key] += 1
    path = tmp_path / "altered.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert main([str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{name} ")
    assert lines[-1] == "0 passed, 1 failed"


def test_a_printed_number_that_is_off_by_a_block_fails(shared: Path) -> None:
    row = copy.deepcopy(next(row for row in ROWS if row["id"] == "L068"))
    row["kv_cache_size_tokens"] += 16
    with pytest.raises(Differs):
        check_row(row)


@pytest.mark.parametrize("text", ["[1]", "{}", '{"id": "x", "model": "m", "check": {"status": "exact"}}'])
def test_rows_of_another_form_fail_on_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text + "\n")
    assert main([str(path)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    path.write_text("no json\n")
    assert main([str(path)]) == 2


def test_names_of_quantized_copies_and_hub_caches_are_understood(shared: Path) -> None:
    for name in ("Qwen/Qwen3-8B", "/hf/hub/models--Qwen--Qwen3-8B/snapshots/0e9e", "someone/Qwen3-8B-quantized.w4a16"):
        spec = known_model(name)
        assert spec is not None
        assert len(spec.layers) == 36
    assert known_model("someone/Qwen3-9000B") is None
