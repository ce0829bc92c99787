"""How one GPU's memory was divided, from what its worker printed (spec memory-profile, section 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pdkv.logs.printed import Printed
from pdkv.logs.startup import RankLog, Settings, StartupLog

# Two printed sizes of two decimals each agree when they differ by no more than their roundings and float noise.
_ROUNDING_SLACK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One part of the budget of a rank; ``graphs`` may lie outside of what was requested (before 0.21)."""

    name: str
    size: Printed


def graphs_subtracted(log: StartupLog) -> bool:
    """Whether the estimate of CUDA graphs was taken off the memory for KV: read off the numbers, else by release."""
    for rank in log.ranks:
        if rank.available_kv and rank.requested and rank.non_kv and rank.graph_estimate:
            gap = rank.requested.bytes - rank.non_kv.bytes - rank.available_kv.bytes
            if rank.graph_estimate.bytes > 4 * _ROUNDING_SLACK:
                return abs(gap - rank.graph_estimate.bytes) < abs(gap)
    release = log.settings.release
    if release is None:
        return False
    major, minor = (int(part) for part in release.split("."))
    return (major, minor) >= (0, 21)


def available_of(rank: RankLog, *, with_graphs: bool) -> Printed | None:
    """Memory for KV of one rank: given by hand, printed, or what its other terms leave of what was requested.

    Workers other than the first print their terms and not the difference (DEBUG level).
    """
    if rank.reserved is not None:
        return rank.reserved
    return rank.available_kv if rank.available_kv is not None else left_of_requested(rank, with_graphs=with_graphs)


def left_of_requested(rank: RankLog, *, with_graphs: bool) -> Printed | None:
    """What the printed terms leave of the requested memory; ``None`` when a term is missing."""
    if rank.requested is None:
        return None
    left = rank.requested
    if rank.non_kv is not None:
        left = left.minus(rank.non_kv)
    elif rank.weights is not None and rank.activation_peak is not None and rank.non_torch is not None:
        left = left.minus(rank.weights).minus(rank.activation_peak).minus(rank.non_torch)
    else:
        return None
    return left.minus(rank.graph_estimate) if with_graphs and rank.graph_estimate is not None else left


def requested_of(total: Printed, utilization: float) -> Printed:
    """``total`` x ``utilization``, rounded up to a byte as vLLM does; as wide as the total's rounding."""
    share = Fraction(str(utilization))
    low, middle, high = (math.ceil(size * share) for size in (total.low_bytes, total.bytes, total.high_bytes))
    return Printed(f"{utilization} of {total.text}", low, middle, high)


def exact_bytes(settings: Settings) -> Printed | None:
    """``--kv-cache-memory-bytes``, where it was given: then it is exact and the same on every rank."""
    return None if settings.kv_cache_memory_bytes is None else Printed.exactly(settings.kv_cache_memory_bytes)


def available_per_stage(log: StartupLog) -> tuple[Printed | None, ...]:
    """Memory for KV of every pipeline stage: of the rank that has least, as far as its ranks printed it."""
    stages = log.settings.pipeline_parallel_size or 1
    given = exact_bytes(log.settings)
    if given is not None:
        return (given,) * stages
    with_graphs = graphs_subtracted(log)
    found: list[Printed | None] = [None] * stages
    for rank in log.ranks:
        size = available_of(rank, with_graphs=with_graphs)
        stage = rank.pipeline_rank or 0
        if size is not None and stage < stages:
            least = found[stage]
            found[stage] = size if least is None else _least(least, size)
    reserve = next((engine.mm_reserve for engine in log.engines if engine.mm_reserve), None)
    if reserve is not None:
        found = [size and size.minus(reserve) for size in found]
    return tuple(found)


def _least(one: Printed, other: Printed) -> Printed:
    """What the smaller of two sizes may be: each end is the smaller end."""
    return Printed(
        min(one, other, key=lambda size: size.bytes).text,
        min(one.low_bytes, other.low_bytes),
        min(one.bytes, other.bytes),
        min(one.high_bytes, other.high_bytes),
    )


def ranks_unknown(log: StartupLog) -> int:
    """How many ranks of an engine did not print what memory they had for KV."""
    if exact_bytes(log.settings) is not None:
        return 0
    settings = log.settings
    ranks = (settings.tensor_parallel_size or 1) * (settings.pipeline_parallel_size or 1)
    known = sum(available_of(rank, with_graphs=False) is not None for rank in log.ranks)
    return max(0, ranks - known)


def terms(rank: RankLog, log: StartupLog) -> tuple[Term, ...]:
    """The parts of what was requested on ``rank``, largest purposes first; only what was printed."""
    found = [Term(name=name, size=size) for name, size in _named(rank) if size is not None]
    if graphs_subtracted(log) and rank.graph_estimate is not None:
        found.append(Term(name="CUDA graphs (estimated)", size=rank.graph_estimate))
    size = available_of(rank, with_graphs=graphs_subtracted(log))
    if size is not None:
        found.append(Term(name="KV cache", size=size))
    return tuple(found)


def _named(rank: RankLog) -> Sequence[tuple[str, Printed | None]]:
    non_torch = rank.non_torch
    if non_torch is None and rank.consumed is not None and rank.weights is not None:
        # 0.3x prints weights and non-torch memory as one sum.
        non_torch = rank.consumed.minus(rank.weights)
    return (("weights", rank.weights), ("activation peak", rank.activation_peak), ("non-torch", non_torch))
