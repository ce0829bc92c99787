"""What crosses the border of the core: what comes in (inbox), what goes out (plans), and how its memory is shown.

Nothing here acts. What happened meanwhile is told in `core.events`, what other instances tell or are told is in
`core.transfer.messages`. Times are integer nanoseconds of the instance's own monotonic clock, passed in by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.core.blocks.extra_keys import LoraAdapter, MultimodalItem
from pdkv.core.events import Event, FinishReason
from pdkv.core.transfer.messages import Awaited, Peer, RemoteSource, ToConsumer, ToProducer, WriteGrant

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
#: int[n]. Tables and what leaves the core are int32; NumPy indexes by int64 without converting it first.
BlockIds = npt.NDArray[np.signedinteger[Any]]


# --------------------------------------------------------------------------------------------------------- inbox


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A prompt to serve. ``prompt`` is int32[n], n >= 1; ``stop_token_ids`` already contains EOS unless ignored.

    ``awaits_grammar``: it is let in once `GrammarReady` says that its output's grammar is compiled; where that does not
    come in time it ends with an error.

    ``priority`` (smaller first) and ``arrival_ns`` (default: when the engine takes it in, in order) count with priority
    scheduling only. ``cache_salt``, ``lora`` and ``items`` (by offset) make equal tokens differ in the prefix cache.
    ``skip_reading_prefix_cache`` computes every token anew (it may still be hit by others); ``report_hits`` announces
    the blocks it hits in the KV events once more. ``encoder_tokens`` are those that an encoder puts out for it (models
    with cross attention).

    Requests with the same ``answer_id`` are answered together: a consumer reads none of them before all have ended.

    ``produce`` keeps the KV under a lease when the request finishes (P's leg: ``do_remote_decode``), and announces that
    under ``transfer_id`` if it has one; ``source`` says where the prompt's KV already is (D's leg:
    ``do_remote_prefill``), ``awaited`` who will announce or write it. Bidirectional mode: ``keep_turn`` keeps the KV of
    prompt and answer for the conversation's next turn (D's leg), whose prefill comes with both ``produce`` and
    ``source``.
    """

    request_id: str
    prompt: Int32Array
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival_ns: int | None = None
    cache_salt: str | None = None
    lora: LoraAdapter | None = None
    items: tuple[MultimodalItem, ...] = ()
    skip_reading_prefix_cache: bool = False
    report_hits: bool = False
    encoder_tokens: int = 0
    awaits_grammar: bool = False
    answer_id: str | None = None
    produce: bool = False
    transfer_id: str | None = None
    source: RemoteSource | None = None
    awaited: Awaited | None = None
    keep_turn: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request now: the client left (ABORT) or the front end saw a stop string (STOP).

    ABORT also says that a `Finished` that there already is reaches nobody: the lease granted with it ends.
    """

    request_id: str
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar that a request waits for is compiled, or (``error``) cannot be, which ends the request."""

    request_id: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Decline:
    """A grant, or the promise of one, that was offered here will not be used (the request never became one)."""

    offer: RemoteSource | Awaited


class FromConsumer(msgspec.Struct, frozen=True):
    """A message to the producer here, and the time it was received at (not when the engine got round to it).

    ``origin`` names the connection that it came by: replies go there.
    """

    message: ToProducer
    received_ns: int
    origin: bytes = b""


class FromProducer(msgspec.Struct, frozen=True):
    """What ``peer``, and nobody else, has answered."""

    message: ToConsumer
    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerMet:
    """A handshake with ``peer`` stands; its clock shows ``clock_offset_ns`` more than ours, as far as is known now."""

    peer: Peer
    clock_offset_ns: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Nothing can be read from ``peer`` now: no handshake with it succeeds (it is gone, another one, or unlike us)."""

    peer: Peer
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEnded:
    """A READ's handle is over: nothing of it can touch the destination any more.

    ``slot`` is the (nonce, lease id) that stood in the lease slot *after* all data had arrived, ``None`` when the read
    failed (``error`` says how). ``moved_bytes`` counts data bytes, ``seconds`` runs from the post to the slot read.
    """

    handle: int
    slot: tuple[int, int] | None
    moved_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteEnded:
    """A WRITE's handle is over: nothing of it touches our memory any more, or leaves it.

    ``error`` says why not all is there. ``cut_off``: a part had been posted and its end is not known, so that it may be
    on its way into the peer's memory still.
    """

    handle: int
    moved_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class GrantsFenced:
    """Nothing can be written here under these grants any more, whatever their producers do."""

    grant_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MoverRestarted:
    """The mover was killed and started again: ``handles``, all it had been given, are fenced and will not report.

    Handles that the control thread had not handed over yet are not among them: they go to the new mover. ``cut_off``:
    parts of the WRITEs among ``handles`` may be on their way into the peer's memory still, as in `WriteEnded`.
    """

    handles: tuple[int, ...]
    cut_off: bool = True


FromMover = ReadEnded | WriteEnded | GrantsFenced | MoverRestarted
InboxItem = NewRequest | Abort | GrammarReady | Decline | FromConsumer | FromProducer | PeerMet | PeerLost | FromMover


# ---------------------------------------------------------------------------------------------------------- plan


class EncoderInput(NamedTuple):
    """Item number ``item`` of a request (`NewRequest.items`) is to be encoded."""

    request_id: str
    item: int


class Batch(msgspec.Struct, frozen=True, eq=False):
    """One ragged forward pass: row i computes ``num_scheduled[i]`` tokens behind ``num_computed[i]`` known ones.

    ``tokens`` int32[sum(num_scheduled)] are the rows' input tokens, flattened. Where ``pending[i]``, the last of row
    i's tokens is not known yet: it is the one that a still outstanding plan samples for that request, and the executor
    puts it in (asynchronous scheduling). ``block_tables`` int32[n, width] hold at least the blocks of
    ``num_computed + num_scheduled`` tokens, padded with 0, the null block. ``group_tables`` are those of every group of
    layers, ``block_tables`` the first of them; a null block stands where no later token looks. ``copies`` int32[m, 2]:
    before anything else, block ``[i, 0]`` is copied to block ``[i, 1]`` (copy on write). ``samples[i]``: row i ends at
    the last known token, so a next token is sampled. ``num_drafts[i]``: how many of row i's tokens, its last ones, are
    drafts to be checked; -1 stands for one that is not known yet, or for padding, which is never accepted. While drafts
    of a still outstanding plan may be refused, ``num_computed`` counts them as accepted: the executor takes those off.

    ``replay_ends`` int32[n] (empty where no group is replayed): row i's tokens before that position are computed for
    windows only that a prefix hit does not cover (`WindowGroup.replayed`), from a window before it on, where such a
    window then has nothing further back. What the other groups have of these tokens is there, and shared.

    With an encoder, its outputs under the names in ``dropped`` (`MultimodalItem.identifier`) are given up first, then
    those of ``encode`` are computed, and kept under their items' names until they are dropped in turn.
    """

    request_ids: tuple[str, ...]
    num_scheduled: Int32Array
    num_computed: Int32Array
    tokens: Int32Array
    pending: BoolArray
    block_tables: Int32Array
    samples: BoolArray
    group_tables: tuple[Int32Array, ...] = ()
    copies: Int32Array = msgspec.field(default_factory=lambda: np.empty((0, 2), dtype=np.int32))
    num_drafts: Int32Array = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    replay_ends: Int32Array = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    encode: tuple[EncoderInput, ...] = ()
    dropped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True, eq=False)
class PostRead:
    """Read ``remote_blocks[i]`` of the source's pool into ``local_blocks[i]``, then read the lease slot.

    Both are block ids where the blocks of both sides are of one size, else ids of *units*, which are the smaller blocks
    of the two: a larger block ``b``, worth ``k`` of them, consists of the units from ``b * k`` on, in the order of its
    tokens. The mover reports exactly one `ReadEnded` for ``handle``, however it ends (a refused handshake included).
    """

    handle: int
    source: RemoteSource
    remote_blocks: Int32Array
    local_blocks: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class PostWrite:
    """Write ``local_blocks[i]`` to ``remote_blocks[i]`` of the consumer's pool, while its slot names the grant.

    Both are block ids, or ids of units (`PostRead`). Nothing is written when the consumer's memory is of another
    ``epoch`` than this by now. The mover reports exactly one `WriteEnded` for ``handle``, however it ends (a refused
    handshake included). Handles of READs and WRITEs are never equal.
    """

    handle: int
    consumer: Peer
    grant: WriteGrant
    remote_blocks: Int32Array
    local_blocks: Int32Array
    epoch: int = 0


class Revoked(msgspec.Struct, frozen=True):
    """A grant that was given up: its slot has been cleared, but its producer has not said yet that it has stopped.

    Who can see to it himself that nothing is written any more reports `GrantsFenced`.
    """

    grant_id: int
    slot: int


class SendMessage(msgspec.Struct, frozen=True):
    """Tell a producer; lost messages are allowed for."""

    peer: Peer
    message: ToProducer


class Reply(msgspec.Struct, frozen=True):
    """Tell a consumer, by the connection that it registered on; lost ones are allowed for."""

    origin: bytes
    message: ToConsumer


class Keepalive(msgspec.Struct, frozen=True):
    """Leases at one peer that the control thread renews every ``lease // 6`` until the core publishes a new set.

    ``awaited``: something is to be announced or decided there, so the connection stays, the handshake is made
    beforehand, and its outcome is told (`PeerMet`, `PeerLost`).
    """

    peer: Peer
    tokens: tuple[bytes, ...]
    awaited: bool = False


class Plan(msgspec.Struct, frozen=True, eq=False):
    """What to do now. Owns its arrays; the core never changes them afterwards.

    Every plan is completed exactly once, in order, with `Outputs` of the same ``step_id``. ``next_deadline_ns`` is when
    the engine must be stepped again even if nothing arrives; ``None`` when nothing is timed. ``cancels`` are handles of
    READs and WRITEs. ``revoked`` is the whole set of grants given up and not fenced yet; for those in ``evict`` whoever
    may still write is to be ended now, which is then reported (`GrantsFenced`).
    """

    step_id: int
    batch: Batch
    reads: tuple[PostRead, ...] = ()
    writes: tuple[PostWrite, ...] = ()
    cancels: tuple[int, ...] = ()
    revoked: tuple[Revoked, ...] = ()
    messages: tuple[SendMessage, ...] = ()
    replies: tuple[Reply, ...] = ()
    keepalives: tuple[Keepalive, ...] = ()
    restart_mover: bool = False
    evict: tuple[int, ...] = ()
    next_deadline_ns: int | None = None
    events: tuple[Event, ...] = ()


class Outputs(msgspec.Struct, frozen=True, eq=False):
    """Sampled tokens of one plan: int32[n], row i valid where ``batch.samples[i]`` (0 elsewhere).

    With speculation, ``more[i]`` int32[accepted] follow the first one (as many as drafts of row i were accepted), and
    ``drafts[i]`` int32[k] are proposed to be checked in row i's next step (not with asynchronous scheduling, where
    they stay with the executor).

    ``invalid_blocks`` are ids of blocks whose KV was to come from elsewhere and is known not to be there. An executor
    that finds out by block, before a load has ended (one rank of several has failed) or behind it, says so here; of
    models of one KV group only. Requests that count them as computed go on in front of them, or end with an error.
    """

    tokens: Int32Array
    more: tuple[Int32Array, ...] = ()
    drafts: tuple[Int32Array, ...] = ()
    invalid_blocks: tuple[int, ...] = ()


# -------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderView:
    """One owner of memory as `/debug/memory` shows it: who, in which account, how many, why, since, until."""

    request_id: str
    account: str
    blocks: int
    cause: str
    since_ns: int
    deadline_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingView:
    """A request that holds no memory yet, because the engine ``producer`` has not announced its prompt's KV."""

    request_id: str
    producer: str
    cause: str
    since_ns: int
    deadline_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """The ledger at one instant: ``accounts`` sum to ``num_blocks``; ``peaks`` are maxima since the start."""

    num_blocks: int
    block_size: int
    accounts: dict[str, int]
    peaks: dict[str, int]
    holders: tuple[HolderView, ...] = field(default=())
    awaiting: tuple[AwaitingView, ...] = field(default=())
