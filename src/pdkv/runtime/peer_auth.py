"""Peers prove to each other that they know one secret, and seal what they say. It has no sockets, so it can be fuzzed.

For each connection of the side channel, new nonces on both sides:

    asking side                               answering side
    `Open`: my id, my nonce              ->
                                         <-   `Opened`: my id, my nonce, HMAC of all four and the wire version
    sealed `Hello`, heartbeats, ...      ->
                                         <-   sealed answers

The first frame that bears a valid seal is the asking side's own proof, for the seal's key comes from the secret and the
same five facts. A seal is a counter and an HMAC over counter and message, under a key for this connection and this
direction. So a frame counts on the connection and in the direction that it was made for, once, and not after a later
one; frames in between may be lost. Whatever is not so is dropped by `BadFrame`, and changes nothing.

Sealed is not encrypted. Without a secret both sides send plain messages, and `PlainLine` and `PlainDoor` refuse peers
that have one, as `SealedLine` and `SealedDoor` refuse those that have none.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from pdkv.runtime.shown import quoted
from pdkv.runtime.wire import (
    SEAL_BYTES,
    WIRE_VERSION,
    Answer,
    BadFrame,
    Hello,
    Open,
    Opened,
    Question,
    Refused,
    decode_answer,
    decode_question,
    encode,
)

SECRETS_DIFFER = "the secrets differ: give both instances the same --transfer-secret-file"
_NO_SECRET_HERE = "this instance has no secret and the other has one: start both with the same --transfer-secret-file"
_SECRET_WANTED = "this instance wants its peers to prove a secret: start both with the same --transfer-secret-file"

_SEALED = 0xC1  # no msgpack message begins with this byte
_HEAD = struct.Struct("<BQ16s")
_COUNTER = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_NONCE_BYTES = 32
_MAX_OFFERED = 1024  # connections that have not proved anything yet; the oldest goes
_MAX_SESSIONS = 4096  # that have; the one that was silent for longest goes, and opens again
_MAX_WAITING = 64  # messages of one connection that wait for it to open
assert _HEAD.size == SEAL_BYTES

Draw = Callable[[int], bytes]


def secret_key(content: bytes) -> bytes:
    """The 32 bytes that stand for the content of a secret file."""
    return hashlib.blake2b(content, digest_size=32, person=b"pdkv-peers").digest()


# ------------------------------------------------------------------------------------------------------- one connection


class Sealer:
    """Seals the messages of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._counter = 0

    def seal(self, message: bytes) -> bytes:
        """The frame of the next message."""
        self._counter += 1
        return _HEAD.pack(_SEALED, self._counter, _mac(self._key, self._counter, message)) + message


class Unsealer:
    """Opens what the `Sealer` with the same key has sealed: each frame once, none after a later one."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._last = 0

    def unseal(self, frame: bytes) -> bytes:
        """The message in a frame. Raises `BadFrame`, after which nothing has changed."""
        if not is_sealed(frame):
            raise BadFrame("not sealed")
        _, counter, mac = _HEAD.unpack_from(frame)
        message = frame[_HEAD.size :]
        if not hmac.compare_digest(mac, _mac(self._key, counter, message)):
            raise BadFrame("the seal is not that of this connection")
        if counter <= self._last:
            raise BadFrame("a frame that came before, or should have")
        self._last = counter
        return message


def is_sealed(frame: bytes) -> bool:
    """Whether ``frame`` has the form of a sealed one."""
    return len(frame) >= _HEAD.size and frame[0] == _SEALED


def _mac(key: bytes, counter: int, message: bytes) -> bytes:
    return hmac.digest(key, _COUNTER.pack(counter) + message, "sha256")[:16]


@dataclass(frozen=True, slots=True)
class _Keys:
    """What both sides of one connection compute, each from the secret and what it has heard."""

    proof: bytes
    to_answering: bytes
    to_asking: bytes


def _agree(secret: bytes, opening: Open, engine_id: str, nonce: bytes) -> _Keys:
    """``engine_id`` and ``nonce`` are the answering side's."""
    facts = (opening.wire.encode(), opening.engine_id.encode(), opening.nonce, engine_id.encode(), nonce)
    transcript = b"".join(_LENGTH.pack(len(fact)) + fact for fact in facts)

    def derive(use: bytes) -> bytes:
        return hmac.digest(secret, use + transcript, "sha256")

    return _Keys(derive(b"pdkv proof\0"), derive(b"pdkv to answering\0"), derive(b"pdkv to asking\0"))


# ---------------------------------------------------------------------------------------------------------- asking side


class PlainLine:
    """The asking side of a connection without a secret."""

    is_open = True

    def reset(self) -> None:
        """The connection is a new one."""

    def send(self, message: Question) -> list[bytes]:
        """The frames to send for ``message``. Raises `BadFrame` when it cannot be sent."""
        return [encode(message)]

    def receive(self, frame: bytes) -> tuple[list[Answer], list[bytes]]:
        """(what the peer has said, what to send now). Raises `BadFrame`."""
        answer = decode_answer(frame)
        if isinstance(answer, Opened):
            raise BadFrame("an answer to what was never asked")
        return [answer], []


class SealedLine:
    """The asking side of a connection on which both prove ``secret``. A `Hello` opens it; the rest waits until then."""

    def __init__(self, secret: bytes, engine_id: str, draw: Draw = secrets.token_bytes) -> None:
        self._secret, self._engine_id, self._draw = secret, engine_id, draw
        self.reset()

    def reset(self) -> None:
        """The connection is a new one: nothing has been proved on it, and what waited is lost."""
        self._opening: Open | None = None
        self._waiting: list[bytes] = []
        self._keys: tuple[Sealer, Unsealer] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the peer has proved that it knows the secret."""
        return self._keys is not None

    def send(self, message: Question) -> list[bytes]:
        """As `PlainLine.send`; no frame for what has to wait."""
        body = encode(message)
        if self._keys is not None:
            return [self._keys[0].seal(body)]
        if self._opening is None and not isinstance(message, Hello):
            raise BadFrame("the connection is not open")
        if len(self._waiting) >= _MAX_WAITING:
            raise BadFrame("too many messages wait for the connection to open")
        self._waiting.append(body)
        if self._opening is not None:
            return []
        assert isinstance(message, Hello)
        nonce = self._draw(_NONCE_BYTES)
        self._opening = Open(seq=message.seq, wire=WIRE_VERSION, engine_id=self._engine_id, nonce=nonce)
        return [encode(self._opening)]

    def receive(self, frame: bytes) -> tuple[list[Answer], list[bytes]]:
        """As `PlainLine.receive`. A peer with another secret comes out as one that has `Refused`."""
        if self._keys is not None:
            answer = decode_answer(self._keys[1].unseal(frame))
            if isinstance(answer, Opened):
                raise BadFrame("opened twice")
            return [answer], []
        answer = decode_answer(frame)
        if self._opening is None or not isinstance(answer, Opened | Refused) or answer.seq != self._opening.seq:
            raise BadFrame("not sealed")
        if isinstance(answer, Refused):
            self.reset()
            return [answer], []
        keys = _agree(self._secret, self._opening, answer.engine_id, answer.nonce)
        if not hmac.compare_digest(answer.proof, keys.proof):
            self.reset()
            return [Refused(seq=answer.seq, reason=SECRETS_DIFFER)], []
        sealer = Sealer(keys.to_answering)
        self._keys = sealer, Unsealer(keys.to_asking)
        waiting, self._waiting = self._waiting, []
        return [], [sealer.seal(body) for body in waiting]


Line = PlainLine | SealedLine


def line_for(secret: bytes | None, engine_id: str) -> Line:
    """The asking side of a new connection of ``engine_id``."""
    return PlainLine() if secret is None else SealedLine(secret, engine_id)


# ------------------------------------------------------------------------------------------------------- answering side


class PlainDoor:
    """The answering side without a secret: whoever reaches the port is heard."""

    def receive(self, sender: bytes, frame: bytes) -> Question | Opened | Refused:
        """What ``sender`` asks; or what to answer at once, unsealed. Raises `BadFrame`."""
        question = decode_question(frame)
        return Refused(seq=question.seq, reason=_NO_SECRET_HERE) if isinstance(question, Open) else question

    def frame(self, sender: bytes, answer: Answer) -> bytes:
        """``answer`` as ``sender`` is to get it. Raises `BadFrame` when it cannot be sent."""
        return encode(answer)


@dataclass(slots=True)
class _Session:
    engine_id: str
    unsealer: Unsealer
    sealer: Sealer


@dataclass
class SealedDoor:
    """The answering side of all connections of ``engine_id``; ``sender`` names one, and is never used again."""

    secret: bytes = field(repr=False)
    engine_id: str
    draw: Draw = secrets.token_bytes
    _offered: OrderedDict[bytes, _Session] = field(default_factory=OrderedDict)
    _open: OrderedDict[bytes, _Session] = field(default_factory=OrderedDict)

    def receive(self, sender: bytes, frame: bytes) -> Question | Opened | Refused:
        """As `PlainDoor.receive`."""
        if is_sealed(frame):
            return self._unseal(sender, frame)
        match decode_question(frame):
            case Open() as opening:
                return self._offer(sender, opening)
            case Hello(seq=seq):
                return Refused(seq=seq, reason=_SECRET_WANTED)
        raise BadFrame("not sealed")

    def frame(self, sender: bytes, answer: Answer) -> bytes:
        """As `PlainDoor.frame`: only who has proved the secret is answered."""
        session = self._open.get(sender)
        if session is None:
            raise BadFrame("its connection has not proved the secret")
        return session.sealer.seal(encode(answer))

    def _offer(self, sender: bytes, opening: Open) -> Opened | Refused:
        if opening.wire != WIRE_VERSION:
            reason = f"it speaks wire version {quoted(opening.wire)}, this instance {WIRE_VERSION!r}: use one release"
            return Refused(seq=opening.seq, reason=reason)
        nonce = self.draw(_NONCE_BYTES)
        keys = _agree(self.secret, opening, self.engine_id, nonce)
        session = _Session(opening.engine_id, Unsealer(keys.to_answering), Sealer(keys.to_asking))
        _put(self._offered, sender, session, _MAX_OFFERED)
        return Opened(seq=opening.seq, engine_id=self.engine_id, nonce=nonce, proof=keys.proof)

    def _unseal(self, sender: bytes, frame: bytes) -> Question:
        """By the session that stands, or by the one that was offered last: that stands from its first frame on."""
        session, offered = self._open.get(sender), self._offered.get(sender)
        if session is None and offered is None:
            raise BadFrame("its connection has not been opened")
        try:
            if session is None:
                raise BadFrame("not open yet")
            body = session.unsealer.unseal(frame)
        except BadFrame:
            if offered is None:
                raise
            body = offered.unsealer.unseal(frame)
            session = self._offered.pop(sender)
        _put(self._open, sender, session, _MAX_SESSIONS)
        question = decode_question(body)
        if isinstance(question, Open):
            raise BadFrame("opened twice")
        if isinstance(question, Hello) and question.engine_id != session.engine_id:
            raise BadFrame("a hello of another engine than the one that opened the connection")
        return question


Door = PlainDoor | SealedDoor


def door_for(secret: bytes | None, engine_id: str) -> Door:
    """The answering side of ``engine_id``."""
    return PlainDoor() if secret is None else SealedDoor(secret, engine_id)


def _put(sessions: OrderedDict[bytes, _Session], sender: bytes, session: _Session, limit: int) -> None:
    sessions[sender] = session
    sessions.move_to_end(sender)
    if len(sessions) > limit:
        sessions.popitem(last=False)
