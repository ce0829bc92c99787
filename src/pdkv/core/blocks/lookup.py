"""The longest prefix that every group has cached: a fixed point over the groups (spec block-pool 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdkv.core.blocks.groups import FullGroup
from pdkv.core.blocks.hashing import HashChain
from pdkv.core.blocks.holders import Hit
from pdkv.core.blocks.kinds.base import JointIndex, Kind
from pdkv.core.ports import Int32Array
from pdkv.units import cdiv


@dataclass(slots=True, eq=False)
class _Alike:
    """Groups of one kind and size, looked up together."""

    kind: Kind
    cached: JointIndex
    groups: list[int]
    full: bool
    blocks: list[Int32Array] = field(default_factory=list)
    tokens: int = 0


class PrefixLookup:
    """Full attention goes first, for it bounds the others; each kind accepts the candidate length or lowers it."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        alike: dict[object, list[Kind]] = {}
        for kind in kinds:
            alike.setdefault(kind.spec, []).append(kind)
        self._num_groups = len(kinds)
        self._parts = [
            _Alike(
                same[0],
                JointIndex([kind.pool.indexes[kind.group] for kind in same]),
                [kind.group for kind in same],
                isinstance(spec, FullGroup),
            )
            for spec, same in alike.items()
        ]
        self._parts.sort(key=lambda part: not part.full)
        self._one_pass = len(self._parts) == 1 or (len(self._parts) == 2 and self._parts[0].full)

    def find(self, hashes: HashChain, max_tokens: int) -> Hit:
        """At most ``max_tokens`` tokens that all groups have."""
        tokens, longest = max_tokens, 0
        looked: set[int] = set()
        while True:
            candidate = tokens
            for number, part in enumerate(self._parts):
                if part.full and number in looked:  # whatever it hit, it also hits every shorter prefix of
                    candidate = min(candidate, part.tokens)
                    continue
                part.blocks, part.tokens = part.kind.find(part.cached, hashes, candidate)
                looked.add(number)
                candidate = part.tokens
                longest = max(longest, candidate)
            settled = candidate >= tokens
            tokens = candidate
            if settled or self._one_pass:
                break
        return self._hit(tokens, longest)

    def _hit(self, tokens: int, longest: int) -> Hit:
        by_group: dict[int, Int32Array] = {}
        for part in self._parts:
            for group, blocks in zip(part.groups, part.blocks, strict=True):
                by_group[group] = blocks[: cdiv(tokens, part.kind.block_size)] if part.full else blocks
            part.blocks = []
        boundary = longest if longest > tokens else 0
        return Hit(tokens, tuple(by_group[group] for group in range(self._num_groups)), boundary)
