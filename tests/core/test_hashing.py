"""Block hashes: chained, of full blocks only, the salt in the first block, and the same however they are computed."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.core.blocks.hashing import NONE_HASH, extend_hashes, raw_sha256


def hashes_of(tokens: list[int], block_size: int = 4, salt: str | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, np.asarray(tokens, dtype=np.int32), block_size, raw_sha256, salt)
    return hashes


def test_definition() -> None:
    tokens = np.arange(8, dtype="<i4")
    first = hashlib.sha256(NONE_HASH + tokens[:4].tobytes()).digest()
    second = hashlib.sha256(first + tokens[4:].tobytes()).digest()
    assert hashes_of(list(range(8))) == [first, second]
    salted = hashlib.sha256(NONE_HASH + tokens[:4].tobytes() + b"cache_salt\0s").digest()
    assert hashes_of(list(range(8)), salt="s") == [salted, hashlib.sha256(salted + tokens[4:].tobytes()).digest()]


def test_only_full_blocks() -> None:
    assert [len(hashes_of(list(range(count)))) for count in (0, 1, 3, 4, 5, 7, 8, 9)] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_a_change_shows_from_its_block_on() -> None:
    plain, other = hashes_of(list(range(16))), hashes_of([*range(6), 99, *range(7, 16)])
    assert [a == b for a, b in zip(plain, other, strict=True)] == [True, False, False, False]


def test_salt_separates_every_block() -> None:
    plain, a, b = (hashes_of(list(range(16)), salt=salt) for salt in (None, "a", "b"))
    assert all(len({x, y, z}) == 3 for x, y, z in zip(plain, a, b, strict=True))
    assert hashes_of(list(range(16)), salt="a") == a
    assert hashes_of(list(range(16)), salt="") == plain


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.lists(st.integers(0, 60)), st.integers(1, 7))
def test_incremental_equals_one_shot(tokens: list[int], cuts: list[int], block_size: int) -> None:
    hashes: list[bytes] = []
    for cut in (*sorted(cuts), len(tokens)):
        extend_hashes(hashes, np.asarray(tokens[:cut], dtype=np.int32), block_size, raw_sha256, "salt")
    assert hashes == hashes_of(tokens, block_size, "salt")


def test_views_of_any_layout_hash_the_same() -> None:
    wide = np.repeat(np.arange(8, dtype=np.int32), 2)
    assert hashes_of(list(range(8))) == hashes_of(wide[::2].tolist())
    hashes: list[bytes] = []
    extend_hashes(hashes, wide[::2], 4, raw_sha256, None)
    assert hashes == hashes_of(list(range(8)))
