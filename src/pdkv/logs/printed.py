"""A size as a log printed it. Rounding hides bytes, so every such size is the interval of what it may have been."""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.units import GIB, MIB

_UNITS = {"GiB": GIB, "GB": GIB, "MiB": MIB, "MB": MIB}
# vLLM rounds to two decimals and then drops trailing zeros: "4.0" is 4.00.
_DECIMALS = 2


@dataclass(frozen=True, slots=True)
class Printed:
    """``low_bytes`` to ``high_bytes`` (both possible) are what rounds to ``text``; ``bytes`` is the middle."""

    text: str
    low_bytes: int
    bytes: int
    high_bytes: int

    @classmethod
    def of(cls, number: str, unit: str = "GiB") -> Printed:
        """The size behind ``number`` (digits, a sign and a point) of ``unit``; vLLM means GiB where it writes GB."""
        sign = -1 if number.startswith("-") else 1
        whole, _, fraction = number.lstrip("+-").partition(".")
        decimals = max(_DECIMALS, len(fraction))
        count = sign * int((whole or "0") + fraction.ljust(decimals, "0"))
        scale, size = 2 * 10**decimals, _UNITS[unit]
        return cls(
            text=f"{number} {unit}",
            low_bytes=-((1 - 2 * count) * size // scale),
            bytes=2 * count * size // scale,
            high_bytes=(2 * count + 1) * size // scale,
        )

    @classmethod
    def exactly(cls, count: int) -> Printed:
        """A size that was printed, or asked for, in bytes."""
        return cls(f"{count} B", count, count, count)

    def minus(self, other: Printed) -> Printed:
        """The difference, with both roundings."""
        return Printed(
            f"{self.text} - {other.text}",
            self.low_bytes - other.high_bytes,
            self.bytes - other.bytes,
            self.high_bytes - other.low_bytes,
        )

    def holds(self, count: int) -> bool:
        """Whether ``count`` bytes would have been printed like this."""
        return self.low_bytes <= count <= self.high_bytes
