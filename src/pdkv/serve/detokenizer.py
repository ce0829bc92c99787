"""Tokens to text while they arrive: no torn characters, stop strings found across token borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 5
_MAX_TORN = 3  # an unfinished UTF-8 character is at most three bytes, so it decodes to at most three U+FFFD
_MAX_WINDOW = 32


class IncrementalDetokenizer:
    """Text of a growing token sequence, given out as soon as it can no longer change.

    A token may end in the middle of a character, and what it decodes to depends on its neighbours, so a window that
    starts a few tokens earlier is decoded and what is new in it given out. U+FFFD at the very end is held back: it may
    be the first half of a character. Without a tokenizer (None) there is no text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window = [int(token) for token in prompt[-_CONTEXT_TOKENS:]]
        self._read = len(self._window)
        self._emitted = len(self._settled(self._decode(self._window)))

    def push(self, token: int) -> str:
        """The text that is certain now that ``token`` is known ("" while a character is incomplete)."""
        self._window.append(token)
        text = self._decode(self._window)
        settled = self._settled(text)
        new = settled[self._emitted :]
        self._emitted = max(self._emitted, len(settled))
        if len(settled) == len(text):
            self._move_window(self._read)
        elif len(self._window) > _MAX_WINDOW:
            self._move_window(len(self._window) - _CONTEXT_TOKENS)
        return new

    def _move_window(self, start: int) -> None:
        self._window = self._window[start:] or self._window
        self._read = len(self._window)
        self._emitted = len(self._settled(self._decode(self._window)))

    def _decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        return text

    @staticmethod
    def _settled(text: str) -> str:
        end = len(text)
        while end > max(0, len(text) - _MAX_TORN) and text[end - 1] == REPLACEMENT:
            end -= 1
        return text[:end]


@dataclass(frozen=True, slots=True)
class StopHit:
    """Text was cut at a stop string."""

    stop: str


class StopChecker:
    """Finds stop strings in streamed text and holds back what could be the beginning of one."""

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, StopHit | None]:
        """Text that may be shown, and the stop string found, if any (nothing is to be shown after that).

        The match that is complete first counts (of several that end together, the longest), so the answer does not
        depend on how the text was cut into tokens.
        """
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            end, at, stop = min(matches)
            self._held = ""
            return text[:end] if self._include else text[:at], StopHit(stop)
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def pass_through(self, text: str) -> str:
        """Text shown without looking for stop strings (before ``min_tokens``)."""
        text, self._held = self._held + text, ""
        return text

    def flush(self) -> str:
        """The text still held back: the sequence ended, so no stop string will complete."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` that begins ``stop``, the whole of it left out."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0


class TextStream:
    """One choice's text: detokeniser and stop strings behind one call per token."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        *,
        stops: tuple[str, ...] = (),
        include_stop: bool = False,
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self._checker = StopChecker(stops, include=include_stop)
        self._include_stop = include_stop
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.stop: StopHit | None = None

    def push(self, token: int) -> str:
        """Text to show after ``token``; sets ``stop`` when a stop string is complete. A stop token shows nothing."""
        self.num_tokens += 1
        ends_here = token in self._stop_token_ids and self.num_tokens >= self._min_tokens
        if self.stop is not None or (ends_here and not self._include_stop):
            return ""
        text = self._detokenizer.push(token)
        if self.num_tokens <= self._min_tokens:
            return self._checker.pass_through(text)
        text, self.stop = self._checker.push(text)
        return text

    def finish(self) -> str:
        """The last text, when the sequence ended without a stop string."""
        return "" if self.stop is not None else self._checker.flush()
