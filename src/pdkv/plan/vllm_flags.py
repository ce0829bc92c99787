"""Every flag that ``vllm serve`` takes or took, and what a plan makes of it (data: vllm_flags.tsv)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, cast

Role = Literal["use", "skip", "warn"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. ``role``: it decides the plan, has no effect on KV memory, or may have one that is not counted.

    ``values`` is argparse's: ``0`` (a switch), ``1``, ``?`` or ``+``. ``removed`` flags are of releases before 0.32.
    """

    name: str
    role: Role
    spellings: tuple[str, ...]
    values: str
    removed: bool
    why: str


@cache
def flags() -> Mapping[str, Flag]:
    """Every spelling (``--tensor-parallel-size``, ``-tp``, ``--no-enforce-eager``) -> its flag."""
    found: dict[str, Flag] = {}
    text = files("pdkv.plan").joinpath("vllm_flags.tsv").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        role, name, others, values, since, why = (line.split("\t") + [""] * 5)[:6]
        flag = Flag(name, cast(Role, role), tuple(others.split()), values, since == "old", why)
        for spelling in (name, *flag.spellings):
            found[spelling] = flag
    return found


def find_flag(spelling: str) -> tuple[Flag, str] | None:
    """The flag written as ``spelling`` and its full spelling: underscores and unique beginnings count, as in vLLM."""
    known = flags()
    if spelling.startswith("--"):
        spelling = spelling.replace("_", "-")
    if spelling in known:
        return known[spelling], spelling
    if not spelling.startswith("--") or len(spelling) < 4:
        return None
    # Abbreviations are of what 0.32 has.
    longer = [other for other, flag in known.items() if other.startswith(spelling) and not flag.removed]
    return (known[longer[0]], longer[0]) if len(longer) == 1 else None
