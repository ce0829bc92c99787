"""The recordings of remote loads: what they cover, that the replay notices a change, that they can be made again."""

from __future__ import annotations

import copy
import gzip
import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.replay_remote import replay_remote
from tests.conformance.rows import Mismatch

DATA = Path(__file__).resolve().parents[1] / "data"
REMOTE, RULES = DATA / "sched_remote.jsonl.gz", DATA / "sched_rules.jsonl.gz"
Row = dict[str, Any]


def rows(recording: Path = REMOTE) -> list[Row]:
    """All recorded rows."""
    with gzip.open(recording, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_what_the_recordings_cover() -> None:
    recorded = rows()
    totals: Counter[str] = Counter()
    for row in recorded:
        totals.update(row["totals"])
    assert len(recorded) >= 20
    assert totals["unfinished"] == 0
    for name in ("loads", "failed_loads", "aborts_while_loading", "block_copies", "preemptions", "max_reserved_blocks"):
        assert totals[name] > 0, f"no row has {name}"
    assert totals["steps_with_deferred_blocks"] > 0
    configs = [row["config"] for row in recorded]
    assert {config["load_failure"] for config in configs if config["load_failure"]} == {"fail", "recompute"}
    assert any(config["watermark"] > 0 for config in configs)
    assert {kind for config in configs for kind in config["kinds"]} == {"full", "sw", "mamba"}
    stalled = [
        step
        for row in recorded
        if row["config"]["async_scheduling"]
        for step in row["steps"]
        if step["running"] and not step["scheduled"] and not step["preempted"]
    ]
    assert stalled, "no step stalls for a deferred free"


def test_what_the_recorded_rules_cover() -> None:
    recorded = rows(RULES)
    assert all(row["totals"]["unfinished"] == 0 for row in recorded)
    configs = [row["config"] for row in recorded]
    for name in ("max_num_active_seqs", "max_num_scheduled_tokens", "long_prefill_token_threshold_adaptive"):
        assert any(config.get(name) for config in configs), f"no row has {name}"
    assert {config.get("prefill_schedule_interval", 1) for config in configs} == {1, 3, 4, 5}
    paused = {step["pause"] for row in recorded for step in row["steps"] if "pause" in step}
    assert paused == {"PAUSED_NEW", "PAUSED_ALL", "UNPAUSED"}
    for policy, asynchronous in (("fail", False), ("fail", True), ("recompute", False), ("recompute", True)):
        told = [
            step
            for row in recorded
            if (row["config"]["load_failure"], row["config"]["async_scheduling"]) == (policy, asynchronous)
            for step in row["steps"]
            if step.get("hurt")
        ]
        assert len(told) >= 3, f"{policy}: bad blocks hurt too few"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("free_blocks_after_schedule", lambda value: value + 1),
        ("free_blocks_after_update", lambda value: value - 1),
        ("holding", lambda value: [*value, "nobody"]),
        ("loads_started", lambda value: [{**value[0], "external_tokens": 1}]),
    ],
)
def test_an_altered_recording_fails(field: str, change: Any) -> None:
    row = copy.deepcopy(next(row for row in rows() if row["id"] == "rm-03"))
    replay_remote(row)
    step = next(step for step in row["steps"] if step["loads_started"])
    step[field] = change(step[field])
    with pytest.raises(Mismatch, match=r"step \d+ .*: ours .*, reference"):
        replay_remote(row)


@pytest.mark.slow
@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names a Python that has vLLM 0.32")
@pytest.mark.parametrize(("recording", "which"), [(REMOTE, "remote"), (RULES, "rules")])
def test_the_reference_says_the_same_again(recording: Path, which: str, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl.gz"
    recorder = Path(__file__).with_name("record.py")
    subprocess.run(
        [os.environ["VLLM_PYTHON"], recorder, again, "0", which], check=True, timeout=220, capture_output=True
    )
    assert gzip.decompress(again.read_bytes()) == gzip.decompress(recording.read_bytes())
