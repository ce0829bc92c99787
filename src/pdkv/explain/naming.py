"""From how a log names a model to one whose shape is known: paths, hub caches, and quantized copies of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pdkv.errors import PdkvError
from pdkv.models.spec import ModelSpec
from pdkv.source import find_spec

_HUB_CACHE = re.compile(r"models--([^/]+)--([^/]+)")
# What publishers append to the name of a model whose weights they store in fewer bits; KV keeps its shape.
_QUANTIZED = re.compile(
    r"[-_.](?:quantized|w\d{1,2}a\d{1,2}(?:fp8)?|fp8|fp4|nvfp4|mxfp4|int[48]|awq|gptq|marlin|dynamic|block|4bit|8bit|bnb|"
    r"autoround|gguf|exl[23]|sym|bf16)$",
    re.IGNORECASE,
)


def candidate_names(name: str) -> Iterator[str]:
    """Names under which the model may be known, the most certain first: as it is, from a cache, its last part, cut."""
    cached = _HUB_CACHE.search(name)
    full = f"{cached[1]}/{cached[2]}" if cached else name.rstrip("/")
    seen = [name, full, full.rsplit("/", 1)[-1]]
    while cut := _QUANTIZED.sub("", seen[-1]):
        if cut == seen[-1]:
            break
        seen.append(cut)
    yield from dict.fromkeys(seen)


def find_named(name: str) -> ModelSpec | None:
    """The model that a log calls ``name``; ``None`` when neither the catalogue nor this machine knows it.

    A log is not trusted with the choice of a file: of this machine, only a model's directory is read.
    """
    for candidate in candidate_names(name):
        if Path(candidate).is_file():
            continue
        try:
            return find_spec(candidate).spec
        except PdkvError:
            continue
    return None
