"""Slots of leases and grants: why an answer is never computed from freed KV (design 3.1).

A slot names what a peer may do with this instance's memory: read under a lease, or write under a grant.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.core.ports import Int32Array
from pdkv.core.transfer.messages import Grant
from pdkv.core.transfer.proof import digest_marks, digest_tokens, lease_token, mark_prefixes, proof_key, prove

#: uint64[n, 2]: {boot nonce, lease or grant id} per slot; id 0 means "nothing". Registered memory that peers read.
SlotArray = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Lease:
    """One grant: whose KV, of which tokens, which slot, until when."""

    request_id: str
    transfer_id: str | None
    answer_id: str | None
    lease_id: int
    slot: int
    token: bytes
    blocks: int
    num_tokens: int
    prompt_digest: bytes
    deadline_ns: int
    next_turn: bool = False

    @property
    def key(self) -> str:
        """Owner of the blocks in the manager."""
        return f"lease:{self.lease_id}"


class LeaseSlots:
    """The owner's side of the slot array: ids never recur, and a slot is cleared before its blocks are freed."""

    def __init__(self, slots: SlotArray, *, nonce: int, secret: bytes, block_size: int) -> None:
        self._slots = slots
        self._block_size = block_size
        self.nonce = nonce
        self._secret = secret
        self._key = proof_key(secret)
        self._next_id = 1
        self._free = list(range(len(slots) - 1, -1, -1))
        slots[:, 1] = 0
        slots[:, 0] = nonce

    @property
    def num_free(self) -> int:
        """Slots that can still be granted."""
        return len(self._free)

    def grant(
        self, blocks: tuple[tuple[int, ...], ...], tokens: Int32Array, cached_tokens: int, *, mark_tokens: int = 0
    ) -> Grant:
        """The proved grant for ``blocks`` by group, which hold the KV of ``tokens``; its slot is armed from now on.

        ``mark_tokens``: prefixes are marked every so many tokens (`Grant.marks`); 0: not at all.
        """
        slot, lease_id = self.arm()
        marks, spacing = mark_prefixes(tokens, mark_tokens) if mark_tokens else (b"", 0)
        grant = Grant(
            block_ids=tuple(block for group in blocks for block in group),
            group_blocks=tuple(len(group) for group in blocks) if len(blocks) > 1 else (),
            block_size=self._block_size,
            num_tokens=len(tokens),
            slot=slot,
            nonce=self.nonce,
            lease_id=lease_id,
            token=lease_token(self._secret, lease_id),
            proof=b"",
            cached_tokens=cached_tokens,
            marks=marks,
            mark_tokens=spacing,
        )
        digest = digest_marks(grant) if marks else digest_tokens(tokens)
        return msgspec.structs.replace(grant, proof=prove(self._key, grant, digest))

    def arm(self) -> tuple[int, int]:
        """(slot, id) of something new: the slot names it from now on. Needs a free one."""
        slot, new_id = self._free.pop(), self._next_id
        self._next_id += 1
        self._slots[slot, 1] = new_id
        return slot, new_id

    def disarm(self, slot: int) -> None:
        """What the slot named is over; the slot is not given out again yet."""
        self._slots[slot, 1] = 0

    def clear(self, slot: int) -> None:
        """The lease is over: a consumer that reads the slot from now on discards what it has read."""
        self.disarm(slot)
        self._free.append(slot)
