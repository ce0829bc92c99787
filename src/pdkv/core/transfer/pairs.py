"""Which parts of one side's memory hold the same tokens' KV as which of the other, whatever their block sizes."""

from __future__ import annotations

import numpy as np

from pdkv.core.blocks.groups import is_cacheable, is_paged
from pdkv.core.blocks.kinds.base import Kind
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.ports import Int32Array
from pdkv.core.transfer.messages import Grant, WriteGrant
from pdkv.units import cdiv


def unlike_blocks(manager: KVCacheManager, block_size: int) -> str | None:
    """Why KV in blocks of ``block_size`` tokens (`Grant`) cannot be moved here, with the numbers; None where it can."""
    ours = manager.paged_block_size
    if block_size == ours:
        return None
    both = f"blocks of {block_size} tokens, here they hold {ours}"
    if block_size < 1 or (block_size % ours and ours % block_size):
        return f"{both}: one must be a multiple of the other (--block-size)"
    if not all(is_paged(kind.spec) for kind in manager.kinds):
        return (
            f"{both}: this model keeps a state in place of some layers' tokens, which moves between equal blocks only; "
            "start both instances with the same --block-size"
        )
    if any(kind.block_size * block_size % ours for kind in manager.kinds):
        return f"{both}: the blocks of this model's other layers cannot be divided like that"
    return None


def unlike_target(manager: KVCacheManager, block_size: int) -> str | None:
    """Why what is kept here cannot be written into blocks of ``block_size`` tokens; None where it can.

    Whoever has granted them cannot tell which of them are not filled from their start (`hide_partly_loaded`).
    """
    problem = unlike_blocks(manager, block_size)
    ours = manager.paged_block_size
    if problem is None and block_size > ours and manager.leaves_last_token:  # some layers keep a window only
        return (
            f"blocks of {block_size} tokens, here they hold {ours}: where a window of this model begins, these fill "
            "only a part of one; use smaller blocks on the decode instance, or let it read (late push, pull)"
        )
    return problem


def granted_blocks(manager: KVCacheManager, grant: Grant | WriteGrant) -> tuple[int, ...]:
    """How many blocks of each group a true grant names; `unlike_blocks` must have nothing against it."""
    there = grant.first_token if isinstance(grant, WriteGrant) else 0
    counts = []
    for kind in manager.kinds:
        size = _their_size(manager, kind, grant.block_size)
        first, stop = kind.peer_span(grant.num_tokens, size)
        begin = max(first, there // size) if is_cacheable(kind.spec) else first
        counts.append(max(stop - begin, 0))
    return tuple(counts)


def _their_size(manager: KVCacheManager, kind: Kind, block_size: int) -> int:
    return kind.block_size * block_size // manager.paged_block_size


def named_blocks(grant: Grant | WriteGrant) -> tuple[int, ...]:
    """How many blocks of each group ``grant`` says that it names."""
    return grant.group_blocks or (len(grant.block_ids),)


def pair_blocks(
    manager: KVCacheManager, key: str, grant: Grant | WriteGrant, tokens: int, there: int
) -> tuple[Int32Array, Int32Array]:
    """int32[n] units (`PostRead`) of the grant and of owner ``key`` here, of all groups, that hold the same tokens' KV.

    Those needed to go on behind the first ``tokens`` of the grant's tokens (all, or a part of it where all groups keep
    every token), without the first ``there`` tokens, a multiple of every block size of the side that has them already.
    `unlike_blocks` must have nothing against the grant.

    What follows the last token in the last block here holds whatever it held before. It need not be cleared (the
    reference does): it is attended to, and the block can be hit, only when the request has computed it over that.
    """
    remote, local, at = [], [], 0
    granted = np.asarray(grant.block_ids, dtype=np.int64)
    for kind, count in zip(manager.kinds, named_blocks(grant), strict=True):
        at += count
        size = _their_size(manager, kind, grant.block_size)
        unit = min(size, kind.block_size)
        theirs, ours = size // unit, kind.block_size // unit
        first, stop = kind.peer_span(grant.num_tokens, size)
        own_first, own_stop = kind.peer_span(tokens)
        begin = max(first * theirs, own_first * ours, there // unit if is_cacheable(kind.spec) else 0)
        units = np.arange(begin, min(stop * theirs, own_stop * ours, cdiv(tokens, unit)))
        remote.append(granted[at - stop + units // theirs] * theirs + units % theirs)
        local.append(manager.blocks_of(key, kind.group)[units // ours].astype(np.int64) * ours + units % ours)
    return np.concatenate(remote).astype(np.int32), np.concatenate(local).astype(np.int32)


def hide_partly_loaded(manager: KVCacheManager, key: str, block_size: int, tokens: int, there: int) -> None:
    """Keep the blocks that ``tokens`` tokens of a peer's KV, in blocks of ``block_size``, do not fill from being hit.

    Where a window begins inside a block, the smaller blocks of a peer do not cover that one from its start. Nothing
    that goes on behind those tokens looks there, but whoever hit the block might. ``there`` as in `pair_blocks`.
    """
    for kind in manager.kinds:
        size = _their_size(manager, kind, block_size)
        first, _ = kind.peer_span(tokens, size)
        own_first, own_stop = kind.peer_span(tokens)
        own_first = max(own_first, there // kind.block_size)
        if own_first < own_stop and own_first * kind.block_size < first * size:
            manager.never_hit(key, kind.group, own_first)
