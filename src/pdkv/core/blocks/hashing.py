"""Hashes of full blocks: each covers its tokens and, by chaining, everything before them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
import numpy as np

from pdkv.core.blocks.extra_keys import ExtraKeys, ExtraKeySource
from pdkv.core.ports import Int32Array

#: hash of (parent hash, int32 tokens of one block, extra keys of that block)
HashFunction = Callable[[bytes, Int32Array, ExtraKeys], bytes]

#: The parent of a sequence's first block under `raw_sha256`; fixed, so that separate processes agree.
NONE_HASH = hashlib.sha256(b"pdkv-none-hash").digest()


def raw_sha256(parent: bytes, tokens: Int32Array, extra: ExtraKeys) -> bytes:
    """pdkv's own default (design 6.6): SHA-256 over parent, little-endian int32 tokens and, as msgpack, extra keys."""
    digest = hashlib.sha256(parent)
    digest.update(tokens.astype("<i4", copy=False).tobytes())
    if extra:
        digest.update(msgspec.msgpack.encode(extra))
    return digest.digest()


def extend_hashes(
    hashes: list[bytes], tokens: Int32Array, unit: int, function: HashFunction, extra: ExtraKeySource
) -> None:
    """Append to ``hashes`` those of the units of ``unit`` tokens that ``tokens`` (the whole sequence) have filled."""
    tokens = np.ascontiguousarray(tokens, dtype=np.int32)
    parent = hashes[-1] if hashes else NONE_HASH
    for start in range(len(hashes) * unit, len(tokens) // unit * unit, unit):
        keys = () if extra.empty else extra.of(start, start + unit)
        parent = function(parent, tokens[start : start + unit], keys)
        hashes.append(parent)
