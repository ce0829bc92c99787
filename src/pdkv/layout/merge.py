"""When layers can share block tables: caches that merge into one description, and caches of one type.

(vLLM, kv_cache_interface.py: ``merge`` and ``is_uniform_with_collection`` of every spec.) *Merging* wants equal pages
and gives one cache for the group. *One type* only wants the same number of blocks for the same tokens: a group of such
caches keeps a description per layer, and its page is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdkv.errors import ConfigError
from pdkv.layout.specs import FULL_LIKE, WINDOWED, AttentionCache, Cache, StateCache
from pdkv.models.spec import LayerKind

_LATENT = (LayerKind.MLA, LayerKind.SLIDING_WINDOW_MLA)


def merged(caches: Sequence[Cache]) -> Cache | None:
    """One cache that stands for all of ``caches``, or ``None`` when there is none.

    Raises ConfigError for full-attention caches that remember different windows: vLLM does not start then.
    """
    first = caches[0]
    if isinstance(first, AttentionCache) and first.kind in _LATENT:
        same = _same_latent if first.kind is LayerKind.MLA else _same_latent_window
        # The page stays padded, but forgets what it was rounded to.
        return replace(first, page_alignment=None) if all(same(first, other) for other in caches) else None
    if isinstance(first, AttentionCache) and first.kind in FULL_LIKE:
        return _merged_full(first, caches)
    return first if all(other == first for other in caches[1:]) else None


def _merged_full(first: AttentionCache, caches: Sequence[Cache]) -> Cache | None:
    kinds = FULL_LIKE - {LayerKind.MLA} if first.kind is not LayerKind.RSWA else {LayerKind.RSWA}
    alike = [cache for cache in caches if isinstance(cache, AttentionCache) and cache.kind in kinds]
    if len(alike) < len(caches):
        return None
    windows = {cache.reach for cache in alike if cache.reach is not None and cache.kind is not LayerKind.RSWA}
    chunks = {cache.chunk for cache in alike if cache.chunk is not None}
    if len(windows) > 1 or len(chunks) > 1:
        raise ConfigError(
            f"layers that are allocated in full have different windows ({sorted(windows | chunks)} tokens): vLLM "
            "cannot put them into one group; leave the hybrid KV cache manager on"
        )
    if (windows and chunks) or not all(_same_page(first, cache) for cache in alike):
        return None
    if first.kind is LayerKind.RSWA:
        return first if all(cache.reach == first.reach for cache in alike) else None
    return replace(first, reach=next(iter(windows), None), chunk=next(iter(chunks), None))


def _same_page(one: AttentionCache, other: AttentionCache) -> bool:
    """Whether two attention caches store the same bytes in the same shape."""
    return (
        one.block_size == other.block_size
        and one.kv_heads == other.kv_heads
        and one.head_dim == other.head_dim
        and one.head_dim_v == other.head_dim_v
        and one.element == other.element
        and one.quant == other.quant
        and one.head_slots == other.head_slots
        and one.state_bytes == other.state_bytes
        and one.tokens_per_state == other.tokens_per_state
        and one.padded_page_bytes == other.padded_page_bytes
        and one.stride == other.stride
        and one.dcp_sharded == other.dcp_sharded
        and one.max_tp_shards == other.max_tp_shards
    )


def _same_latent(first: AttentionCache, other: Cache) -> bool:
    return (
        isinstance(other, AttentionCache)
        and other.kind is LayerKind.MLA
        and _same_page(first, other)
        and first.storage == other.storage
        and first.model_version == other.model_version
        and first.role == other.role
        and first.leads_index == other.leads_index
    )


def _same_latent_window(first: AttentionCache, other: Cache) -> bool:
    """vLLM does not compare the pages here: such caches are only ever grouped by type."""
    return (
        isinstance(other, AttentionCache)
        and other.kind is LayerKind.SLIDING_WINDOW_MLA
        and first.storage == other.storage
        and first.tokens_per_state == other.tokens_per_state
        and first.model_version == other.model_version
        and first.reach == other.reach
        and first.extra_retained == other.extra_retained
        and first.bounded_replay == other.bounded_replay
        and first.stride == other.stride
        and first.dcp_sharded == other.dcp_sharded
        and first.max_tp_shards == other.max_tp_shards
    )


def one_type(caches: Sequence[Cache]) -> bool:
    """Whether all need the same number of blocks for the same tokens; the first decides what they are compared with."""
    first = caches[0]
    if any(cache.block_size != first.block_size or cache.dcp_sharded != first.dcp_sharded for cache in caches):
        return False
    if isinstance(first, StateCache):
        return all(_same_state(first, cache) for cache in caches)
    if first.kind in FULL_LIKE:
        return all(cache.kind in FULL_LIKE for cache in caches)
    if first.kind is LayerKind.SLIDING_WINDOW:
        return all(
            isinstance(cache, AttentionCache) and cache.kind in WINDOWED and cache.reach == first.reach
            for cache in caches
        )
    return all(
        isinstance(cache, AttentionCache)
        and cache.kind is first.kind
        and cache.reach == first.reach
        and cache.chunk == first.chunk
        and cache.bounded_replay == first.bounded_replay
        for cache in caches
    )


def _same_state(first: StateCache, other: Cache) -> bool:
    return (
        isinstance(other, StateCache)
        and other.speculative_blocks == first.speculative_blocks
        and other.checkpoint_blocks == first.checkpoint_blocks
        and other.checkpoint_alignment == first.checkpoint_alignment
        and other.page_bytes == first.page_bytes
        and other.tp_replicated == first.tp_replicated
    )


def promoted(caches: dict[str, Cache]) -> dict[str, Cache]:
    """Windows and chunks next to full attention, allocated in full as well; anything else comes back as it is.

    Their computation stays what it was. Raises ConfigError when the result still is not of one type.
    """
    listed = list(caches.values())
    if merged(listed) is not None or one_type(listed):
        return caches
    found = dict(caches)
    if any(cache.kind in FULL_LIKE for cache in listed):
        sizes = {cache.block_size for cache in listed if cache.kind in FULL_LIKE}
        shared = next(iter(sizes)) if len(sizes) == 1 else None
        for name, cache in caches.items():
            if isinstance(cache, AttentionCache) and cache.kind in (*WINDOWED, LayerKind.CHUNKED_LOCAL):
                found[name] = _promoted_cache(cache, shared or cache.block_size)
    listed = list(found.values())
    if merged(listed) is None and not one_type(listed):
        raise ConfigError(
            "the layers are of kinds that cannot be allocated alike, so the hybrid KV cache manager cannot be turned "
            f"off ({', '.join(sorted({cache.kind.value for cache in caches.values()}))})"
        )
    return found


def _promoted_cache(cache: AttentionCache, block_size: int) -> AttentionCache:
    if cache.kind is LayerKind.SLIDING_WINDOW_MLA:
        raise ConfigError(
            "a window of latents cannot be allocated in full: vLLM 0.32 does not start with the hybrid KV cache "
            "manager turned off for such a model; leave it on"
        )
    padded = cache.padded_page_bytes
    if padded is not None:
        padded = max(padded, cache.dense_page_bytes * block_size // cache.block_size)
    return replace(
        cache,
        kind=LayerKind.FULL_ATTENTION,
        block_size=block_size,
        padded_page_bytes=padded,
        extra_retained=0,
    )
