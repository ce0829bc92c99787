"""Which texts are too long to be tokenised at all: tens of megabytes take a tokenizer a minute.

Byte-level BPE gives a lower bound of the tokens. Of every other kind (and of bytes that byte-level BPE drops) a text of
any length can become few tokens, for spaces may be stripped and unknown characters fused, so characters are limited.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from typing import Any

_CHARS_PER_TOKEN = 16  # more than any language or program has, where no single token is as long


def most_characters(tokenizer: Any, most_tokens: int) -> int:
    """How long a text of ``most_tokens`` tokens can be in characters, where none of them vanish.

    Everything that is longer holds more tokens, or is mostly of characters that become none.
    """
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return most_tokens * max(longest, _CHARS_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class TokenBound:
    """Of a byte-level BPE tokenizer: the most UTF-8 bytes that one token stands for, and the bytes that it drops."""

    longest: int
    dropped: bytes
    normal_form: bool

    def tokens_at_least(self, text: str) -> int:
        """A lower bound of the number of tokens; special tokens that are put around the text are not counted."""
        if self.normal_form:
            text = unicodedata.normalize("NFC", text)
        return -(-len(text.encode().translate(None, self.dropped)) // self.longest)


def token_bound(tokenizer: Any) -> TokenBound | None:
    """The bound of a Hugging Face tokenizer; ``None`` where text can shrink before it is cut into tokens.

    That is: another kind than byte-level BPE, a normaliser other than NFC, tokens that swallow the spaces around them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    facts = json.loads(backend.to_str())
    model, added = facts["model"], facts["added_tokens"]
    normalizer = (facts["normalizer"] or {}).get("type")
    if (
        model.get("type") != "BPE"
        or model.get("unk_token") is not None
        or normalizer not in (None, "NFC")
        or not _keeps_all_bytes(facts["pre_tokenizer"])
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return None
    lengths = [len(piece) for piece in model["vocab"]]  # one character stands for one byte
    lengths += [len(token["content"].encode()) for token in added]
    dropped = bytes(byte for byte, character in _byte_characters() if character not in model["vocab"])
    return TokenBound(max(lengths, default=1), dropped, normalizer == "NFC")


def _keeps_all_bytes(pre_tokenizer: dict[str, Any] | None) -> bool:
    """It is byte-level, and nothing before that step removes characters."""
    if pre_tokenizer is None:
        return False
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    removes = any(step["type"] == "Split" and step["behavior"] == "Removed" for step in steps)
    kinds = {step["type"] for step in steps}
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Split", "Digits"} and not removes


def _byte_characters() -> list[tuple[int, str]]:
    """(byte, the character that stands for it in byte-level vocabularies): printable Latin-1 is itself, as in GPT-2."""
    themselves = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in themselves)
    return [*((b, chr(b)) for b in sorted(themselves)), *((b, chr(256 + i)) for i, b in enumerate(others))]
