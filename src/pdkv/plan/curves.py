"""Concurrency by the length of requests, for types of KV: the lines of the report page."""

from __future__ import annotations

from dataclasses import replace

from pdkv.errors import PdkvError
from pdkv.plan.advice import Resize
from pdkv.plan.kv_types import usable_types
from pdkv.plan.options import PlanOptions
from pdkv.plan.page import Curve

_SHORTEST = 1 << 10
_MOST_CURVES = 5


def concurrency_by_length(resize: Resize, options: PlanOptions) -> tuple[Curve, ...]:
    """Requests at once at every power of two up to the longest; for the type that was asked for and others."""
    base = resize(options)
    longest = max(base.capacity.max_model_len, _SHORTEST)
    lengths = [_SHORTEST]
    while lengths[-1] * 2 <= longest:
        lengths.append(lengths[-1] * 2)
    if lengths[-1] != longest:
        lengths.append(longest)
    types = dict.fromkeys((options.kv_cache_dtype, *usable_types(base.spec, options)))
    found = []
    for value in list(types)[:_MOST_CURVES]:
        try:
            sized = resize(replace(options, kv_cache_dtype=value))
        except PdkvError:
            continue
        engines = options.data_parallel_size
        requests = tuple(sized.concurrency(length) * engines for length in lengths)
        found.append(Curve(name=value, lengths=tuple(lengths), requests=requests))
    return tuple(found)
