"""The core against recordings of vLLM 0.32: all of ../shared/oracle where it is, and a part of it that comes along."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.replay import Mismatch, NotBuilt, main, read_rows, replay_row

DATA = Path(__file__).resolve().parents[1] / "data"
KINDS = ("sched_traces", "blockpool_traces")


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
    try:
        replay_row(row)
    except NotBuilt as reason:
        pytest.skip(str(reason))


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
