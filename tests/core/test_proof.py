"""The proof of a grant: only what the producer gave, for the prompt it computed, passes."""

from __future__ import annotations

import hashlib
import hmac

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.core.transfer.messages import Grant
from pdkv.core.transfer.proof import digest_tokens, is_proved, lease_token, proof_key, prove

KEY = proof_key(b"s" * 32)
DIGEST = b"d" * 16
COVERED = ("block_ids", "block_size", "num_tokens", "slot", "nonce", "lease_id", "token")

int64s = st.integers(0, 2**63 - 1)
uint64s = st.integers(0, 2**64 - 1)
block_ids = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
grants = st.builds(
    Grant,
    block_ids=block_ids,
    block_size=int64s,
    num_tokens=int64s,
    slot=int64s,
    nonce=uint64s,
    lease_id=uint64s,
    token=st.binary(max_size=20),
    proof=st.just(b""),
    cached_tokens=int64s,
)
SMALL = Grant(block_ids=(1,), block_size=16, num_tokens=1, slot=0, nonce=1, lease_id=1, token=b"t" * 16, proof=b"")


def proved(grant: Grant, digest: bytes = DIGEST) -> Grant:
    return msgspec.structs.replace(grant, proof=prove(KEY, grant, digest))


def test_the_proof_is_a_truncated_hmac_sha256() -> None:
    """Spelled out once: another implementation must be able to make it."""
    grant = Grant(
        block_ids=(3, 258),
        block_size=16,
        num_tokens=20,
        slot=2,
        nonce=2**63 + 1,
        lease_id=5,
        token=b"t" * 16,
        proof=b"",
    )
    message = b"".join(
        (
            (2**63 + 1).to_bytes(8, "little"),
            *(value.to_bytes(8, "little") for value in (5, 2, 20, 16, 2, 16, 16)),
            b"t" * 16,
            DIGEST,
            b"\x03\0\0\0\x02\x01\0\0",
        )
    )
    assert prove(KEY, grant, DIGEST) == hmac.new(KEY, message, hashlib.sha256).digest()[:16]


@given(grants, st.binary(max_size=20))
def test_a_true_grant_passes(grant: Grant, digest: bytes) -> None:
    assert is_proved(KEY, proved(grant, digest), digest)


@given(grants, grants, st.sampled_from(COVERED))
def test_changing_any_covered_field_fails(grant: Grant, other: Grant, field: str) -> None:
    value = getattr(other, field)
    if value == getattr(grant, field):
        return
    assert not is_proved(KEY, msgspec.structs.replace(proved(grant), **{field: value}), DIGEST)


@given(grants, grants)
def test_a_crossed_proof_fails(grant: Grant, other: Grant) -> None:
    facts = [tuple(getattr(of, field) for field in COVERED) for of in (grant, other)]
    if facts[0] != facts[1]:
        assert not is_proved(KEY, msgspec.structs.replace(grant, proof=proved(other).proof), DIGEST)


@given(grants, st.binary(max_size=20))
def test_another_prompt_fails(grant: Grant, digest: bytes) -> None:
    assert is_proved(KEY, proved(grant), digest) == (digest == DIGEST)


@given(grants, st.integers(0, 127))
def test_a_damaged_proof_fails(grant: Grant, bit: int) -> None:
    whole = proved(grant)
    damaged = bytearray(whole.proof)
    damaged[bit // 8] ^= 1 << bit % 8
    for proof in (bytes(damaged), whole.proof[:-1], whole.proof + b"\0", b""):
        assert not is_proved(KEY, msgspec.structs.replace(whole, proof=proof), DIGEST)


@given(grants, st.binary(min_size=1, max_size=64))
def test_another_start_s_key_fails(grant: Grant, secret: bytes) -> None:
    assert not is_proved(proof_key(secret), proved(grant), DIGEST) or secret == b"s" * 32


@pytest.mark.parametrize("moved", [1, -1])
def test_bytes_cannot_wander_between_token_and_digest(moved: int) -> None:
    grant = SMALL
    text = grant.token + DIGEST
    at = 16 + moved
    shifted = msgspec.structs.replace(proved(grant), token=text[:at])
    assert not is_proved(KEY, shifted, text[at:])


@pytest.mark.parametrize(
    "change",
    [{"nonce": -1}, {"nonce": 2**64}, {"lease_id": -1}, {"slot": 2**63}, {"num_tokens": 2**70}, {"block_size": 2**64},
     {"block_ids": (2**31,)}, {"block_ids": (-(2**40),)}],
    ids=str,
)  # fmt: skip
def test_numbers_that_no_grant_has_are_refused(change: dict[str, object]) -> None:
    grant = msgspec.structs.replace(SMALL, proof=b"p" * 16)
    assert not is_proved(KEY, msgspec.structs.replace(grant, **change), DIGEST)


def test_the_statistics_are_not_covered() -> None:
    """A router may leave ``remote_prefill_cached_tokens`` out."""
    grant = msgspec.structs.replace(SMALL, cached_tokens=9)
    assert is_proved(KEY, msgspec.structs.replace(proved(grant), cached_tokens=0), DIGEST)


def test_tokens_and_key_are_of_one_secret_each() -> None:
    """The key that every peer gets makes no token: neither DONE nor a heartbeat can be forged with it."""
    made = {lease_token(secret, lease_id) for secret in (b"a", b"b", proof_key(b"a")) for lease_id in (1, 2, 2**63)}
    assert len(made) == 9
    assert {len(token) for token in made} == {16}
    assert proof_key(b"a") != proof_key(b"b")
    assert len(proof_key(b"a")) == 32


def test_every_token_of_a_prompt_counts() -> None:
    prompt = np.arange(20, dtype=np.int32)
    digests = {digest_tokens(prompt), digest_tokens(prompt[:-1])}
    for at in range(20):
        other = prompt.copy()
        other[at] += 1
        digests.add(digest_tokens(other))
    assert len(digests) == 22
