"""Every decoder of frames against everything that can be done to a frame: a message whose bounds hold, or `BadFrame`.

Seeded, so a failure names the seed that replays it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from benchmarks.plain_pool import plain

from pdkv.core.transfer.messages import (
    Announce,
    CancelGrant,
    Done,
    Fenced,
    Gone,
    Grant,
    Heartbeat,
    Noted,
    NotWritten,
    OfGrant,
    Peer,
    Register,
    RegisterWrite,
    Withdraw,
    WriteGrant,
    Written,
)
from pdkv.runtime import wire
from pdkv.runtime.wire import (
    BadFrame,
    Broken,
    Cancel,
    Connect,
    Ended,
    Forget,
    FrameBuffer,
    Hello,
    HelloReply,
    NixlOffer,
    Open,
    Opened,
    PeerMemory,
    Post,
    Ready,
    Refused,
    Serve,
    ShmOffer,
    Start,
    decode_answer,
    decode_from_mover,
    decode_question,
    decode_to_mover,
)

NIXL = NixlOffer(
    agent="a", metadata=b"\0\xff" * 9, pool_kind="VRAM", pool_device=3, pool_address=2**47, slots_address=2**47 + 1
)
SHM = ShmOffer(boot_id="b", pid=9, pool_fd=3, pool_inode=2**40, slots_fd=4, slots_inode=5)
MEMORY = PeerMemory(geometry=plain(4, 64), num_slots=2, shm=SHM, nixl=NIXL)
GRANT = Grant(
    block_ids=(1, 2),
    block_size=16,
    num_tokens=32,
    slot=1,
    nonce=2**63,
    lease_id=7,
    token=b"t" * 16,
    proof=b"p" * 16,
    group_blocks=(1, 1),
)
WRITE_GRANT = WriteGrant(
    nonce=2**63,
    grant_id=7,
    slot=1,
    block_ids=(1, 2, 3),
    block_size=16,
    num_tokens=48,
    first_token=16,
    prompt_digest=b"d" * 16,
    group_blocks=(2, 1),
)
CONSUMER = Peer("d", "127.0.0.1", 5601)
HELLO_REPLY = HelloReply(
    seq=1,
    engine_id="p",
    nonce=3,
    grant_key=b"k" * 32,
    epoch=1,
    lease_ns=10,
    clock_ns=9,
    facts={"a": "b"},
    memory=MEMORY,
)
START = Start(transport="shm", agent="a", pool_fd=3, slots_fd=4, geometry=plain(4, 64), num_slots=2)
MESSAGES: dict[Callable[[bytes], Any], tuple[Any, ...]] = {
    decode_question: (
        Hello(seq=1, engine_id="d", target="p", facts={"dtype": "float32"}),
        Open(seq=1, wire="3", engine_id="d", nonce=b"n" * 32),
        Heartbeat((b"x" * 16, b"y" * 16)),
        Done(b"z" * 16, "d"),
        Register("t", "p"),
        RegisterWrite(transfer_id="t", producer="p", consumer=CONSUMER),
        RegisterWrite(transfer_id="t", producer="p", consumer=CONSUMER, grant=WRITE_GRANT),
        CancelGrant("t", "p", 2**63, 7),
        Withdraw("t"),
    ),
    decode_answer: (
        HELLO_REPLY,
        Opened(seq=1, engine_id="p", nonce=b"n" * 32, proof=b"p" * 32),
        Refused(seq=2, reason="no"),
        Announce("t", "r", GRANT),
        Gone("t", "over"),
        Noted(2**63, 7, True),
        Written(2**63, 7, 64),
        NotWritten(2**63, 7, "no"),
        Fenced(2**63, 7),
    ),
    decode_to_mover: (
        START,
        Connect(peer="p", memory=MEMORY),
        Forget(peer="p"),
        Post(handle=1, peer="p", remote_blocks=b"\1\0\0\0", local_blocks=b"\2\0\0\0", slot=3),
        Cancel(handle=1),
        Serve(for_ns=5),
    ),
    decode_from_mover: (
        Ready(offer=NIXL),
        Broken(reason="no"),
        Ended(handle=1, slot=(2**63, 7), moved_bytes=64, seconds=0.5),
    ),
}
ODD = (
    *(
        None,
        True,
        -1,
        0,
        2**31,
        2**63,
        2**64 - 1,
        -(2**63),
        0.5,
        float("inf"),
        "",
        "\0\n",
        "x" * 5000,
        b"",
        b"\xff" * 5000,
    ),
    *([], [None] * 300, {}, {"type": "hello"}, [[[[[]]]]]),
)


def encoded(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def words_hold(message: WriteGrant | CancelGrant | OfGrant) -> None:
    assert 0 <= message.nonce < 2**64
    assert 0 < message.grant_id < 2**64


def bounds_hold(message: Any) -> None:
    """What the rest of the code relies on without looking again."""
    match message:
        case Heartbeat():
            assert all(len(token) == 16 for token in message.tokens)
        case Done():
            assert len(message.token) == 16
        case Register() | Withdraw():
            assert 0 < len(message.transfer_id) <= 256
        case CancelGrant():
            assert 0 < len(message.transfer_id) <= 256
            words_hold(message)
        case RegisterWrite():
            assert 0 < len(message.transfer_id) <= 256
            assert 0 < message.consumer.port < 2**16
            assert 0 < len(message.consumer.host) <= 512
            assert 0 < len(message.consumer.engine_id) <= 512
            assert 0 <= message.epoch < 2**62
            if message.grant is not None:
                words_hold(message.grant)
                assert 0 <= message.grant.slot < 2**31
                assert len(message.grant.prompt_digest) == 16
        case Written():
            words_hold(message)
            assert 0 <= message.moved_bytes < 2**62
        case Noted() | NotWritten() | Fenced():
            words_hold(message)
        case Announce():
            assert (len(message.grant.token), len(message.grant.proof)) == (16, 16)
        case Open():
            assert len(message.nonce) == 32
        case Opened():
            assert (len(message.nonce), len(message.proof)) == (32, 32)
        case HelloReply():
            assert len(message.grant_key) == 32
            memory = message.memory
            assert 0 < memory.geometry.nbytes <= 2**62  # an address behind it is a 64-bit word
            assert 0 <= memory.num_slots < 2**31


def spoiled_bytes(rng: random.Random, frame: bytes, others: list[bytes]) -> bytes:
    """A few of: a bit turned, cut short, made longer, a piece doubled, another frame's put in, a length blown up."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(frame) + 1)
        match rng.randrange(6):
            case 0 if frame:
                at = rng.randrange(len(frame))
                frame = frame[:at] + bytes([frame[at] ^ 1 << rng.randrange(8)]) + frame[at + 1 :]
            case 1:
                frame = frame[:at]
            case 2:
                frame += rng.randbytes(rng.randint(1, 20))
            case 3:
                frame = frame[:at] + frame[at : at + 8] * rng.randint(2, 50) + frame[at:]
            case 4:
                other = rng.choice(others)
                cut = rng.randrange(len(other))
                frame = frame[:at] + other[cut : cut + rng.randint(1, 40)] + frame[at:]
            case _:  # heads of maps, arrays, texts and bytes that claim gigabytes
                frame = frame[:at] + rng.choice((b"\xdf", b"\xdd", b"\xdb", b"\xc6")) + b"\xff" * 4 + frame[at:]
    return frame


def spoiled_value(rng: random.Random, value: Any) -> Any:
    """The message as plain data, with one value, key or element of it, however deep, made odd, doubled or left out."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed["x" * rng.randint(1, 300)] = rng.choice(ODD)
            case _:
                changed[key] = spoiled_value(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], *([spoiled_value(rng, value[at])] * rng.randint(0, 3)), *value[at + 1 :]]
    return rng.choice(ODD)


def test_every_message_of_every_decoder_is_tried() -> None:
    decoders = {name: one for name, one in vars(wire).items() if name.startswith("decode_")}
    assert set(decoders.values()) == set(MESSAGES)
    unions = {
        decode_question: wire.Question | Open,
        decode_answer: wire.Answer | Opened,
        decode_to_mover: wire.ToMover,
        decode_from_mover: wire.FromMover,
    }
    for decode, union in unions.items():
        assert {type(message) for message in MESSAGES[decode]} == set(get_args(union))


@pytest.mark.parametrize("decode", MESSAGES, ids=lambda d: d.__name__)
def test_valid_messages_come_through(decode: Callable[[bytes], Any]) -> None:
    for message in MESSAGES[decode]:
        assert decode(encoded(message)) == message
        bounds_hold(message)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("decode", MESSAGES, ids=lambda d: d.__name__)
def test_spoiled_frames_are_dropped_or_are_messages_in_bounds(decode: Callable[[bytes], Any], seed: int) -> None:
    rng = random.Random(seed)
    valid = [encoded(message) for messages in MESSAGES.values() for message in messages]
    own = [encoded(message) for message in MESSAGES[decode]]
    taken = 0
    for _ in range(4000):
        frame = rng.choice(own)
        if rng.random() < 0.5:
            plain = msgspec.msgpack.decode(frame)
            for _ in range(rng.randint(1, 2)):
                plain = spoiled_value(rng, plain)
            frame = encoded(plain)
        else:
            frame = spoiled_bytes(rng, frame, valid)
        try:
            bounds_hold(decode(frame))
            taken += 1
        except BadFrame as error:
            assert str(error).isprintable()  # it is logged
    assert 0 < taken < 2000, "the damage must be small enough to pass now and then, and large enough to be seen"


@pytest.mark.parametrize("decode", MESSAGES, ids=lambda d: d.__name__)
def test_random_bytes_are_dropped(decode: Callable[[bytes], Any]) -> None:
    rng = random.Random(9)
    for _ in range(4000):
        with pytest.raises(BadFrame):
            decode(rng.randbytes(rng.randint(0, 200)))


@pytest.mark.parametrize("decode", MESSAGES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1a", b"\xdd\0\0\0\1"], ids=["array", "map", "array32"])
def test_deep_nesting_is_dropped(decode: Callable[[bytes], Any], head: bytes) -> None:
    for depth in (100, 1000, 200_000):
        with pytest.raises(BadFrame):
            decode(head * depth + b"\xc0")
        inside = msgspec.msgpack.encode({"type": "hello", "facts": {}})[:-1]  # where a field of a message stands
        with pytest.raises(BadFrame):
            decode(inside + head * depth + b"\xc0")


@pytest.mark.parametrize("decode", MESSAGES, ids=lambda d: d.__name__)
def test_other_channels_messages_are_dropped(decode: Callable[[bytes], Any]) -> None:
    for other, messages in MESSAGES.items():
        for message in messages if other is not decode else ():
            with pytest.raises(BadFrame):
                decode(encoded(message))


def with_geometry(**changes: int) -> PeerMemory:
    """Memory whose geometry is one that no instance can have."""
    geometry = msgspec.structs.asdict(MEMORY.geometry) | changes
    impossible = msgspec.defstruct("Impossible", list(geometry))(**geometry)
    return msgspec.structs.replace(MEMORY, geometry=impossible)


@pytest.mark.parametrize("decode", [decode_question, decode_answer], ids=lambda d: d.__name__)
def test_oversized_frames_are_not_even_looked_at(decode: Callable[[bytes], Any]) -> None:
    with pytest.raises(BadFrame, match="at most"):
        decode(encoded(Refused(seq=1, reason="x" * wire.MAX_FRAME_BYTES)))


@pytest.mark.parametrize(
    "bad",
    [
        with_geometry(num_blocks=-1),
        with_geometry(num_blocks=2**62),
        with_geometry(head_bytes=2**40),
        with_geometry(num_blocks=2**30, block_size=2**30, head_bytes=8),
        with_geometry(layers=0),
        with_geometry(ranks=2**11, heads=2**11),
        with_geometry(ranks=2, heads=3),
        msgspec.structs.replace(MEMORY, num_slots=2**63),
        msgspec.structs.replace(MEMORY, shm=msgspec.structs.replace(SHM, pid=2**40)),
        msgspec.structs.replace(MEMORY, shm=msgspec.structs.replace(SHM, pool_fd=-1)),
        msgspec.structs.replace(MEMORY, nixl=msgspec.structs.replace(NIXL, pool_address=2**63)),
        msgspec.structs.replace(MEMORY, nixl=msgspec.structs.replace(NIXL, pool_device=-1)),
    ],
)
def test_memory_that_cannot_be_is_dropped(bad: PeerMemory) -> None:
    with pytest.raises(BadFrame):
        decode_answer(encoded(msgspec.structs.replace(HELLO_REPLY, memory=bad)))


@pytest.mark.parametrize("seed", range(4))
def test_a_spoiled_stream_of_the_mover_gives_frames_or_ends(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        stream = b"".join(wire.pack(message) for message in MESSAGES[decode_from_mover])
        stream = spoiled_bytes(rng, stream, [stream])
        buffer, frames = FrameBuffer(limit_bytes=1 << 16), []
        try:
            for at in range(0, len(stream), 7):
                frames += list(buffer.feed(stream[at : at + 7]))
            for frame in frames:
                decode_from_mover(frame)
        except BadFrame:
            pass
        assert sum(len(frame) + 4 for frame in frames) <= len(stream)
