"""The second half of the worlds under policy ``strict``: right tokens, everything given back, one outcome each."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.faults.worlds import SECOND_HALF, assert_bad_weather, play


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("seeds", SECOND_HALF, ids=str)
def test_strict_breaks_nothing(seeds: range, seen: Counter[str]) -> None:
    play(seeds, seen)


def test_the_weather_is_bad_enough(seen: Counter[str]) -> None:
    assert_bad_weather(seen)
