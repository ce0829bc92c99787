"""Sizes as people read and write them."""

from __future__ import annotations

import pytest

from pdkv.units import GIB, TIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (3 * GIB, "3.00 GiB"),
        (999 * TIB, "999.00 TiB"),
        (2048 * TIB, "2048.00 TiB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_what_is_printed_can_be_given_back() -> None:
    assert parse_bytes(format_bytes(999 * TIB)) == 999 * TIB
