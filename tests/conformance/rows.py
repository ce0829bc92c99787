"""What the replays of recordings have in common: how a difference is told, and how a recording names a group."""

from __future__ import annotations

from typing import Any

from pdkv.core.blocks.groups import (
    ChunkedGroup,
    CrossGroup,
    Drafting,
    FullGroup,
    Group,
    ReferenceWindowGroup,
    RingGroup,
    StateGroup,
    WindowGroup,
)

Row = dict[str, Any]


class Mismatch(AssertionError):
    """The first difference of a row."""


class Unreadable(Exception):
    """The row is of no format, or names a thing, that the replay knows."""


def expect(where: str, ours: object, theirs: object) -> None:
    """Raise `Mismatch` unless both are equal."""
    if ours != theirs:
        raise Mismatch(f"{where}: ours {ours!r}, reference {theirs!r}")


def sampled_token(request_id: str, position: int) -> int:
    """Token of a request at an output position, as the recorder defines it."""
    return (sum(request_id.encode()) * 31 + position * 7) % 997


def group_of(facts: Row) -> Group:
    """A recorded group as the core's fact about it."""
    kind, size = facts["kind"], facts["block_size"]
    if kind in ("full", "full_attention", "mla_attention", "mla"):
        return FullGroup(block_size=size)
    if kind in ("sw", "sliding_window", "sliding_window_mla"):
        return WindowGroup(block_size=size, window=facts["sliding_window"], replayed=facts.get("bounded_replay", False))
    if kind in ("chunked", "chunked_local", "chunked_local_attention"):
        return ChunkedGroup(block_size=size, chunk=facts["attention_chunk_size"])
    if kind == "mamba":
        aligned = facts.get("mamba_cache_mode", "none") == "align"
        return StateGroup(
            block_size=size,
            aligned=aligned,
            speculative_blocks=facts.get("num_speculative_blocks", 0),
            checkpoint_blocks=facts.get("num_prefill_checkpoint_blocks", 0),
            checkpoint_alignment=facts.get("prefill_checkpoint_alignment"),
        )
    if kind == "rswa":
        return ReferenceWindowGroup(block_size=size, window=facts["rswa_window"])
    if kind == "circular_buffer":
        return RingGroup(block_size=size)
    if kind == "cross_attention":
        return CrossGroup(block_size=size, encoder_tokens=facts["max_encoder_tokens"])
    raise Unreadable(f"a group of kind {kind}")


def drafting_of(config: Row) -> Drafting:
    """What a recorded drafter does to cached prefixes."""
    lookahead = config.get("num_prefill_lookahead", 0)
    groups = config.get("eagle_groups", ())
    return Drafting(groups=frozenset(groups), unsettled_tokens=max(lookahead - 1, 0))


def watermark_share(config: Row) -> float:
    """A share of the pool that comes to the recorded number of blocks, whatever is lost in the division."""
    blocks = config.get("watermark_blocks", 0)
    return (blocks + 0.5) / config["num_blocks"] if blocks else 0.0
