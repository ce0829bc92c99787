"""The answering side of the side channel: who may read from here. It has no sockets, so all of it can be fuzzed."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pdkv.core.engine import Identity
from pdkv.core.ports import Done, Heartbeat, PeerMessage, RemoteSource
from pdkv.core.transfer.lease import lease_token
from pdkv.runtime.device_memory import DeviceMemory
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.shown import quoted, readable
from pdkv.runtime.wire import Answer, Claim, ClaimReply, Hello, HelloReply, PeerMemory, Question, Refused

_SHOWN_FACTS = 20  # of a list that a stranger sent


@dataclass(frozen=True)
class PeerIdentity:
    """One life of an instance as peers meet it: who it is, and the ``facts`` that must be equal on both sides."""

    core: Identity
    facts: dict[str, str]


@dataclass(frozen=True)
class TransferMemory:
    """What peers read and what READs fill: the pool, and the lease slots (little-endian uint64[num_slots, 2])."""

    pool: SharedMemory | DeviceMemory
    bytes_per_block: int
    num_blocks: int
    slots: SharedMemory
    num_slots: int


def differing_facts(our_name: str, ours: Mapping[str, str], their_name: str, theirs: Mapping[str, str]) -> str | None:
    """Every fact that differs, with both values, or None. The text is read on both sides: it calls each by its name."""
    we, they = readable(our_name), readable(their_name)
    differences = [
        f"{readable(name)}: {we} has {quoted(ours.get(name))}, {they} has {quoted(theirs.get(name))}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if not differences:
        return None
    return (
        "; ".join(differences[:_SHOWN_FACTS])
        + ". A decode instance reads a prefill instance's KV byte for byte: start both with the same model, dtype, "
        "block size and transport"
    )


@dataclass
class Doorkeeper:
    """Answers `Hello` and `Claim`, and knows for how long somebody may be reading from here.

    ``describe()`` gives the memory as it can be read now and its epoch.
    """

    identity: PeerIdentity
    facts: Mapping[str, str]
    memory: TransferMemory
    lease_ns: int
    describe: Callable[[], tuple[PeerMemory, int]]
    refusals: int = 0
    _claims: dict[bytes, int] = field(default_factory=dict)  # token -> until when it may be read, on our clock

    def answer(self, question: Question, now_ns: int) -> Answer | PeerMessage:
        """The reply to send back, or the hint itself when it is one for the engine."""
        match question:
            case Hello():
                return self._hello(question)
            case Claim():
                return self._claim(question, now_ns)
            case Heartbeat(tokens=tokens):
                for token in tokens:
                    if token in self._claims:
                        self._claims[token] = now_ns + self.lease_ns
                return question
            case Done(token=token):
                self._claims.pop(token, None)
                return question

    def readers_until_ns(self, now_ns: int) -> int | None:
        """Until when a claimed lease may be read from here; None when nobody holds one."""
        for token in [token for token, until in self._claims.items() if until <= now_ns]:
            del self._claims[token]
        return max(self._claims.values(), default=None)

    def _hello(self, hello: Hello) -> Answer:
        reason = self._stranger(hello.target)
        if reason is None:
            reason = differing_facts(self.identity.core.engine_id, self.facts, hello.engine_id, hello.facts)
        if reason is not None:
            self.refusals += 1
            return Refused(seq=hello.seq, reason=reason)
        memory, epoch = self.describe()
        return HelloReply(
            seq=hello.seq,
            engine_id=self.identity.core.engine_id,
            nonce=self.identity.core.nonce,
            epoch=epoch,
            lease_ns=self.lease_ns,
            facts=dict(self.facts),
            memory=memory,
        )

    def _claim(self, claim: Claim, now_ns: int) -> Answer:
        reason = self._stranger(claim.source.peer.engine_id) or self._invalid(claim.source)
        if reason is not None:
            self.refusals += 1
            return Refused(seq=claim.seq, reason=reason)
        self._claims[claim.source.token] = now_ns + self.lease_ns
        return ClaimReply(seq=claim.seq, epoch=self.describe()[1])

    def _stranger(self, engine_id: str) -> str | None:
        if engine_id == self.identity.core.engine_id:
            return None
        return f"engine {quoted(engine_id)} is gone, {self.identity.core.engine_id!r} answers there now"

    def _invalid(self, source: RemoteSource) -> str | None:
        """Why this grant was never ours or is no longer; None when it stands."""
        memory = self.memory
        if source.nonce != self.identity.core.nonce:
            return "the lease is of an earlier life of this engine"
        well_formed = (
            0 <= source.slot < memory.num_slots
            and 0 < source.lease_id < 1 << 63
            and 0 < source.num_tokens < 1 << 62
            and 0 < len(source.block_ids) <= memory.num_blocks
            and all(0 <= block < memory.num_blocks for block in source.block_ids)
        )
        if not well_formed:
            return f"slot, ids, tokens or blocks are outside what there is ({memory.num_blocks} blocks)"
        expected = lease_token(
            self.identity.core.secret,
            lease_id=source.lease_id,
            slot=source.slot,
            block_ids=source.block_ids,
            num_tokens=source.num_tokens,
            prompt_digest=source.prompt_digest,
        )
        if not hmac.compare_digest(expected, source.token):
            return (
                "the token does not belong to these blocks and this prompt: kv_transfer_params must be passed on "
                "unchanged, and both instances must turn the request into the same tokens (tokenizer, chat template)"
            )
        slot = memory.slots.array(np.dtype("<u8"), (memory.num_slots, 2))[source.slot]
        if (int(slot[0]), int(slot[1])) != (source.nonce, source.lease_id):
            return f"lease {source.lease_id} has ended (expired, or already released)"
        return None
