"""Facts of known models, one JSON file each, shipped in the wheel: sizing them needs no download.

A file holds ``name``, ``aliases``, ``params`` (parameters, tied embeddings counted once) and ``config``, the fields of
the model's config.json that the layout reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One known model."""

    name: str
    aliases: tuple[str, ...]
    params: int
    config: dict[str, Any]


@cache
def catalog() -> dict[str, CatalogModel]:
    """All known models by name, in alphabetical order."""
    found = {}
    for entry in sorted(files(__name__).iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            model = msgspec.json.decode(entry.read_bytes(), type=CatalogModel)
            found[model.name] = model
    return found


def find_model(ref: str) -> CatalogModel | None:
    """The known model called ``ref`` (its name or an alias such as its hub id, in any case), or ``None``."""
    wanted = ref.lower()
    for model in catalog().values():
        if wanted in (model.name, *(alias.lower() for alias in model.aliases)):
            return model
    return None
