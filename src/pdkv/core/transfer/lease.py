"""Lease slots: why an answer is never computed from freed KV (design 3.1)."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from pdkv.core.ports import Int32Array

#: uint64[n, 2]: {boot nonce, lease id} per slot; lease id 0 means "no lease". Registered memory that peers read.
SlotArray = npt.NDArray[np.uint64]


def digest_tokens(tokens: Int32Array) -> bytes:
    """16 bytes that name a token sequence: P computed these, D is about to decode behind the same ones."""
    return hashlib.blake2b(np.asarray(tokens, dtype="<i4").tobytes(), digest_size=16, person=b"pdkv-prompt").digest()


def lease_token(
    secret: bytes, *, lease_id: int, slot: int, block_ids: tuple[int, ...], num_tokens: int, prompt_digest: bytes
) -> bytes:
    """The 16 bytes that prove a grant: a keyed hash over everything a consumer may ask for under it.

    Nobody without the producer's boot secret can make one, so forged block ids are refused without asking the engine;
    and since the prompt is part of it, so is a grant that was given for another prompt (another tokenizer or chat
    template on P, params mixed up on the way).
    """
    mac = hashlib.blake2b(key=secret, digest_size=16, person=b"pdkv-lease")
    mac.update(np.asarray([lease_id, slot, num_tokens, len(block_ids)], dtype="<i8").tobytes())
    mac.update(np.asarray(block_ids, dtype="<i4").tobytes())
    mac.update(prompt_digest)
    return mac.digest()


class LeaseSlots:
    """The producer's side of the slot array: ids never recur, and a slot is cleared before its blocks are freed."""

    def __init__(self, slots: SlotArray, *, nonce: int, secret: bytes) -> None:
        self._slots = slots
        self.nonce = nonce
        self._secret = secret
        self._next_id = 1
        self._free = list(range(len(slots) - 1, -1, -1))
        slots[:, 1] = 0
        slots[:, 0] = nonce

    @property
    def num_free(self) -> int:
        """Slots that can still be granted."""
        return len(self._free)

    def grant(self, block_ids: tuple[int, ...], tokens: Int32Array) -> tuple[int, int, bytes]:
        """(slot, lease id, token) for the blocks that hold the KV of ``tokens``; the slot is armed from now on."""
        slot, lease_id = self._free.pop(), self._next_id
        self._next_id += 1
        self._slots[slot, 1] = lease_id
        token = lease_token(
            self._secret,
            lease_id=lease_id,
            slot=slot,
            block_ids=block_ids,
            num_tokens=len(tokens),
            prompt_digest=digest_tokens(tokens),
        )
        return slot, lease_id, token

    def clear(self, slot: int) -> None:
        """The lease is over: a consumer that reads the slot from now on discards what it has read."""
        self._slots[slot, 1] = 0
        self._free.append(slot)
