"""The side channel's codec: what goes in comes out, and nothing that comes from outside can do more than be dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from benchmarks.plain_pool import plain
from hypothesis import given, settings
from hypothesis import strategies as st

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
    FrameBuffer,
    Hello,
    HelloReply,
    NixlOffer,
    PeerMemory,
    Refused,
    decode_answer,
    decode_question,
    encode,
)

MEMORY = PeerMemory(
    geometry=plain(4, 64),
    num_slots=2,
    nixl=NixlOffer(
        agent="a",
        metadata=b"\0\xff",
        pool_kind="VRAM",
        pool_device=3,
        pool_address=2**47,
        slots_address=2**47 + 1,
    ),
)
GRANT = Grant(
    block_ids=(3, 1),
    block_size=16,
    num_tokens=20,
    slot=1,
    nonce=3,
    lease_id=2**60,
    token=b"t" * 16,
    proof=b"p" * 16,
    group_blocks=(2,),
)
CONSUMER = Peer("d", "127.0.0.1", 5601)
WRITE_GRANT = WriteGrant(
    nonce=2**64 - 1,
    grant_id=1,
    slot=0,
    block_ids=(4, 2),
    block_size=16,
    num_tokens=32,
    first_token=0,
    prompt_digest=b"d" * 16,
)
QUESTIONS = [
    Hello(seq=1, engine_id="d", target="p", facts={"dtype": "float32"}),
    Heartbeat((b"x" * 16, b"y" * 16)),
    Done(b"z" * 16, "d"),
    Register("transfer-1", "p"),
    RegisterWrite(transfer_id="transfer-1", producer="p", consumer=CONSUMER, grant=WRITE_GRANT),
    CancelGrant("transfer-1", "p", 2**64 - 1, 1),
    Withdraw("transfer-1"),
]
ANSWERS = [
    HelloReply(
        seq=1, engine_id="p", nonce=3, grant_key=b"k" * 32, epoch=1, lease_ns=10, clock_ns=-5, facts={}, memory=MEMORY
    ),
    Refused(seq=2, reason="no"),
    Announce("transfer-1", "r", GRANT),
    Gone("transfer-1", "it died"),
    Noted(2**64 - 1, 1, False),
    Written(2**64 - 1, 1, 2**40),
    NotWritten(2**64 - 1, 1, "it died"),
    Fenced(2**64 - 1, 1),
]

# Anything msgpack can say, in the shapes that come near a message.
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
near_messages = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            [
                *("hello", "heartbeat", "done", "hello_reply", "refused", "register", "withdraw", "announce", "gone"),
                *("register_write", "cancel_grant", "noted", "written", "not_written", "fenced"),
            ]
        )
    },
    optional=dict.fromkeys(
        (
            *("seq", "engine_id", "target", "facts", "tokens", "token", "consumer", "nonce", "grant_key", "memory"),
            *("transfer_id", "producer", "request_id", "grant", "reason", "grant_id", "writing", "moved_bytes"),
        ),
        anything,
    ),
)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: type(q).__name__)
def test_questions_survive_the_wire(question: wire.Question) -> None:
    assert decode_question(encode(question)) == question


@pytest.mark.parametrize("epoch", [-1, 2**62])
def test_registrations_of_no_epoch_are_dropped(epoch: int) -> None:
    message = RegisterWrite(transfer_id="t", producer="p", consumer=CONSUMER, epoch=epoch)
    with pytest.raises(BadFrame, match="a registration of epoch"):
        decode_question(encode(message))


@pytest.mark.parametrize("moved_bytes", [-1, 2**62])
def test_a_write_of_odd_size_is_dropped(moved_bytes: int) -> None:
    with pytest.raises(BadFrame, match="a WRITE of"):
        decode_answer(encode(Written(1, 1, moved_bytes)))


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: type(a).__name__)
def test_answers_survive_the_wire(answer: wire.Answer) -> None:
    assert decode_answer(encode(answer)) == answer


@pytest.mark.parametrize("question", QUESTIONS[:1], ids=lambda q: type(q).__name__)
def test_a_question_is_no_answer(question: wire.Question) -> None:
    with pytest.raises(BadFrame):
        decode_answer(encode(question))


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_dropped(frame: bytes) -> None:
    for decode in (decode_question, decode_answer):
        try:
            decode(frame)
        except BadFrame:
            pass


@settings(deadline=None)
@given(near_messages | anything)
def test_wrong_types_are_dropped(message: object) -> None:
    frame = msgspec.msgpack.encode(message)
    for decode in (decode_question, decode_answer):
        try:
            decoded = decode(frame)
        except BadFrame:
            continue
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(decoded))["type"] == message["type"]  # type: ignore[index]


@settings(deadline=None)
@given(st.sampled_from(QUESTIONS), st.data())
def test_damaged_messages_are_dropped(question: wire.Question, data: st.DataObject) -> None:
    frame = bytearray(encode(question))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_question(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    except BadFrame:
        pass


@settings(deadline=None)
@given(st.sampled_from(ANSWERS), st.data())
def test_damaged_answers_are_dropped(answer: wire.Answer, data: st.DataObject) -> None:
    frame = bytearray(encode(answer))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_answer(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    except BadFrame:
        pass


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_key_of_another_length_is_dropped(length: int) -> None:
    with pytest.raises(BadFrame):
        decode_answer(encode(msgspec.structs.replace(ANSWERS[0], grant_key=b"k" * length)))


def test_deep_nesting_is_dropped() -> None:
    with pytest.raises(BadFrame):
        decode_question(b"\x91" * 100_000 + b"\x90")


def test_frames_have_a_size_limit() -> None:
    with pytest.raises(BadFrame, match="at most"):
        decode_question(b"\xc0" * (wire.MAX_FRAME_BYTES + 1))
    with pytest.raises(BadFrame, match="peers take"):
        encode(Heartbeat((b"x" * 16,) * 300_000))


@pytest.mark.parametrize("hint", [Heartbeat((b"short",)), Done(b"x" * 17, "d")], ids=["heartbeat", "done"])
def test_hints_with_malformed_tokens_are_dropped(hint: Heartbeat | Done) -> None:
    with pytest.raises(BadFrame, match="16 bytes"):
        decode_question(encode(hint))


KINDS = [
    lambda name: Register(name, "p"),
    lambda name: RegisterWrite(transfer_id=name, producer="p", consumer=CONSUMER),
    lambda name: CancelGrant(name, "p", 1, 1),
    Withdraw,
]


@pytest.mark.parametrize("transfer_id", ["", "x" * 257], ids=["empty", "long"])
@pytest.mark.parametrize("kind", KINDS, ids=["register", "write", "cancel", "withdraw"])
def test_transfer_ids_have_a_size_limit(kind: Callable[[str], wire.Question], transfer_id: str) -> None:
    with pytest.raises(BadFrame, match="transfer id of"):
        decode_question(encode(kind(transfer_id)))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ({"grant_id": 0}, "64-bit"),
        ({"nonce": -1}, "64-bit"),
        ({"slot": -1}, "slot"),
        ({"slot": 2**31}, "slot"),
        ({"prompt_digest": b"short"}, "digest"),
    ],
)
def test_registrations_with_malformed_grants_are_dropped(damage: dict[str, Any], text: str) -> None:
    grant = msgspec.structs.replace(WRITE_GRANT, **damage)
    with pytest.raises(BadFrame, match=text):
        decode_question(encode(RegisterWrite(transfer_id="t", producer="p", consumer=CONSUMER, grant=grant)))


@pytest.mark.parametrize("damage", [{"port": 0}, {"port": 65536}, {"host": ""}, {"engine_id": "x" * 513}], ids=str)
def test_registrations_from_nowhere_are_dropped(damage: dict[str, Any]) -> None:
    consumer = msgspec.structs.replace(CONSUMER, **damage)
    with pytest.raises(BadFrame, match="a peer"):
        decode_question(encode(RegisterWrite(transfer_id="t", producer="p", consumer=consumer)))


@pytest.mark.parametrize("damage", [{"token": b"short"}, {"proof": b""}, {"proof": b"p" * 17}], ids=str)
def test_announcements_with_malformed_grants_are_dropped(damage: dict[str, bytes]) -> None:
    grant = msgspec.structs.replace(GRANT, **damage)
    with pytest.raises(BadFrame, match="token and proof"):
        decode_answer(encode(Announce("transfer-1", "r", grant)))


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=8), st.integers(1, 30))
def test_frames_are_put_together_from_any_pieces(bodies: list[bytes], piece: int) -> None:
    stream = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    buffer = FrameBuffer()
    frames = [f for at in range(0, len(stream), piece) for f in buffer.feed(stream[at : at + piece])]
    assert frames == bodies


def test_a_stream_cannot_announce_a_huge_frame() -> None:
    with pytest.raises(BadFrame):
        list(FrameBuffer(limit_bytes=100).feed((101).to_bytes(4, "little")))
