"""Tables of `pdkv plan` for a person: what --compare and --target-concurrency answer."""

from __future__ import annotations

from rich import box
from rich.table import Table

from pdkv.cli.plan_warnings import print_notes, print_refusals
from pdkv.cli.terminal import stdout_console
from pdkv.plan.compare import Comparison
from pdkv.plan.solve import Solution, SolveReport


def print_comparison(comparison: Comparison) -> None:
    """A row a combination; a refused one says why."""
    console = stdout_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in comparison.dimensions:
        table.add_column(name)
    for name in ("GPUs", "tokens", "requests at once", "longest that fits", "B a token"):
        table.add_column(name, justify="right")
    for cell in comparison.cells:
        row = [str(cell.settings[name]) for name in comparison.dimensions]
        if cell.refused is not None:
            table.add_row(*row, "", "[red]refused[/]")
            continue
        table.add_row(
            *row,
            f"{cell.gpus}",
            f"{cell.kv_cache_size_tokens:,}",
            f"{cell.max_concurrency:.2f}" if cell.fits else f"[red]{cell.max_concurrency:.2f}[/]",
            f"{cell.estimated_max_model_len:,}",
            f"{cell.bytes_per_token:,}",
        )
    console.print(table, soft_wrap=False)
    print_refusals(console, comparison.warnings)
    print_notes(console, comparison.warnings)
    for reason in dict.fromkeys(cell.refused for cell in comparison.cells if cell.refused is not None):
        console.print(f"[red]refused[/]: {reason}", soft_wrap=True)


def print_solution(report: SolveReport) -> None:
    """The verdict, then the table of what else would do."""
    console = stdout_console()
    target = report.target
    wanted = f"{_count(target.concurrency, 'request')} of {_count(target.tokens, 'token')} at once"
    if report.unquantized is None:
        kind = " with KV in the model's own type" if report.best is not None else ""
        console.print(f"[bold red]not on {_count(target.max_gpus, 'GPU')}[/]{kind}: {wanted}")
    else:
        console.print(f"[bold green]{_holds(report.unquantized)}[/] {wanted}: {_split(report.unquantized)}")
    if report.best is not None and report.best != report.unquantized:
        console.print(
            f"[bold yellow]{_holds(report.best)}[/] them in 8 bits, which rounds keys and values (check the answers' "
            f"quality): {_split(report.best)}"
        )
    if report.nearest is not None:
        near = report.nearest
        console.print(
            f"nearest: {near.requests:,} of them on {_count(near.gpus, 'GPU')} ({_split(near)}); "
            + (
                f"{target.concurrency:,} fit when each has {_count(near.longest_tokens, 'token')}"
                if near.longest_tokens
                else "fewer requests, or more GPUs (--max-gpus)"
            )
        )
    print_refusals(console, report.warnings)
    # What gives up no quality first, though others may need fewer GPUs.
    listed = [one for one in dict.fromkeys((report.unquantized, report.best, *report.others)) if one is not None]
    if listed:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("GPUs", "TP", "PP", "DCP", "DP", "KV type", "requests held", "longest for as many"):
            table.add_column(name, justify="left" if name == "KV type" else "right")
        for one in listed:
            table.add_row(
                str(one.gpus),
                str(one.tensor_parallel_size),
                str(one.pipeline_parallel_size),
                str(one.decode_context_parallel_size),
                str(one.data_parallel_size),
                one.kv_cache_dtype,
                f"{one.requests:,}",
                f"{one.longest_tokens:,}",
            )
        console.print(table, soft_wrap=False)
    print_notes(console, report.warnings)


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _holds(solution: Solution) -> str:
    return f"{_count(solution.gpus, 'GPU')} {'holds' if solution.gpus == 1 else 'hold'}"


def _split(solution: Solution) -> str:
    sizes = (
        ("--tensor-parallel-size", solution.tensor_parallel_size),
        ("--pipeline-parallel-size", solution.pipeline_parallel_size),
        ("--decode-context-parallel-size", solution.decode_context_parallel_size),
        ("--data-parallel-size", solution.data_parallel_size),
    )
    words = [f"{flag} {size}" for flag, size in sizes if size > 1]
    if solution.kv_cache_dtype != "auto":
        words.append(f"--kv-cache-dtype {solution.kv_cache_dtype}")
    return " ".join(words) or "nothing to set"
