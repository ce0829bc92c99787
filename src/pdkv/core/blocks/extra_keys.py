"""What makes equal tokens differ in content: adapter, multimodal input, salt (spec block-pool 3)."""

from __future__ import annotations

from dataclasses import dataclass

#: tagged keys of one hash unit, in vLLM's order; empty when the tokens alone decide
ExtraKeys = tuple[tuple[str | int, ...], ...]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """The adapter a request is computed with; the path too, so that a name pointed elsewhere shares nothing."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """An image, clip or sound that stands in a prompt as ``length`` placeholder tokens from ``offset`` on."""

    identifier: str
    offset: int
    length: int


class ExtraKeySource:
    """The extra keys of any range of one request's tokens."""

    def __init__(self, lora: LoraAdapter | None, items: tuple[MultiModalItem, ...], cache_salt: str | None) -> None:
        self._lora: ExtraKeys = (("lora", lora.name, lora.path),) if lora else ()
        self._items = items
        self._salt: ExtraKeys = (("cache_salt", cache_salt),) if cache_salt else ()
        self.empty = not (self._lora or self._items or self._salt)

    def alike(self, other: ExtraKeySource) -> bool:
        """Whether both give the same keys everywhere."""
        return (self._lora, self._items, self._salt) == (other._lora, other._items, other._salt)

    def of(self, start: int, end: int) -> ExtraKeys:
        """Keys of tokens ``start:end``: adapter, then items that overlap them, then the salt in the first range only.

        Chaining spreads the salt. An item's key has its offset from ``start``, so that the same item elsewhere differs.
        """
        items = tuple(
            ("mm", item.identifier, item.offset - start)
            for item in self._items
            if item.offset < end and item.offset + item.length > start
        )
        return (*self._lora, *items, *(self._salt if start == 0 else ()))
