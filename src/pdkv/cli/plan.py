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
    block_size: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Tokens per block; what the backend prefers when not given.")
    ] = None,
    max_model_len: Annotated[
        str | None, typer.Option(metavar="TOKENS|auto", help="Longest request; auto: the longest that fits.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option(metavar="TOKENS", help="Tokens of one step; sliding windows and chunks reserve for them.")
    ] = 8192,
    dtype: Annotated[str, typer.Option(help="What the model computes in: auto, float16, bfloat16, float32.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="What KV is stored as, any value of vLLM: auto, bfloat16, fp8, nvfp4, fp8_ds_mla ...")
    ] = "auto",
    kv_cache_dtype_skip_layers: Annotated[
        str | None, typer.Option(metavar="0,1,..", help="Layers that keep the model's own type; or: sliding_window.")
    ] = None,
    mamba_ssm_cache_dtype: Annotated[
        str, typer.Option(help="What recurrent states are kept in: auto, float32, bfloat16, float16.")
    ] = "auto",
    attention_backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="As in vLLM; when not given, what it takes on an NVIDIA Hopper.")
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", help="GPUs a layer is split over.")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option("--pipeline-parallel-size", "-pp", help="Stages the layers are split into.")
    ] = 1,
    decode_context_parallel_size: Annotated[
        int, typer.Option("--decode-context-parallel-size", "-dcp", help="GPUs that share the tokens of a layer.")
    ] = 1,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(metavar="N", help="This many blocks, whatever the memory.")
    ] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="States are saved at block ends then.")] = True,
    async_scheduling: Annotated[bool, typer.Option(help="Two steps are in flight then.")] = True,
    disable_hybrid_kv_cache_manager: Annotated[
        bool, typer.Option("--disable-hybrid-kv-cache-manager", help="Allocate windows in full.")
    ] = False,
    vllm_version: Annotated[str, typer.Option(metavar="0.N", help="The release whose rules hold.")] = "0.32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Exact KV capacity of MODEL for a given amount of memory, by vLLM's rules. Needs no GPU and no torch."""
    from pdkv.plan.planner import PlanOptions, make_plan
    from pdkv.source import find_spec

    options = PlanOptions(
        kv_cache_memory_bytes=parse_optional_count("--kv-cache-memory-bytes", kv_cache_memory_bytes),
        num_gpu_blocks_override=num_gpu_blocks_override,
        block_size=block_size,
        max_model_len=parse_max_model_len(max_model_len),
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=async_scheduling,
        enable_prefix_caching=enable_prefix_caching,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_dtype_skip_layers=_split(kv_cache_dtype_skip_layers),
        mamba_ssm_cache_dtype=mamba_ssm_cache_dtype,
        attention_backend=attention_backend,
        disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        decode_context_parallel_size=decode_context_parallel_size,
        vllm_version=vllm_version,
    )
    report = make_plan(find_spec(model), options)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print_report(report)


def _split(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


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
    table.add_row("GPUs", str(len(report.ranks)))
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
