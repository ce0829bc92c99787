"""Peers that prove one secret to each other: what is let through, and that nothing else is, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.core.transfer.messages import Announce, Done, Gone, Heartbeat, Register
from pdkv.runtime import peer_auth
from pdkv.runtime.peer_auth import SECRETS_DIFFER, Door, Line, PlainDoor, SealedDoor, SealedLine, door_for, line_for
from pdkv.runtime.wire import BadFrame, Hello, Open, Opened, Refused, decode_answer, encode

SECRET, OTHER = b"s" * 32, b"o" * 32
FACTS = {"model": "m@1"}
HELLO = Hello(seq=3, engine_id="d", target="p", facts=FACTS)
BEAT = Heartbeat((b"t" * 16,))


def done(number: int) -> Done:
    """A message that is told from all others."""
    return Done(number.to_bytes(16, "little"), "d")


def opened(
    secret: bytes = SECRET, sender: bytes = b"c1", door: SealedDoor | None = None
) -> tuple[SealedLine, SealedDoor]:
    """Both sides of a connection after its handshake; the `Hello` has been heard."""
    line, door = SealedLine(SECRET, "d"), door or SealedDoor(SECRET, "p")
    (opening,) = line.send(HELLO)
    offer = door.receive(sender, opening)
    assert isinstance(offer, Opened)
    answers, (hello,) = line.receive(encode(offer))
    assert answers == []
    assert door.receive(sender, hello) == HELLO
    return line, door


def dropped(receive: Callable[[], object]) -> str:
    """What the `BadFrame` says."""
    with pytest.raises(BadFrame) as error:
        receive()
    return str(error.value)


def test_equal_secrets_open_and_everything_passes_in_order() -> None:
    line, door = opened()
    assert line.is_open
    for message in (BEAT, done(1), Register("t", "p"), HELLO):
        (frame,) = line.send(message)
        assert door.receive(b"c1", frame) == message
    for answer in (Gone("t", "over"), Refused(seq=3, reason="no")):
        assert line.receive(door.frame(b"c1", answer)) == ([answer], [])


def test_hints_wait_for_the_connection_to_open() -> None:
    line, door = SealedLine(SECRET, "d"), SealedDoor(SECRET, "p")
    assert dropped(lambda: line.send(BEAT)) == "the connection is not open"
    (opening,) = line.send(HELLO)
    assert line.send(done(1)) == line.send(done(2)) == []
    _, frames = line.receive(encode(door.receive(b"c", opening)))
    assert [door.receive(b"c", frame) for frame in frames] == [HELLO, done(1), done(2)]


def test_only_so_many_messages_wait() -> None:
    line = SealedLine(SECRET, "d")
    line.send(HELLO)
    with pytest.raises(BadFrame, match="too many"):
        for number in range(1000):
            line.send(done(number))


def test_another_secret_is_named_and_nothing_of_either_is_told() -> None:
    line, door = SealedLine(OTHER, "d"), SealedDoor(SECRET, "p")
    (opening,) = line.send(HELLO)
    offer = encode(door.receive(b"c", opening))
    ((refusal,), frames) = line.receive(offer)
    assert refusal == Refused(seq=HELLO.seq, reason=SECRETS_DIFFER)
    assert frames == []
    assert not line.is_open
    assert "--transfer-secret-file" in SECRETS_DIFFER
    for secret in (SECRET, OTHER):
        assert secret not in opening + offer
        assert secret.decode() not in repr(door) + refusal.reason
    assert dropped(lambda: door.frame(b"c", Gone("t", "x"))) == "its connection has not proved the secret"


@pytest.mark.parametrize(
    ("asking", "answering", "says"), [(None, SECRET, "prove a secret"), (SECRET, None, "has no secret")]
)
def test_a_secret_on_one_side_only_is_refused_saying_which_option(
    asking: bytes | None, answering: bytes | None, says: str
) -> None:
    line, door = line_for(asking, "d"), door_for(answering, "p")
    (frame,) = line.send(HELLO)
    refusal = door.receive(b"c", frame)
    assert isinstance(refusal, Refused)
    assert line.receive(encode(refusal)) == ([refusal], [])
    assert refusal.seq == HELLO.seq
    assert says in refusal.reason
    assert "--transfer-secret-file" in refusal.reason


def test_without_a_secret_both_sides_speak_plainly() -> None:
    line: Line = line_for(None, "d")
    door: Door = door_for(None, "p")
    (frame,) = line.send(BEAT)
    assert door.receive(b"c", frame) == BEAT
    assert line.receive(door.frame(b"c", Gone("t", "x"))) == ([Gone("t", "x")], [])
    stray = Opened(seq=1, engine_id="p", nonce=b"n" * 32, proof=b"p" * 32)
    dropped(lambda: line.receive(encode(stray)))


@pytest.mark.parametrize("message", [BEAT, done(1), Register("t", "p")], ids=lambda m: type(m).__name__)
def test_plain_messages_are_dropped_where_a_secret_is_wanted(message: Done) -> None:
    _, door = opened()
    for sender in (b"c1", b"stranger"):
        assert dropped(lambda sender=sender: door.receive(sender, encode(message))) == "not sealed"


def test_plain_answers_are_dropped_on_an_open_connection() -> None:
    line, _ = opened()
    for answer in (Gone("t", "x"), Refused(seq=HELLO.seq, reason="forged")):
        assert dropped(lambda answer=answer: line.receive(encode(answer))) == "not sealed"
    assert line.is_open


def test_before_it_is_open_only_an_answer_to_this_opening_counts() -> None:
    line, door = SealedLine(SECRET, "d"), SealedDoor(SECRET, "p")
    (opening,) = line.send(HELLO)
    offer = door.receive(b"c", opening)
    assert isinstance(offer, Opened)
    dropped(lambda: line.receive(encode(Gone("t", "x"))))
    dropped(lambda: line.receive(encode(msgspec.structs.replace(offer, seq=offer.seq + 1))))
    line.receive(encode(offer))
    assert line.is_open


@pytest.mark.parametrize("change", [{"engine_id": "q"}, {"nonce": b"x" * 32}, {"proof": b"x" * 32}])
def test_the_proof_covers_what_the_answering_side_says(change: dict[str, object]) -> None:
    line, door = SealedLine(SECRET, "d"), SealedDoor(SECRET, "p")
    (opening,) = line.send(HELLO)
    offer = msgspec.structs.replace(door.receive(b"c", opening), **change)
    ((refusal,), _) = line.receive(encode(offer))
    assert isinstance(refusal, Refused)
    assert refusal.reason == SECRETS_DIFFER


@pytest.mark.parametrize("change", [{"engine_id": "q"}, {"nonce": b"x" * 32}])
def test_the_proof_covers_what_the_asking_side_says(change: dict[str, object]) -> None:
    line, door = SealedLine(SECRET, "d"), SealedDoor(SECRET, "p")
    (frame,) = line.send(HELLO)
    opening = msgspec.msgpack.decode(frame, type=Open)
    offer = door.receive(b"c", encode(msgspec.structs.replace(opening, **change)))
    ((refusal,), _) = line.receive(encode(offer))
    assert isinstance(refusal, Refused)
    assert refusal.reason == SECRETS_DIFFER


def test_the_proof_covers_the_wire_version(monkeypatch: pytest.MonkeyPatch) -> None:
    line, door = SealedLine(SECRET, "d"), SealedDoor(SECRET, "p")
    monkeypatch.setattr(peer_auth, "WIRE_VERSION", "another")
    (opening,) = line.send(HELLO)
    monkeypatch.undo()
    refusal = door.receive(b"c", opening)
    assert isinstance(refusal, Refused)
    assert "'another'" in refusal.reason
    true = msgspec.structs.replace(msgspec.msgpack.decode(opening, type=Open), wire=peer_auth.WIRE_VERSION)
    ((refusal,), _) = line.receive(encode(door.receive(b"c", encode(true))))  # a forger who hides it
    assert isinstance(refusal, Refused)
    assert refusal.reason == SECRETS_DIFFER


def test_an_offer_without_proof_of_the_asking_side_gives_nothing() -> None:
    """Whoever does not know the secret gets an `Opened` from anyone, and can do nothing with it."""
    _, door = opened()
    stranger = SealedLine(OTHER, "d")
    (opening,) = stranger.send(HELLO)
    assert isinstance(door.receive(b"stranger", opening), Opened)
    forged = peer_auth.Sealer(OTHER).seal(encode(BEAT))
    assert "seal" in dropped(lambda: door.receive(b"stranger", forged))
    dropped(lambda: door.frame(b"stranger", Gone("t", "x")))


def test_a_frame_counts_once_and_not_after_a_later_one() -> None:
    line, door = opened()
    first, second, third = (line.send(done(number))[0] for number in (1, 2, 3))
    assert door.receive(b"c1", second) == done(2)
    for old in (second, first):
        assert "came before" in dropped(lambda old=old: door.receive(b"c1", old))
    assert door.receive(b"c1", third) == done(3)


def test_answers_count_once_too() -> None:
    line, door = opened()
    frame = door.frame(b"c1", Gone("t", "x"))
    assert line.receive(frame) == ([Gone("t", "x")], [])
    assert "came before" in dropped(lambda: line.receive(frame))


def test_frames_of_another_connection_or_direction_are_dropped() -> None:
    line, door = opened()
    other, _ = opened(sender=b"c2", door=door)
    (frame,) = line.send(done(1))
    answer = door.frame(b"c1", Gone("t", "x"))
    dropped(lambda: door.receive(b"c2", frame))
    dropped(lambda: door.receive(b"c3", frame))
    dropped(lambda: other.receive(answer))
    dropped(lambda: line.receive(frame))  # reflected
    dropped(lambda: door.receive(b"c1", answer))
    assert door.receive(b"c1", frame) == done(1)
    assert line.receive(answer) == ([Gone("t", "x")], [])


def test_a_recorded_connection_cannot_be_played_again() -> None:
    line, door = SealedLine(SECRET, "d"), SealedDoor(SECRET, "p")
    (opening,) = line.send(HELLO)
    _, frames = line.receive(encode(door.receive(b"c", opening)))
    frames += line.send(done(1))
    for sender, listener in ((b"again", door), (b"c", SealedDoor(SECRET, "p"))):  # beside it; after a restart
        assert isinstance(listener.receive(sender, opening), Opened)
        for frame in frames:
            dropped(lambda s=sender, at=listener, f=frame: at.receive(s, f))
    assert [door.receive(b"c", frame) for frame in frames] == [HELLO, done(1)]


def test_an_opening_beside_an_open_connection_changes_nothing_until_it_is_proved() -> None:
    line, door = opened()
    door.receive(b"c1", encode(Open(seq=9, wire=peer_auth.WIRE_VERSION, engine_id="d", nonce=b"f" * 32)))
    assert door.receive(b"c1", line.send(done(1))[0]) == done(1)
    again, _ = opened(sender=b"c1", door=door)  # its own holder may open it anew
    assert door.receive(b"c1", again.send(done(2))[0]) == done(2)
    dropped(lambda: door.receive(b"c1", line.send(done(3))[0]))


def test_after_a_reset_nothing_of_the_old_connection_counts() -> None:
    line, door = opened()
    old = door.frame(b"c1", Gone("t", "x"))
    line.reset()
    assert not line.is_open
    dropped(lambda: line.receive(old))
    dropped(lambda: line.send(BEAT))


def test_an_engine_cannot_speak_for_another() -> None:
    line, door = opened()
    (frame,) = line.send(msgspec.structs.replace(HELLO, engine_id="e"))
    assert "another engine" in dropped(lambda: door.receive(b"c1", frame))


def test_a_flood_of_openings_is_bounded_and_leaves_open_connections_alone() -> None:
    line, door = opened()
    for number in range(3000):
        opening = Open(seq=1, wire=peer_auth.WIRE_VERSION, engine_id="x", nonce=number.to_bytes(32, "little"))
        door.receive(b"flood%d" % number, encode(opening))
    assert len(door._offered) == peer_auth._MAX_OFFERED
    assert door.receive(b"c1", line.send(done(1))[0]) == done(1)
    assert list(door._open) == [b"c1"]


def test_frames_that_are_too_short_or_sealed_without_a_secret_are_dropped() -> None:
    _, door = opened()
    for frame in (b"", b"\xc1", b"\xc1" * 24, b"\xc1" * 25, b"\xc1" * 4000):
        dropped(lambda f=frame: door.receive(b"c1", f))
        dropped(lambda f=frame: PlainDoor().receive(b"c1", f))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_frame_is_dropped_and_changes_nothing(data: st.DataObject) -> None:
    line, door = opened()
    (frame,) = line.send(done(1))
    answer = door.frame(b"c1", Gone("t", "x"))
    for whole, receive in ((frame, lambda f: door.receive(b"c1", f)), (answer, line.receive)):
        damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
        for _ in range(data.draw(st.integers(0, 3)) if damaged else 0):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
        if damaged != whole:
            dropped(lambda d=bytes(damaged), r=receive: r(d))
    assert door.receive(b"c1", frame) == done(1)
    assert line.receive(answer) == ([Gone("t", "x")], [])


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_stranger_does_only_what_was_sent_is_heard_once_and_in_order(seed: int) -> None:
    """Four connections, two doors, and somebody in between who drops, repeats, swaps, damages and makes up frames."""
    rng = random.Random(seed)
    doors = [SealedDoor(SECRET, name, rng.randbytes) for name in ("p", "q")]
    lines = {b"c%d" % at: SealedLine(SECRET, "d", rng.randbytes) for at in range(4)}
    sent: dict[bytes, list[object]] = {name: [] for name in lines}
    heard: dict[tuple[bytes, int], list[object]] = {}
    seen: list[bytes] = [encode(BEAT), encode(HELLO)]  # all frames that ever travelled, in either direction
    handshakes = 0
    for number in range(1500):
        name = rng.choice(list(lines))
        line, at = lines[name], int(name[1:]) % 2
        act = rng.random()
        try:
            if act < 0.03:
                line.reset()
            elif act < 0.1 or not line.is_open:
                line.reset()
                (opening,) = line.send(msgspec.structs.replace(HELLO, seq=number))
                seen.append(opening)
                offer = encode(doors[at].receive(name, opening))  # type: ignore[arg-type]
                seen.append(offer)
                if rng.random() < 0.8:
                    _, frames = line.receive(offer)
                    sent[name].append(msgspec.structs.replace(HELLO, seq=number))
                    heard.setdefault((name, at), []).append(doors[at].receive(name, frames[0]))
                    seen += frames
                    handshakes += 1
            elif act < 0.5:
                (frame,) = line.send(done(number))
                sent[name].append(done(number))
                seen.append(frame)
                if rng.random() < 0.8:
                    heard.setdefault((name, at), []).append(doors[at].receive(name, frame))
            else:
                frame = rng.choice(seen)
                if act > 0.8:
                    spoiled = bytearray(frame)
                    spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
                    frame = bytes(spoiled)
                to, door_at = rng.choice([*lines, b"stranger"]), rng.randrange(2)
                if rng.random() < 0.2 and to in lines:
                    answers, _ = lines[to].receive(frame)
                    assert all(isinstance(answer, Refused) for answer in answers)  # of an opening, at most
                    continue
                question = doors[door_at].receive(to, frame)
                if not isinstance(question, Opened | Refused):
                    heard.setdefault((to, door_at), []).append(question)
        except BadFrame:
            pass
    assert handshakes > 20
    for (name, at), messages in heard.items():
        assert at == int(name[1:]) % 2, "heard at the other door"
        later = iter(sent[name])
        assert all(message in later for message in messages), "repeated, out of order, or never sent"


def test_announcements_are_sealed() -> None:
    """They carry lease tokens: whoever has not proved the secret is sent none (those on the way may read them)."""
    _, door = opened()
    announce = msgspec.msgpack.decode(
        msgspec.msgpack.encode(
            {
                "type": "announce",
                "transfer_id": "t",
                "request_id": "r",
                "grant": {
                    "block_ids": [1],
                    "block_size": 16,
                    "num_tokens": 16,
                    "slot": 0,
                    "nonce": 1,
                    "lease_id": 1,
                    "token": b"t" * 16,
                    "proof": b"p" * 16,
                },
            }
        ),
        type=Announce,
    )
    assert decode_answer(encode(announce)) == announce
    assert dropped(lambda: door.frame(b"stranger", announce)) == "its connection has not proved the secret"
