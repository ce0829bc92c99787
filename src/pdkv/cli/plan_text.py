"""The answer of `pdkv plan` for a person: the verdict in one line, then the numbers behind it, then what to change."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from pdkv.plan.report import PlanReport
from pdkv.units import format_bytes


def print_report(report: PlanReport) -> None:
    """The verdict in one line, then the numbers behind it, then what to change."""
    console = Console(highlight=False, soft_wrap=True)
    kv, capacity = report.kv, report.capacity
    if capacity.fits:
        console.print(
            f"[bold green]fits[/]: {capacity.kv_cache_size_tokens:,} tokens of KV cache, "
            f"{capacity.max_concurrency:.2f} requests of {capacity.max_model_len:,} tokens at once"
        )
    else:
        longest = capacity.estimated_max_model_len
        console.print(
            f"[bold red]does not fit[/]: one request of {capacity.max_model_len:,} tokens needs "
            f"{capacity.blocks_per_max_len_request:,} blocks, {capacity.usable_blocks:,} are usable; "
            + (f"the longest that fits has {longest:,} tokens" if longest else "not even one token fits")
        )
    available = report.memory.available_kv_bytes
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
    table.add_row("memory for KV", f"{available:,} B a GPU ({format_bytes(available)}), {report.memory.basis}")
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
    for warning in report.warnings:
        console.print(f"[yellow]note[/]: {warning}")
    for advice in report.advice:
        console.print(f"[cyan]{advice.id}[/]: {advice.text} -> {advice.effect}")


def _groups_text(report: PlanReport) -> str:
    """One line a group; like groups are counted."""
    lines: dict[str, int] = {}
    for group in report.kv.groups:
        window = "" if group.window is None else f" of {group.window:,} tokens"
        size = "" if group.block_size == report.kv.block_size else f", {group.block_size:,} tokens a block"
        line = f"{group.layers} x {group.kind}{window} ({group.page_bytes:,} B a page{size})"
        lines[line] = lines.get(line, 0) + 1
    return "\n".join(line if count == 1 else f"{count} groups of {line}" for line, count in lines.items())


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
