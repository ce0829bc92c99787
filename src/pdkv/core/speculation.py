"""Speculative decoding, as far as memory and scheduling see it (spec scheduler 3 and 10, block-pool 4 to 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdkv.core.blocks.groups import NO_DRAFTING, Drafting, Group
from pdkv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A drafter that proposes tokens, which the model checks in the next step.

    ``num_tokens`` drafts at most are checked for a request in one step, beside its sampled token; ``lookahead_tokens``
    slots more are allocated behind what a step computes, for what the drafter writes (EAGLE, MTP and draft models:
    ``num_tokens``; n-grams: none). ``drafting_slots`` rows of a step's token budget go to drafting for each request (a
    draft model: 1).

    ``drop_groups`` are the groups that the drafter's own layers are in, when it reads hidden states (EAGLE, MTP): what
    they hit loses its end. Empty: all groups; ``None``: it reads none, nothing is lost. ``prefill_lookahead_tokens``
    prompt tokens are read beyond those computed (EAGLE: 1; MTP of several modules: ``num_tokens``).
    """

    num_tokens: int
    lookahead_tokens: int = 0
    drafting_slots: int = 0
    drop_groups: tuple[int, ...] | None = None
    prefill_lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("num_tokens", 1),
            ("lookahead_tokens", 0),
            ("drafting_slots", 0),
            ("prefill_lookahead_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"speculation: {name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def step_tokens(self) -> int:
        """Slots that one decode step takes: the sampled token, its drafts, and the drafter's lookahead."""
        return 1 + self.num_tokens + self.lookahead_tokens

    def drafting(self, groups: Sequence[Group]) -> Drafting:
        """What it does to cached prefixes of a model with these groups."""
        if self.drop_groups is None:
            return NO_DRAFTING
        return Drafting(
            groups=frozenset(self.drop_groups or range(len(groups))),
            unsettled_tokens=max(self.prefill_lookahead_tokens - 1, 0),
        )
