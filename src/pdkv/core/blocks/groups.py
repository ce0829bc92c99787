"""Groups of layers that share block tables, as facts: what kind, how many tokens a block holds, how far it looks back.

All groups draw from one pool. Sizes are tokens. The rules of each kind are in `blocks/kinds`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from pdkv.errors import ConfigError
from pdkv.units import cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class FullGroup:
    """Full attention and MLA: every token stays until the request ends."""

    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowGroup:
    """Sliding window: a token sees the last ``window`` tokens, itself included; ``extra`` more are kept behind it.

    ``replayed``: its blocks are never hit. Of a prefix that the other groups have cached the last ``window`` tokens are
    computed once more, for this group only (DeepSeek-V4.1's bounded replay).
    """

    block_size: int
    window: int
    extra: int = 0
    replayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedGroup:
    """Chunked local attention: a token sees its own chunk of ``chunk`` tokens up to itself."""

    block_size: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """Mamba and linear attention: one state stands for all tokens before it.

    ``aligned``: the state at the end of a block is kept and can be hit (vLLM's cache mode ``align``); else one block
    holds the running state for life (mode ``none``; its block size is then the model's length).
    ``speculative_blocks`` more hold the states of draft tokens.

    A backend with ``checkpoint_blocks`` writes, beside the state at a chunk's end, the one where the prompt can be
    resumed inside that chunk, so that no chunk need end there: at places that are a multiple of
    ``checkpoint_alignment`` tokens behind the chunk's start.
    """

    block_size: int
    aligned: bool
    speculative_blocks: int = 0
    checkpoint_blocks: int = 0
    checkpoint_alignment: int | None = None

    def checkpoint_fits(self, start: int, end: int, position: int, *, hash_tokens: int) -> bool:
        """Whether a chunk of tokens ``start:end`` writes the state behind token ``position`` as well.

        It begins where a hash ends, at least one hash in front of the position, and the column in front of its last one
        is not the one that it starts from. (vLLM's ``is_mamba_prefill_checkpoint_valid``)
        """
        alignment = self.checkpoint_alignment
        return (
            self.checkpoint_blocks > 0
            and alignment is not None
            and start % hash_tokens == 0
            and cdiv(end, self.block_size) - 2 > (start - 1) // self.block_size
            and start + hash_tokens <= position < end
            and (position - start) % alignment == 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceWindowGroup:
    """R-SWA: a token sees the whole prompt and the last ``window`` tokens; what lies between is given back."""

    block_size: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RingGroup:
    """A circular buffer (the states that a compressor has not written yet): one block for life, never hit."""

    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossGroup:
    """Cross attention: the encoder's output, there from admission on; ``encoder_tokens`` at most for one request."""

    block_size: int
    encoder_tokens: int


#: Layers that only encode keep no KV, so they are in no group.
Group = FullGroup | WindowGroup | ChunkedGroup | StateGroup | ReferenceWindowGroup | RingGroup | CrossGroup


def is_cacheable(group: Group) -> bool:
    """Whether blocks of ``group`` can be hit; those of the others are scratch of their request."""
    return not (isinstance(group, RingGroup | CrossGroup) or (isinstance(group, WindowGroup) and group.replayed))


def replay_tokens(groups: Sequence[Group]) -> int:
    """Tokens at the end of a prefix hit that are computed once more; 0 where every group is hit, or none is."""
    return max((group.window for group in groups if isinstance(group, WindowGroup) and group.replayed), default=0)


def is_paged(group: Group) -> bool:
    """Whether a block of ``group`` is the KV of its tokens, so that blocks of another size can hold the same."""
    return not isinstance(group, StateGroup | RingGroup | CrossGroup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What a drafter that reads the model's hidden states (EAGLE, MTP) does to cached prefixes (block-pool 4-5).

    ``groups`` drop the end of what they hit, which the drafter must see computed; the last ``unsettled_tokens`` before
    the next one may be computed again with other successors, so they are never cached (multi-module MTP).
    """

    groups: frozenset[int] = frozenset()
    unsettled_tokens: int = 0

    def over(self, groups: Sequence[Group]) -> Drafting:
        """The same for groups that hit together: where one of several equal ones drops, all do."""
        dropping = {groups[number] for number in self.groups}
        return replace(self, groups=frozenset(number for number, group in enumerate(groups) if group in dropping))


NO_DRAFTING = Drafting()


@dataclass(frozen=True, slots=True)
class Granularity:
    """What the groups of a model have in common (spec kv-layout 4, block-pool 4-5).

    ``scheduler_tokens`` is the least common multiple of the block sizes; ``hash_tokens`` the tokens of one hash unit;
    a prefix hit ends on a multiple of ``hit_tokens``: the scheduler's unit, or the hash unit with fine-grained hits.
    """

    scheduler_tokens: int
    hash_tokens: int
    hit_tokens: int

    @property
    def fine_hits(self) -> bool:
        """Whether a hit may end inside a block."""
        return self.hit_tokens < self.scheduler_tokens


@cache
def granularity(groups: tuple[Group, ...], *, hash_tokens: int | None, enable_caching: bool) -> Granularity:
    """Derived sizes of ``groups``; ``hash_tokens`` overrides the unit (greatest common divisor of the block sizes).

    Raises `ConfigError` when a block size is not a multiple of the unit.
    """
    sizes = [group.block_size for group in groups]
    scheduler = math.lcm(*sizes)
    states = [group for group in groups if isinstance(group, StateGroup)]
    if not enable_caching or any(not state.aligned for state in states):
        return Granularity(scheduler, scheduler if hash_tokens is None else hash_tokens, scheduler)
    if len(groups) == 1 and hash_tokens not in (None, sizes[0]):
        raise ConfigError(
            f"one hash covers {hash_tokens} tokens, but hits of a single group end where its blocks of {sizes[0]} do. "
            "Leave the prefix match unit out"
        )
    hashed = [group.block_size for group in groups if is_cacheable(group)] or sizes
    unit = math.gcd(*hashed) if hash_tokens is None else hash_tokens
    if unit < 1 or any(size % unit for size in hashed):
        raise ConfigError(
            f"one hash covers {unit} tokens, but the groups' blocks hold {hashed}: each must be a multiple of it. "
            "Choose a prefix match unit that divides them all"
        )
    looking_back = [group for group in groups if isinstance(group, WindowGroup | ChunkedGroup) and is_cacheable(group)]
    coarse = any(group.block_size != unit for group in looking_back)
    fine = len(groups) > 1 and any(state.block_size > unit for state in states) and not coarse
    return Granularity(scheduler, unit, unit if fine else scheduler)


def check_groups(
    groups: tuple[Group, ...],
    *,
    enable_caching: bool,
    retention_interval: int | None,
    drafting: Drafting = NO_DRAFTING,
) -> None:
    """Raises `ConfigError` for sizes that cannot be, and for kinds that do not go together."""
    for number, group in enumerate(groups):
        reach = {"block_size": group.block_size}
        if isinstance(group, WindowGroup | ReferenceWindowGroup):
            reach["window"] = group.window
        elif isinstance(group, ChunkedGroup):
            reach["chunk"] = group.chunk
        elif isinstance(group, CrossGroup):
            reach["encoder_tokens"] = group.encoder_tokens
        elif isinstance(group, StateGroup) and group.checkpoint_alignment is not None:
            reach["checkpoint_alignment"] = group.checkpoint_alignment
        for name, tokens in reach.items():
            if tokens < 1:
                raise ConfigError(f"group {number}: {name} is {tokens}; it must be at least 1 token")
    scheduler = math.lcm(*(group.block_size for group in groups))
    if enable_caching:
        _check_caching(groups, scheduler)
        _check_replay(groups)
        _check_drafting(groups, scheduler, drafting)
    if retention_interval in (None, 0):
        return
    assert retention_interval is not None
    if not any(isinstance(group, WindowGroup | StateGroup) for group in groups):
        raise ConfigError(
            f"prefix_cache_retention_interval is {retention_interval}, but no group has a sliding window or a state, "
            "so it would change nothing. Leave it at 0"
        )
    if retention_interval < 0 or retention_interval % scheduler:
        raise ConfigError(
            f"prefix_cache_retention_interval is {retention_interval}; it must be a multiple of the scheduler's block "
            f"of {scheduler} tokens, 0 (only where a request can be resumed) or None (everywhere)"
        )


def _check_caching(groups: tuple[Group, ...], scheduler: int) -> None:
    sizes = [group.block_size for group in groups]
    if not any(is_cacheable(group) for group in groups):
        raise ConfigError("no group's blocks can be hit, so there is nothing to cache. Turn prefix caching off")
    for number, group in enumerate(groups):
        if isinstance(group, ReferenceWindowGroup | CrossGroup):
            raise ConfigError(
                f"group {number}: {type(group).__name__} blocks cannot be shared between requests, so a model that has "
                "them is served without prefix caching. Turn prefix caching off"
            )
        if not isinstance(group, ChunkedGroup):
            continue
        if any(size != scheduler for size in sizes):
            raise ConfigError(
                f"prefix caching with chunked local attention needs one block size for all groups; they have {sizes}. "
                "Use one size, or disable prefix caching"
            )
        if group.chunk % group.block_size:  # a hit could end where blocks of the chunk before it are needed again
            raise ConfigError(
                f"group {number}: a chunk of {group.chunk} tokens is no multiple of its blocks of {group.block_size}, "
                "so a prefix hit could miss a part of a chunk. Use a block size that divides it, or no prefix caching"
            )
    states = {group.block_size for group in groups if isinstance(group, StateGroup) and group.aligned}
    if len(states) > 1:
        raise ConfigError(
            f"groups of aligned states must have one block size, where their chunks end; they have {sorted(states)}"
        )


def _check_replay(groups: tuple[Group, ...]) -> None:
    replayed = [group for group in groups if isinstance(group, WindowGroup) and group.replayed]
    windows = sorted({group.window for group in replayed})
    if len(windows) > 1:
        raise ConfigError(f"groups that are replayed behind a prefix hit must have one window; they have {windows}")
    others = [group for group in groups if not isinstance(group, FullGroup | RingGroup) and group not in replayed]
    if replayed and others:
        raise ConfigError(
            f"a window that is replayed behind a prefix hit does not go with {type(others[0]).__name__}: what that one "
            "would look back at from the tokens computed again is not kept"
        )
    for group in replayed:
        if group.window % group.block_size == 1:
            raise ConfigError(
                f"the first token that is replayed, {group.window} before a hit's end, would lie in a block of "
                f"{group.block_size} tokens that is given back already. Use another block size"
            )


def _check_drafting(groups: tuple[Group, ...], scheduler: int, drafting: Drafting) -> None:
    for number in sorted(drafting.groups):
        if number >= len(groups):
            raise ConfigError(f"the drafter's layers are said to be in group {number}; there are {len(groups)} groups")
        if isinstance(groups[number], ChunkedGroup):
            raise ConfigError(
                f"group {number}: a drafter that drops the end of cached prefixes does not go with chunked local "
                "attention. Turn prefix caching off, or draft without the model's hidden states"
            )
    if drafting.groups and scheduler <= drafting.unsettled_tokens:
        raise ConfigError(
            f"{drafting.unsettled_tokens + 1} draft modules in a row reach beyond the {scheduler} tokens that a cached "
            "prefix loses. Use larger blocks, fewer draft tokens, or no prefix caching"
        )
