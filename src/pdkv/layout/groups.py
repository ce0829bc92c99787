"""Layers -> groups (spec kv-layout, section 5), in vLLM's order of rules.

A block id belongs to one group at a time and all groups lie over the same memory, so a block takes the bytes of the
*largest* group, and a request draws blocks for every group from the one pool.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pdkv.errors import ConfigError
from pdkv.layout.dtypes import KvDtype
from pdkv.layout.merge import merged, one_type, promoted
from pdkv.layout.packed import packed_buckets
from pdkv.layout.pages import attention_cache
from pdkv.layout.placement import KvLayout, Placement, layer_stride_bytes, place, round_up
from pdkv.layout.rules import DEFAULT_RULES, VllmRules
from pdkv.layout.specs import FULL_LIKE, WINDOWED, AttentionCache, Cache, Limits
from pdkv.layout.unify import equal_counts, unified
from pdkv.models.spec import LayerKind, LayerSpec


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block tables.

    ``cache`` is what the memory manager sees. ``members`` holds a cache for every layer of a group of one type whose
    pages differ, and is ``None`` for a group whose layers all are like ``cache``. After projection onto a pipeline
    stage ``layers`` are those of the stage, maybe none.
    """

    layers: tuple[str, ...]
    cache: Cache
    members: Mapping[str, Cache] | None = None

    @property
    def kind(self) -> LayerKind | None:
        """The kind of all its layers, full attention for a mix of kinds that keep every token; ``None`` for others."""
        kinds = {cache.kind for cache in (self.members or {"": self.cache}).values()}
        if len(kinds) == 1:
            return next(iter(kinds))
        return LayerKind.FULL_ATTENTION if kinds <= FULL_LIKE else None

    @property
    def block_size(self) -> int:
        """Tokens per block on one rank."""
        return self.cache.block_size

    @property
    def prefix_cacheable(self) -> bool:
        """Whether blocks of the group can be found again by their hash."""
        return all(cache.prefix_cacheable for cache in (self.members or {"": self.cache}).values())

    def of(self, layer: str) -> Cache:
        """The cache of one of its layers."""
        return self.cache if self.members is None else self.members[layer]

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """What each of ``layers`` stores for one block."""
        return tuple(self.of(layer).page_bytes for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes one block of this group takes over all its layers, without alignment."""
        return sum(self.page_bytes)

    def blocks_for(self, num_tokens: int, limits: Limits) -> int:
        """Blocks that one request of ``num_tokens`` tokens holds at its largest."""
        return max(cache.blocks_for(num_tokens, limits) for cache in (self.members or {"": self.cache}).values())

    def on(self, layers: Mapping[str, Cache]) -> Group:
        """This group on a pipeline stage that holds ``layers``. A stage without any keeps the group's description."""
        here = tuple(name for name in self.layers if name in layers)
        if len(here) == len(self.layers):
            return self
        members = self.members
        if here and members is not None:
            members = {name: members[name] for name in here}
        return replace(self, layers=here, members=members)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How one rank lays out its KV."""

    groups: tuple[Group, ...]
    layout: KvLayout = KvLayout.LBNHC
    limits: Limits = field(default_factory=Limits)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the pool: the largest group's. 0 on a rank without KV."""
        if not self.layout.blocks_outermost:
            return max(
                (sum(layer_stride_bytes(group.of(name)) for name in group.layers) for group in self.groups), default=0
            )
        strides = [group.of(name).stride_bytes for group in self.groups for name in group.layers]
        return round_up(max((group.bytes_per_block for group in self.groups), default=0), math.lcm(*strides))

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of the pool that one request of ``num_tokens`` tokens holds, over all groups."""
        return sum(group.blocks_for(num_tokens, self.limits) for group in self.groups)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of the pool that one request of ``num_tokens`` tokens holds; padding layers count."""
        return self.bytes_per_block * self.blocks_for(num_tokens)

    def placements(self, num_blocks: int) -> tuple[Placement, ...]:
        """Every layer's place in an allocation of ``num_blocks`` blocks.

        A group of one type without a layer on this stage lists the model's layers all the same, as vLLM does.
        """
        members = [group.members or dict.fromkeys(group.layers, group.cache) for group in self.groups]
        return place(members, num_blocks, self.layout, self.bytes_per_block)

    def check_layout(self) -> None:
        """Raise ConfigError when pages of different sizes cannot be expressed in the physical layout."""
        sizes = {page for group in self.groups for page in group.page_bytes}
        if len(sizes) <= 1:
            return
        if not self.layout.pages_contiguous or (len(self.groups) > 1 and self.layout.layers_outermost):
            raise ConfigError(
                f"KV layout {self.layout.name} cannot hold pages of different sizes ({sorted(sizes)} bytes) in "
                f"{len(self.groups)} groups; use BLHNC"
            )


def make_groups(
    caches: Mapping[str, Cache],
    *,
    layout: KvLayout = KvLayout.LBNHC,
    hybrid_manager: bool = True,
    extra_retained: int = 0,
    rules: VllmRules = DEFAULT_RULES,
) -> tuple[Group, ...]:
    """The groups of a whole model; ``caches`` map layer names to caches in the order of registration.

    ``extra_retained`` tokens are kept behind every window (multi-module MTP). Without the hybrid manager, windows are
    allocated in full. Raises ConfigError when the layers cannot be put together, as vLLM does at start-up.
    """
    caches = {name: _retaining(cache, extra_retained) for name, cache in caches.items()}
    caches = {name: cache for name, cache in caches.items() if cache.kind is not LayerKind.ENCODER_ONLY}
    if not hybrid_manager:
        caches = _without_hybrid_manager(caches)
    if not caches:
        return ()
    listed = list(caches.values())
    if (alike := merged(listed)) is not None:
        return (Group(tuple(caches), alike),)
    if one_type(listed):
        return (Group(tuple(caches), listed[0], caches),)
    if layout.blocks_outermost and len({cache.page_bytes for cache in listed}) > 1:
        return tuple(Group(tuple(bucket), next(iter(bucket.values())), bucket) for bucket in packed_buckets(caches))
    equal = unified(caches)
    if equal is None:
        return (_all_in_full(caches),)
    found = []
    for names in equal_counts(equal, rules):
        group = merged([equal[name] for name in names])
        assert group is not None, "buckets hold caches that merge"
        found.append(Group(tuple(names), group))
    return tuple(found)


def _retaining(cache: Cache, extra_retained: int) -> Cache:
    if isinstance(cache, AttentionCache) and cache.kind in WINDOWED:
        return replace(cache, extra_retained=extra_retained)
    return cache


def _without_hybrid_manager(caches: Mapping[str, Cache]) -> dict[str, Cache]:
    """Windows promoted to full allocation, apart for caches that context parallelism replicates."""
    found: dict[str, Cache] = dict(caches)
    for replicated in (False, True):
        part = {
            name: cache
            for name, cache in caches.items()
            if (isinstance(cache, AttentionCache) and not cache.dcp_sharded) == replicated
        }
        if part:
            found.update(promoted(part))
    return found


def _all_in_full(caches: Mapping[str, Cache]) -> Group:
    """The fallback for a latent next to windows whose pages do not fit together: windows are allocated in full."""
    kinds = {cache.kind for cache in caches.values()}
    if LayerKind.MLA in kinds and LayerKind.SLIDING_WINDOW in kinds and not kinds & _NO_FALLBACK:
        try:
            whole = promoted(dict(caches))
        except ConfigError:
            whole = {}
        if whole and one_type(list(whole.values())):
            return Group(tuple(whole), next(iter(whole.values())), whole)
    pages = sorted({cache.page_bytes for cache in caches.values()})
    raise ConfigError(
        f"pages of {', '.join(map(str, pages))} bytes cannot be made equal: a latent's page can only grow by whole "
        "multiples of its block size; choose another --block-size"
    )


_NO_FALLBACK = {LayerKind.SLIDING_WINDOW_MLA, LayerKind.CHUNKED_LOCAL}


def layouts_of_stages(
    stages: Sequence[Mapping[str, Cache]],
    *,
    layout: KvLayout = KvLayout.LBNHC,
    limits: Limits | None = None,
    hybrid_manager: bool = True,
    extra_retained: int = 0,
    rules: VllmRules = DEFAULT_RULES,
) -> tuple[RankLayout, ...]:
    """One layout per pipeline stage: groups are made over the whole model and projected onto every stage.

    Raises ConfigError when the same layer differs between stages, or as `make_groups` does.
    """
    whole: dict[str, Cache] = {}
    for stage in stages:
        for name, cache in stage.items():
            if whole.setdefault(name, cache) != cache:
                raise ConfigError(f"layer {name} is not the same on all ranks")
    groups = make_groups(
        whole, layout=layout, hybrid_manager=hybrid_manager, extra_retained=extra_retained, rules=rules
    )
    found = tuple(
        RankLayout(tuple(group.on(stage) for group in groups), layout, limits or Limits()) for stage in stages
    )
    for rank in found:
        rank.check_layout()
    return found


def group_layers(
    layers: tuple[LayerSpec, ...],
    *,
    first: int = 0,
    block_size: int,
    dtype: KvDtype,
    tensor_parallel: int = 1,
    limits: Limits | None = None,
) -> RankLayout:
    """The layout of a rank that holds attention ``layers``, called ``layers.FIRST`` and on, all of one block size.

    For a model whose layers the caller knows; `build.stage_caches` is the way from a config.
    """
    caches: dict[str, Cache] = {
        f"layers.{first + index}": attention_cache(
            layer, block_size=block_size, dtype=dtype, tensor_parallel=tensor_parallel
        )
        for index, layer in enumerate(layers)
    }
    return layouts_of_stages([caches], limits=limits)[0]
