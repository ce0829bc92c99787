"""Option values as people (and vLLM's command lines) write them -> ints. Each raises ConfigError naming the option."""

from __future__ import annotations

import re
from typing import Literal

from pdkv.errors import ConfigError

_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgtKMGT]?)(?P<suffix>i?[bB]?)")
# More than anyone means, and less than what Python converts.
_MOST_DIGITS = 30
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


_BYTES = "1073741824, 512MiB, 2GiB, 1.5g or 4G"
TOKENS = "4096, 8k (8000) or 8K (8192)"
"""Examples of lengths, for `parse_count`."""


def parse_count(option: str, text: str, examples: str = _BYTES) -> int:
    """An integer with vLLM's suffixes: ``k m g t`` are powers of 1000, ``K M G T`` and ``KiB``.. powers of 1024.

    ``KB``, ``MB``, ``GB`` are powers of 1000. Decimals go with a suffix only: ``1.5g``, ``2.5GiB``.
    """
    match = _NUMBER.fullmatch(text.strip().replace("_", "").replace(",", ""))
    if (
        match is None
        or len(match["number"]) > _MOST_DIGITS
        or ("." in match["number"] and not match["unit"])
        or (match["suffix"] and not match["unit"])
    ):
        text = text if len(text) <= _MOST_DIGITS else f"{text[:_MOST_DIGITS]}..."
        raise ConfigError(f"{option} {text!r}: not a number that can be used here; write for example {examples}")
    unit, suffix = match["unit"], match["suffix"].lower()
    binary = suffix.startswith("i") or (unit.isupper() and not suffix)
    factor = (1024 if binary else 1000) ** _POWER[unit.lower()]
    if "." not in match["number"]:
        return int(match["number"]) * factor
    whole, fraction = match["number"].split(".")
    return int(whole + fraction) * factor // 10 ** len(fraction)


def parse_optional_count(option: str, text: str | None, examples: str = _BYTES) -> int | None:
    """`parse_count`, or ``None`` for an option that was not given."""
    return None if text is None else parse_count(option, text, examples)


def parse_max_model_len(text: str | None) -> int | Literal["auto"] | None:
    """``None``: the model's own; ``auto`` (vLLM also writes -1): the longest that fits; else tokens: 4096 or 8k."""
    if text is None:
        return None
    if text.strip().lower() in ("auto", "-1"):
        return "auto"
    return parse_count("--max-model-len", text, "4096, 8k or auto")
