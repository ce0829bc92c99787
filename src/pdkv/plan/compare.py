"""One plan per combination of settings: the table behind ``--compare``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pdkv.errors import ConfigError, PdkvError
from pdkv.models.spec import ModelSpec
from pdkv.plan.advice import Resize
from pdkv.plan.kv_types import usable_types
from pdkv.plan.model_length import beyond_model_length
from pdkv.plan.options import PlanOptions
from pdkv.plan.sizing import Sized, bytes_per_token, whole
from pdkv.plan.vllm_values import FIELDS

MOST_CELLS = 5000
_SEPARATOR = ":"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination and its capacity; all ``None`` but ``refused`` where vLLM would not start."""

    settings: dict[str, Any]
    kv_cache_size_tokens: int | None
    max_concurrency: float | None
    estimated_max_model_len: int | None
    max_model_len: int | None
    fits: bool | None
    num_blocks: int | None
    block_size: int | None
    bytes_per_token: int | None
    available_kv_bytes: int | None
    gpus: int
    refused: str | None


_NUMBERS = tuple(field.name for field in fields(Cell) if field.name not in ("settings", "gpus", "refused"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``dimensions`` are options, ``values`` what each was given, ``cells`` their product in that order.

    ``warnings`` hold for some of the cells and say for which.
    """

    dimensions: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    cells: tuple[Cell, ...]
    warnings: tuple[str, ...] = ()


def parse_dimensions(text: str, spec: ModelSpec, options: PlanOptions) -> dict[str, tuple[Any, ...]]:
    """``kv_cache_dtype,tensor_parallel_size=1:2:4`` -> option names with their values; usual ones where none are given.

    Names may be written as flags. Raises ConfigError for names that cannot be compared, values that cannot be read,
    and more than MOST_CELLS combinations.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        written, equals, listed = part.partition("=")
        name = written.strip().lstrip("-").replace("-", "_")
        if name not in _COMPARABLE:
            raise ConfigError(f"--compare {written.strip()}: there are {', '.join(sorted(_COMPARABLE))}")
        if name in found:
            raise ConfigError(f"--compare {name}: named twice; give all its values at once, {name}=A{_SEPARATOR}B")
        if equals and not all(value.strip() for value in listed.split(_SEPARATOR)):
            raise ConfigError(f"--compare {part}: a value is missing, for example {name}=A{_SEPARATOR}B")
        if equals:
            values = tuple(_read(name, value.strip()) for value in listed.split(_SEPARATOR))
        elif name in _USUAL:
            values = tuple(_USUAL[name](spec, options))
        else:
            raise ConfigError(f"--compare {name}: give its values, for example {name}=A{_SEPARATOR}B")
        found[name] = tuple(dict.fromkeys(values))
    if not found:
        raise ConfigError("--compare: name what to compare, for example kv_cache_dtype,tensor_parallel_size")
    cells = math.prod(len(values) for values in found.values())
    if cells > MOST_CELLS:
        raise ConfigError(f"--compare: {cells:,} combinations, at most {MOST_CELLS:,}; give fewer values")
    return found


def compare(dimensions: Mapping[str, Sequence[Any]], options: PlanOptions, resize: Resize) -> Comparison:
    """Size every combination. One that vLLM would refuse is an entry that says why."""
    names = tuple(dimensions)
    values = tuple(tuple(dimensions[name]) for name in names)
    cells: list[Cell] = []
    longest: Sized | None = None
    for combination in itertools.product(*values):
        settings = dict(zip(names, combination, strict=True))
        try:
            sized = resize(replace(options, **settings))
        except PdkvError as error:
            cells.append(Cell(settings=settings, refused=str(error), gpus=0, **dict.fromkeys(_NUMBERS)))
            continue
        cells.append(_cell(settings, sized))
        if longest is None or sized.capacity.max_model_len > longest.capacity.max_model_len:
            longest = sized
    beyond = () if longest is None else beyond_model_length(longest.spec, longest.capacity.max_model_len)
    return Comparison(dimensions=names, values=values, cells=tuple(cells), warnings=beyond)


def _cell(settings: dict[str, Any], sized: Sized) -> Cell:
    changed, capacity = sized.options, sized.capacity
    return Cell(
        settings=settings,
        kv_cache_size_tokens=capacity.kv_cache_size_tokens * changed.data_parallel_size,
        max_concurrency=capacity.max_concurrency * changed.data_parallel_size,
        estimated_max_model_len=capacity.estimated_max_model_len,
        max_model_len=capacity.max_model_len,
        fits=capacity.fits,
        num_blocks=capacity.num_blocks,
        block_size=sized.built.block_size,
        bytes_per_token=whole(bytes_per_token(sized.bottleneck)),
        available_kv_bytes=capacity.available_bytes,
        gpus=changed.gpus,
        refused=None,
    )


def _lengths(spec: ModelSpec, _options: PlanOptions) -> list[int]:
    most = spec.max_model_len
    return [*(length for length in (4096, 8192, 32768, 131072, 262144, 524288, 1 << 20) if length < most), most]


_USUAL: Mapping[str, Callable[[ModelSpec, PlanOptions], Sequence[Any]]] = {
    "kv_cache_dtype": usable_types,
    "tensor_parallel_size": lambda _spec, _options: (1, 2, 4, 8),
    "pipeline_parallel_size": lambda _spec, _options: (1, 2, 4),
    "data_parallel_size": lambda _spec, _options: (1, 2, 4, 8),
    "decode_context_parallel_size": lambda _spec, _options: (1, 2, 4, 8),
    "max_model_len": _lengths,
    "max_num_batched_tokens": lambda _spec, _options: (512, 1024, 2048, 4096, 8192, 16384),
    "block_size": lambda _spec, _options: (16, 32, 64, 128),
    "mamba_ssm_cache_dtype": lambda _spec, _options: ("auto", "float32", "bfloat16"),
    "enable_prefix_caching": lambda _spec, _options: (True, False),
    "async_scheduling": lambda _spec, _options: (True, False),
    "disable_hybrid_kv_cache_manager": lambda _spec, _options: (False, True),
    "gpu_memory_utilization": lambda _spec, _options: (0.8, 0.85, 0.9, 0.92, 0.95),
}
_OTHERS = (
    "kv_cache_memory_bytes",
    "attention_backend",
    "gpu",
    "vllm_version",
    "max_num_seqs",
    "enforce_eager",
    "dtype",
)
_COMPARABLE = frozenset((*_USUAL, *_OTHERS))
_READERS = {name: (flag, read) for flag, (name, read) in FIELDS.items()}


def _read(name: str, text: str) -> Any:
    """A value as vLLM's flag would read it; switches as true and false."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    flag, read = _READERS.get(name, ("", None))
    return text if read is None else read(flag, text)
