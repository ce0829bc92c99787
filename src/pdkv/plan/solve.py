"""Backwards: how many GPUs, and how split, hold so many requests of such a length at once?

Every split that vLLM would start is sized (tensor, pipeline and decode-context parallel ranks of one engine); engines
are then added until the target is met. Whole requests are counted: what an engine's pool really holds, null block out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pdkv.errors import ConfigError, PdkvError
from pdkv.models.spec import ModelSpec
from pdkv.plan.advice import Resize
from pdkv.plan.model_length import beyond_model_length
from pdkv.plan.options import PlanOptions
from pdkv.plan.sizing import Sized
from pdkv.units import cdiv

_STEPS = (1, 2, 4, 8, 16, 32, 64)
_CHOSEN = ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "data_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``concurrency`` requests of ``tokens`` tokens (prompt and answer) at once, on at most ``max_gpus`` GPUs."""

    concurrency: int
    tokens: int
    max_gpus: int = 64

    def __post_init__(self) -> None:
        for flag, value in (
            ("--target-concurrency", self.concurrency),
            ("--at-tokens", self.tokens),
            ("--max-gpus", self.max_gpus),
        ):
            if value < 1:
                raise ConfigError(f"{flag} {value}: must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One deployment. ``requests`` are held at once by all engines; ``longest_tokens`` is the longest length at which
    the target number would still be held."""

    gpus: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    data_parallel_size: int
    kv_cache_dtype: str
    requests: int
    longest_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveReport:
    """``best`` needs the fewest GPUs (``None``: nothing up to ``max_gpus`` does), ``unquantized`` the fewest of those
    that keep KV in the type that was asked for (auto: the model's own) and so give up no quality: the same one, where
    8 bits save no GPU. ``others`` are the next best, one for every type of KV and split; ``nearest`` is what comes
    closest when nothing is enough. ``warnings`` as in a plan."""

    target: Target
    best: Solution | None
    unquantized: Solution | None
    others: tuple[Solution, ...]
    nearest: Solution | None
    examined: int
    warnings: tuple[str, ...]


def solve(spec: ModelSpec, options: PlanOptions, target: Target, resize: Resize) -> SolveReport:
    """The smallest deployments of ``spec`` that hold ``target``, cheapest first.

    With ``options.kv_cache_dtype`` of auto, 8-bit KV is tried too, unless the checkpoint asks for a type. Raises
    the layout's error when no split at all can be started.
    """
    found: list[tuple[Sized, int]] = []
    refused: PdkvError | None = None
    examined = 0
    for candidate in _splits(spec, options, target):
        examined += 1
        try:
            sized = resize(candidate)
        except PdkvError as error:
            refused = refused or error
            continue
        found.append((sized, sized.whole_requests(target.tokens)))
    if not found and refused is not None:
        raise refused
    meets, falls_short = [], []
    for sized, each in found:
        most = target.max_gpus // sized.options.ranks
        engines = cdiv(target.concurrency, each) if each else most + 1
        if engines <= most:
            meets.append(_solution(sized, engines, target))
        elif most:
            falls_short.append(_solution(sized, most, target))
    meets.sort(key=_preference)
    best = meets[0] if meets else None
    unquantized = next((one for one in meets if one.kv_cache_dtype == options.kv_cache_dtype), None)
    nearest = max(falls_short, key=lambda one: (one.requests, one.longest_tokens, -one.gpus), default=None)
    return SolveReport(
        target=target,
        best=best,
        unquantized=unquantized,
        others=tuple(_distinct(meets[1:], best)),
        nearest=None if best else nearest,
        examined=examined,
        warnings=(
            *beyond_model_length(spec, target.tokens),
            *_warnings(options),
            *_too_few_seqs(options.seqs(spec), target, unquantized or best),
        ),
    )


def _splits(spec: ModelSpec, options: PlanOptions, target: Target) -> Iterator[PlanOptions]:
    quantizable = options.kv_cache_dtype == "auto" and spec.kv_dtype is None
    types = ("auto", "fp8") if quantizable else (options.kv_cache_dtype,)
    for tensor in _STEPS:
        for pipeline in _STEPS[:3]:
            if tensor * pipeline * options.prefill_context_parallel_size > target.max_gpus:
                continue
            for context in _STEPS:
                if tensor % context or pipeline > spec.decoder_layers:
                    continue
                for kv_cache_dtype in types:
                    yield replace(
                        options,
                        tensor_parallel_size=tensor,
                        pipeline_parallel_size=pipeline,
                        decode_context_parallel_size=context,
                        data_parallel_size=1,
                        kv_cache_dtype=kv_cache_dtype,
                        max_model_len=target.tokens,
                    )


def _solution(sized: Sized, engines: int, target: Target) -> Solution:
    options = sized.options
    return Solution(
        gpus=options.ranks * engines,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        decode_context_parallel_size=options.decode_context_parallel_size,
        data_parallel_size=engines,
        kv_cache_dtype=options.kv_cache_dtype,
        requests=engines * sized.whole_requests(target.tokens),
        longest_tokens=longest_at(
            sized, cdiv(target.concurrency, engines), max(sized.spec.max_model_len, target.tokens)
        ),
    )


def longest_at(sized: Sized, requests: int, limit: int) -> int:
    """The longest length, at most ``limit``, of which one engine holds ``requests`` at once; 0 when there is none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if sized.whole_requests(middle) >= requests:
            low = middle
        else:
            high = middle - 1
    return low


def _preference(solution: Solution) -> tuple[int, bool, int, int, int, int]:
    """Fewest GPUs; then the model's own type of KV, the fewest stages, context ranks and tensor ranks; then room."""
    return (
        solution.gpus,
        solution.kv_cache_dtype != "auto",
        solution.pipeline_parallel_size,
        solution.decode_context_parallel_size,
        solution.tensor_parallel_size,
        -solution.requests,
    )


def _distinct(solutions: Sequence[Solution], best: Solution | None, most: int = 8) -> Iterator[Solution]:
    """The best of every type and split, a few of them."""
    seen = set() if best is None else {(best.kv_cache_dtype, best.tensor_parallel_size)}
    for solution in solutions:
        key = (solution.kv_cache_dtype, solution.tensor_parallel_size)
        if key not in seen and len(seen) <= most:
            seen.add(key)
            yield solution


def _too_few_seqs(most: int, target: Target, solution: Solution | None) -> Iterator[str]:
    """Room for requests is of no use to an engine that may not run as many."""
    each = 0 if solution is None else cdiv(target.concurrency, solution.data_parallel_size)
    if each > most:
        yield (
            f"vLLM runs at most {most:,} requests at once on an engine (--max-num-seqs), and each is to run "
            f"{each:,}: give --max-num-seqs {each}, and the plan again with it (activations grow with it)"
        )


def _warnings(options: PlanOptions) -> Iterator[str]:
    given = {name: getattr(options, name) for name in _CHOSEN}
    unused = ", ".join(f"--{name.replace('_', '-')} {size}" for name, size in given.items() if size > 1)
    if unused:
        yield f"the sizes are what is looked for: {unused} was not used"
    if options.kv_cache_memory_bytes is not None:
        yield (
            "the same KV bytes per GPU were taken for every split; more tensor or pipeline ranks leave more beside the "
            "weights, which --gpu instead of --kv-cache-memory-bytes counts"
        )
    elif options.enable_expert_parallel:
        yield "with expert parallelism, engines beside one another would also divide the experts; not counted here"
