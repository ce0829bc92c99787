"""Facts of known models, shipped in the wheel: sizing them needs no download.

One file per publisher (``*.jsonl``), one line per model: its name on the hub, other names of the same shape, where its
config was read, and the config itself. A config is whole but for fields that size nothing (token ids, dropouts, code
to load ...), and names that differ in a number only are folded (``layers.{0-61}.mlp``); reading unfolds them. Only the
line of the model that is asked for is parsed further than its names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import msgspec

_RANGES = re.compile(r"\{([\d,-]+)\}")


class CatalogModel(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """One known model.

    ``name`` is its name on the hub, ``aliases`` are further names under which the same config holds, ``source`` says
    where the config was read.
    """

    name: str
    aliases: tuple[str, ...]
    source: str
    stored: msgspec.Raw = msgspec.field(name="config")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        config: dict[str, Any] = msgspec.json.decode(self.stored)
        return {key: _unfolded(value) if key == "quantization_config" else value for key, value in config.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and its aliases."""
        return (self.name, *self.aliases)


@cache
def catalog() -> dict[str, CatalogModel]:
    """All known models by name, in alphabetical order."""
    decoder = msgspec.json.Decoder(CatalogModel)
    found = [
        model
        for entry in files(__name__).iterdir()
        if entry.name.endswith(".jsonl")
        for model in decoder.decode_lines(entry.read_bytes())
    ]
    return {model.name: model for model in sorted(found, key=lambda model: model.name.lower())}


def find_model(ref: str) -> CatalogModel | None:
    """The known model called ``ref``: a name or alias, or the last part of one, in any case; else ``None``.

    A last part that models of several publishers have is nobody's.
    """
    wanted = ref.lower()
    full, short = _by_name()
    return full.get(wanted) or short.get(wanted)


def similar_names(ref: str, count: int = 5) -> list[str]:
    """Names of known models that look like ``ref``, the nearest first."""
    from difflib import get_close_matches  # only a misspelt name pays for it

    wanted = ref.lower().rsplit("/", 1)[-1]
    spelled = {name.lower().rsplit("/", 1)[-1]: name for model in catalog().values() for name in model.names}
    begun = [part for part in spelled if len(wanted) > 2 and (wanted.startswith(part) or part.startswith(wanted))]
    found = [
        *sorted(begun, key=lambda part: abs(len(part) - len(wanted))),
        *get_close_matches(wanted, spelled, n=count),
    ]
    return [spelled[part] for part in dict.fromkeys(found)][:count]


@cache
def _by_name() -> tuple[dict[str, CatalogModel], dict[str, CatalogModel | None]]:
    full = {name.lower(): model for model in catalog().values() for name in model.names}
    short: dict[str, CatalogModel | None] = {}
    for name, model in full.items():
        last = name.rsplit("/", 1)[-1]
        short[last] = model if short.get(last, model) is model else None
    return full, short


def _unfolded(value: Any) -> Any:
    """Lists of names and keys of mappings with their ranges written out."""
    if isinstance(value, Mapping):
        return {name: _unfolded(inner) for key, inner in value.items() for name in _names(key)}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [name for item in value for name in _names(item)]
    return value


def _names(folded: str) -> list[str]:
    """``a.{0-2,5}.b`` -> a.0.b, a.1.b, a.2.b, a.5.b; an expression (``re:``) and a name without a range stay."""
    found = None if folded.startswith("re:") else _RANGES.search(folded)
    if found is None:
        return [folded]
    numbers: list[int] = []
    for part in found[1].split(","):
        low, _, high = part.partition("-")
        numbers += range(int(low), int(high or low) + 1)
    return [folded[: found.start()] + str(number) + folded[found.end() :] for number in numbers]
