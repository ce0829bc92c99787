"""``--report DIR``: the plan as one HTML page that needs nothing else, not even the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pdkv.plan import svg
from pdkv.plan.compare import Cell, Comparison
from pdkv.plan.model_length import is_beyond_model_length
from pdkv.plan.report import MemoryFacts, PlanReport
from pdkv.units import format_bytes

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; } svg text { fill: currentColor; }
.grid { stroke: currentColor; stroke-opacity: .15; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .8rem .15rem 0; text-align: right; border-bottom: 1px solid #8884; }
td:first-child, th:first-child { text-align: left; } .wide { overflow-x: auto; }
pre { white-space: pre-wrap; border: 1px solid #8886; padding: .8rem; }
.bad { color: #d55e00; } .good { color: #009e73; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """How many requests fit at once, by their length, under one type of KV."""

    name: str
    lengths: tuple[int, ...]
    requests: tuple[float, ...]


def page(report: PlanReport, by_type: Comparison, curves: Sequence[Curve], table: Comparison | None) -> str:
    """The whole document. ``by_type`` compares kv_cache_dtype; ``table`` is what --compare asked for."""
    capacity = report.capacity
    verdict = (
        f'<span class="good">fits</span>: {capacity.kv_cache_size_tokens:,} tokens of KV cache, '
        f"{capacity.max_concurrency:.2f} requests of {capacity.max_model_len:,} tokens at once"
        if capacity.fits
        else f'<span class="bad">does not fit</span>: one request of {capacity.max_model_len:,} tokens needs '
        f"{format_bytes(capacity.needed_bytes)} a GPU, {format_bytes(capacity.available_bytes)} are there; the longest "
        f"that fits has {capacity.estimated_max_model_len:,} tokens"
    )
    parts = [
        f"<h1>{escape(report.model.name)}</h1><p>{verdict}</p>",
        *_refusals(report.warnings),
        "<h2>Memory of each rank</h2>",
        _memory(report),
        "<h2>Tokens of KV cache by type</h2>",
        svg.bars([_type_mark(cell) for cell in by_type.cells if cell.refused is None]),
        "<h2>Requests at once by length</h2>",
        svg.lines([_line(curve) for curve in curves], "tokens of each request", "requests at once"),
    ]
    if table is not None:
        parts += ["<h2>Comparison</h2>", comparison_table(table), *_refusals(table.warnings)]
    parts += _texts(report)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>pdkv plan: {escape(report.model.name)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(parts)
        + f"<p>By the rules of vLLM {escape(report.rules)}.</p></body></html>\n"
    )


def _refusals(warnings: Sequence[str]) -> list[str]:
    """What vLLM would not start with stands beside the numbers."""
    return [f'<p class="bad">{escape(text)}</p>' for text in warnings if is_beyond_model_length(text)]


def _memory(report: PlanReport) -> str:
    """What fills a GPU: the budget's terms where they are known, then KV of one longest request and what is left."""
    memory, capacity = report.memory, report.capacity
    rows = []
    for rank in report.ranks:
        request = min(capacity.blocks_per_max_len_request * rank.bytes_per_block, rank.available_kv_bytes)
        pool = capacity.num_blocks * rank.bytes_per_block
        kv = [
            ("KV of one longest request", request),
            ("KV for others", max(0, pool - request)),
            ("left by rounding to the smallest rank", max(0, rank.available_kv_bytes - max(pool, request))),
        ]
        parts = [*_terms(memory), *kv]
        rows.append((f"rank {rank.rank}", [svg.Mark(name, value, format_bytes(value)) for name, value in parts]))
    total = max(sum(mark.value for mark in marks) for _, marks in rows)
    return svg.stacked(rows, total)


def _terms(memory: MemoryFacts) -> list[tuple[str, int]]:
    named = (
        ("weights", memory.weights_bytes),
        ("activations", memory.activation_bytes),
        ("outside torch", memory.non_torch_bytes),
        ("CUDA graphs", memory.cudagraph_bytes),
        ("reserved", memory.reserve_bytes),
    )
    return [(name, value) for name, value in named if value is not None]


def _type_mark(cell: Cell) -> svg.Mark:
    tokens = cell.kv_cache_size_tokens or 0
    return svg.Mark(str(cell.settings["kv_cache_dtype"]), tokens, f"{tokens:,}")


def _line(curve: Curve) -> svg.Line:
    return svg.Line(
        curve.name,
        tuple(map(float, curve.lengths)),
        tuple(
            svg.Mark(f"{length:,} tokens", requests, f"{requests:.2f}")
            for length, requests in zip(curve.lengths, curve.requests, strict=True)
        ),
    )


def comparison_table(table: Comparison) -> str:
    """A row a combination."""
    heads = [*table.dimensions, "GPUs", "tokens", "requests at once", "longest that fits", "B a token"]
    rows = []
    for cell in table.cells:
        values: list[Any] = [cell.settings[name] for name in table.dimensions]
        if cell.refused is not None:
            rows.append([*map(_shown, values), f'<td colspan="5" class="bad">{escape(cell.refused)}</td>'])
            continue
        numbers = (
            f"{cell.gpus}",
            f"{cell.kv_cache_size_tokens:,}",
            f"{cell.max_concurrency:.2f}",
            f"{cell.estimated_max_model_len:,}",
            f"{cell.bytes_per_token:,}",
        )
        rows.append([*map(_shown, values), *(f"<td>{number}</td>" for number in numbers)])
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _shown(value: Any) -> str:
    return f"<td>{escape(str(value))}</td>"


def _texts(report: PlanReport) -> list[str]:
    found = []
    if report.advice:
        items = "".join(
            f"<li><b>{escape(one.id)}</b>: {escape(one.text)} &rarr; {escape(one.effect)}</li>" for one in report.advice
        )
        found.append(f"<h2>What to change</h2><ul>{items}</ul>")
    notes = [text for text in report.warnings if not is_beyond_model_length(text)]
    if notes:
        found.append(f"<h2>Notes</h2><ul>{''.join(f'<li>{escape(text)}</li>' for text in notes)}</ul>")
    found.append(f"<h2>Command</h2><pre>{escape(report.command)}</pre>")
    return found
