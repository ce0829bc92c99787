"""Hashes of full blocks: each covers its tokens and, by chaining, everything before them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from pdkv.core.ports import Int32Array

#: hash of (parent hash, int32 tokens of one block, extra key bytes of that block)
HashFunction = Callable[[bytes, Int32Array, bytes], bytes]

#: The parent of a sequence's first block under `raw_sha256`; fixed, so that separate processes agree.
NONE_HASH = hashlib.sha256(b"pdkv-none-hash").digest()


def raw_sha256(parent: bytes, tokens: Int32Array, extra: bytes) -> bytes:
    """pdkv's own default (design 6.6): SHA-256 over parent, little-endian int32 tokens and the extra key."""
    digest = hashlib.sha256(parent)
    digest.update(tokens.astype("<i4", copy=False).tobytes())
    if extra:
        digest.update(extra)
    return digest.digest()


def extend_hashes(
    hashes: list[bytes], tokens: Int32Array, block_size: int, function: HashFunction, cache_salt: str | None
) -> None:
    """Append to ``hashes`` those of the blocks that ``tokens`` (the whole sequence) fill since the last call.

    A cache salt enters the first block only; chaining spreads it (spec block-pool section 3).
    """
    tokens = np.ascontiguousarray(tokens, dtype=np.int32)
    parent = hashes[-1] if hashes else NONE_HASH
    for block in range(len(hashes), len(tokens) // block_size):
        extra = b"cache_salt\0" + cache_salt.encode() if cache_salt and block == 0 else b""
        parent = function(parent, tokens[block * block_size : (block + 1) * block_size], extra)
        hashes.append(parent)
