"""What makes equal tokens differ in content: adapter, multimodal input, salt, embeddings (spec block-pool 3)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

#: One more fact that a block's content depends on: a tag ("lora", "mm", "cache_salt", "prompt_embeds") and its values.
ExtraKey = tuple[str | bytes | int, ...]
ExtraKeys = tuple[ExtraKey, ...]


class LoraAdapter(NamedTuple):
    """The adapter a request is computed with; the path too, so that a name pointed elsewhere shares nothing."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, clip, ...: ``identifier`` names its content, which stands for tokens offset .. offset + length.

    An encoder's output stands in all of these tokens, or in those of ``embedded`` (start, stop), from ``offset`` on;
    between them are tokens like line breaks.
    """

    identifier: str
    offset: int
    length: int
    embedded: tuple[tuple[int, int], ...] | None = None

    @property
    def embeddings(self) -> int:
        """Embeddings that its encoder puts out."""
        return self.embeddings_in(0, self.length)

    def embeddings_in(self, start: int, stop: int) -> int:
        """How many of them stand in its tokens ``start:stop``."""
        if self.embedded is None:
            return stop - start
        return sum(max(min(end, stop) - max(begin, start), 0) for begin, end in self.embedded)


class ExtraKeySource(Protocol):
    """The extra keys of any range of one request's tokens."""

    @property
    def empty(self) -> bool:
        """Whether no range has any."""
        ...

    def of(self, start: int, end: int) -> ExtraKeys:
        """Keys of tokens ``start:end``, in vLLM's order."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ContentKeys:
    """What the KV of a request depends on besides its tokens.

    ``lora`` is (name, path). ``multimodal`` is sorted by offset. ``prompt_embeds`` [prompt tokens, hidden size] are
    embeddings given in place of tokens; their bytes are hashed as they lie in memory (bfloat16: a uint16 view).
    """

    cache_salt: str | None = None
    lora: LoraAdapter | tuple[str, str] | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    prompt_embeds: npt.NDArray[Any] | None = None

    @property
    def empty(self) -> bool:
        """Whether no range has any."""
        return not (self.cache_salt or self.lora or self.multimodal) and self.prompt_embeds is None

    def of(self, start: int, end: int) -> ExtraKeys:
        """Keys of tokens ``start:end``: adapter, items that overlap them, salt, embeddings.

        The salt is in the first range only, for chaining spreads it. An item's key has its offset from ``start``.
        """
        lora: ExtraKeys = (("lora", *self.lora),) if self.lora else ()
        items: ExtraKeys = tuple(
            ("mm", item.identifier, item.offset - start)
            for item in self.multimodal
            if item.offset < end and item.offset + item.length > start
        )
        salt: ExtraKeys = (("cache_salt", self.cache_salt),) if self.cache_salt and start == 0 else ()
        return lora + items + salt + self._embeds_key(start, end)

    def _embeds_key(self, start: int, end: int) -> ExtraKeys:
        if self.prompt_embeds is None:
            return ()
        return (("prompt_embeds", hashlib.sha256(self.prompt_embeds[start:end].tobytes()).digest()),)

    def alike(self, other: ContentKeys) -> bool:
        """Whether both give the same keys everywhere; embeddings count as different."""
        mine, theirs = (self.cache_salt, self.lora, self.multimodal), (other.cache_salt, other.lora, other.multimodal)
        return mine == theirs and self.prompt_embeds is None and other.prompt_embeds is None
