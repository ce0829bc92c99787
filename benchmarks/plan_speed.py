"""How long `pdkv plan` takes: from the shell to the answer, and 500 cells of --compare. Prints JSON; needs no GPU.

    python benchmarks/plan_speed.py [--runs N]

Ends with 1 when a bar is missed (start-up 0.5 s, 500 cells 5 s), in CPU seconds of the process as well as on the clock.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

from pdkv.plan.compare import compare
from pdkv.plan.options import PlanOptions
from pdkv.plan.planner import size_planned
from pdkv.source import PlannedModel, find_spec

START_UP_BAR_S, COMPARE_BAR_S, CELLS = 0.5, 5.0, 500
COMMAND = (sys.executable, "-m", "pdkv", "plan", "smollm2", "--gpu", "h100", "--json")
DIMENSIONS = {
    "kv_cache_dtype": ("auto", "fp8", "int8_per_token_head", "int4_per_token_head", "fp8_per_token_head"),
    "max_model_len": (1024, 2048, 4096, 6144, 8192),
    "max_num_batched_tokens": (1024, 2048, 4096, 8192, 16384),
    "tensor_parallel_size": (1, 3),
    "gpu_memory_utilization": (0.9, 0.95),
}


def start_up() -> tuple[float, float]:
    """(seconds on the clock, CPU seconds) of one `pdkv plan`."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(COMMAND, check=True, stdout=subprocess.DEVNULL)
    took, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def five_hundred_cells(model: PlannedModel) -> tuple[float, float]:
    """(seconds on the clock, CPU seconds) of a comparison of CELLS cells, the budget of each estimated."""
    start, cpu = time.perf_counter(), time.process_time()
    table = compare(DIMENSIONS, PlanOptions(gpu="h100"), lambda options: size_planned(model, options))
    took, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert len(table.cells) == CELLS
    assert all(cell.refused is None for cell in table.cells)
    return took, cpu


def main() -> int:
    """Medians over the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    starts = [start_up() for _ in range(runs)]
    cells = [five_hundred_cells(find_spec("smollm2")) for _ in range(runs)]
    found = {
        "start_up_s": statistics.median(wall for wall, _ in starts),
        "start_up_cpu_s": statistics.median(cpu for _, cpu in starts),
        "compare_500_s": statistics.median(wall for wall, _ in cells),
        "compare_500_cpu_s": statistics.median(cpu for _, cpu in cells),
    }
    print(json.dumps({**{name: round(value, 3) for name, value in found.items()}, "runs": runs}, indent=2))
    return 0 if found["start_up_s"] <= START_UP_BAR_S and found["compare_500_s"] <= COMPARE_BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
