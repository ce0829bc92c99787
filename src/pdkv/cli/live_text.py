"""Running servers as text: for ``pdkv explain URL`` once, for ``pdkv top`` again and again."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pdkv.explain.live import Instance, Live
from pdkv.explain.report import Finding, Severity
from pdkv.explain.usage import Share
from pdkv.units import format_bytes

COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
_BAR_CELLS = 48
_CAUSE_COLOURS = {
    "running": "green",
    "draft": "bright_green",
    "loading": "cyan",
    "loaded_waiting": "bright_cyan",
    "retained": "magenta",
    "deferred": "yellow",
    "quarantine": "red",
    "without a request": "red",
    "cached": "blue",
    "free": "bright_black",
    "free or cached": "bright_black",
}


def finding_line(finding: Finding) -> str:
    """One line of markup: what, how much, what to do."""
    size = "" if finding.bytes is None else f" [dim]({format_bytes(finding.bytes)})[/]"
    effect = "" if finding.effect is None else f" -> {escape(finding.effect)}"
    return f"[{COLOURS[finding.severity]}]{escape(finding.id)}[/]: {escape(finding.text)}{size}{effect}"


def live_view(live: Live) -> RenderableType:
    """Every engine with its bar of blocks, its rates and its findings; then what they show together."""
    parts: list[RenderableType] = []
    for instance in live.instances:
        parts += _instance(instance)
    parts += [Text.from_markup(finding_line(finding)) for finding in live.findings]
    return Group(*parts)


def _instance(instance: Instance) -> list[RenderableType]:
    seen = instance.observed
    usage = "?" if seen["usage"] is None else f"{seen['usage']:.1%}"
    stages = seen["fetch_stages"]
    loading = "" if stages is None else f"  loading {stages.get('in_progress', 0):,}"
    head = Text.from_markup(
        f"[bold]{escape(instance.name)}[/]  [dim]{escape(instance.url)}[/]\n"
        f"usage {usage}  running {seen['running']:,}  waiting {seen['waiting']:,}{loading}" + _rates(instance)
    )
    parts: list[RenderableType] = [head]
    if instance.split:
        parts += [_bar(instance.split), _table(instance.split)]
    parts += [Text.from_markup(finding_line(finding)) for finding in instance.findings]
    return [*parts, Text("")]


def _rates(instance: Instance) -> str:
    rates = instance.rates
    if not rates:
        return ""
    shown = [
        f"{rates[name]:,.1f} {words}/s"
        for name, words in (
            ("generation_tokens", "tokens"),
            ("finished", "finished"),
            ("transfers", "transfers"),
            ("preemptions", "preempted"),
        )
        if name in rates
    ]
    return "" if not shown else "\n" + "  ".join(shown)


def _bar(shares: tuple[Share, ...]) -> Text:
    """The pool as one line of cells, every cause at its likely size."""
    sizes = [(share, share.likely_blocks or (share.low_blocks + share.high_blocks) // 2) for share in shares]
    whole = max(1, sum(count for _, count in sizes))
    bar, used, drawn = Text(), 0, 0
    for share, count in sizes:
        used += count
        cells = round(_BAR_CELLS * used / whole) - drawn
        drawn += cells
        bar.append("█" * cells, style=_CAUSE_COLOURS.get(share.cause, "white"))
    return bar


def _table(shares: tuple[Share, ...]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for _ in range(4):
        table.add_column()
    for share in shares:
        if not share.high_blocks:
            continue
        blocks = f"{share.low_blocks:,}" if share.exact else f"{share.low_blocks:,} to {share.high_blocks:,}"
        if share.likely_blocks is not None and not share.exact:
            blocks += f", likely {share.likely_blocks:,}"
        size = ""
        if share.low_bytes is not None and share.high_bytes is not None:
            size = format_bytes(share.high_bytes) if share.exact else f"up to {format_bytes(share.high_bytes)}"
        colour = _CAUSE_COLOURS.get(share.cause, "white")
        table.add_row(f"[{colour}]{escape(share.cause)}[/]", f"{blocks} blocks", size, f"[dim]{escape(share.text)}[/]")
    return table
