"""The bars of the memory budget hold for every field row whose model's config is at hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_accuracy", ROOT / "benchmarks" / "plan_accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_bars_hold_leaving_each_model_out(benchmark: ModuleType) -> None:
    rows = benchmark._read(next(path for path in benchmark.ROWS if path.is_file()))
    cases, skipped = benchmark._cases(rows, [benchmark.SHARED / "models"])
    if not any(case.version_class in benchmark.CLASSES[2:] for case in cases):
        pytest.skip("no config of a field row's model is at hand")
    results = [benchmark._compare(case, benchmark._without(case, cases)) for case in cases]
    summary = benchmark._summary(results)
    assert summary["bars_met"], summary
    recent = [result for result in results if result["class"] in benchmark.CLASSES[2:]]
    outside = [result["id"] for result in recent if not result["within_bounds"]]
    assert len(outside) <= len(recent) // 10, f"outside of their own bounds: {outside}"
    assert set(skipped).isdisjoint(result["id"] for result in results)


def test_a_model_does_not_take_part_in_the_constants_it_is_judged_with(benchmark: ModuleType) -> None:
    rows = [
        {
            "id": f"row{index}",
            "model": f"Qwen/Qwen3-{size}",
            "vllm": "0.19.0",
            "gpu": "H100-80GB",
            "gpu_total_gib": 79.19,
            "gpu_memory_utilization": 0.9,
            "available_kv_gib_logged": 40.0,
            "non_torch_gib": held,
        }
        for index, (size, held) in enumerate((("8B", 0.5), ("32B", 1.5)))
    ]
    folder = benchmark.SHARED / "models"
    if not folder.is_dir():
        pytest.skip(f"no reference data: {folder} does not exist on this machine")
    cases, skipped = benchmark._cases(rows, [folder])
    assert skipped == {}
    alone = [benchmark._without(case, cases).alone / (1 << 30) for case in cases]
    assert alone == pytest.approx([1.5, 0.5]), "each from the other's row"


def test_rows_that_leave_something_open_are_named(benchmark: ModuleType) -> None:
    row = {"id": "x", "model": "smollm2", "available_kv_gib_logged": 1.0}
    _, skipped = benchmark._cases([row, {**row, "id": "y", "vllm": "0.19"}], [])
    assert skipped == {"x": "the release of vLLM is not stated", "y": "--gpu-memory-utilization is not stated"}
