"""Findings about memory: how the budget was spent, which rank decides, what was left out."""

from __future__ import annotations

from pdkv.explain.budget import available_of, graphs_subtracted, terms
from pdkv.explain.capacity import spare_bytes
from pdkv.explain.report import Finding, Severity
from pdkv.explain.start import Start
from pdkv.units import GIB, MIB, format_bytes

# Below this, ranks differ only by rounding and by what a driver keeps.
_NOTEWORTHY_BYTES = 64 * MIB
# A CUDA context and NCCL's buffers are there before the first measurement: up to about 2 GiB with 4 GPUs.
_OWN_BEFORE_LOADING_BYTES = 4 * GIB


def budget_findings(start: Start) -> list[Finding]:
    """Where the memory of the bottleneck rank went, and what the others leave unused."""
    return [
        *_spent(start),
        *_bottleneck(start),
        *_left_out(start),
        *_graphs(start),
        *_restarts(start),
        *_runtime(start),
    ]


def _spent(start: Start) -> list[Finding]:
    rank = start.bottleneck
    if rank is None:
        return []
    parts = terms(rank, start.log)
    if not parts:
        return []
    whole = rank.requested
    if whole is None:
        whole = rank.total
    text = ", ".join(
        f"{term.name} {term.size.bytes / GIB:.2f} GiB"
        + (f" ({term.size.bytes / whole.bytes:.0%})" if whole is not None and whole.bytes > 0 else "")
        for term in parts
    )
    of = "" if whole is None else f" of {whole.text}"
    if rank.requested is not None and rank.total is not None:
        share = start.log.settings.gpu_memory_utilization or "a share"
        of = f" of {rank.requested.text} ({share} of {rank.total.text})"
    largest = max(parts, key=lambda term: term.size.bytes)
    return [Finding(id="budget", text=f"{rank.name}{of}: {text}", bytes=largest.size.bytes, effect=largest.name)]


def _bottleneck(start: Start) -> list[Finding]:
    rank = start.bottleneck
    spare = spare_bytes(start)
    wasted = {name: count for name, count in spare.items() if count > _NOTEWORTHY_BYTES}
    if rank is None or len(spare) < 2 or not wasted:
        return []
    most = max(wasted, key=lambda name: wasted[name])
    return [
        Finding(
            id="bottleneck-rank",
            severity=Severity.WARNING,
            text=f"{rank.name} has the least room for KV and every rank is cut to its number of blocks: {len(wasted)} "
            f"rank(s) leave memory unused, {most} {format_bytes(wasted[most])}",
            bytes=sum(wasted.values()),
            effect="move layers off that stage (VLLM_PP_LAYER_PARTITION), or lower what makes it larger",
        )
    ]


def _left_out(start: Start) -> list[Finding]:
    """Device memory that gpu_memory_utilization leaves to nobody, by vLLM's own suggestion where it made one."""
    rank = start.bottleneck
    if rank is None:
        return []
    found = []
    if rank.free_at_start is not None and rank.total is not None:
        others = rank.total.bytes - rank.free_at_start.bytes
        if others > _OWN_BEFORE_LOADING_BYTES:
            found.append(
                Finding(
                    id="device-shared",
                    severity=Severity.WARNING,
                    text=f"{format_bytes(others)} of {rank.total.text} were in use before the model was loaded: "
                    "another process on the GPU, or one that did not end",
                    bytes=others,
                )
            )
    if rank.free_at_start is not None and rank.requested is not None and rank.suggested_full_bytes is not None:
        size = available_of(rank, with_graphs=graphs_subtracted(start.log))
        more = rank.suggested_full_bytes - (size.bytes if size else 0)
        if more > GIB:
            found.append(
                Finding(
                    id="memory-left-out",
                    text=f"gpu_memory_utilization leaves "
                    f"{format_bytes(rank.free_at_start.bytes - rank.requested.bytes)} free; "
                    f"vLLM itself suggests --kv-cache-memory={rank.suggested_full_bytes}",
                    bytes=more,
                    effect=f"{format_bytes(more)} more for KV on this GPU",
                )
            )
    return found


def _graphs(start: Start) -> list[Finding]:
    """CUDA graphs come on top of what was requested when their estimate was not subtracted."""
    rank = start.bottleneck
    if rank is None or rank.graph_actual is None:
        return []
    actual, estimate = rank.graph_actual, rank.graph_estimate
    if not graphs_subtracted(start.log):
        return [
            Finding(
                id="graphs-outside-budget",
                text=f"CUDA graphs took {actual.text} beyond what gpu_memory_utilization asked for: this release does "
                "not take them off the memory for KV",
                bytes=actual.bytes,
                effect="leave that much free on the device, or set VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1",
            )
        ]
    if estimate is not None and abs(actual.bytes - estimate.bytes) > 256 * MIB:
        return [
            Finding(
                id="graph-estimate-off",
                text=f"CUDA graphs were estimated at {estimate.text} and took {actual.text}",
                bytes=estimate.bytes - actual.bytes,
                effect=f"--kv-cache-memory={rank.suggested_bytes}" if rank.suggested_bytes else None,
            )
        ]
    return []


def _restarts(start: Start) -> list[Finding]:
    if start.log.starts < 2:
        return []
    return [
        Finding(
            id="several-starts",
            severity=Severity.WARNING,
            text=f"the log holds {start.log.starts} starts; the last one with an outcome is explained",
        )
    ]


def _runtime(start: Start) -> list[Finding]:
    stats = start.log.runtime
    if stats is None:
        return []
    found = []
    if stats.preemptions:
        found.append(
            Finding(
                id="preemptions",
                severity=Severity.WARNING,
                text=f"the log counts {stats.preemptions:,} preemptions after the start: their KV was thrown away and "
                "computed again",
            )
        )
    if stats.usage_percent > 0 and stats.running == stats.waiting == 0:
        found.append(
            Finding(
                id="usage-without-requests",
                severity=Severity.WARNING,
                text=f"the last line shows {stats.usage_percent:g}% of the pool in use with nothing running or "
                "waiting: blocks held for a peer, or leaked",
            )
        )
    return found
