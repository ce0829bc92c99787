"""The answer of `pdkv plan` for a person: the verdict in one line, then the numbers behind it, then what to change."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from pdkv.cli.plan_warnings import print_notes, print_refusals
from pdkv.cli.terminal import stdout_console
from pdkv.plan.decode import DecodeFacts, HeldBlocks
from pdkv.plan.long_context import LongContext
from pdkv.plan.report import MemoryFacts, PlanReport
from pdkv.units import format_bytes


def print_report(report: PlanReport, irrelevant: Sequence[str] = ()) -> None:
    """The verdict in one line, then the numbers behind it, then what to change."""
    console = stdout_console()
    kv, capacity = report.kv, report.capacity
    if capacity.fits:
        console.print(
            f"[bold green]fits[/]: {capacity.kv_cache_size_tokens:,} tokens of KV cache, "
            f"{capacity.max_concurrency:.2f} requests of {capacity.max_model_len:,} tokens at once"
        )
    elif report.memory.available_kv_bytes <= 0:
        asked, over = report.memory.requested_bytes or 0, -report.memory.available_kv_bytes
        console.print(
            f"[bold red]does not fit[/]: weights and the rest take {format_bytes(over)} more than the "
            f"{format_bytes(asked)} of a GPU that was asked for, before any KV"
        )
    else:
        longest = capacity.estimated_max_model_len
        console.print(
            f"[bold red]does not fit[/]: one request of {capacity.max_model_len:,} tokens needs "
            f"{capacity.blocks_per_max_len_request:,} blocks, {capacity.usable_blocks:,} are usable; "
            + (f"the longest that fits has {longest:,} tokens" if longest else "not even one token fits")
        )
    print_refusals(console, report.warnings)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("model", f"{report.model.name}, {report.model.layers} layers with KV")
    table.add_row(
        "KV per token", f"{kv.bytes_per_token:,} B a GPU, {kv.bytes_per_token_all_ranks:,} B on all, {kv.dtype}"
    )
    if kv.fixed_bytes_per_request:
        fixed = kv.fixed_bytes_per_request
        table.add_row("and per request", f"{fixed:,} B a GPU ({format_bytes(fixed)}) for windows, chunks and states")
    table.add_row("block", f"{kv.block_size} tokens, {kv.bytes_per_block:,} B ({format_bytes(kv.bytes_per_block)})")
    table.add_row("layers", _groups_text(report))
    table.add_row("memory for KV", _memory_text(report.memory))
    if report.memory.requested_bytes is not None:
        asked, total = report.memory.requested_bytes, report.memory.total_bytes or 0
        table.add_row("of", f"{format_bytes(asked)} of {format_bytes(total)} asked for; {_terms_text(report.memory)}")
    elif report.memory.weights_bytes is not None:
        total = report.memory.total_bytes or 0
        table.add_row("beside it", f"{_terms_text(report.memory)}, estimated; the GPU has {format_bytes(total)}")
    table.add_row("blocks", f"{capacity.num_blocks:,}, of which {capacity.usable_blocks:,} usable")
    table.add_row("a longest request", f"{capacity.blocks_per_max_len_request:,} blocks")
    deployment = report.deployment
    table.add_row("GPUs", _gpus_text(report))
    if deployment.engines > 1:
        table.add_row(
            "all engines", f"{deployment.max_concurrency:.2f} requests, {deployment.kv_cache_size_tokens:,} tokens"
        )
    table.add_row("rules", f"vLLM {report.rules}")
    console.print(table, soft_wrap=False)
    if report.decode is not None:
        _print_decode(console, report.decode)
    if report.long_context is not None:
        _print_long(console, report.long_context)
    print_notes(console, (*report.memory.notes, *report.warnings))
    for advice in report.advice:
        console.print(f"[cyan]{advice.id}[/]: {advice.text} -> {advice.effect}")
    if irrelevant:
        console.print(f"[dim]no effect on KV memory: {', '.join(irrelevant)}[/]")


def _groups_text(report: PlanReport) -> str:
    """One line a group; like groups are counted."""
    lines: dict[str, int] = {}
    for group in report.kv.groups:
        window = "" if group.window is None else f" of {group.window:,} tokens"
        size = "" if group.block_size == report.kv.block_size else f", {group.block_size:,} tokens a block"
        line = f"{group.layers} x {group.kind}{window} ({group.page_bytes:,} B a page{size})"
        lines[line] = lines.get(line, 0) + 1
    return "\n".join(line if count == 1 else f"{count} groups of {line}" for line, count in lines.items())


def _memory_text(memory: MemoryFacts) -> str:
    """How much there is, and how sure that is."""
    available = memory.available_kv_bytes
    text = f"{available:,} B a GPU ({format_bytes(available)}), {memory.basis}"
    if memory.low_bytes is None or memory.high_bytes is None:
        return text
    return f"{text}: between {format_bytes(memory.low_bytes)} and {format_bytes(memory.high_bytes)}"


def _terms_text(memory: MemoryFacts) -> str:
    """What takes memory besides KV."""
    parts = (
        ("weights", memory.weights_bytes),
        ("activations", memory.activation_bytes),
        ("outside torch", memory.non_torch_bytes),
        ("CUDA graphs", memory.cudagraph_bytes),
        ("reserved", memory.reserve_bytes),
    )
    return ", ".join(f"{name} {format_bytes(value)}" for name, value in parts if value)


def _gpus_text(report: PlanReport) -> str:
    deployment = report.deployment
    parts = [
        f"{name} {size}"
        for name, size in (
            ("TP", deployment.tensor_parallel_size),
            ("PP", deployment.pipeline_parallel_size),
            ("DCP", deployment.decode_context_parallel_size),
            ("DP", deployment.data_parallel_size),
        )
        if size > 1
    ]
    return f"{deployment.gpus}" + (f" ({', '.join(parts)})" if parts else "")


def _print_decode(console: Console, decode: DecodeFacts) -> None:
    """What the split into P and D means for this pool."""
    table = Table(
        box=box.SIMPLE, show_header=False, pad_edge=False, title="prefill and decode apart", title_justify="left"
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    if decode.connector is not None:
        mode = f", {decode.mode}" if decode.mode else ""
        table.add_row("connector", f"{decode.connector}, {decode.role}{mode}")
    table.add_row(
        "blocks of a request",
        f"{decode.decoding_blocks_per_request:,} while it decodes; admission counts with "
        f"{decode.reserved_blocks_per_request:,} ({decode.in_flight_tokens:,} tokens in flight)",
    )
    if decode.watermark_blocks:
        table.add_row("watermark", f"{decode.watermark_blocks:,} blocks are left free while anything runs")
    if decode.transferred_bytes_per_request is not None:
        took = "" if decode.transfer_time_s is None else f", {decode.transfer_time_s:.3f} s"
        table.add_row(
            "moved per request",
            f"{decode.transferred_bytes_per_request:,} B a GPU "
            f"({format_bytes(decode.transferred_bytes_per_request)}){took}",
        )
    if decode.host_buffer_bytes:
        table.add_row("host buffers", f"{format_bytes(decode.host_buffer_bytes)} of host memory a GPU")
    if decode.preempted_tokens is not None:
        took = "" if decode.preempted_time_s is None else f", {decode.preempted_time_s:.2f} s"
        table.add_row("a preemption costs", f"{decode.preempted_tokens:,} tokens computed again on D{took}")
    for name, held in (("D", decode.decode), ("P", decode.prefill)):
        if held is not None:
            table.add_row(f"{name} holds", _held_text(held))
    if decode.lease_bytes_bound is not None:
        table.add_row(
            "P holds at most", f"{format_bytes(decode.lease_bytes_bound)} a GPU, if no D reads for a whole lease"
        )
    if decode.prefill_engines_per_decode_engine is not None:
        table.add_row("P for each D", f"{decode.prefill_engines_per_decode_engine:.2f}")
    if decode.missing:
        table.add_row("not known without", ", ".join(decode.missing))
    console.print(table, soft_wrap=False)
    for note in decode.notes:
        console.print(f"[yellow]note[/]: {note}")


def _held_text(held: HeldBlocks) -> str:
    parts = (("running", held.running), ("loading", held.loading), ("kept for a peer", held.retained))
    known = [f"{value:,.0f} {name}" if value >= 10 else f"{value:.2g} {name}" for name, value in parts if value]
    unknown = [name for name, value in parts if value is None]
    text = f"{', '.join(known)} blocks on average" if known else ""
    if held.engines is not None:
        text += f": {held.engines:.2f} engines"
    return "; ".join(filter(None, (text, f"not known: {', '.join(unknown)}" if unknown else "")))


def _print_long(console: Console, long: LongContext) -> None:
    """One request, and what each lever does about it."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"a request of {long.tokens:,} tokens: {format_bytes(long.request_bytes)} a GPU, "
        f"{format_bytes(long.request_bytes_all_ranks)} on all",
        title_justify="left",
    )
    for name in ("lever", "one request, a GPU", "at once", "longest"):
        table.add_column(name, justify="left" if name == "lever" else "right")
    table.add_row("as it is", format_bytes(long.request_bytes), f"{long.concurrency:.2f}", f"{long.longest:,}")
    for lever in long.levers:
        if lever.request_bytes is None or lever.concurrency is None or lever.longest is None:
            table.add_row(lever.text, "[dim]not possible here[/]")
        else:
            table.add_row(
                lever.text, format_bytes(lever.request_bytes), f"{lever.concurrency:.2f}", f"{lever.longest:,}"
            )
    table.add_row("requests that share their first half", "", f"{long.shared_prefix_requests}", f"{long.longest:,}")
    console.print(table, soft_wrap=False)
    console.print(f"host tier: {long.host_tier}")
