"""Explanations as text for a terminal. What a log says is printed as text, never as markup."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdkv.cli.live_text import COLOURS, finding_line, live_view
from pdkv.cli.terminal import stdout_console
from pdkv.explain.compare import Comparison
from pdkv.explain.live import Live
from pdkv.explain.report import Explanation, Recomputed, Severity
from pdkv.explain.sources import Answer, Directory
from pdkv.units import format_bytes


def print_all(answer: Answer) -> None:
    """Print ``answer`` to standard output."""
    console = stdout_console()
    if isinstance(answer, Directory):
        _print_directory(console, answer)
    elif isinstance(answer, Comparison):
        _print_comparison(console, answer)
    elif isinstance(answer, Live):
        console.print(live_view(answer), soft_wrap=False)
    else:
        _print_start(console, answer)


def _print_start(console: Console, start: Explanation) -> None:
    seen = start.observed
    head = f"vLLM {seen['version'] or '?'}  {seen['model'] or '?'}"
    state = "[green]serving[/]" if seen["ready"] else "[red]failed[/]" if seen["failure"] else "starting"
    console.print(f"[bold]{escape(head)}[/]  {state}")
    table = Table(box=box.SIMPLE, show_header=True, pad_edge=False)
    for column in ("", "printed", "recomputed"):
        table.add_column(column, style="dim" if not column else "", no_wrap=True)
    numbers = start.recomputed
    for name, key, form in (
        ("blocks", "num_blocks", "{:,}"),
        ("KV cache size, tokens", "kv_cache_size_tokens", "{:,}"),
        ("concurrency", "max_concurrency", "{:.2f}x"),
        ("length, tokens", "max_model_len", "{:,}"),
    ):
        printed = seen.get(key)
        ours = None if numbers is None else getattr(numbers, key)
        if printed is not None or ours is not None:
            table.add_row(name, *("-" if value is None else form.format(value) for value in (printed, ours)))
    console.print(table, soft_wrap=False)
    if numbers is not None:
        console.print(f"[dim]{escape(_shape_text(numbers))}[/]")
    verdict = {
        True: "[bold green]agrees[/]: the printed numbers are what the rules give",
        False: "[bold yellow]differs[/]: the printed numbers are not what the rules give",
        None: "nothing to compare: capacity was not printed, or the model is not known",
    }
    console.print(verdict[start.agrees])
    for finding in start.findings:
        console.print(finding_line(finding))


def _shape_text(numbers: Recomputed) -> str:
    lines: dict[str, int] = {}
    for group in numbers.groups:
        window = "" if group.window is None else f" of {group.window:,} tokens"
        line = f"{group.layers} x {group.kind}{window}, {group.block_size} tokens a block"
        lines[line] = lines.get(line, 0) + 1
    groups = "; ".join(line if count == 1 else f"{count} groups of {line}" for line, count in lines.items())
    return (
        f"rules of vLLM {numbers.rules}, {numbers.dtype} KV, {numbers.bytes_per_block:,} B a block, "
        f"{numbers.blocks_per_max_len_request:,} blocks a full request; {groups}"
    )


def _print_directory(console: Console, directory: Directory) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("log", "vLLM", "tokens", "concurrency", "agrees", "first finding"):
        table.add_column(column, overflow="fold")
    for start in directory.starts:
        seen = start.observed
        worst = next((finding for finding in start.findings if finding.severity is not Severity.INFO), None)
        table.add_row(
            escape(start.source.rsplit("/", 1)[-1]),
            escape(seen["version"] or "?"),
            "-" if seen["kv_cache_size_tokens"] is None else f"{seen['kv_cache_size_tokens']:,}",
            "-" if seen["max_concurrency"] is None else f"{seen['max_concurrency']:.2f}x",
            {True: "yes", False: "[yellow]no[/]", None: "-"}[start.agrees],
            "" if worst is None else f"[{COLOURS[worst.severity]}]{escape(worst.id)}[/]",
        )
    console.print(table, soft_wrap=False)
    for refused in directory.refused:
        console.print(f"[dim]{escape(refused.source)}[/]: {escape(refused.error)}")


def _print_comparison(console: Console, comparison: Comparison) -> None:
    change = comparison.difference
    for name, start in (("A", comparison.a), ("B", comparison.b)):
        seen = start.observed
        tokens = seen["kv_cache_size_tokens"]
        console.print(
            f"[bold]{name}[/] {escape(start.source)}: vLLM {escape(seen['version'] or '?')}, "
            f"{escape(seen['model'] or '?')}, " + ("no capacity printed" if tokens is None else f"{tokens:,} tokens")
        )
    if change.kv_bytes is not None:
        console.print(f"\nmemory for KV, B - A: [bold]{_signed(change.kv_bytes)}[/]")
        for cause in change.memory:
            console.print(f"  {_signed(cause.bytes or 0):>14}  [cyan]{escape(cause.id)}[/]: {escape(cause.text)}")
    if change.kv_cache_size_tokens is not None:
        console.print(f"\nprinted tokens, B - A: [bold]{change.kv_cache_size_tokens:+,}[/]")
        for cause in change.capacity:
            console.print(f"  {cause.tokens or 0:>+14,}  [cyan]{escape(cause.id)}[/]: {escape(cause.text)}")
    if change.changed:
        console.print("\nsettings that differ")
        for setting in change.changed:
            console.print(f"  {setting.setting}: {escape(str(setting.a))} -> {escape(str(setting.b))}")
    console.print()
    for finding in change.findings:
        console.print(finding_line(finding))


def _signed(count: int) -> str:
    return f"{'-' if count < 0 else '+'}{format_bytes(abs(count))}"
