"""The core against recordings of vLLM 0.32: all of ../shared/oracle where it is, and a part of it that comes along."""

from __future__ import annotations

import copy
import functools
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.replay import main, read_rows, replay_row
from tests.conformance.rows import Mismatch

DATA = Path(__file__).resolve().parents[1] / "data"
KINDS = ("sched_traces", "blockpool_traces")


@functools.cache
def packed_rows() -> list[Any]:
    """The recordings in tests/data, one parameter a row."""
    rows = []
    for path in sorted(DATA.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows += [
                pytest.param(json.loads(line), id=f"{path.name.split('.')[0]}-{n}") for n, line in enumerate(lines)
            ]
    return rows


@pytest.mark.parametrize("row", packed_rows())
def test_packed_recordings(row: dict[str, Any]) -> None:
    replay_row(row)


@pytest.mark.parametrize("kind", KINDS)
def test_open_recordings(kind: str, shared: Path) -> None:
    paths = sorted((shared / "oracle").glob(f"{kind}*.open.jsonl"))
    if not paths:
        pytest.skip(f"no {kind}*.open.jsonl in {shared / 'oracle'}")
    replayed = 0
    for path in paths:
        for row in read_rows(path):
            replay_row(row)
            replayed += 1
    assert replayed > 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_altered_recording_fails(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = copy.deepcopy(next(param.values[0] for param in packed_rows() if param.id and param.id.startswith(kind)))
    if kind == "sched_traces":
        step = next(step for step in row["steps"] if step["scheduled"])
        step["free_blocks_after_schedule"] += 1
    else:
        step = next(step for step in row["steps"] if step["op"] == "allocate_slots" and step["result"])
        step["result"]["table"][0][0] += 1
    with pytest.raises(Mismatch, match="ours .*, reference"):
        replay_row(row)
    path = tmp_path / "altered.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert main([str(path)]) == 1
    assert "0 passed, 1 failed" in capsys.readouterr().out


def pool_row() -> dict[str, Any]:
    """A small recording of the block pool."""
    rows = [param.values[0] for param in packed_rows() if param.id and param.id.startswith("blockpool_traces")]
    return copy.deepcopy(min(rows, key=lambda row: len(row["steps"])))


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_is_read_whether_it_is_packed_or_not(
    packed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = pool_row() | {"a_field_of_tomorrow": 1}
    row["steps"][0]["another"] = None
    row["config"]["mood"] = "good"
    line = (json.dumps(row) + "\n\n").encode()
    path = tmp_path / "rows"
    path.write_bytes(gzip.compress(2 * line) if packed else 2 * line)
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == "2 passed, 0 failed\n"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda row, line: line[:-30], "not a JSON object"),
        (lambda row, line: "[1, 2]", "not a JSON object but a list"),
        (lambda row, line: "{}", "no known row format"),
        (
            lambda row, line: json.dumps(row | {"config": {"groups": [{"kind": "quantum", "block_size": 16}]}}),
            "quantum",
        ),
        (lambda row, line: json.dumps(row | {"config": {**row["config"], "num_blocks": -1}}), "Error"),
        (lambda row, line: json.dumps(row | {"config": {"groups": []}}), "no field 'hash_block_size'"),
        (lambda row, line: json.dumps(row | {"steps": [{"op": "check", "after": {}}]}), "unknown operation"),
        (lambda row, line: json.dumps(row | {"steps": [{"op": "free", "req": "nobody"}]}), "nobody"),
        (lambda row, line: json.dumps(row | {"steps": 7}), "TypeError"),
    ],
)
def test_a_row_that_cannot_be_understood_fails_alone(
    spoil: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = pool_row()
    good = json.dumps(row)
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{good}\n{spoil(row, good)}\n{good}\n")
    assert main([str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"{path}:2: ")
    assert says in lines[0]
    assert lines[1] == "2 passed, 1 failed"


def test_a_damaged_file_fails_and_a_missing_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = gzip.compress((json.dumps(pool_row()) + "\n").encode())
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    assert main([str(path)]) == 1
    assert "0 passed, 1 failed" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere.jsonl")]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    assert main([]) == 2
