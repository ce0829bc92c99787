"""What decode instances keep of conversations, remembered for their next turns (bidirectional mode).

Clients neither see nor send `kv_transfer_params`, so the router reads them out of D's answer, and gives them to the
prefill instance that gets the conversation's next turn. That turn is known by its beginning: the messages of the turn
before and the answer to them; of a completion, its text up to a piece's end (`affinity`), or its prompt where that is
token ids. Whether the beginning is the same to the token is P's to tell, by the marks that come with the params.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from pdkv.serve.affinity import prefix_keys

_MOST_BYTES = 64 << 20  # of params remembered
_MOST_EVENT_BYTES = 4 << 20  # of an answer that does not end a line: it is passed on unread
_PARAMS = b'"kv_transfer_params"'


def turn_keys(body: dict[str, Any]) -> list[bytes]:
    """A key for each beginning of the conversation that an earlier turn may have had, the shortest first."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return prefix_keys(body)
    state = hashlib.blake2b(repr(body.get("cache_salt")).encode(), digest_size=16)
    keys = []
    for message in messages:
        said = message if isinstance(message, dict) else {}
        state.update(msgspec.json.encode([said.get("role"), said.get("content")]))
        keys.append(state.digest())
    return keys


def answered(body: dict[str, Any], text: str) -> dict[str, Any]:
    """The conversation of ``body`` with the answer ``text`` behind it."""
    if isinstance(body.get("messages"), list):
        return {**body, "messages": [*body["messages"], {"role": "assistant", "content": text}]}
    prompt = body.get("prompt")
    return {**body, "prompt": prompt + text} if isinstance(prompt, str) else body


@dataclass(frozen=True, slots=True)
class Kept:
    """What the instance ``label`` keeps of a conversation until ``until_s``."""

    label: str
    params: bytes
    until_s: float


class TurnMemory:
    """The last turn of each conversation. Bounded in bytes and by the time for which it is kept; the oldest go first.

    ``usable`` says whether the instance of that label may still be asked for anything.
    """

    def __init__(self, ttl_s: float, usable: Callable[[str], bool], most_bytes: int = _MOST_BYTES) -> None:
        self._ttl_s, self._usable, self._most_bytes = ttl_s, usable, most_bytes
        self._turns: OrderedDict[bytes, Kept] = OrderedDict()
        self._lives: dict[str, str] = {}  # by label, the engine id under which it has kept all that is remembered
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def remember(self, body: dict[str, Any], text: str, label: str, params: Any) -> None:
        """``label`` has answered ``body`` with ``text`` and keeps what ``params`` say. Without params: nothing."""
        engine_id = params.get("remote_engine_id") if isinstance(params, dict) else None
        keys = turn_keys(answered(body, text))
        if not isinstance(engine_id, str) or not keys:
            return
        if self._lives.get(label) != engine_id:
            self.forget(label)  # it has been restarted since
            self._lives[label] = engine_id
        kept = Kept(label, msgspec.json.encode(params), time.monotonic() + self._ttl_s)
        self._drop(keys[-1])
        self._turns[keys[-1]] = kept
        self._bytes += len(kept.params)
        while self._turns and (self._bytes > self._most_bytes or self._oldest().until_s <= time.monotonic()):
            self._drop(next(iter(self._turns)))

    def take(self, body: dict[str, Any]) -> Any:
        """The params of the latest turn that ``body`` goes on from, once; ``None`` when nothing is kept of it."""
        for key in reversed(turn_keys(body)):
            kept = self._turns.get(key)
            if kept is not None:
                self._drop(key)
                if kept.until_s > time.monotonic() and self._usable(kept.label):
                    return msgspec.json.decode(kept.params)
        return None

    def forget(self, label: str) -> None:
        """``label`` has lost its memory."""
        for key in [key for key, kept in self._turns.items() if kept.label == label]:
            self._drop(key)

    def _oldest(self) -> Kept:
        return next(iter(self._turns.values()))

    def _drop(self, key: bytes) -> None:
        kept = self._turns.pop(key, None)
        if kept is not None:
            self._bytes -= len(kept.params)


class Listener:
    """Reads one answer of a decode instance as it passes by, takes the params out, and remembers them."""

    def __init__(self, turns: TurnMemory, body: dict[str, Any], label: str) -> None:
        self._turns, self._body, self._label = turns, body, label
        self._text: list[str] = []

    async def streamed(self, chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Server-sent events; those without params as they are."""
        rest = b""
        async with aclosing(chunks):
            async for chunk in chunks:
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    yield self._event(event) + b"\n\n"
                if len(rest) > _MOST_EVENT_BYTES:
                    yield rest
                    rest = b""
        if rest:
            yield rest

    async def whole(self, chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """An answer in one piece."""
        async with aclosing(chunks):
            content = b"".join([chunk async for chunk in chunks])
        yield self._read(content)

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return event
        return b"data: " + self._read(event.removeprefix(b"data: "))

    def _read(self, content: bytes) -> bytes:
        """Note what is said; returns ``content`` without params."""
        try:
            said = msgspec.json.decode(content)
            for choice in said["choices"]:
                if choice["index"] == 0:
                    part = choice.get("message") or choice.get("delta") or choice
                    self._text.append(part.get("content") or part.get("text") or "")
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):  # no answer: nothing to remember
            return content
        if _PARAMS not in content or (params := said.get("kv_transfer_params")) is None:
            return content
        # They come with the end of the text, and the next turn may follow as soon as the client has seen that.
        self._turns.remember(self._body, "".join(self._text), self._label, params)
        said["kv_transfer_params"] = None
        return msgspec.json.encode(said)
