"""How a consumer tells a true grant from a forged one without asking the producer (design 3.1).

The producer draws a secret at every start. From it come the leases' tokens, which only the producer and the consumer of
each lease know, and the key that proves grants, which every peer gets with the handshake. Whoever holds that key can
forge a proof, but no token; and a peer that is let in may read the producer's memory one-sided anyway. What the proof
keeps out are params that a client or a router made up, changed or mixed up.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec
import numpy as np

from pdkv.core.ports import Int32Array
from pdkv.core.transfer.messages import Grant, RemoteSource
from pdkv.units import cdiv

TOKEN_BYTES = 16
PROOF_BYTES = 16
KEY_BYTES = 32
MARK_BYTES = 16
MOST_MARKS = 1024

# What follows has no fixed length: token, prompt digest and blocks. Their lengths stand in front.
_HEADER = struct.Struct("<QQqqqqqq")


def digest_tokens(tokens: Int32Array) -> bytes:
    """16 bytes that name a token sequence: P computed these, D is about to decode behind the same ones."""
    return hashlib.blake2b(np.asarray(tokens, dtype="<i4").tobytes(), digest_size=16, person=b"pdkv-prompt").digest()


def mark_prefixes(tokens: Int32Array, unit: int) -> tuple[bytes, int]:
    """(marks, spacing): `digest_tokens` of every prefix that is a multiple of the spacing long, and of all tokens.

    The spacing is ``unit`` tokens (a block), doubled until there are at most `MOST_MARKS` marks.
    """
    while cdiv(len(tokens), unit) > MOST_MARKS:
        unit *= 2
    state = hashlib.blake2b(digest_size=MARK_BYTES, person=b"pdkv-prompt")
    marks = []
    for start in range(0, len(tokens), unit):
        state.update(np.asarray(tokens[start : start + unit], dtype="<i4").tobytes())
        marks.append(state.digest())
    return b"".join(marks), unit


def marked_tokens(grant: Grant, tokens: Int32Array) -> int:
    """How many tokens of ``grant`` begin ``tokens``, as far as its marks tell: all, or a multiple of their spacing.

    0 where the marks are none of a grant of so many tokens.
    """
    unit, most = grant.mark_tokens, grant.num_tokens
    if unit < 1 or len(grant.marks) != cdiv(most, unit) * MARK_BYTES or len(grant.marks) > MOST_MARKS * MARK_BYTES:
        return 0
    ends = [*range(unit, most, unit), most]
    own, _ = mark_prefixes(tokens[:most], unit)
    same = 0
    for number, end in enumerate(ends):
        at = slice(number * MARK_BYTES, (number + 1) * MARK_BYTES)
        if end > len(tokens) or own[at] != grant.marks[at]:
            break
        same = end
    return same


def bind(source: RemoteSource, prompt: Int32Array) -> RemoteSource:
    """``source`` for a consumer's own ``prompt``: what its proof must be over, and how many tokens it supplies."""
    grant = source.grant
    if not grant.marks:
        digest = digest_tokens(prompt[: grant.num_tokens])
        return msgspec.structs.replace(source, prompt_digest=digest, usable_tokens=grant.num_tokens)
    usable = marked_tokens(grant, prompt)
    return msgspec.structs.replace(source, prompt_digest=digest_marks(grant), usable_tokens=usable)


def digest_marks(grant: Grant) -> bytes:
    """16 bytes that stand for the prompt where marks tell prefixes apart: each of them is proved with it."""
    header = grant.mark_tokens.to_bytes(8, "little")
    return hashlib.blake2b(header + grant.marks, digest_size=16, person=b"pdkv-marks").digest()


def lease_token(secret: bytes, lease_id: int) -> bytes:
    """The 16 bytes by which a lease is renewed and released: nobody guesses them without the boot ``secret``."""
    return hashlib.blake2b(
        lease_id.to_bytes(8, "little"), key=secret, digest_size=TOKEN_BYTES, person=b"pdkv-lease"
    ).digest()


def proof_key(secret: bytes) -> bytes:
    """The 32 bytes with which the grants of this start are proved; they tell nothing about the ``secret``."""
    return hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=b"pdkv-proof").digest()


def prove(key: bytes, grant: Grant, prompt_digest: bytes) -> bytes:
    """16 bytes (HMAC-SHA256, truncated) over all that a consumer may ask for under ``grant``, its token and its prompt.

    Since the prompt is part of it, so is a grant refused that was given for another one (another tokenizer or chat
    template on P, params mixed up on the way). Neither ``grant.proof`` nor ``cached_tokens`` is covered. Raises
    ``ValueError`` for numbers that no grant has (outside 64 bits, block ids outside 32).
    """
    try:
        header = _HEADER.pack(
            grant.nonce,
            grant.lease_id,
            grant.slot,
            grant.num_tokens,
            grant.block_size,
            len(grant.block_ids),
            len(grant.token),
            len(prompt_digest),
        )
        blocks = np.array((*grant.block_ids, *grant.group_blocks), dtype="<i4").tobytes()
    except (struct.error, OverflowError) as error:
        raise ValueError(f"a grant with numbers that do not fit ({error})") from error
    return hmac.digest(key, b"".join((header, grant.token, prompt_digest, blocks)), "sha256")[:PROOF_BYTES]


def is_proved(key: bytes, grant: Grant, prompt_digest: bytes) -> bool:
    """Whether the holder of ``key`` gave this very grant for the prompt of ``prompt_digest``."""
    try:
        expected = prove(key, grant, prompt_digest)
    except ValueError:
        return False
    return hmac.compare_digest(expected, grant.proof)
