"""Groups of unequal pages packed into one block, for layouts that keep all layers of a block together (rule 6).

DeepSeek-V4 is the case in point: latents, indexer keys, windows and compressor states have pages of five sizes. Layers
that need the same blocks form a bucket. A bucket with equally many layers of each of several page sizes repeats a
pattern; buckets are split so that all groups cover about as many repeats, and fit into the same bytes per block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.layout.merge import one_type
from pdkv.layout.specs import Cache
from pdkv.models.spec import LayerKind
from pdkv.units import cdiv


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Layers of one type; ``by_page`` lists their names per page size."""

    caches: dict[str, Cache]
    by_page: dict[int, list[str]]

    @property
    def first(self) -> Cache:
        return next(iter(self.caches.values()))

    @property
    def repeats(self) -> int:
        """Layers of the most frequent page size: in a balanced bucket, how often its pattern repeats."""
        return Counter(cache.page_bytes for cache in self.caches.values()).most_common(1)[0][1]

    @property
    def balanced(self) -> bool:
        """Whether there are equally many layers of each page size."""
        return len({len(names) for names in self.by_page.values()}) == 1

    def widest_bytes(self, groups: int) -> int:
        """Bytes per block of the largest of the groups that it is split into."""
        return sum(cdiv(len(names), groups) * page for page, names in self.by_page.items())


def packed_buckets(caches: Mapping[str, Cache]) -> list[dict[str, Cache]]:
    """The layers of every group, in order."""
    buckets = [_bucket(members) for members in _by_type(caches)]
    floor = max((bucket.repeats for bucket in buckets if bucket.balanced and len(bucket.by_page) > 1), default=0)
    per_group = least_padding([bucket.repeats for bucket in buckets if bucket.balanced], floor) if floor else None

    def groups_of(bucket: _Bucket) -> int:
        return cdiv(bucket.repeats, per_group) if bucket.balanced and per_group is not None else 1

    def small(bucket: _Bucket) -> bool:
        """Whether a bucket can be split down to one layer a group, so that it never widens the block."""
        kind = bucket.first.kind
        windows = per_group is None and kind in (LayerKind.SLIDING_WINDOW, LayerKind.SLIDING_WINDOW_MLA)
        return kind in (LayerKind.MAMBA, LayerKind.CIRCULAR_BUFFER) or windows

    room = max(bucket.widest_bytes(len(bucket.caches) if small(bucket) else groups_of(bucket)) for bucket in buckets)
    found: list[dict[str, Cache]] = []
    for bucket in buckets:
        count = groups_of(bucket)
        if small(bucket):
            count = max(count, cdiv(len(bucket.caches), max(room // bucket.first.page_bytes, 1)))
        if count == 1:
            found.append(bucket.caches)
            continue
        repeats = list(zip(*bucket.by_page.values(), strict=False))
        for start in range(count):
            names = [name for repeat in repeats[start::count] for name in repeat]
            found.append({name: bucket.caches[name] for name in names})
    if not all(found) or sum(map(len, found)) < len(caches):
        raise ConfigError(
            "layers with pages of different sizes do not pack into groups: vLLM does not start with such a model"
        )
    return found


def _by_type(caches: Mapping[str, Cache]) -> list[dict[str, Cache]]:
    """Every layer into the first bucket that it is of one type with."""
    buckets: list[dict[str, Cache]] = []
    for name, cache in caches.items():
        for bucket in buckets:
            if one_type([*bucket.values(), cache]):
                bucket[name] = cache
                break
        else:
            buckets.append({name: cache})
    return buckets


def _bucket(caches: dict[str, Cache]) -> _Bucket:
    by_page: dict[int, list[str]] = {}
    for name, cache in caches.items():
        by_page.setdefault(cache.page_bytes, []).append(name)
    return _Bucket(caches, by_page)


def least_padding(counts: list[int], floor: int) -> int:
    """The group size from ``floor`` to the largest count that pads all counts the least; the larger one on a tie."""
    sizes = range(max(1, floor), max(counts) + 1)
    if not sizes:
        return max(1, floor)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))
