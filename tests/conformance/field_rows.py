"""A row of ../shared/field/startup_observations.jsonl -> the start that it describes, as if its log had been read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pdkv.explain.budget import requested_of
from pdkv.explain.naming import candidate_names, find_named
from pdkv.explain.start import Start, read_start
from pdkv.logs.printed import Printed
from pdkv.logs.startup import EngineLog, Failure, FailureKind, RankLog, Settings, StartupLog
from pdkv.models.families import spec_from_config
from pdkv.models.spec import LayerKind, LayerSpec, ModelSpec
from pdkv.units import GIB

Row = dict[str, Any]

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "models"
_BF16_K_AND_V_BYTES = 4


def start_of(row: Row) -> Start:
    """The start of a row, recomputed for its model, or for the rate that its numbers imply where none is named."""
    return read_start(row["id"], log_of(row), model_of(row))


def log_of(row: Row) -> StartupLog:
    """What the log of a row would have been read as."""
    settings = _settings(row)
    engine = EngineLog(
        num_blocks=_count(row.get("num_gpu_blocks")),
        kv_cache_size_tokens=_count(row.get("kv_cache_size_tokens")),
        max_model_len=_count(row.get("max_model_len")),
        max_concurrency=row.get("max_concurrency"),
        concurrency_text=None if row.get("max_concurrency") is None else _decimals(row["max_concurrency"], 2),
        attention_block_size=_count(row.get("attention_block_size")),
    )
    return StartupLog(
        settings=settings,
        ranks=_ranks(row, settings),
        engines=(engine,) if engine.sized or engine.max_concurrency is not None else (),
        failures=_failures(row),
        runtime=None,
        ready="error" not in row,
        starts=1,
    )


def model_of(row: Row) -> ModelSpec | None:
    """The model of a row: by its name, or one layer that stores as many bytes a token as the row's numbers imply.

    The rate stands for a model that nobody here knows only where one group keeps all tokens; then the row's blocks,
    tokens and concurrency are still held against each other.
    """
    found = known_model(row["model"])
    if found is not None:
        return found
    rate = row["check"].get("bytes_per_token_per_rank") if row["check"].get("kv_groups", 1) == 1 else None
    if rate is None and row["model"] == "not stated":
        # No number of such a row depends on the bytes of a token: any rate gives the same.
        rate = 64
    return None if rate is None else _model_of_rate(rate, row.get("kv_cache_dtype"), _count(row.get("tp")) or 1)


def known_model(name: str) -> ModelSpec | None:
    """By a name in the catalogue, or of a file in ../shared/models."""
    for candidate in candidate_names(name.split(" ")[0]):
        found = find_named(candidate)
        if found is not None:
            return found
        for path in sorted(CONFIGS.glob("*.json")):
            known = path.stem.replace("--", "/", 1).lower()
            if candidate.lower() in (known, known.rsplit("/", 1)[-1]):
                return spec_from_config(json.loads(path.read_text()), name=path.stem)
    return None


def _model_of_rate(rate: int, kv_cache_dtype: str | None, tensor_parallel: int) -> ModelSpec:
    per_element = 2 if str(kv_cache_dtype).startswith("fp8") else _BF16_K_AND_V_BYTES
    size = rate // per_element
    layer = LayerSpec(LayerKind.FULL_ATTENTION, 1, size, size)
    return ModelSpec(
        name=f"{rate} bytes a token",
        architecture="",
        layers=(layer,),
        attention_heads=tensor_parallel,
        max_model_len=1 << 30,
        dtype="bfloat16",
    )


def _settings(row: Row) -> Settings:
    text = str(row.get("vllm") or "")
    version = None if "not stated" in text else re.search(r"0\.\d+[\w.+]*", text)
    given = row.get("kv_cache_memory_bytes_gib")
    return Settings(
        version=None if version is None else version[0].rstrip(".x"),
        engine="V0" if "V0" in text else "V1" if "V1" in text else None,
        model=row["model"],
        dtype=row.get("dtype"),
        quantization=row.get("quantization"),
        kv_cache_dtype=row.get("kv_cache_dtype"),
        max_model_len=_count(row.get("max_model_len")),
        tensor_parallel_size=_count(row.get("tp")),
        pipeline_parallel_size=_count(row.get("pp")),
        data_parallel_size=_count(row.get("dp")),
        decode_context_parallel_size=_count(row.get("dcp")),
        block_size=_count(row.get("block_size") or row["check"].get("block_size")),
        max_num_batched_tokens=_count(row.get("max_num_batched_tokens")),
        max_num_seqs=_count(row.get("max_num_seqs")),
        gpu_memory_utilization=row.get("gpu_memory_utilization"),
        kv_cache_memory_bytes=given * GIB if isinstance(given, int) else None,
        enable_prefix_caching=row.get("prefix_caching"),
        attention_backend=row.get("attention_backend"),
    )


def _ranks(row: Row, settings: Settings) -> tuple[RankLog, ...]:
    names = {
        "weights": ("weights_gib_per_rank", "model_loading_gib"),
        "activation_peak": ("activation_peak_gib_per_rank", "activation_peak_gib"),
        "non_torch": ("non_torch_gib_per_rank", "non_torch_gib"),
        "non_kv": ("non_kv_gib_per_rank", ""),
        "graph_estimate": ("cudagraph_estimate_gib_per_rank", ""),
    }
    count = max((len(row.get(per_rank, [])) for per_rank, _ in names.values()), default=0) or 1
    ranks = []
    for index in range(count):
        tensor = settings.tensor_parallel_size or 1
        rank = RankLog(rank=index, pipeline_rank=index // tensor, tensor_rank=index % tensor)
        rank.total = _gib(row.get("gpu_total_gib"))
        rank.free_at_start = _gib(row.get("gpu_free_at_start_gib"))
        rank.requested = _gib(row.get("requested_gib"))
        if rank.requested is None and rank.total is not None and settings.gpu_memory_utilization is not None:
            rank.requested = requested_of(rank.total, settings.gpu_memory_utilization)
        for fact, (per_rank, single) in names.items():
            values = row.get(per_rank) or ([row.get(single)] * count)
            setattr(rank, fact, _gib(values[index]))
        rank.available_kv = _gib(row.get("available_kv_gib_logged")) if index == 0 else None
        given = row.get("kv_cache_memory_bytes_gib")
        rank.reserved = _gib(given) if isinstance(given, float) else None
        ranks.append(rank)
    return tuple(ranks)


def _failures(row: Row) -> tuple[Failure, ...]:
    errors = row.get("error") or ()
    return tuple(
        Failure(kind=FailureKind.ERROR, text=text) for text in ([errors] if isinstance(errors, str) else errors)
    )


def _gib(value: Any) -> Printed | None:
    return Printed.of(repr(value)) if isinstance(value, int | float) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _decimals(value: float, least: int) -> str:
    return f"{value:.{least}f}"
