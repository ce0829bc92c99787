"""Model + settings + bytes -> PlanReport. Exact: nothing here is estimated, so the bytes must be given."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from pdkv.errors import ConfigError
from pdkv.layout.capacity import Capacity, size_pool
from pdkv.layout.dtypes import MODEL_DTYPES, KvDtype, resolve_kv_dtype
from pdkv.layout.groups import RankLayout, group_layers
from pdkv.layout.pages import check_tensor_parallel, stage_layers
from pdkv.layout.rules import DEFAULT_RULES
from pdkv.models.spec import ModelSpec
from pdkv.plan.report import (
    Advice,
    CapacityFacts,
    GroupFacts,
    KvFacts,
    MemoryFacts,
    ModelFacts,
    PlanReport,
    RankFacts,
)
from pdkv.plan.source import PlannedModel
from pdkv.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What vLLM would be told; names and defaults are its own. ``None`` is "not set". Raises ConfigError when wrong."""

    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int = DEFAULT_RULES.default_block_size
    max_model_len: int | Literal["auto"] | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"--{field.name.replace('_', '-')} {value}: must be at least 1")
        if self.dtype not in ("auto", *MODEL_DTYPES):
            raise ConfigError(f"--dtype {self.dtype}: there are auto, {', '.join(MODEL_DTYPES)}")


def make_plan(model: PlannedModel, options: PlanOptions) -> PlanReport:
    """Size ``model`` under ``options``.

    A model that does not fit is an answer (``capacity.fits`` false, with advice). Raises ConfigError for settings that
    cannot be, and when neither KV bytes nor a number of blocks are given.
    """
    if options.kv_cache_memory_bytes is None and options.num_gpu_blocks_override is None:
        raise ConfigError(
            "how much memory is there for KV? Give --kv-cache-memory-bytes (per GPU, for example 40GiB; vLLM prints "
            "its own as 'Available KV cache memory') or --num-gpu-blocks-override"
        )
    spec = model.spec
    model_dtype = _model_dtype(spec, options)
    dtype = resolve_kv_dtype(options.kv_cache_dtype, model_dtype, spec.kv_dtype)
    layouts = _layouts(spec, options, dtype)
    capacity = _capacity(spec, options, layouts)
    bottleneck = layouts[capacity.bottleneck]
    return PlanReport(
        model=ModelFacts(
            name=spec.name,
            layers=len(spec.layers),
            params=model.params,
            weights_bytes=None if model.params is None else model.params * MODEL_DTYPES[model_dtype],
        ),
        kv=_kv_facts(bottleneck, layouts, options, dtype),
        memory=MemoryFacts(available_kv_bytes=capacity.available_bytes, basis="given"),
        capacity=CapacityFacts(
            num_blocks=capacity.num_blocks,
            usable_blocks=capacity.usable_blocks,
            blocks_per_max_len_request=capacity.blocks_per_max_len_request,
            kv_cache_size_tokens=capacity.kv_cache_size_tokens,
            max_concurrency=capacity.max_concurrency,
            max_model_len=capacity.max_model_len,
            estimated_max_model_len=capacity.estimated_max_model_len,
            fits=capacity.fits,
        ),
        ranks=_ranks(layouts, capacity, options),
        rules=DEFAULT_RULES.version,
        advice=_advice(spec, options, capacity, dtype),
        warnings=_warnings(spec, options, capacity, dtype),
    )


def _model_dtype(spec: ModelSpec, options: PlanOptions) -> str:
    """The type the model computes in. As in vLLM, auto halves a 32-bit checkpoint (and one that does not say)."""
    if options.dtype != "auto":
        return options.dtype
    return "bfloat16" if spec.dtype in (None, "float32") else spec.dtype


def _layouts(spec: ModelSpec, options: PlanOptions, dtype: KvDtype) -> tuple[RankLayout, ...]:
    """One layout per pipeline stage; the tensor-parallel ranks of a stage are alike."""
    check_tensor_parallel(spec, options.tensor_parallel_size)
    return tuple(
        group_layers(
            spec.layers[stage.start : stage.stop],
            first=stage.start,
            block_size=options.block_size,
            dtype=dtype,
            tensor_parallel=options.tensor_parallel_size,
        )
        for stage in stage_layers(len(spec.layers), options.pipeline_parallel_size)
    )


def _capacity(spec: ModelSpec, options: PlanOptions, layouts: tuple[RankLayout, ...]) -> Capacity:
    length = options.max_model_len if isinstance(options.max_model_len, int) else spec.max_model_len
    if length > spec.max_model_len:
        raise ConfigError(
            f"--max-model-len {length} is more than {spec.name} was made for ({spec.max_model_len} tokens, by its "
            "config.json); lower it"
        )
    # Bytes are only absent when the number of blocks is given, and then they are not looked at.
    available = options.kv_cache_memory_bytes or 0
    return size_pool(
        layouts,
        [available] * len(layouts),
        max_model_len=None if options.max_model_len == "auto" else length,
        model_limit=spec.max_model_len,
        num_blocks_override=options.num_gpu_blocks_override,
    )


def _kv_facts(bottleneck: RankLayout, layouts: tuple[RankLayout, ...], options: PlanOptions, dtype: KvDtype) -> KvFacts:
    per_token = [layout.bytes_per_block // options.block_size for layout in layouts]
    return KvFacts(
        bytes_per_token=bottleneck.bytes_per_block // options.block_size,
        bytes_per_token_all_ranks=sum(per_token) * options.tensor_parallel_size,
        fixed_bytes_per_request=0,
        bytes_per_block=bottleneck.bytes_per_block,
        block_size=options.block_size,
        groups=tuple(
            GroupFacts(
                kind=group.kind.value,
                layers=len(group.layers),
                block_size=group.block_size,
                page_bytes=group.page_bytes[0],
                window=None,
            )
            for group in bottleneck.groups
        ),
        dtype=dtype.name,
    )


def _ranks(layouts: tuple[RankLayout, ...], capacity: Capacity, options: PlanOptions) -> tuple[RankFacts, ...]:
    size = options.tensor_parallel_size
    return tuple(
        RankFacts(
            rank=stage * size + rank,
            pipeline_stage=stage,
            layers=sum(len(group.layers) for group in layout.groups),
            bytes_per_block=layout.bytes_per_block,
            available_kv_bytes=capacity.available_per_rank[stage],
            num_blocks=capacity.blocks_per_rank[stage],
        )
        for stage, layout in enumerate(layouts)
        for rank in range(size)
    )


def _advice(spec: ModelSpec, options: PlanOptions, capacity: Capacity, dtype: KvDtype) -> tuple[Advice, ...]:
    found = []
    if not capacity.fits:
        if capacity.estimated_max_model_len > 0:
            longest = capacity.estimated_max_model_len
            found.append(
                Advice(
                    "max-model-len", f"set --max-model-len {longest}, or auto", f"one request of {longest} tokens fits"
                )
            )
        needed = capacity.needed_bytes
        found.append(
            Advice(
                "kv-cache-memory-bytes",
                f"give at least {needed} bytes ({format_bytes(needed)}) per GPU for KV",
                f"one request of {capacity.max_model_len} tokens fits",
            )
        )
    if dtype.element_bytes > 1 and options.num_gpu_blocks_override is None:
        with_fp8 = _capacity(spec, options, _layouts(spec, options, resolve_kv_dtype("fp8", dtype.name)))
        found.append(
            Advice(
                "kv-cache-dtype",
                "store KV in 8 bits: --kv-cache-dtype fp8",
                f"{with_fp8.kv_cache_size_tokens} tokens instead of {capacity.kv_cache_size_tokens}",
            )
        )
    return tuple(found)


def _warnings(spec: ModelSpec, options: PlanOptions, capacity: Capacity, dtype: KvDtype) -> tuple[str, ...]:
    found = []
    if options.num_gpu_blocks_override is not None and options.kv_cache_memory_bytes is not None:
        found.append("--num-gpu-blocks-override decides the number of blocks; --kv-cache-memory-bytes was not used")
    if options.dtype == "auto" and spec.dtype in (None, "float32"):
        said = "does not say its type" if spec.dtype is None else "is in float32"
        found.append(f"the checkpoint {said}; vLLM's --dtype auto serves it in bfloat16")
    if options.kv_cache_dtype == "auto" and spec.kv_dtype is not None:
        found.append(f"the checkpoint asks for {dtype.name} KV, and --kv-cache-dtype auto follows it")
    smallest = min(layer.kv_heads for layer in spec.layers)
    if options.tensor_parallel_size > smallest:
        copies = options.tensor_parallel_size // smallest
        found.append(
            f"{spec.name} has {smallest} KV heads: --tensor-parallel-size {options.tensor_parallel_size} keeps "
            f"{copies} copies of each, and more ranks add no room for KV"
        )
    if max(capacity.blocks_per_rank) > capacity.num_blocks:
        found.append("pipeline stages differ in size: all are cut to the smallest number of blocks")
    return tuple(found)
