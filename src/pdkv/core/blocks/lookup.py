"""The longest prefix that every group has cached: a fixed point over the groups (spec block-pool 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdkv.core.blocks.groups import FullGroup, StateGroup, is_cacheable
from pdkv.core.blocks.hashing import HashChain
from pdkv.core.blocks.holders import Hit, no_hit
from pdkv.core.blocks.kinds.base import EMPTY, JointIndex, Kind
from pdkv.core.ports import Int32Array
from pdkv.units import cdiv


@dataclass(slots=True, eq=False)
class _Alike:
    """Groups of one kind and size, looked up together."""

    kind: Kind
    cached: JointIndex
    groups: list[int]
    full: bool
    drops: bool
    blocks: list[Int32Array] = field(default_factory=list)
    tokens: int = 0


class PrefixLookup:
    """Full attention goes first, for it bounds the others; each kind accepts the candidate length or lowers it."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        alike: dict[object, list[Kind]] = {}
        for kind in kinds:
            if is_cacheable(kind.spec):
                alike.setdefault(kind.spec, []).append(kind)
        self._num_groups = len(kinds)
        self._nothing = no_hit(len(kinds))
        self._parts = [
            _Alike(
                same[0],
                JointIndex([kind.pool.indexes[kind.group] for kind in same]),
                [kind.group for kind in same],
                isinstance(spec, FullGroup),
                any(kind.drops for kind in same),
            )
            for spec, same in alike.items()
        ]
        self._parts.sort(key=lambda part: not part.full)
        parts = self._parts
        alone = len(parts) == 1 and (len(kinds) == 1 or not parts[0].drops)
        self._alike = alone and len(parts[0].groups) == len(kinds)  # one look answers for all
        self._one_pass = alone or (len(parts) == 2 and parts[0].full)

    def find(self, hashes: HashChain, max_tokens: int) -> Hit:
        """At most ``max_tokens`` tokens that all groups have."""
        if self._alike:
            part = self._parts[0]
            blocks, tokens = part.kind.find(part.cached, hashes, max_tokens, drop=part.drops)
            return Hit(tokens, tuple(blocks)) if tokens else self._nothing
        tokens, longest = max_tokens, 0
        looked: set[int] = set()
        dropped: set[int] = set()  # parts that have lost their end for the candidate length: once is enough
        while True:
            candidate = tokens
            for number, part in enumerate(self._parts):
                if part.full and number in looked:  # whatever it hit, it also hits every shorter prefix of
                    candidate = min(candidate, part.tokens)
                    continue
                drop = part.drops and number not in dropped
                limit = self._beyond(part, candidate, hashes) if drop else candidate
                part.blocks, part.tokens = part.kind.find(part.cached, hashes, limit, drop=drop)
                looked.add(number)
                if drop:
                    dropped.add(number)
                elif part.tokens < candidate:
                    dropped.clear()
                candidate = part.tokens
                longest = max(longest, candidate)
            settled = candidate >= tokens
            tokens = min(tokens, candidate)
            if settled or self._one_pass:
                break
        return self._hit(tokens, longest)

    @property
    def states_may_lag(self) -> bool:
        """Whether all groups are of full attention or states: the one state that matters can come with a load."""
        kinds = [part.kind for part in self._parts]
        return len(kinds) > 1 and self._parts[0].full and all(isinstance(k.spec, FullGroup | StateGroup) for k in kinds)

    def find_for_load(self, hashes: HashChain, max_tokens: int) -> tuple[Hit, bool]:
        """What full attention has, and whether a state is missing there, which a load must then bring.

        Where a state lies deeper than full attention goes, that is of no use: then it is what all groups have.
        """
        for part in self._parts:
            limit = self._beyond(part, max_tokens, hashes) if part.drops else max_tokens
            part.blocks, part.tokens = part.kind.find(part.cached, hashes, limit, drop=part.drops)
        tokens = self._parts[0].tokens
        if any(part.tokens > tokens for part in self._parts):
            return self.find(hashes, max_tokens), False
        missing = any(part.tokens < tokens for part in self._parts)
        return self._hit(tokens, 0), missing

    def _beyond(self, part: _Alike, candidate: int, hashes: HashChain) -> int:
        """Of several groups, one that loses the end of its hit may look that much further; a single one may not."""
        if self._num_groups == 1:
            return candidate
        return min(candidate + part.kind.dropped_tokens, len(hashes) * part.kind.settings.sizes.hash_tokens)

    def _hit(self, tokens: int, longest: int) -> Hit:
        by_group: dict[int, Int32Array] = dict.fromkeys(range(self._num_groups), EMPTY)
        for part in self._parts:
            for group, blocks in zip(part.groups, part.blocks, strict=True):
                by_group[group] = blocks[: cdiv(tokens, part.kind.block_size)] if part.full else blocks
            part.blocks = []
        boundary = longest if longest > tokens else 0
        return Hit(tokens, tuple(by_group[group] for group in range(self._num_groups)), boundary)
