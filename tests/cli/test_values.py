"""Numbers as people write them."""

from __future__ import annotations

import pytest

from pdkv.cli.values import parse_count, parse_max_model_len, parse_optional_count
from pdkv.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1073741824", 2**30),
        ("1_000", 1000),
        ("4G", 4 * 2**30),
        ("4g", 4 * 10**9),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("4GB", 4 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5g", 1_500_000_000),
        ("2.5 GiB", 5 * 2**29),
        ("8k", 8000),
        ("8K", 8192),
    ],
)
def test_counts(text: str, expected: int) -> None:
    assert parse_count("--x", text) == expected


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5", "4Q", "GiB", "12b", "1e9"])
def test_not_a_count(text: str) -> None:
    with pytest.raises(ConfigError, match="--x .*not a number"):
        parse_count("--x", text)


def test_optional_and_auto() -> None:
    assert parse_optional_count("--x", None) is None
    assert parse_optional_count("--x", "7") == 7
    assert parse_max_model_len(None) is None
    assert parse_max_model_len("auto") == "auto"
    assert parse_max_model_len("-1") == "auto"
    assert parse_max_model_len("4096") == 4096
