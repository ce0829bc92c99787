"""Units: bytes and time are integers; these helpers only parse and print them."""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

NS_PER_S = 1_000_000_000

_FACTORS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": KIB,
    "mi": MIB,
    "gi": GIB,
    "ti": TIB,
}
_SIZE = re.compile(r"^\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?i?)b?\s*$", re.IGNORECASE)


def cdiv(a: int, b: int) -> int:
    """Ceiling of ``a / b`` for ints with ``b > 0``."""
    return -(-a // b)


def seconds_to_ns(seconds: float) -> int:
    """Whole nanoseconds in ``seconds`` (rounded to the nearest)."""
    return round(seconds * NS_PER_S)


def parse_bytes(text: str) -> int:
    """Bytes in a size such as ``512Mi``, ``2GiB``, ``1.5G`` or ``1048576``.

    ``k m g t`` are powers of 1000 and ``Ki Mi Gi Ti`` powers of 1024. Raises ``ValueError`` for anything else.
    """
    match = _SIZE.match(text)
    if match is None or match["unit"].lower() not in _FACTORS:
        raise ValueError(f"not a size: {text!r} (write for example 1073741824, 512MiB, 2GiB or 1.5G)")
    return (
        int(float(match["number"]) * _FACTORS[match["unit"].lower()])
        if "." in match["number"]
        else (int(match["number"]) * _FACTORS[match["unit"].lower()])
    )


def format_bytes(count: int) -> str:
    """``count`` bytes for a person: the exact integer below 1 KiB, else two decimals of a binary unit."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"
