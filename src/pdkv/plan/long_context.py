"""Long requests: what one costs, what fits, and what each lever does about it (founding report, section 7, corrected).

Every lever is planned, so its numbers are those of a plan with it applied. Two are not settings of vLLM and are
computed from blocks: requests that share a prefix, and a host tier, which keeps copies and cannot make a request fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pdkv.plan.advice import Lever, Resize, applied, levers
from pdkv.plan.kv_types import usable_types
from pdkv.plan.sizing import Sized, growing
from pdkv.units import format_bytes

# What people write as 128k is long, be it a power of 1000 or of 1024.
LONG_TOKENS = 128_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverEffect:
    """One lever: what a request then costs the bottleneck rank, and how many fit at once; all ``None`` when it cannot
    be applied. ``longest`` is the longest request that fits, at most the one that was asked for."""

    id: str
    text: str
    changes: dict[str, Any]
    request_bytes: int | None
    concurrency: float | None
    longest: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LongContext:
    """A long request as it is, and under each lever.

    ``shared_prefix_requests`` are requests that fit at once when all share their first half; ``host_tier`` says what a
    host tier does for such requests and what it cannot.
    """

    tokens: int
    request_bytes: int
    request_bytes_all_ranks: int
    concurrency: float
    longest: int
    levers: tuple[LeverEffect, ...]
    shared_prefix_requests: int
    host_tier: str


def long_context(sized: Sized, resize: Resize) -> LongContext | None:
    """For requests of at least LONG_TOKENS that were asked for, and those that do not fit into the pool there is.

    ``None`` for others, without KV, and where the weights leave no pool.
    """
    capacity = sized.capacity
    tokens = capacity.max_model_len
    asked = isinstance(sized.options.max_model_len, int) and tokens >= LONG_TOKENS
    if not capacity.bytes_per_block or not capacity.usable_blocks or (capacity.fits and not asked):
        return None
    return LongContext(
        tokens=tokens,
        request_bytes=sized.bottleneck.bytes_for(tokens),
        request_bytes_all_ranks=_all_ranks(sized, tokens),
        concurrency=sized.concurrency(tokens),
        longest=capacity.estimated_max_model_len,
        levers=tuple(_effects(sized, resize)) if sized.options.num_gpu_blocks_override is None else (),
        shared_prefix_requests=_sharing(sized, tokens),
        host_tier=host_tier(sized, tokens),
    )


def _all_ranks(sized: Sized, tokens: int) -> int:
    return sized.options.tensor_parallel_size * sum(layout.bytes_for(tokens) for layout in sized.layouts)


def _effects(sized: Sized, resize: Resize) -> Iterator[LeverEffect]:
    tokens = sized.capacity.max_model_len
    for lever in _all_levers(sized):
        # At the same length, also where the plan was for the longest that fits.
        other = applied(sized, replace(lever, changes={**lever.changes, "max_model_len": tokens}), resize)
        yield LeverEffect(
            id=lever.id,
            text=lever.text,
            changes=lever.changes,
            request_bytes=None if other is None else other.bottleneck.bytes_for(tokens),
            concurrency=None if other is None else other.concurrency(tokens) * other.options.data_parallel_size,
            longest=None if other is None else other.capacity.estimated_max_model_len,
        )


def _all_levers(sized: Sized) -> Iterator[Lever]:
    yield from (lever for lever in levers(sized) if lever.id != "kv-cache-dtype")
    yield from _types(sized)
    options = sized.options
    for name, flag, what in (
        ("tensor_parallel_size", "--tensor-parallel-size", "divide KV heads over twice the GPUs"),
        ("pipeline_parallel_size", "--pipeline-parallel-size", "divide the layers into twice the stages"),
        ("data_parallel_size", "--data-parallel-size", "add an engine with a pool of its own: no longer request"),
    ):
        doubled = 2 * getattr(options, name)
        yield Lever(flag.removeprefix("--"), f"{what}: {flag} {doubled}", {name: doubled})


def _types(sized: Sized) -> Iterator[Lever]:
    """Every type of KV that the model can be kept in, but the present one."""
    for value in usable_types(sized.spec, sized.options):
        if value not in ("auto", sized.options.kv_cache_dtype):
            yield Lever(f"kv-cache-dtype {value}", f"--kv-cache-dtype {value}", {"kv_cache_dtype": value})


def _sharing(sized: Sized, tokens: int) -> int:
    """Requests at once when the first half of each is the same; windows and states are nobody's to share for long."""
    rank, usable = sized.bottleneck, sized.capacity.usable_blocks
    whole = rank.blocks_for(tokens)
    half = sum(group.blocks_for(tokens // 2, rank.limits) for group in growing(rank) if group.prefix_cacheable)
    own = whole - half
    return 0 if whole > usable else (usable - half) // own if own else usable


def host_tier(sized: Sized, tokens: int) -> str:
    """What the host tier that was asked for, or one of 100 GiB, does for requests of ``tokens`` tokens."""
    held = _all_ranks(sized, tokens)
    text = (
        "a host tier keeps copies for later hits; a running request needs all its blocks on the GPUs, so it makes no "
        "longer request fit and no more run at once"
    )
    given = sized.options.kv_offloading_bytes
    size = given if given is not None else 100 << 30
    return f"{text}. {format_bytes(size)} would keep {size / held:.2f} requests of this length ready to be read back"
