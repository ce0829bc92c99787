"""How far `pdkv plan`'s memory budget is from what vLLM printed, leave-one-model-out.

Every row of a file in the format of ../shared/field/startup_observations.jsonl that states its memory for KV is
estimated from its model and flags alone. The measured constants of the budget (`pdkv.plan.measured`) are derived again
from the rows of all *other* models first. Errors are shares of the memory that was requested of the GPU. Prints JSON;
ends with 1 when a bar is missed. Needs no GPU and no torch.

    python benchmarks/plan_accuracy.py [FILE] [--configs DIR] [--rows]
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdkv.errors import PdkvError
from pdkv.explain.naming import candidate_names
from pdkv.layout.rules import VllmRules
from pdkv.models.catalog import find_model
from pdkv.models.families import spec_from_config
from pdkv.models.gpus import find_gpu
from pdkv.plan.budget import estimate
from pdkv.plan.measured import Measured, measured
from pdkv.plan.options import PlanOptions
from pdkv.plan.report import MemoryFacts
from pdkv.source import PlannedModel
from pdkv.units import GIB

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
ROWS = (SHARED / "field" / "startup_observations.jsonl", ROOT / "tests/data/field/startup_observations.jsonl.gz")
BARS = {"available_kv": 0.02, "weights": 0.01}
CLASSES = ("before 0.10", "0.10 to 0.16", "0.17", "0.18 to 0.20", "from 0.21")

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A row that can be estimated."""

    row: Row
    model: PlannedModel
    options: PlanOptions
    base: str

    @property
    def version_class(self) -> str:
        """Which releases it counts with."""
        minor = int(self.options.vllm_version.split(".")[1])
        return CLASSES[sum(minor >= first for first in (10, 17, 18, 21))]

    @property
    def available(self) -> float:
        """GiB that the rank with the least memory had for KV."""
        spent = self.row.get("non_kv_gib_per_rank")
        if spent and self.row.get("requested_gib"):
            return float(self.row["requested_gib"]) - max(spent)
        return float(self.row["available_kv_gib_logged"])

    @property
    def weights(self) -> float | None:
        """GiB of weights of the rank that has most."""
        per_rank = self.row.get("weights_gib_per_rank")
        return max(per_rank) if per_rank else self.row.get("model_loading_gib")

    @property
    def non_torch(self) -> float | None:
        """GiB outside PyTorch on a rank."""
        per_rank = self.row.get("non_torch_gib_per_rank")
        return statistics.median(per_rank) if per_rank else self.row.get("non_torch_gib")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="rows, plain or gzipped; default: those of the field data")
    parser.add_argument("--configs", type=Path, help="a folder of more configs, <owner>--<model>.json")
    parser.add_argument("--rows", action="store_true", help="print every row too")
    args = parser.parse_args()
    path = args.file or next((path for path in ROWS if path.is_file()), None)
    if path is None:
        print("no rows: give a FILE", file=sys.stderr)
        return 2
    cases, skipped = _cases(_read(path), [folder for folder in (args.configs, SHARED / "models") if folder])
    results = [_compare(case, _without(case, cases)) for case in cases]
    summary = _summary(results)
    shipped = {case.version_class: measured(VllmRules(case.options.vllm_version)) for case in cases}
    constants = {name: [_gib(kept), _gib(_derived(name, cases, kept))] for name, kept in shipped.items()}
    report = {**summary, "constants_shipped_and_derived_gib": constants, "skipped": skipped}
    print(json.dumps({**report, "rows": results} if args.rows else report, indent=2))
    return 0 if summary["bars_met"] else 1


def _read(path: Path) -> list[Row]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


# ----------------------------------------------------------------------------------------------------------- the cases


def _cases(rows: Iterable[Row], folders: list[Path]) -> tuple[list[Case], dict[str, str]]:
    """The rows that can be estimated, and why the others cannot."""
    cases, skipped = [], {}
    for row in rows:
        if not isinstance(row.get("available_kv_gib_logged"), int | float):
            continue
        try:
            cases.append(_case(row, folders))
        except PdkvError as error:
            skipped[row["id"]] = str(error)[:160]
        except LookupError as reason:
            skipped[row["id"]] = str(reason.args[0])
    return cases, skipped


def _case(row: Row, folders: list[Path]) -> Case:
    version = re.search(r"0\.\d+", str(row.get("vllm") or ""))
    if version is None:
        raise LookupError("the release of vLLM is not stated")
    if row.get("gpu_memory_utilization") is None:
        raise LookupError("--gpu-memory-utilization is not stated")
    if row.get("gpu_total_gib") is None:
        raise LookupError("the memory of the GPU is not stated")
    given: dict[str, Any] = {
        "gpu": find_gpu(str(row.get("gpu") or "")).name,
        "gpu_memory_bytes": int(row["gpu_total_gib"] * GIB),
        "gpu_memory_utilization": row["gpu_memory_utilization"],
        "tensor_parallel_size": row.get("tp") or 1,
        "pipeline_parallel_size": row.get("pp") or 1,
        "vllm_version": version[0],
        **{key: row[key] for key in ("max_model_len", "max_num_batched_tokens", "max_num_seqs") if row.get(key)},
    }
    if row.get("dtype"):
        given["dtype"] = row["dtype"]
    options = PlanOptions(**given)
    _ = options.rules
    model, base = _model(row["model"], folders)
    return Case(row, model, options, base)


def _model(name: str, folders: list[Path]) -> tuple[PlannedModel, str]:
    """The model of a row and the name it is left out by: quantized copies go with the model they were made from."""
    names = [found.lower() for found in candidate_names(name.split(" ")[0])]
    for wanted in names:
        if (known := find_model(wanted)) is not None:
            return _planned(known.config, name), known.name
        for folder in folders:
            for path in sorted(folder.glob("*.json")):
                alias = path.stem.replace("--", "/", 1).lower()
                if wanted in (alias, alias.rsplit("/", 1)[-1]):
                    return _planned(json.loads(path.read_bytes()), name), path.stem
    raise LookupError(f"no config of {name}")


def _planned(config: dict[str, Any], name: str) -> PlannedModel:
    if "quantization_config" not in config and (section := _published_format(name)) is not None:
        config = {**config, "quantization_config": section}
    return PlannedModel(spec_from_config(config, name=name), config)


def _published_format(name: str) -> dict[str, Any] | None:
    """How RedHatAI's copies of a model are quantized, by their names (the recipes on their model cards)."""
    ignore = ["re:.*lm_head", "re:vision_tower.*", "re:multi_modal_projector.*"]
    common = {"quant_method": "compressed-tensors", "ignore": ignore}
    lowered = name.lower()
    if lowered.endswith("fp8-dynamic"):
        weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
        return {**common, "format": "float-quantized", "config_groups": {"group_0": {"weights": weights}}}
    if lowered.endswith("w8a8"):
        weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
        return {**common, "format": "int-quantized", "config_groups": {"group_0": {"weights": weights}}}
    if lowered.endswith("w4a16"):
        return {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
    return None


# -------------------------------------------------------------------------------------------------------- leave one out


def _without(case: Case, cases: list[Case]) -> Measured:
    """The constants of the case's releases from the rows of all other models."""
    others = [other for other in cases if other.base != case.base]
    return _derived(case.version_class, others, measured(case.options.rules))


def _derived(version_class: str, cases: list[Case], shipped: Measured) -> Measured:
    """Medians over ``cases`` of a class; what no row of it shows stays as shipped."""
    # 0.17 keeps what the releases before it do.
    classes = CLASSES[:3] if version_class in CLASSES[:3] else (version_class,)
    rows = [case for case in cases if case.version_class in classes and case.non_torch is not None]

    def median(kind: Iterator[Case]) -> float | None:
        values = [case.non_torch for case in kind if case.non_torch is not None]
        return statistics.median(values) if values else None

    alone = median(case for case in rows if case.options.ranks == 1)
    tensor = median(case for case in rows if case.options.tensor_parallel_size > 1)
    kept = shipped.alone if alone is None else int(alone * GIB)
    return replace(
        shipped,
        alone=kept,
        tensor_parallel=shipped.tensor_parallel if tensor is None else int(tensor * GIB) - kept,
    )


def _compare(case: Case, constants: Measured) -> dict[str, Any]:
    stages = estimate(case.model, case.options, constants=constants)
    found: MemoryFacts = min(stages, key=lambda stage: stage.available_kv_bytes)
    requested = (found.requested_bytes or 0) / GIB
    off = found.available_kv_bytes / GIB - case.available
    weights = max(stage.weights_bytes or 0 for stage in stages) / GIB
    return {
        "id": case.row["id"],
        "model": case.row["model"],
        "left_out": case.base,
        "class": case.version_class,
        "tp": case.options.tensor_parallel_size,
        "pp": case.options.pipeline_parallel_size,
        "available_gib": [round(found.available_kv_bytes / GIB, 2), round(case.available, 2)],
        "error_of_requested": round(off / requested, 5),
        "within_bounds": (found.low_bytes or 0) <= case.available * GIB <= (found.high_bytes or 0),
        "weights_gib": [round(weights, 2), case.weights],
        "weights_error": None if not case.weights else round(weights / case.weights - 1, 5),
        "activation_gib": [
            round((found.activation_bytes or 0) / GIB, 2),
            case.row.get("activation_peak_gib_per_rank") or case.row.get("activation_peak_gib"),
        ],
    }


# ------------------------------------------------------------------------------------------------------------- summary


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    by_class = {
        name: _figures([result for result in results if result["class"] == name])
        for name in CLASSES
        if any(result["class"] == name for result in results)
    }
    judged = [result for result in results if result["class"] in CLASSES[2:]]
    recent, weights = _figures(judged), _figures(results)["weights_mean_abs_error"]
    met = bool(judged) and recent["mean_abs_error"] <= BARS["available_kv"] and weights <= BARS["weights"]
    return {
        "bars": BARS,
        "bars_met": met,
        "from_0.17": recent,
        "by_class": by_class,
        "overall": _figures(results),
    }


def _figures(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the rows; errors of available KV bytes are shares of the requested bytes."""
    errors = [abs(result["error_of_requested"]) for result in results]
    weights = [abs(result["weights_error"]) for result in results if result["weights_error"] is not None]
    return {
        "rows": len(results),
        "models": len({result["left_out"] for result in results}),
        "mean_abs_error": round(statistics.fmean(errors), 5) if errors else None,
        "worst": max(errors, default=None),
        "within_bounds": sum(result["within_bounds"] for result in results),
        "weights_mean_abs_error": round(statistics.fmean(weights), 5) if weights else None,
        "weights_worst": max(weights, default=None),
    }


def _gib(constants: Measured) -> dict[str, float]:
    return {
        name: round(getattr(constants, name) / GIB, 3)
        for name in ("alone", "tensor_parallel", "pipeline_only", "per_graph")
    }


if __name__ == "__main__":
    sys.exit(main())
