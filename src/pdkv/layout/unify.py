"""Groups of equal pages and equal counts: every block must have the same bytes in every group (section 5, rule 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pdkv.errors import ConfigError
from pdkv.layout.merge import merged
from pdkv.layout.rules import VllmRules
from pdkv.layout.specs import Cache, StateCache
from pdkv.models.spec import LayerKind
from pdkv.units import cdiv


def unified(caches: Mapping[str, Cache]) -> dict[str, Cache] | None:
    """The same caches with pages of equal size, or ``None`` when that cannot be.

    A smaller page grows by a whole multiple of its block size when it can. Else it is padded: a state, whose size does
    not depend on the block size, and K and V. A latent's page is read in whole rows, and cannot be padded.
    """
    largest = max(cache.page_bytes for cache in caches.values())
    found: dict[str, Cache] = {}
    for name, cache in caches.items():
        if cache.page_bytes == largest:
            found[name] = cache
        elif isinstance(cache, StateCache):
            found[name] = replace(cache, padded_page_bytes=largest)
        elif largest % cache.page_bytes == 0:
            found[name] = cache.with_block_size(cache.block_size * (largest // cache.page_bytes))
        elif cache.kind is not LayerKind.MLA:
            found[name] = replace(cache, padded_page_bytes=largest)
        else:
            return None
        if found[name].page_bytes != largest:
            raise ConfigError(
                f"layer {name}: its padded page of {cache.page_bytes} bytes cannot be brought to {largest} bytes; "
                "choose another --block-size"
            )
    return found


def equal_counts(caches: Mapping[str, Cache], rules: VllmRules) -> list[list[str]]:
    """Layers in groups of (nearly) equal count: the pattern of a hybrid model, repeated.

    A bucket of like layers is split into ceil(n / size) groups; layer ``j`` goes to group ``j`` mod groups, which keeps
    pipeline stages balanced. Missing layers are padding.
    """
    buckets = _buckets(caches, rules)
    size = group_size([len(names) for names in buckets], rules)
    found = []
    for names in buckets:
        count = cdiv(len(names), size)
        found += [names[start::count] for start in range(count)]
    return found


def group_size(counts: list[int], rules: VllmRules) -> int:
    """Layers per group: the smallest bucket, or the largest when it is not much larger (less padding that way)."""
    smallest, largest = min(counts), max(counts)
    return largest if largest < smallest * rules.group_size_stretch else smallest


def padding_layers(counts: list[int], rules: VllmRules) -> list[tuple[int, float]]:
    """Per bucket of ``counts`` layers: layers added to fill its last group, and the share of waste as vLLM warns it."""
    size = group_size(counts, rules)
    return [(-count % size, -count % size / count) for count in counts]


def _buckets(caches: Mapping[str, Cache], rules: VllmRules) -> list[list[str]]:
    """Names of layers with equal caches, then those joined whose caches merge."""
    by_cache: dict[Cache, list[str]] = {}
    for name, cache in caches.items():
        by_cache.setdefault(cache, []).append(name)
    if not rules.joins_caches_that_merge:
        return list(by_cache.values())
    names_of: list[list[str]] = []
    caches_of: list[list[Cache]] = []
    for cache, names in by_cache.items():
        for bucket, joined in zip(names_of, caches_of, strict=True):
            if _merge([*joined, cache]) is not None:
                bucket.extend(names)
                joined.append(cache)
                break
        else:
            names_of.append(list(names))
            caches_of.append([cache])
    return names_of


def _merge(caches: list[Cache]) -> Cache | None:
    """Like `merged`; different windows are a reason to stay apart here, not an error."""
    try:
        return merged(caches)
    except ConfigError:
        return None
