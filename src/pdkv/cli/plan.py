"""``pdkv plan``: will this model fit, how many tokens, how many requests?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pdkv.cli.values import parse_max_model_len, parse_optional_count

if TYPE_CHECKING:
    from pdkv.plan.report import PlanReport


app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A known model (smollm2), a directory, or a config.json.")
    ],
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory for KV on each GPU: 42949672960, 40GiB, 40G.")
    ] = None,
    block_size: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens per block.")] = 16,
    max_model_len: Annotated[
        str | None, typer.Option(metavar="TOKENS|auto", help="Longest request; auto: the longest that fits.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="What the model computes in: auto, float16, bfloat16, float32.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="What KV is stored as: auto, float16, bfloat16, float32, fp8, fp8_e4m3, fp8_e5m2.")
    ] = "auto",
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", help="GPUs a layer is split over.")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option("--pipeline-parallel-size", "-pp", help="Stages the layers are split into.")
    ] = 1,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(metavar="N", help="This many blocks, whatever the memory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Exact KV capacity of MODEL for a given amount of memory, by vLLM's rules. Needs no GPU and no torch."""
    from pdkv.plan.planner import PlanOptions, make_plan
    from pdkv.plan.source import find_spec

    options = PlanOptions(
        kv_cache_memory_bytes=parse_optional_count("--kv-cache-memory-bytes", kv_cache_memory_bytes),
        num_gpu_blocks_override=num_gpu_blocks_override,
        block_size=block_size,
        max_model_len=parse_max_model_len(max_model_len),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
    )
    report = make_plan(find_spec(model), options)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print_report(report)


def _print_report(report: PlanReport) -> None:
    """The verdict in one line, then the numbers behind it, then what to change."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from pdkv.units import format_bytes

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
    groups = ", ".join(f"{group.layers} x {group.kind} ({group.page_bytes:,} B a page)" for group in kv.groups)
    available = report.memory.available_kv_bytes
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("model", f"{report.model.name}, {report.model.layers} layers")
    table.add_row(
        "KV per token", f"{kv.bytes_per_token:,} B a GPU, {kv.bytes_per_token_all_ranks:,} B on all, {kv.dtype}"
    )
    table.add_row("block", f"{kv.block_size} tokens, {kv.bytes_per_block:,} B ({format_bytes(kv.bytes_per_block)})")
    table.add_row("layers", groups)
    table.add_row("memory for KV", f"{available:,} B a GPU ({format_bytes(available)}), {report.memory.basis}")
    table.add_row("blocks", f"{capacity.num_blocks:,}, of which {capacity.usable_blocks:,} usable")
    table.add_row("a longest request", f"{capacity.blocks_per_max_len_request:,} blocks")
    table.add_row("GPUs", str(len(report.ranks)))
    table.add_row("rules", f"vLLM {report.rules}")
    console.print(table, soft_wrap=False)
    for warning in report.warnings:
        console.print(f"[yellow]note[/]: {warning}")
    for advice in report.advice:
        console.print(f"[cyan]{advice.id}[/]: {advice.text} -> {advice.effect}")
