"""In how many tokens the scheduler, the block hashes and prefix-cache hits count (spec kv-layout, section 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.layout.groups import Group
from pdkv.layout.specs import FULL_LIKE, AttentionCache, Cache, StateCache
from pdkv.models.spec import LayerKind


@dataclass(frozen=True, slots=True)
class TokenSteps:
    """``scheduler``: what computed tokens round to. ``hashes``: tokens per block hash. ``hits``: where hits end."""

    scheduler: int
    hashes: int
    hits: int


def token_steps(
    groups: Sequence[Group],
    *,
    block_size: int,
    prefix_caching: bool = True,
    connector: bool = False,
    prefix_match_unit: int | None = None,
    decode_context_parallel: int = 1,
) -> TokenSteps:
    """The sizes for a model's groups; ``block_size`` is the configured one, which only counts without groups.

    Raises ConfigError for a ``prefix_match_unit`` that the block sizes do not allow.
    """
    sizes = [_global_block(group.cache, decode_context_parallel) for group in groups]
    hashing = prefix_caching or connector
    if len(groups) <= 1:
        step = sizes[0] if groups else block_size * decode_context_parallel
        if groups and hashing and prefix_match_unit not in (None, step):
            raise ConfigError(
                f"--prefix-match-unit {prefix_match_unit}: with one group hits end where blocks do; leave it out or "
                f"set it to {step}"
            )
        return TokenSteps(step, step, step)
    scheduler = math.lcm(*sizes)
    caches = [cache for group in groups for cache in _caches(group)]
    unaligned = any(isinstance(cache, StateCache) and cache.mode != "align" for cache in caches)
    if not hashing or unaligned:
        return TokenSteps(scheduler, scheduler, scheduler)
    cacheable = [size for group, size in zip(groups, sizes, strict=True) if group.prefix_cacheable] or sizes
    hashes = math.gcd(*cacheable) if prefix_match_unit is None else prefix_match_unit
    if hashes < 1 or any(size % hashes for size in cacheable):
        raise ConfigError(f"--prefix-match-unit {hashes} does not divide the block sizes {sorted(set(cacheable))}")
    fine = _states_hit_within_blocks(caches, hashes, decode_context_parallel)
    _check_compression(caches, hashes if fine else scheduler)
    if prefix_caching and fine and _all_groups_hit_within_blocks(groups, hashes, decode_context_parallel):
        return TokenSteps(scheduler, hashes, hashes)
    return TokenSteps(scheduler, hashes, scheduler)


def _caches(group: Group) -> list[Cache]:
    return list(group.members.values()) if group.members is not None else [group.cache]


def _global_block(cache: Cache, decode_context_parallel: int) -> int:
    """Tokens that a block covers over all context-parallel ranks."""
    return cache.block_size * (decode_context_parallel if cache.dcp_sharded else 1)


def _states_hit_within_blocks(caches: Sequence[Cache], hashes: int, decode_context_parallel: int) -> bool:
    """Whether states saved at block ends can be found at a finer step than their blocks."""
    return any(
        isinstance(cache, StateCache)
        and cache.mode == "align"
        and (cache.block_size > hashes if decode_context_parallel == 1 else cache.block_size >= hashes)
        for cache in caches
    )


def _all_groups_hit_within_blocks(groups: Sequence[Group], hashes: int, decode_context_parallel: int) -> bool:
    """Windows and chunks are looked up by whole blocks, which must be the step then."""
    return all(
        not group.prefix_cacheable
        or group.cache.kind in (*FULL_LIKE, LayerKind.MAMBA)
        or _global_block(group.cache, decode_context_parallel) == hashes
        for group in groups
    )


def _check_compression(caches: Sequence[Cache], hits: int) -> None:
    for cache in caches:
        per_state = cache.tokens_per_state
        whole = isinstance(cache, AttentionCache) and isinstance(per_state, int) and per_state > 1
        if whole and cache.prefix_cacheable and hits % per_state:
            raise ConfigError(f"prefix hits would end every {hits} tokens, inside a state of {per_state} tokens")


def tensor_parallel_replicas(groups: Sequence[Group], tensor_parallel: int, decode_context_parallel: int = 1) -> int:
    """How many consecutive tensor-parallel ranks hold the same KV in every layer."""
    found = tensor_parallel
    caches = [cache for group in groups for cache in _caches(group)]
    for cache in caches:
        shards = cache.max_tp_shards if isinstance(cache, AttentionCache) else None
        whole = shards is None or (cache.dcp_sharded and decode_context_parallel > 1)
        found = math.gcd(found, 1 if whole else max(1, tensor_parallel // (shards or 1)))
    return found if caches else 1
