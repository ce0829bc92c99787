"""`pdkv plan --json` against recordings of vLLM 0.32: config.json and flags in, its numbers out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdkv.cli.main import app

# The flags that a recorded setting stands for.
FLAGS = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "kv_cache_dtype": "--kv-cache-dtype",
    "max_model_len": "--max-model-len",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "num_gpu_blocks_override": "--num-gpu-blocks-override",
    "mamba_ssm_cache_dtype": "--mamba-ssm-cache-dtype",
    "requested_block_size": "--block-size",
    "attention_backend": "--attention-backend",
    "model_dtype": "--dtype",
}
SWITCHES = {
    "async_scheduling": "async-scheduling",
    "enable_prefix_caching": "enable-prefix-caching",
    "disable_hybrid_kv_cache_manager": "disable-hybrid-kv-cache-manager",
}
# Recorded with a backend that does not take the type, or without the layers that `vllm serve` adds.
UNLIKE_SERVE = ("fp8_e5m2", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")


def words(row: dict[str, Any]) -> list[str]:
    """The command line of a row."""
    given = row["engine_args"]
    found = ["--kv-cache-memory-bytes", str(row["available_bytes"])]
    for name, flag in FLAGS.items():
        if given.get(name) is not None:
            found += [flag, str(given[name])]
    for name, flag in SWITCHES.items():
        if given.get(name) is not None:
            found.append(f"--{flag}" if given[name] else f"--no-{flag}")
    if given["kv_cache_dtype_skip_layers"]:
        found += ["--kv-cache-dtype-skip-layers", ",".join(given["kv_cache_dtype_skip_layers"])]
    return found


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.output)
    return answer


def test_every_recorded_capacity(shared: Path, tmp_path: Path) -> None:
    checked = 0
    for line in (shared / "oracle" / "capacity.open.jsonl").read_text().splitlines():
        row = json.loads(line)
        given, expected = row["engine_args"], row["expected"]
        if given["kv_cache_dtype"] in UNLIKE_SERVE and not given["kv_cache_dtype_skip_layers"]:
            continue
        path = tmp_path / f"{row['id']}.json"
        path.write_text(json.dumps(row["config"]))
        capacity = run(str(path), *words(row))["capacity"]
        assert (capacity["num_blocks"], capacity["kv_cache_size_tokens"], capacity["max_concurrency"]) == (
            expected["num_blocks"],
            expected["kv_tokens"],
            expected["max_concurrency"],
        ), row["id"]
        for small in row.get("small_budgets", ()):
            budget = ["--kv-cache-memory-bytes", str(small["available_bytes"])]
            capacity = run(str(path), *words(row), *budget)["capacity"]
            assert capacity["fits"] is (small["error"] is None), row["id"]
            assert capacity["longest_per_rank"] == small["estimated_max_model_len_per_worker"], row["id"]
            checked += 1
        checked += 1
    assert checked > 100


@pytest.mark.parametrize("as_text", [True, False])
def test_the_same_through_a_pasted_command(shared: Path, tmp_path: Path, as_text: bool) -> None:
    """Every tenth row, as a `vllm serve` command and as the args of a container."""
    for line in (shared / "oracle" / "capacity.open.jsonl").read_text().splitlines()[::10]:
        row = json.loads(line)
        if row["engine_args"]["kv_cache_dtype"] in UNLIKE_SERVE:
            continue
        path = tmp_path / "config.json"
        path.write_text(json.dumps(row["config"]))
        listed = [str(path), *words(row)]
        text = (
            f"vllm serve {' '.join(listed)}" if as_text else json.dumps({"command": ["vllm", "serve"], "args": listed})
        )
        capacity = run("--command", text)["capacity"]
        assert capacity["num_blocks"] == row["expected"]["num_blocks"], row["id"]
        assert capacity["kv_cache_size_tokens"] == row["expected"]["kv_tokens"], row["id"]
