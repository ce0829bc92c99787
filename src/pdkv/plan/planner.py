"""Model + settings + bytes -> PlanReport. Exact: nothing here is estimated, so the bytes must be given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from pdkv.errors import ConfigError
from pdkv.layout.backends import default_backend
from pdkv.layout.build import BuiltCaches, stage_caches
from pdkv.layout.capacity import Capacity, size_pool
from pdkv.layout.dtypes import MODEL_DTYPES
from pdkv.layout.groups import Group, RankLayout, layouts_of_stages
from pdkv.layout.specs import FULL_LIKE, AttentionCache
from pdkv.models.spec import LayerKind, ModelSpec
from pdkv.plan.options import PlanOptions
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
from pdkv.source import PlannedModel
from pdkv.units import format_bytes

__all__ = ["PlanOptions", "make_plan"]

# Longer than any window, chunk or batch: what a request holds beyond its per-token share has settled.
_LONG_CONTEXT = 1 << 60


@dataclass(frozen=True, slots=True)
class _Sized:
    """A model under one set of options."""

    options: PlanOptions
    built: BuiltCaches
    layouts: tuple[RankLayout, ...]
    capacity: Capacity

    @property
    def bottleneck(self) -> RankLayout:
        return self.layouts[self.capacity.bottleneck]


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
    sized = _size(spec, options)
    capacity = sized.capacity
    return PlanReport(
        model=ModelFacts(
            name=spec.name,
            layers=_decoder_layers(layer.name for layer in spec.layers),
            params=model.params,
            weights_bytes=None if model.params is None else model.params * MODEL_DTYPES[options.model_dtype(spec)],
        ),
        kv=_kv_facts(sized),
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
        ranks=_ranks(sized),
        rules=options.rules.version,
        advice=_advice(spec, sized),
        warnings=_warnings(spec, sized),
    )


def _size(spec: ModelSpec, options: PlanOptions) -> _Sized:
    built = stage_caches(spec, options.settings(spec))
    layouts = layouts_of_stages(
        built.stages,
        layout=built.layout,
        limits=options.limits,
        hybrid_manager=not options.disable_hybrid_kv_cache_manager,
        rules=options.rules,
    )
    # Bytes are only absent when the number of blocks is given, and then they are not looked at.
    available = options.kv_cache_memory_bytes or 0
    length = options.length(spec)
    capacity = size_pool(
        layouts,
        [available] * len(layouts),
        max_model_len=None if options.max_model_len == "auto" else length,
        model_limit=length,
        num_blocks_override=options.num_gpu_blocks_override,
        rules=options.rules,
    )
    return _Sized(options, built, layouts, capacity)


def _decoder_layers(names: Iterable[str]) -> int:
    """Decoder layers among the names of caches (``layers.N.part``)."""
    return len({name.split(".")[1] for name in names})


# ----------------------------------------------------------------------------------------------------------- the facts


def _kv_facts(sized: _Sized) -> KvFacts:
    bottleneck, ranks = sized.bottleneck, sized.options.tensor_parallel_size
    return KvFacts(
        bytes_per_token=_whole(_bytes_per_token(bottleneck)),
        bytes_per_token_all_ranks=_whole(sum((_bytes_per_token(rank) for rank in sized.layouts), Fraction()) * ranks),
        fixed_bytes_per_request=_fixed_bytes(bottleneck),
        bytes_per_block=bottleneck.bytes_per_block,
        block_size=min((group.block_size for group in bottleneck.groups), default=sized.built.block_size),
        groups=tuple(_group_facts(group, bottleneck, sized.capacity.max_model_len) for group in bottleneck.groups),
        dtype=sized.built.dtype.name,
    )


def _growing(rank: RankLayout) -> list[Group]:
    """Groups whose blocks grow with a request for ever."""
    return [group for group in rank.groups if group.cache.kind in FULL_LIKE]


def _bytes_per_token(rank: RankLayout) -> Fraction:
    """Bytes that one more token takes in the long run, padding included. Fewer blocks are needed under DCP."""
    return sum(
        (
            Fraction(rank.bytes_per_block, group.block_size * rank.limits.decode_context_parallel)
            for group in _growing(rank)
        ),
        Fraction(),
    )


def _fixed_bytes(rank: RankLayout) -> int:
    """Bytes that a long request holds whatever its length: windows, chunks and states at their largest."""
    growing = _growing(rank)
    fixed = [group.blocks_for(_LONG_CONTEXT, rank.limits) for group in rank.groups if group not in growing]
    return sum(fixed) * rank.bytes_per_block


def _whole(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


def _group_facts(group: Group, rank: RankLayout, length: int) -> GroupFacts:
    cache = group.cache
    windowed = isinstance(cache, AttentionCache) and cache.kind not in FULL_LIKE
    kind = group.kind
    return GroupFacts(
        kind="unknown" if kind is None else kind.value,
        layers=len(group.layers),
        block_size=group.block_size,
        page_bytes=max(group.page_bytes, default=0),
        window=cache.reach_tokens if windowed and isinstance(cache, AttentionCache) else None,
        bytes_per_block=group.bytes_per_block,
        blocks_per_max_len_request=group.blocks_for(length, rank.limits),
    )


def _ranks(sized: _Sized) -> tuple[RankFacts, ...]:
    size = sized.options.tensor_parallel_size
    return tuple(
        RankFacts(
            rank=stage * size + rank,
            pipeline_stage=stage,
            layers=_decoder_layers(name for group in layout.groups for name in group.layers),
            bytes_per_block=layout.bytes_per_block,
            available_kv_bytes=sized.capacity.available_per_rank[stage],
            num_blocks=sized.capacity.blocks_per_rank[stage],
        )
        for stage, layout in enumerate(sized.layouts)
        for rank in range(size)
    )


# ----------------------------------------------------------------------------------------------- advice and warnings


def _advice(spec: ModelSpec, sized: _Sized) -> tuple[Advice, ...]:
    found = []
    capacity = sized.capacity
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
    options = sized.options
    if sized.built.dtype.element_bytes > 1:
        found += _what_if(
            spec,
            sized,
            replace(options, kv_cache_dtype="fp8"),
            "kv-cache-dtype",
            "store KV in 8 bits: --kv-cache-dtype fp8",
        )
    size = options.tensor_parallel_size
    if any(layer.kind is LayerKind.MLA for layer in spec.layers) and size > 1 == options.decode_context_parallel_size:
        found += _what_if(
            spec,
            sized,
            replace(options, decode_context_parallel_size=size),
            "decode-context-parallel-size",
            f"divide the latents by tokens, rather than keep {size} copies: --decode-context-parallel-size {size}",
        )
    return tuple(found)


def _what_if(spec: ModelSpec, sized: _Sized, options: PlanOptions, which: str, text: str) -> list[Advice]:
    """Advice to change to ``options``, with what that gives; none when it is not possible or no better."""
    if options.num_gpu_blocks_override is not None:
        return []
    try:
        other = _size(spec, options).capacity
    except ConfigError:
        return []
    now = sized.capacity.kv_cache_size_tokens
    if other.kv_cache_size_tokens <= now:
        return []
    return [Advice(which, text, f"{other.kv_cache_size_tokens} tokens instead of {now}")]


def _warnings(spec: ModelSpec, sized: _Sized) -> tuple[str, ...]:
    options, built = sized.options, sized.built
    found = list(spec.warnings)
    if options.num_gpu_blocks_override is not None and options.kv_cache_memory_bytes is not None:
        found.append("--num-gpu-blocks-override decides the number of blocks; --kv-cache-memory-bytes was not used")
    if options.dtype == "auto" and spec.dtype in (None, "float32"):
        said = "does not say its type" if spec.dtype is None else "is in float32"
        found.append(f"the checkpoint {said}; vLLM's --dtype auto serves it in bfloat16")
    if options.kv_cache_dtype == "auto" and spec.kv_dtype is not None:
        found.append(f"the checkpoint asks for {built.dtype.name} KV, and --kv-cache-dtype auto follows it")
    if options.attention_backend is None and built.backend is not default_backend(spec, "auto"):
        found.append(f"{built.dtype.name} KV needs the {built.backend.name} backend; the numbers are for it")
    if built.block_size != (options.block_size or options.rules.default_block_size):
        found.append(f"{built.backend.name} and the layers of this model make blocks of {built.block_size} tokens")
    if skipped := set(options.skip_layers(spec)) - set(options.kv_cache_dtype_skip_layers):
        found.append(f"layers {', '.join(sorted(skipped, key=int))} keep the model's own type, as under vllm serve")
    found += _replication(spec, options)
    found += _padding(sized.bottleneck)
    if max(sized.capacity.blocks_per_rank) > sized.capacity.num_blocks:
        found.append("pipeline stages differ in size: all are cut to the smallest number of blocks")
    return tuple(found)


def _replication(spec: ModelSpec, options: PlanOptions) -> list[str]:
    size = options.tensor_parallel_size
    divided = [layer.kv_heads for layer in spec.layers if layer.kv_heads and not layer.replicated]
    if divided and size > min(divided):
        smallest = min(divided)
        return [
            f"{spec.name} has {smallest} KV heads: --tensor-parallel-size {size} keeps {size // smallest} copies of "
            "each, and more ranks add no room for KV"
        ]
    if size > 1 and not divided and spec.has(LayerKind.MLA):
        return [f"latents are whole on every rank: --tensor-parallel-size {size} adds no room for KV"]
    return []


def _padding(rank: RankLayout) -> list[str]:
    """Layers that groups are padded with, on the bottleneck rank."""
    if len(rank.groups) < 2 or not rank.bytes_per_block:
        return []
    used = sum(group.bytes_per_block for group in rank.groups)
    share = 1 - used / (rank.bytes_per_block * len(rank.groups))
    if share < 0.005:
        return []
    counts = ", ".join(str(len(group.layers)) for group in rank.groups)
    return [f"groups of {counts} layers share blocks of one size: {share:.1%} of a full pool is padding"]
