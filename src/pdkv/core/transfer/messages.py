"""What P and D tell each other, and the grant by which KV is handed over (design 3.1).

All of it travels between processes: structs, encoded by `runtime.wire`, or as ``kv_transfer_params`` by `serve.params`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

#: How D learns of a prompt's KV and how that moves: read from P when told by the router, read when P has announced it,
#: or written by P.
TransferMode = Literal["pull", "push", "write"]


class Peer(msgspec.Struct, frozen=True):
    """Where an instance's side channel listens, and which life of it is meant."""

    engine_id: str
    host: str
    port: int


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What a lease gives a consumer (design 3.1); becomes ``kv_transfer_params`` in the producer's response.

    ``block_ids`` are the producer's block ids, group by group in prompt order; ``group_blocks`` says how many of them
    each group has (empty: all belong to the only one). They are the last ones up to ``num_tokens``: all of a group of
    full attention, a window's worth, the one state. ``block_size`` is the tokens in a block of the producer's first
    group that has its KV by tokens; those of its other groups differ from the consumer's by the same factor.
    ``nonce`` and ``lease_id`` are the two words the lease slot ``slot`` holds for as long as the blocks are kept.
    ``token`` (16 bytes) names the lease in heartbeats and `Done`; ``proof`` (16 bytes) binds all of this to the prompt:
    the consumer checks it (`transfer.proof`) before anything moves. ``cached_tokens`` is for statistics only.
    ``marks`` are 16 bytes for the prefix up to every ``mark_tokens``-th token and for all of it: a consumer whose
    tokens differ from some point on may use what is in front of it. Without them the tokens must be equal.
    """

    block_ids: tuple[int, ...]
    block_size: int
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

    The router draws the id, unguessable and new for each attempt, and gives it to both sides. ``write``: ``peer`` is
    to WRITE it here when it has been computed, instead of announcing it to be read.
    """

    peer: Peer
    transfer_id: str
    write: bool = False


class WriteGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer's memory, granted to a producer for one WRITE of one prompt's KV (design 3.2).

    ``nonce`` (the consumer's, of this start) and ``grant_id``, which never recurs, stand in the consumer's slot
    ``slot`` for as long as the producer may write. ``block_ids`` are the consumer's, group by group in prompt order
    (``group_blocks`` and ``block_size`` as in `Grant`): the table entries that a peer supplies to go on behind
    ``num_tokens`` tokens, of which the first ``first_token`` are there already. ``prompt_digest``
    (`transfer.proof.digest_tokens`) is that of the ``num_tokens`` tokens: the producer refuses what it did not compute.
    """

    nonce: int
    grant_id: int
    slot: int
    block_ids: tuple[int, ...]
    block_size: int
    num_tokens: int
    first_token: int
    prompt_digest: bytes
    group_blocks: tuple[int, ...] = ()


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


class RegisterWrite(msgspec.Struct, frozen=True, tag="register_write", kw_only=True):
    """``consumer`` waits for what ``producer`` computes under this id, to be written under ``grant`` (WRITE push).

    Repeated until it is answered for good (`Written`, `NotWritten`). Without a grant it waits in its queue, and wants
    the KV to be kept until it has memory to grant. ``epoch`` is that of the consumer's memory when this was sent: put
    in by its control thread, which tells peers the same in handshakes. Nothing is written to memory of another epoch,
    so a grant does not survive the mover that it was given with.
    """

    transfer_id: str
    producer: str
    consumer: Peer
    grant: WriteGrant | None = None
    epoch: int = 0


class CancelGrant(msgspec.Struct, frozen=True, tag="cancel_grant"):
    """Nothing may be written under this grant any more. Repeated until the producer has said that nothing will be.

    ``producer`` was asked to write: another life of it, where it listened, knows nothing of what had left the first.
    """

    transfer_id: str
    producer: str
    nonce: int
    grant_id: int


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


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """The registration of this grant is known; ``writing``: its prefill has finished, and the WRITE is under way."""

    nonce: int
    grant_id: int
    writing: bool


class Written(msgspec.Struct, frozen=True, tag="written"):
    """All KV that the grant asks for is in the consumer's memory, and nothing of the WRITE is under way any more."""

    nonce: int
    grant_id: int
    moved_bytes: int


class NotWritten(msgspec.Struct, frozen=True, tag="not_written"):
    """Nothing (more) will be written under this grant, and nothing is under way; if ``cut_off``, as in `Fenced`."""

    nonce: int
    grant_id: int
    reason: str
    cut_off: bool = False


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """The answer to `CancelGrant`: nothing is under way, nor will be, under this grant. Also of unknown ones.

    If the WRITE was ``cut_off``, nothing more leaves the producer, but what has left it may still be in a socket of the
    consumer's host, and be written by the consumer's own mover: the consumer has to fence that itself. A producer says
    so, too, of what an earlier life of it was asked for.
    """

    nonce: int
    grant_id: int
    cut_off: bool = False


OfGrant = Noted | Written | NotWritten | Fenced
ToProducer = Heartbeat | Done | Register | RegisterWrite | CancelGrant | Withdraw
ToConsumer = Announce | Gone | OfGrant
