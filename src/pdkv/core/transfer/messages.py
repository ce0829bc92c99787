"""What P and D tell each other, and the grant by which KV is handed over (design 3.1).

All of it travels between processes: structs, encoded by `runtime.wire`, or as ``kv_transfer_params`` by `serve.params`.
"""

from __future__ import annotations

import msgspec


class Peer(msgspec.Struct, frozen=True):
    """Where an instance's side channel listens, and which life of it is meant."""

    engine_id: str
    host: str
    port: int


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What a lease gives a consumer (design 3.1); becomes ``kv_transfer_params`` in the producer's response.

    ``block_ids`` are the producer's block ids, group by group in prompt order; ``group_blocks`` says how many of them
    each group has (empty: all belong to the only one). They are the last ones up to ``num_tokens``: all of a group of
    full attention, a window's worth, the one state.
    ``nonce`` and ``lease_id`` are the two words the lease slot ``slot`` holds for as long as the blocks are kept.
    ``token`` (16 bytes) names the lease in heartbeats and `Done`; ``proof`` (16 bytes) binds all of this to the prompt:
    the consumer checks it (`transfer.proof`) before anything moves. ``cached_tokens`` is for statistics only.
    ``marks`` are 16 bytes for the prefix up to every ``mark_tokens``-th token and for all of it: a consumer whose
    tokens differ from some point on may use what is in front of it. Without them the tokens must be equal.
    """

    block_ids: tuple[int, ...]
    num_tokens: int
    slot: int
    nonce: int
    lease_id: int
    token: bytes
    proof: bytes
    cached_tokens: int = 0
    group_blocks: tuple[int, ...] = ()
    marks: bytes = b""
    mark_tokens: int = 0


class RemoteSource(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's KV on a producer. ``prompt_digest`` and ``usable_tokens`` are the consumer's own (`proof.bind`).

    ``expires_ns``, of KV that a decode instance kept for the next turn: until when, by the clock of ``peer``. It is
    renewed by nothing. ``None``: under a lease, which heartbeats renew.
    """

    peer: Peer
    request_id: str
    grant: Grant
    expires_ns: int | None = None
    prompt_digest: bytes = b""
    usable_tokens: int = 0


class Awaited(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's KV that ``peer`` is to compute, or has computed, under ``transfer_id`` (push mode).

    The router draws the id, unguessable and new for each attempt, and gives it to both sides.
    """

    peer: Peer
    transfer_id: str


# ---------------------------------------------------------------------------------------------------- the messages


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """A consumer still wants these leases. A hint: unknown tokens are ignored."""

    tokens: tuple[bytes, ...]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A consumer needs this lease no longer (read, or never to be read). A hint, as above."""

    token: bytes
    consumer: str


class Register(msgspec.Struct, frozen=True, tag="register"):
    """A consumer waits for what ``producer`` computes under this id (push). Repeated until it is answered."""

    transfer_id: str
    producer: str


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """A consumer no longer waits for this id. A hint: unknown ids are ignored."""

    transfer_id: str


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """The prefill under this id has finished: its KV is kept under ``grant`` (to a registered consumer)."""

    transfer_id: str
    request_id: str
    grant: Grant


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Nothing will come, or stands any more, under this id (to a registered consumer)."""

    transfer_id: str
    reason: str


ToProducer = Heartbeat | Done | Register | Withdraw
ToConsumer = Announce | Gone
