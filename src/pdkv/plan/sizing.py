"""A model under one set of options, laid out and sized: what every part of a plan asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from pdkv.errors import ConfigError
from pdkv.layout.backends import BACKENDS, Backend
from pdkv.layout.build import BuiltCaches, KvSettings, stage_caches
from pdkv.layout.capacity import Capacity, size_pool
from pdkv.layout.draft import with_draft_layers
from pdkv.layout.groups import Group, RankLayout, layouts_of_stages
from pdkv.layout.specs import FULL_LIKE
from pdkv.models.spec import LayerKind, ModelSpec
from pdkv.plan.options import PlanOptions

# Longer than any window, chunk or batch: what a request holds beyond its per-token share has settled.
_LONG_CONTEXT = 1 << 60


@dataclass(frozen=True, slots=True)
class Sized:
    """``layouts`` and ``available`` hold one entry a pipeline stage; ``spec`` includes the layers of a draft model."""

    spec: ModelSpec
    options: PlanOptions
    built: BuiltCaches
    layouts: tuple[RankLayout, ...]
    capacity: Capacity

    @property
    def bottleneck(self) -> RankLayout:
        """The layout of the stage that has the fewest blocks."""
        return self.layouts[self.capacity.bottleneck]

    def concurrency(self, num_tokens: int) -> float:
        """How many requests of ``num_tokens`` tokens the pool holds at once, on one engine; 0 when one does not fit."""
        per_request = max(layout.blocks_for(num_tokens) for layout in self.layouts)
        blocks = self.capacity.num_blocks
        if not per_request:
            return float("inf")
        return blocks / per_request if per_request <= self.capacity.usable_blocks else 0.0

    def whole_requests(self, num_tokens: int) -> int:
        """Requests of ``num_tokens`` tokens that are really there at once, on one engine: the null block is none's."""
        per_request = max(layout.blocks_for(num_tokens) for layout in self.layouts)
        return self.capacity.usable_blocks // per_request if per_request else 1 << 30


def lay_out(spec: ModelSpec, options: PlanOptions) -> tuple[ModelSpec, BuiltCaches, tuple[RankLayout, ...]]:
    """The caches and groups of every stage. Raises ConfigError for settings that cannot be."""
    options.check_batch(spec)
    spec = with_draft_layers(spec, options.speculative_method)
    _check_backend(spec, options.backend)
    settings = options.settings(spec)
    if not spec.has(LayerKind.MAMBA):
        # Only states look at the length, so that plans which differ in it share their caches.
        settings = replace(settings, max_model_len=1)
    built = _caches(spec, settings)
    if options.layout is not None:
        built = replace(built, layout=options.layout)
    hybrid = options.hybrid_manager(spec)
    try:
        layouts = layouts_of_stages(
            built.stages, layout=built.layout, limits=options.limits(spec), hybrid_manager=hybrid, rules=options.rules
        )
    except ConfigError as error:
        if hybrid or options.kv_transfer is None or options.disable_hybrid_kv_cache_manager:
            raise
        raise ConfigError(f"{options.kv_transfer.connector} switches the hybrid manager off, and {error}") from error
    return spec, built, layouts


@lru_cache(maxsize=256)
def _caches(spec: ModelSpec, settings: KvSettings) -> BuiltCaches:
    """Comparisons ask for the same caches in many amounts of memory."""
    return stage_caches(spec, settings)


def _check_backend(spec: ModelSpec, backend: Backend | None) -> None:
    """Raise ConfigError for a backend of the other kind of attention."""
    if backend is None:
        return
    latent = spec.has(LayerKind.MLA, LayerKind.SLIDING_WINDOW_MLA)
    if backend.latent != latent and any(layer.state is None for layer in spec.layers):
        keeps = "latents" if latent else "K and V"
        others = ", ".join(
            sorted(name for name, other in BACKENDS.items() if other.latent == latent and name != "INDEXER")
        )
        raise ConfigError(
            f"--attention-backend {backend.name} is not for {spec.name}, which keeps {keeps}; these are: {others}"
        )


def size(spec: ModelSpec, options: PlanOptions, available_bytes: Iterable[int] | None = None) -> Sized:
    """Lay out ``spec`` and size its pool.

    ``available_bytes`` are what each stage's ranks have for KV, the same for all when there is only one;
    ``options.kv_cache_memory_bytes`` when not given. Raises ConfigError and DoesNotFit as the layout does.
    """
    spec, built, layouts = lay_out(spec, options)
    # Bytes are only absent when the number of blocks is given, and then they are not looked at.
    given = (options.kv_cache_memory_bytes or 0,) if available_bytes is None else tuple(available_bytes)
    available = list(given) if len(given) == len(layouts) else [min(given)] * len(layouts)
    length = options.length(spec)
    capacity = size_pool(
        layouts,
        available,
        max_model_len=None if options.max_model_len == "auto" else length,
        model_limit=length,
        num_blocks_override=options.num_gpu_blocks_override,
        rules=options.rules,
    )
    return Sized(spec, options, built, layouts, capacity)


def growing(rank: RankLayout) -> list[Group]:
    """Groups whose blocks grow with a request for ever."""
    return [group for group in rank.groups if group.cache.kind in FULL_LIKE]


def bytes_per_token(rank: RankLayout) -> Fraction:
    """Bytes that one more token takes in the long run, padding included. Fewer blocks are needed under DCP."""
    return sum(
        (
            Fraction(rank.bytes_per_block, group.block_size * rank.limits.decode_context_parallel)
            for group in growing(rank)
        ),
        Fraction(),
    )


def fixed_bytes(rank: RankLayout) -> int:
    """Bytes that a long request holds whatever its length: windows, chunks and states at their largest."""
    kept = growing(rank)
    fixed = [group.blocks_for(_LONG_CONTEXT, rank.limits) for group in rank.groups if group not in kept]
    return sum(fixed) * rank.bytes_per_block


def whole(value: Fraction) -> int:
    """``value``, up to the next integer."""
    return -(-value.numerator // value.denominator)
