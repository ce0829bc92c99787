"""Which instance has lately been given which prefix: a prompt is best served where its beginning is cached.

The router has no tokenizer, so prefixes are pieces of the request's text (or token ids) as the client sent it; a
piece's key covers all pieces before it, as block hashes do.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import msgspec

_PIECE_BYTES = 256
_MOST_PIECES = 4096  # of one prompt: what lies beyond its first MiB is not told apart
_MOST_KEYS = 1 << 16


def prefix_keys(body: dict[str, Any]) -> list[bytes]:
    """One key per whole piece of the prompt, covering everything up to the piece's end, the cache salt included."""
    content = body.get("messages", body.get("prompt"))
    data = msgspec.json.encode(content)[: _PIECE_BYTES * _MOST_PIECES]
    state = hashlib.blake2b(repr(body.get("cache_salt")).encode(), digest_size=16)
    keys = []
    for start in range(0, len(data) - _PIECE_BYTES + 1, _PIECE_BYTES):
        state.update(data[start : start + _PIECE_BYTES])
        keys.append(state.digest())
    return keys


class PrefixMemory:
    """The last holders of each prefix, the oldest forgotten first. A memory of what was sent, not of what is cached."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def remember(self, keys: list[bytes], label: str) -> None:
        """``label`` is being given a prompt with these keys."""
        for key in keys:
            self._holders.setdefault(key, set()).add(label)
            self._holders.move_to_end(key)
        while len(self._holders) > self._most_keys:
            self._holders.popitem(last=False)

    def forget(self, label: str) -> None:
        """``label`` has lost its memory."""
        for holders in self._holders.values():
            holders.discard(label)

    def share(self, keys: list[bytes], label: str) -> float:
        """Which share of the prompt (0..1), from its start on, ``label`` has been given before."""
        known = 0
        for key in keys:
            if label not in self._holders.get(key, ()):
                break
            known += 1
        return known / len(keys) if keys else 0.0
