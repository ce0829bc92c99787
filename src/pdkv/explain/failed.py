"""Findings about a start that failed: why, in numbers, and the smallest change that would start."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from pdkv.errors import PdkvError
from pdkv.explain.recompute import recompute
from pdkv.explain.report import Finding, Severity
from pdkv.explain.start import Start
from pdkv.logs.printed import Printed
from pdkv.logs.startup import Failure, FailureKind
from pdkv.units import GIB, cdiv, format_bytes


def failure_findings(start: Start) -> list[Finding]:
    """Why it failed, and what to change. Empty for a start that came to serve."""
    failure = start.log.failure
    if failure is None:
        return []
    explain = _EXPLAINED.get(failure.kind)
    if explain is None:
        return [_why(failure, failure.text)]
    return explain(start, failure)


def _why(failure: Failure, text: str, *, count: int | None = None) -> Finding:
    return Finding(id=f"failed-{failure.kind.value}", severity=Severity.ERROR, text=text, bytes=count)


def _change(text: str, effect: str, *, count: int | None = None) -> Finding:
    return Finding(id="smallest-change", severity=Severity.ERROR, text=text, effect=effect, bytes=count)


def _positive(size: Printed | None) -> Printed | None:
    """``size`` where something can be a share of it; a broken log may say that a device has no memory."""
    return size if size is not None and size.low_bytes > 0 else None


def _device_shared(start: Start, failure: Failure) -> list[Finding]:
    free, total, requested = failure.memory("free"), failure.memory("total"), failure.memory("requested")
    total = _positive(total)
    if free is None or total is None or requested is None:
        return [_why(failure, failure.text)]
    index = failure.count("device")
    where = "the GPU" if index is None else f"GPU {index}"
    others = [rank.free_at_start for rank in start.log.ranks if rank.free_at_start is not None]
    usual = max((size.bytes for size in others), default=total.bytes)
    held = max(0, usual - free.bytes)
    beside = ""
    if others:
        beside = f"; another rank had {max(others, key=lambda size: size.bytes).text} free, so {format_bytes(held)} "
        beside += f"of {where} belong to another process"
    share = math.floor(free.low_bytes / total.high_bytes * 100) / 100
    found = [
        _why(
            failure,
            f"{where} had {free.text} of {total.text} free at the start, and {requested.text} were asked for{beside}",
            count=requested.bytes - free.bytes,
        )
    ]
    loses = requested.bytes - int(total.bytes * share)
    found.append(
        _change(
            f"end the other process on {where}, or --gpu-memory-utilization {share:.2f}",
            f"{format_bytes(loses)} less for KV on every rank than was asked for, if the model still fits"
            if share > 0
            else "there is nothing left for this instance while the other process runs",
            count=loses,
        )
    )
    return found


def _too_long(start: Start, failure: Failure) -> list[Finding]:
    length = failure.count("max_model_len") or 0
    needed, available = failure.memory("needed"), failure.memory("available")
    if needed is None or available is None:
        held = failure.count("kv_cache_size_tokens") or 0
        return [
            _why(failure, f"one request of {length:,} tokens does not fit: the pool holds {held:,} tokens"),
            _change(f"--max-model-len {held}", f"one request of {held:,} tokens fits"),
        ]
    short = needed.bytes - available.bytes
    found = [
        _why(
            failure,
            f"one request of {length:,} tokens needs {needed.text} of KV cache, and {available.text} are there",
            count=short,
        )
    ]
    return [*found, *_ways_to_fit(start, failure, needed, available, length)]


def _ways_to_fit(start: Start, failure: Failure, needed: Printed, available: Printed, length: int) -> list[Finding]:
    """In the order of what they cost: more of the device that is free anyway, 8 bits, a shorter request."""
    ways = []
    short = needed.high_bytes - available.low_bytes
    rank = next((rank for rank in start.log.ranks if _positive(rank.total)), None)
    utilization = start.log.settings.gpu_memory_utilization
    if rank is not None and rank.total is not None and utilization is not None:
        share = math.ceil((utilization + short / rank.total.low_bytes) * 1000) / 1000
        free = rank.free_at_start
        graphs = rank.graph_actual.bytes if rank.graph_actual else GIB
        if share <= 1 and free is not None and rank.total.high_bytes * share <= free.low_bytes - graphs:
            ways.append(
                (f"--gpu-memory-utilization {share:g}", f"{format_bytes(short)} more for KV, which the device has free")
            )
    if eight := _with_eight_bits(start, available):
        ways.append(("--kv-cache-dtype fp8", f"one request of {length:,} tokens then needs {format_bytes(eight)}"))
    longest = failure.count("estimated_max_model_len") or _recomputed_longest(start)
    if longest:
        ways.append((f"--max-model-len {longest} (or auto)", f"one request of {longest:,} tokens fits"))
    if not ways:
        ways.append(("more GPUs (--tensor-parallel-size) or a smaller model", f"{format_bytes(short)} are missing"))
    (text, effect), others = ways[0], ways[1:]
    return [
        _change(text, effect, count=short),
        *(Finding(id="other-change", text=other, effect=what) for other, what in others),
    ]


def _with_eight_bits(start: Start, available: Printed) -> int | None:
    """Bytes of one full request with 8-bit KV, when it fits then; ``None`` when it does not or is stored so already."""
    settings = start.log.settings
    if start.spec is None or start.verdict is None or start.verdict.sizing.built.dtype.element_bytes <= 1:
        return None
    stages = settings.pipeline_parallel_size or 1
    try:
        other = recompute(start.spec, replace(settings, kv_cache_dtype="fp8"), [available] * stages, None)
    except PdkvError:
        return None
    if other is None:
        return None
    capacity = other.sizing.capacity(other.blocks[0])
    return capacity.needed_bytes if capacity.fits else None


def _recomputed_longest(start: Start) -> int | None:
    if start.verdict is None:
        return None
    return start.verdict.sizing.capacity(start.verdict.blocks[0]).estimated_max_model_len or None


def _no_memory(start: Start, failure: Failure) -> list[Finding]:
    rank = start.bottleneck
    size = None if rank is None else rank.available_kv
    short = -size.low_bytes if size is not None and size.bytes < 0 else 0
    spent = "" if rank is None or rank.weights is None else f": weights alone take {rank.weights.text}"
    found = [_why(failure, f"nothing is left for KV after weights and activations{spent}", count=short or None)]
    utilization = start.log.settings.gpu_memory_utilization
    need = short + (0 if start.verdict is None else start.verdict.sizing.capacity(1).needed_bytes)
    if rank is not None and rank.total is not None and _positive(rank.total) and utilization is not None:
        share = math.ceil((utilization + need / rank.total.low_bytes) * 1000) / 1000
        if share <= 0.99:
            found.append(
                _change(f"--gpu-memory-utilization {share:g}", f"{format_bytes(need)} for KV: one full request")
            )
            return found
    size_now = start.log.settings.tensor_parallel_size or 1
    found.append(
        _change(
            f"--tensor-parallel-size {2 * size_now}, or a quantized checkpoint",
            "each GPU holds half of the weights" if size_now == 1 else "each GPU holds a smaller share of the weights",
        )
    )
    return found


def _state_blocks(_start: Start, failure: Failure) -> list[Finding]:
    asked, there = failure.count("max_num_seqs") or 0, failure.count("blocks") or 0
    return [
        _why(failure, f"{asked:,} sequences were asked for and each decodes with a state of its own: {there:,} fit"),
        _change(f"--max-num-seqs {there}", f"{there:,} sequences at once"),
    ]


def _sampler_oom(start: Start, failure: Failure) -> list[Finding]:
    """The sampler's logits grow with max_num_seqs, and are allocated after the pool has taken what was left."""
    sequences = max(1, failure.count("max_num_seqs") or 1)
    oom = next((other for other in start.log.failures if other.kind is FailureKind.OUT_OF_MEMORY), None)
    tried, free = (None, None) if oom is None else (oom.memory("tried"), oom.memory("free"))
    if tried is None or free is None:
        return [_why(failure, failure.text), _change(f"--max-num-seqs {max(1, sequences // 2)}", "half the logits")]
    fits = max(1, free.low_bytes // max(1, cdiv(tried.high_bytes, sequences)))
    fits -= fits % 8 if fits > 8 else 0
    total = _positive(oom.memory("total")) if oom is not None else None
    found = [
        _why(
            failure,
            f"the pool was made, and then {tried.text} for the sampler's {sequences:,} sequences did not fit into the "
            f"{free.text} left: this release sizes the pool before it captures graphs and warms up the sampler",
            count=tried.bytes - free.bytes,
        ),
        _change(f"--max-num-seqs {fits}", f"{fits:,} sequences need {format_bytes(tried.bytes * fits // sequences)}"),
    ]
    utilization = start.log.settings.gpu_memory_utilization
    if total is not None and utilization is not None:
        share = math.floor((utilization - (tried.high_bytes - free.low_bytes) / total.low_bytes) * 1000) / 1000
        found.append(
            Finding(
                id="other-change",
                text=f"--gpu-memory-utilization {share:g}",
                effect=f"leaves {format_bytes(int(total.bytes * (utilization - share)))} more to the sampler, from KV",
            )
        )
    return found


def _out_of_memory(start: Start, failure: Failure) -> list[Finding]:
    tried, free, total = failure.memory("tried"), failure.memory("free"), _positive(failure.memory("total"))
    sized = start.engine is not None
    when = "after the pool was made" if sized else "before the pool was made, while loading or profiling"
    text = f"the device was full {when}: {'' if tried is None else tried.text} more were asked for"
    if free is not None and total is not None:
        text += f", and {free.text} of {total.text} were free"
    found = [_why(failure, text, count=None if tried is None else tried.bytes)]
    utilization = start.log.settings.gpu_memory_utilization
    if sized and tried and free and total and utilization:
        share = math.floor((utilization - (tried.high_bytes - free.low_bytes) / total.low_bytes) * 1000) / 1000
        found.append(_change(f"--gpu-memory-utilization {share:g}", "leaves that much of the pool to what comes after"))
        return found
    size = start.log.settings.tensor_parallel_size or 1
    batch = start.log.settings.max_num_batched_tokens
    loaded = any(rank.weights is not None for rank in start.log.ranks)
    if loaded and batch and batch > 2048:
        found.append(_change(f"--max-num-batched-tokens {batch // 2}", "about half the activations of the profile run"))
    else:
        found.append(_change(f"--tensor-parallel-size {2 * size}", "each GPU holds about half of the weights"))
    return found


def _disturbed(_start: Start, failure: Failure) -> list[Finding]:
    before, after = failure.memory("free_before"), failure.memory("free_after")
    change = "" if before is None or after is None else f" ({before.text} free before, {after.text} after)"
    return [
        _why(failure, f"another process gave back memory of this GPU while it was being measured{change}"),
        _change("start instances that share a GPU one after the other", "the measurement then means this instance"),
    ]


def _above_model(_start: Start, failure: Failure) -> list[Finding]:
    asked, limit = failure.count("max_model_len") or 0, failure.count("model_limit") or 0
    return [
        _why(failure, f"{asked:,} tokens were asked for, and the model was made for {limit:,}"),
        _change(f"--max-model-len {limit}", "the longest request that the model's position encoding allows"),
    ]


def _heads(_start: Start, failure: Failure) -> list[Finding]:
    heads, size = failure.count("heads") or 1, failure.count("tensor_parallel_size") or 1
    fits = max(count for count in range(1, max(2, size)) if heads % count == 0)
    return [
        _why(failure, f"{heads} attention heads cannot be divided over {size} GPUs"),
        _change(f"--tensor-parallel-size {fits}", f"{heads // fits} heads on each GPU"),
    ]


def _missing_device(start: Start, failure: Failure) -> list[Finding]:
    settings = start.log.settings
    sizes = (settings.data_parallel_size, settings.tensor_parallel_size, settings.pipeline_parallel_size)
    wanted = math.prod(size or 1 for size in sizes)
    rank = failure.count("rank")
    return [
        _why(failure, f"a worker was to use GPU {rank}, and this host shows no such device"),
        _change(
            f"give the container {max(wanted, (rank or 0) + 1)} GPUs, or --data-parallel-size 1",
            "every worker has a GPU of its own",
        ),
    ]


def _not_found(_start: Start, failure: Failure) -> list[Finding]:
    return [
        _why(failure, f"the model's files could not be had: {failure.text}"),
        _change(
            "give a token with access to the model (HF_TOKEN, and accept its licence), or a local directory",
            "memory was not reached: nothing is known about whether it fits",
        ),
    ]


_EXPLAINED: dict[FailureKind, Callable[[Start, Failure], list[Finding]]] = {
    FailureKind.DEVICE_SHARED: _device_shared,
    FailureKind.REQUEST_TOO_LONG: _too_long,
    FailureKind.NO_KV_MEMORY: _no_memory,
    FailureKind.STATE_BLOCKS: _state_blocks,
    FailureKind.SAMPLER_OOM: _sampler_oom,
    FailureKind.OUT_OF_MEMORY: _out_of_memory,
    FailureKind.PROFILING_DISTURBED: _disturbed,
    FailureKind.LENGTH_ABOVE_MODEL: _above_model,
    FailureKind.HEADS_NOT_DIVISIBLE: _heads,
    FailureKind.MISSING_DEVICE: _missing_device,
    FailureKind.MODEL_NOT_FOUND: _not_found,
}
