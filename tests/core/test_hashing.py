"""Block hashes: chained, of full blocks only, the salt in the first block, and the same however they are computed."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.core.blocks.encoding import cbor
from pdkv.core.blocks.extra_keys import ContentKeys, LoraAdapter, MultimodalItem
from pdkv.core.blocks.hashing import NONE_HASH, HashChain, extend_hashes, raw_sha256


def hashes_of(tokens: list[int], block_size: int = 4, salt: str | None = None) -> list[bytes]:
    hashes = HashChain()
    extend_hashes(hashes, np.asarray(tokens, dtype=np.int32), block_size, raw_sha256, ContentKeys(cache_salt=salt))
    return list(hashes)


def test_definition() -> None:
    tokens = np.arange(8, dtype="<i4")
    first = hashlib.sha256(NONE_HASH + tokens[:4].tobytes()).digest()
    second = hashlib.sha256(first + tokens[4:].tobytes()).digest()
    assert hashes_of(list(range(8))) == [first, second]
    salted = hashlib.sha256(NONE_HASH + tokens[:4].tobytes() + cbor((("cache_salt", "s"),))).digest()
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
    hashes = HashChain()
    for cut in (*sorted(cuts), len(tokens)):
        extend_hashes(
            hashes, np.asarray(tokens[:cut], dtype=np.int32), block_size, raw_sha256, ContentKeys(cache_salt="salt")
        )
    assert list(hashes) == hashes_of(tokens, block_size, "salt")


def test_thousands_of_blocks_in_one_call_are_those_of_as_many_calls() -> None:
    """Blocks are taken a thousand at a time; extra keys stay with theirs."""
    blocks = np.arange(2 * 5000, dtype=np.int32).reshape(-1, 2)
    extra = {row: ("item", row) for row in (0, 7, 1023, 1024, 2048, 4999)}
    digests: list[bytes] = []
    for row, block in enumerate(blocks):
        keys = {0: extra[row]} if row in extra else {}
        digests += raw_sha256(digests[-1] if digests else None, block[None], keys)
    assert raw_sha256(None, blocks, extra) == digests


def test_views_of_any_layout_hash_the_same() -> None:
    wide = np.repeat(np.arange(8, dtype=np.int32), 2)
    assert hashes_of(list(range(8))) == hashes_of(wide[::2].tolist())
    hashes = HashChain()
    extend_hashes(hashes, wide[::2], 4, raw_sha256, ContentKeys())
    assert list(hashes) == hashes_of(list(range(8)))


def test_extra_keys_stand_in_the_order_of_the_reference_and_where_they_belong() -> None:
    items = (MultimodalItem("x", 3, 6), MultimodalItem("y", 9, 1), MultimodalItem("x", 14, 4))
    keys = ContentKeys(lora=LoraAdapter("a", "/a"), multimodal=items, cache_salt="s")
    lora = ("lora", "a", "/a")
    assert keys.of(0, 4) == (lora, ("mm", "x", 3), ("cache_salt", "s"))
    assert keys.of(4, 8) == (lora, ("mm", "x", -1))
    assert keys.of(8, 12) == (lora, ("mm", "x", -5), ("mm", "y", 1))
    assert keys.of(12, 16) == (lora, ("mm", "x", 2))
    assert keys.of(16, 20) == (lora, ("mm", "x", -2))
    assert keys.of(20, 24) == (lora,)
    assert ContentKeys(cache_salt="").empty


def test_what_differs_in_extra_keys_shares_nothing_from_there_on() -> None:
    tokens = np.arange(16, dtype=np.int32)
    sources = [
        ContentKeys(),
        ContentKeys(lora=LoraAdapter("a", "/a")),
        ContentKeys(lora=LoraAdapter("a", "/b")),  # a name that points elsewhere now
        ContentKeys(multimodal=(MultimodalItem("x", 5, 2),)),
        ContentKeys(multimodal=(MultimodalItem("x", 6, 2),)),
    ]
    chains: list[HashChain] = []
    for source in sources:
        chains.append(HashChain())
        extend_hashes(chains[-1], tokens, 4, raw_sha256, source)
    assert len({chain[0] for chain in chains}) == 3  # the items begin in the second unit
    assert all(len({chain[i] for chain in chains}) == len(chains) for i in (1, 2, 3))
