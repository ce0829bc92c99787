"""The side channel's messages: msgpack, tagged, size-capped; nothing is ever unpickled.

One message is one ZMQ frame. The asking side (DEALER) sends `Hello`, and the core's hints `Heartbeat`, `Done` and
`Withdraw` and, in push mode, `Register`, `RegisterWrite` and `CancelGrant`. The answering side (ROUTER) replies to the
first with the same ``seq``, and to registrations and cancellations sooner or later. A frame that is too long or cannot
be decoded raises `BadFrame`: the receiver counts and drops it. Peers that share a secret first exchange `Open` and
`Opened`, and put all else under a seal (`runtime.peer_auth`).

A second, private channel joins the control thread and its mover (one socket pair, frames with a 4-byte length).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from pdkv.core.transfer.messages import (
    Announce,
    CancelGrant,
    Done,
    Heartbeat,
    OfGrant,
    Peer,
    Register,
    RegisterWrite,
    ToConsumer,
    ToProducer,
    Withdraw,
    WriteGrant,
    Written,
)
from pdkv.core.transfer.proof import KEY_BYTES, PROOF_BYTES, TOKEN_BYTES
from pdkv.runtime.geometry import Geometry
from pdkv.runtime.shown import readable

WIRE_VERSION = "5"
MAX_FRAME_BYTES = 4 << 20
SEAL_BYTES = 25  # of a sealed frame (`runtime.peer_auth`), in front of the message
MAX_MOVER_FRAME_BYTES = 64 << 20
MAX_TRANSFER_ID_CHARS = 256
_MAX_NAME_CHARS = 512
_DIGEST_BYTES = 16
_WORD_LIMIT = 1 << 64  # nonces and numbers of grants stand in 64-bit words


MemoryKind = Literal["DRAM", "VRAM"]
"""Where memory is: in the host, or in a GPU (NIXL's names)."""

Address = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]  # a stranger's: an offset added to it must not wrap
DeviceIndex = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class BadFrame(Exception):
    """A frame from outside that is not one of the messages expected there."""


# ------------------------------------------------------------------------------------------------- between instances


class ShmOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Where an instance's memory files are on this host: ``/proc/<pid>/fd/<fd>``, known again by their inodes."""

    boot_id: str
    pid: Count
    pool_fd: Count
    pool_inode: int
    slots_fd: Count
    slots_inode: int


class NixlOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a NIXL reader needs: the agent's own metadata blob, and where pool and slots lie in that agent's process.

    The pool may be in a GPU (``VRAM``, ``pool_device`` is CUDA's index in that process); the slots are host memory.
    """

    agent: str
    metadata: bytes
    pool_kind: MemoryKind
    pool_device: DeviceIndex
    pool_address: Address
    slots_address: Address


class PeerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's readable memory: a pool of this geometry, and ``num_slots`` lease slots."""

    geometry: Geometry
    num_slots: Count
    shm: ShmOffer | None = None
    nixl: NixlOffer | None = None


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """I am ``engine_id`` and look for ``target``; these are my facts (they must equal yours)."""

    seq: int
    engine_id: str
    target: str
    facts: dict[str, str]


class HelloReply(msgspec.Struct, frozen=True, kw_only=True, tag="hello_reply"):
    """Facts agree. ``epoch`` changes whenever ``memory`` does (a restarted mover has a new agent).

    ``grant_key`` proves the grants of this life of the engine, the one of ``nonce`` (`core.transfer.proof`).
    ``clock_ns`` is what the engine's clock showed when this was written: its deadlines go by that clock.
    """

    seq: int
    engine_id: str
    nonce: int
    grant_key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    epoch: int
    lease_ns: int
    clock_ns: int
    facts: dict[str, str]
    memory: PeerMemory


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """I am ``engine_id``, speak ``wire`` and know the secret: show that you do. ``nonce`` is new each time."""

    seq: int
    wire: Annotated[str, msgspec.Meta(max_length=32)]
    engine_id: Annotated[str, msgspec.Meta(max_length=512)]
    nonce: Bytes32


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """Here is the proof that I know it, too; yours is the seal of whatever you say next."""

    seq: int
    engine_id: Annotated[str, msgspec.Meta(max_length=512)]
    nonce: Bytes32
    proof: Bytes32


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """No, to a `Hello` or an `Open`; ``reason`` is for people."""

    seq: int
    reason: str


Question = Hello | ToProducer
Answer = HelloReply | Refused | ToConsumer

_encoder = msgspec.msgpack.Encoder()
_questions = msgspec.msgpack.Decoder(Question | Open)
_answers = msgspec.msgpack.Decoder(Answer | Opened)


def encode(message: Question | Answer | Open | Opened) -> bytes:
    """One frame; raises `BadFrame` when the message is longer than a peer would take."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(f"a {type(message).__name__} of {len(frame)} bytes, peers take {MAX_FRAME_BYTES}")
    return frame


def decode_question(frame: bytes) -> Question | Open:
    """What somebody sent to the ROUTER. Raises `BadFrame`."""
    message: Question | Open = _decode(_questions, frame)
    if isinstance(message, Heartbeat) and any(len(token) != TOKEN_BYTES for token in message.tokens):
        raise BadFrame("a heartbeat with a token that is not 16 bytes")
    if isinstance(message, Done) and len(message.token) != TOKEN_BYTES:
        raise BadFrame("a done with a token that is not 16 bytes")
    named = Register | RegisterWrite | CancelGrant | Withdraw
    if isinstance(message, named) and not 0 < len(message.transfer_id) <= MAX_TRANSFER_ID_CHARS:
        raise BadFrame(f"a transfer id of {len(message.transfer_id)} characters")
    if isinstance(message, RegisterWrite):
        _check_peer(message.consumer)
        if not 0 <= message.epoch < 1 << 62:
            raise BadFrame(f"a registration of epoch {message.epoch}")
        if message.grant is not None:
            _check_grant(message.grant)
    if isinstance(message, CancelGrant):
        _check_words(message)
    return message


def decode_answer(frame: bytes) -> Answer | Opened:
    """What a peer answered. Raises `BadFrame`."""
    answer: Answer | Opened = _decode(_answers, frame)
    if isinstance(answer, Announce):
        lengths = len(answer.grant.token), len(answer.grant.proof)
        if lengths != (TOKEN_BYTES, PROOF_BYTES):
            raise BadFrame(f"a grant whose token and proof have {lengths} bytes")
    if isinstance(answer, OfGrant):
        _check_words(answer)
    if isinstance(answer, Written) and not 0 <= answer.moved_bytes < 1 << 62:
        raise BadFrame(f"a WRITE of {answer.moved_bytes} bytes")
    return answer


def _check_peer(peer: Peer) -> None:
    if not (0 < len(peer.engine_id) <= _MAX_NAME_CHARS and 0 < len(peer.host) <= _MAX_NAME_CHARS):
        raise BadFrame(f"a peer with names of {len(peer.engine_id)} and {len(peer.host)} characters")
    if not 0 < peer.port < 1 << 16:
        raise BadFrame(f"a peer at port {peer.port}")


def _check_words(message: WriteGrant | CancelGrant | OfGrant) -> None:
    if not (0 <= message.nonce < _WORD_LIMIT and 0 < message.grant_id < _WORD_LIMIT):
        raise BadFrame("a grant whose numbers are no 64-bit words")


def _check_grant(grant: WriteGrant) -> None:
    """Bounds of what is used as it is; whether the grant fits what is kept is the core's to see."""
    _check_words(grant)
    if not 0 <= grant.slot < 1 << 31:
        raise BadFrame(f"a grant with slot {grant.slot}")
    if len(grant.prompt_digest) != _DIGEST_BYTES:
        raise BadFrame(f"a grant whose digest has {len(grant.prompt_digest)} bytes")


def _decode(decoder: msgspec.msgpack.Decoder, frame: bytes, limit_bytes: int = MAX_FRAME_BYTES):  # type: ignore[no-untyped-def]
    if len(frame) > limit_bytes:
        raise BadFrame(f"{len(frame)} bytes, at most {limit_bytes} are taken")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrame(readable(str(error))) from error


# ------------------------------------------------------------------------------------------------- control <-> mover


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """First message to a mover process: which transport, and the inherited descriptors of pool and slots."""

    transport: str
    agent: str
    pool_fd: int
    slots_fd: int
    geometry: Geometry
    num_slots: int


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag="connect"):
    """Posts for ``peer`` read this memory from now on."""

    peer: str
    memory: PeerMemory


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """No further post names ``peer``."""

    peer: str


class Post(msgspec.Struct, frozen=True, kw_only=True, tag="post"):
    """Read ``remote_blocks[i]`` into ``local_blocks[i]``, then the lease slot.

    Both are little-endian int32: transfer units (`transports.segments`), blocks where both sides' blocks are of one
    size. With a ``grant`` (its two words) the other way: write ``local_blocks[i]`` to ``remote_blocks[i]`` while the
    slot holds them.
    """

    handle: int
    peer: str
    remote_blocks: bytes
    local_blocks: bytes
    slot: int
    grant: tuple[int, int] | None = None


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Post no further slice of ``handle``; unknown handles are ignored."""

    handle: int


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag="serve"):
    """Peers may read from here for the next ``for_ns`` (0: no longer): help the transport along promptly."""

    for_ns: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The mover works; ``offer`` is what peers need to read from it (its agent may be new: sent again then)."""

    offer: NixlOffer | None


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag="broken"):
    """The mover cannot start."""

    reason: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Nothing of ``handle`` can touch the destination any more; the fields are those of `core.ports.ReadEnded`.

    A WRITE reads no ``slot``.
    """

    handle: int
    slot: tuple[int, int] | None
    moved_bytes: int
    seconds: float
    error: str | None = None
    cut_off: bool = False


ToMover = Start | Connect | Forget | Post | Cancel | Serve
FromMover = Ready | Broken | Ended

_to_mover = msgspec.msgpack.Decoder(ToMover)
_from_mover = msgspec.msgpack.Decoder(FromMover)
_LENGTH = struct.Struct("<I")


def decode_to_mover(frame: bytes) -> ToMover:
    """What the control thread told the mover. Raises `BadFrame`."""
    message: ToMover = _decode(_to_mover, frame, MAX_MOVER_FRAME_BYTES)
    return message


def decode_from_mover(frame: bytes) -> FromMover:
    """What the mover reported. Raises `BadFrame`."""
    message: FromMover = _decode(_from_mover, frame, MAX_MOVER_FRAME_BYTES)
    return message


def pack(message: msgspec.Struct) -> bytes:
    """The message with its length in front."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Puts the length-prefixed frames of a byte stream together again."""

    def __init__(self, limit_bytes: int = MAX_MOVER_FRAME_BYTES) -> None:
        self._bytes = bytearray()
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that ``data`` completes. Raises `BadFrame` for one that is longer than the limit."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self._limit_bytes:
                raise BadFrame(f"a frame of {length} bytes, at most {self._limit_bytes} are taken")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            frame = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield frame
