"""Three charts as inline SVG: a stacked bar, bars, and lines over a logarithmic axis. No script, no font, no network.

Text takes the page's colour, so that the charts read on light and dark backgrounds; every mark carries its exact number
as a tooltip (``<title>``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's palette: told apart with any kind of colour vision.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")

_WIDTH = 720
_LABELS = 190
_ROW = 26


@dataclass(frozen=True, slots=True)
class Mark:
    """A part of a bar or a point of a line: where, how much, and what a reader sees when pointing at it."""

    label: str
    value: float
    shown: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line's name and its points, in order of ``at``."""

    name: str
    at: tuple[float, ...]
    marks: tuple[Mark, ...]


def stacked(rows: Sequence[tuple[str, Sequence[Mark]]], total: float) -> str:
    """One bar a row, its parts side by side to the scale of ``total``, with a legend of the first row's parts."""
    body = []
    for index, (name, parts) in enumerate(rows):
        y = index * _ROW
        body.append(_row_label(name, y))
        x = float(_LABELS)
        for number, part in enumerate(parts):
            width = _scaled(part.value, total)
            body.append(_rect(x, y, width, PALETTE[number % len(PALETTE)], f"{part.label}: {part.shown}"))
            x += width
    height = len(rows) * _ROW
    for number, part in enumerate(rows[0][1] if rows else ()):
        y = height + 14 + number * 20
        body.append(
            f'<rect x="{_LABELS}" y="{y}" width="12" height="12" fill="{PALETTE[number % len(PALETTE)]}"/>'
            f'<text x="{_LABELS + 18}" y="{y + 11}">{escape(part.label)}: {escape(part.shown)}</text>'
        )
    return _svg(body, len(rows) * _ROW + 24 + 20 * (len(rows[0][1]) if rows else 0))


def bars(marks: Sequence[Mark]) -> str:
    """One bar a mark, the largest over the whole width."""
    most = max((mark.value for mark in marks), default=0) or 1
    body = []
    for index, mark in enumerate(marks):
        y = index * _ROW
        width = _scaled(mark.value, most) * 0.8
        body += [
            _row_label(mark.label, y),
            _rect(_LABELS, y, width, PALETTE[0], f"{mark.label}: {mark.shown}"),
            f'<text x="{_LABELS + width + 6:.1f}" y="{y + 16}">{escape(mark.shown)}</text>',
        ]
    return _svg(body, len(marks) * _ROW + 6)


def lines(drawn: Sequence[Line], x_label: str, y_label: str) -> str:
    """Lines over two logarithmic axes. Points that are not above 0 are left out: there is nothing to hold."""
    points = [(at, mark.value) for line in drawn for at, mark in zip(line.at, line.marks, strict=True)]
    points = [(x, y) for x, y in points if x > 0 and y > 0]
    if not points:
        return "<p>Nothing fits at any of these lengths.</p>"
    left, top, width, height = 70, 10, _WIDTH - 220, 280
    x_low, x_high = _span([x for x, _ in points], 2)
    y_low, y_high = _span([y for _, y in points], 10)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - math.log(x_low)) / (math.log(x_high) - math.log(x_low))
        up = (math.log(y) - math.log(y_low)) / (math.log(y_high) - math.log(y_low))
        return left + across * width, top + (1 - up) * height

    body = [*_grid(place, x_low, x_high, y_low, y_high, (left, top, width, height))]
    for number, line in enumerate(drawn):
        colour = PALETTE[number % len(PALETTE)]
        placed = [
            (*place(at, mark.value), mark) for at, mark in zip(line.at, line.marks, strict=True) if mark.value > 0
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in placed)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(line.name)}, '
            f"{escape(mark.label)}: {escape(mark.shown)}</title></circle>"
            for x, y, mark in placed
        ]
        y = top + 14 + number * 20
        body.append(
            f'<rect x="{left + width + 20}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{left + width + 38}" y="{y}">{escape(line.name)}</text>'
        )
    body += [
        f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="14" y="{top + height / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {top + height / 2})">{escape(y_label)}</text>',
    ]
    return _svg(body, max(top + height + 50, 30 + 20 * len(drawn)))


def _span(values: Sequence[float], base: int) -> tuple[float, float]:
    """Powers of ``base`` around ``values``, at least one apart."""
    low = base ** math.floor(math.log(min(values), base))
    high = base ** math.ceil(math.log(max(values), base))
    return float(low), float(high if high > low else low * base)


def _grid(
    place: Callable[[float, float], tuple[float, float]],
    x_low: float,
    x_high: float,
    y_low: float,
    y_high: float,
    area: tuple[int, int, int, int],
) -> list[str]:
    left, top, width, height = area
    found = []
    x = x_low
    while x <= x_high * 1.001:
        at, _ = place(x, y_low)
        found.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + height}" class="grid"/>'
            f'<text x="{at:.1f}" y="{top + height + 18}" text-anchor="middle">{short(x)}</text>'
        )
        x *= 2 if x_high / x_low <= 2**9 else 4
    y = y_low
    while y <= y_high * 1.001:
        _, at = place(x_low, y)
        found.append(
            f'<line x1="{left}" x2="{left + width}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>'
            f'<text x="{left - 8}" y="{at + 5:.1f}" text-anchor="end">{y:g}</text>'
        )
        y *= 10
    return found


def short(tokens: float) -> str:
    """Tokens in the powers of 1024 that people write: 8K, 1M; other numbers as they are."""
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= factor and tokens % factor == 0:
            return f"{tokens / factor:g}{unit}"
    return f"{tokens:g}"


def _scaled(value: float, total: float) -> float:
    return max(0.0, value) / total * (_WIDTH - _LABELS) if total > 0 else 0.0


def _row_label(text: str, y: int) -> str:
    return f'<text x="{_LABELS - 8}" y="{y + 16}" text-anchor="end">{escape(text)}</text>'


def _rect(x: float, y: int, width: float, colour: str, tip: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 6}" fill="{colour}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _svg(body: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">{"".join(body)}</svg>'
