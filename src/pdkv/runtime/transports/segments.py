"""Where the bytes of KV lie in two pools that need not be alike: pairs of transfer units become slices of segments."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pdkv.runtime.geometry import Geometry
from pdkv.runtime.transports.base import SLICE_BYTES, Slice

MAX_SEGMENTS = 8192
"""Of a slice: each is a descriptor that NIXL checks and UCX posts by itself, and nothing else moves meanwhile."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Mapping:
    """Copies between two pools, from ``source`` to ``target``; `geometry.unlike` must have nothing against them.

    They go in *transfer units* of ``unit_tokens`` tokens, the smaller of the two block sizes: where a block holds ``k``
    of them, unit ``u`` is the part ``u % k`` of block ``u // k``, of all layers, heads and ranks. Every rank of the
    target gets its heads, also those that other ranks have, too; of several sources one is read.
    """

    def __init__(self, source: Geometry, target: Geometry) -> None:
        self._source, self._target = source, target
        self.unit_tokens = min(source.block_size, target.block_size)
        self.source_units = source.num_blocks * (source.block_size // self.unit_tokens)
        self.target_units = target.num_blocks * (target.block_size // self.unit_tokens)
        same_heads = source.rank_heads == target.rank_heads
        self._whole = same_heads and source.block_size == target.block_size
        self._pieces = _rank_pieces(source, target) if self._whole else _strided_pieces(source, target, same_heads)

    def slices(
        self,
        source_units: Int32Array,
        target_units: Int32Array,
        slice_bytes: int = SLICE_BYTES,
        max_segments: int = MAX_SEGMENTS,
    ) -> Iterator[Slice]:
        """Slices of at most ``slice_bytes`` and ``max_segments`` segments that copy ``source_units[i]`` to
        ``target_units[i]``: int64[n, 3], offset in the source's pool, offset in the target's, bytes.

        The units must exist (`source_units`, `target_units`). Each target byte is written once if its unit is named
        once. No segment reaches from one rank's memory into the next.
        """
        if self._whole:
            blocks = list(zip(source_units.tolist(), target_units.tolist(), strict=True))
            return _merged(blocks, self._source.bytes_per_block, self._pieces.tolist(), slice_bytes, max_segments)
        starts = np.stack(
            (
                _starts(source_units, self._source, self.unit_tokens),
                _starts(target_units, self._target, self.unit_tokens),
            ),
            axis=1,
        )
        return _spread(starts, _at_most(self._pieces, slice_bytes), slice_bytes, max_segments)


def _starts(units: Int32Array, pool: Geometry, unit_tokens: int) -> Int64Array:
    """int64[n]: the offset of each unit's first token, in the memory of one rank."""
    blocks, parts = np.divmod(units.astype(np.int64), pool.block_size // unit_tokens)
    return blocks * pool.bytes_per_block + parts * (unit_tokens * pool.token_bytes)


def _runs_of_heads(source: Geometry, target: Geometry) -> Iterator[tuple[int, int]]:
    """(source, target) offsets, in their pools, of heads that lie together in both; every rank of the target gets all.

    Of several source ranks that hold the same head, target ranks use different ones.
    """
    run = min(source.rank_heads, target.rank_heads)
    for rank in range(target.ranks):
        first = rank * target.heads // target.ranks
        for head in range(first, first + target.rank_heads, run):
            holder = head * source.ranks // source.heads + rank % source.copies
            inside = head - holder * source.heads // source.ranks
            yield (
                holder * source.rank_bytes + inside * source.head_bytes,
                rank * target.rank_bytes + (head - first) * target.head_bytes,
            )


def _rank_pieces(source: Geometry, target: Geometry) -> Int64Array:
    """int64[ranks, 2]: where the block 0 of each rank of the target lies in both pools, and its source."""
    return np.array(list(_runs_of_heads(source, target)), dtype=np.int64)


def _strided_pieces(source: Geometry, target: Geometry, same_heads: bool) -> Int64Array:
    """int64[k, 3]: what a unit consists of, as (source, target, bytes), from the unit's first token in rank 0 on."""
    unit_tokens = min(source.block_size, target.block_size)
    heads = np.array(list(_runs_of_heads(source, target)), dtype=np.int64)
    planes = np.arange(source.layers * source.vectors)[:, None] * np.array(
        [source.block_size * source.token_bytes, target.block_size * target.token_bytes]
    )
    if same_heads:  # the tokens of a unit lie together on both sides
        tokens, nbytes = np.zeros((1, 2), dtype=np.int64), unit_tokens * source.token_bytes
    else:
        tokens = np.arange(unit_tokens)[:, None] * np.array([source.token_bytes, target.token_bytes])
        nbytes = min(source.token_bytes, target.token_bytes)
    starts = (heads[:, None, None] + planes[None, :, None] + tokens[None, None]).reshape(-1, 2)
    return np.column_stack((starts, np.full(len(starts), nbytes)))


def _at_most(pieces: Int64Array, nbytes: int) -> Int64Array:
    """The same bytes in pieces of at most ``nbytes``."""
    size = int(pieces[0, 2])
    if size <= nbytes:
        return pieces
    cuts = np.arange(0, size, nbytes)
    starts = (pieces[:, None, :2] + cuts[None, :, None]).reshape(-1, 2)
    return np.column_stack((starts, np.tile(np.minimum(size - cuts, nbytes), len(pieces))))


def _spread(starts: Int64Array, pieces: Int64Array, slice_bytes: int, max_segments: int) -> Iterator[Slice]:
    """All ``pieces`` of each unit in turn; ``starts`` int64[n, 2] are the units' in both pools."""
    step = max(1, min(max_segments, slice_bytes // int(pieces[0, 2])))
    count = len(starts) * len(pieces)
    for first in range(0, count, step):
        unit, piece = np.divmod(np.arange(first, min(first + step, count)), len(pieces))
        segments = pieces[piece]
        segments[:, :2] += starts[unit]
        yield segments


def _merged(
    blocks: list[tuple[int, int]],
    bytes_per_block: int,
    ranks: list[list[int]],
    slice_bytes: int,
    max_segments: int,
) -> Iterator[Slice]:
    """Whole blocks, rank by rank (``ranks``: where block 0 lies in both pools).

    Pairs that are adjacent on both sides become one segment: large segments are what makes transports fast. A block
    (or run) that crosses a slice's end is cut at the byte. (Plain Python: it runs between copies that have emptied the
    caches, where a dozen calls into NumPy took three times as long.)
    """
    part: list[int] = []
    room = slice_bytes
    for source_base, target_base in ranks:
        at = 0
        while at < len(blocks):
            first = at
            at += 1
            while (
                at < len(blocks) and blocks[at][0] == blocks[at - 1][0] + 1 and blocks[at][1] == blocks[at - 1][1] + 1
            ):
                at += 1
            source = source_base + blocks[first][0] * bytes_per_block
            target = target_base + blocks[first][1] * bytes_per_block
            left = (at - first) * bytes_per_block
            while left:
                nbytes = min(left, room)
                part += (source, target, nbytes)
                source, target, left, room = source + nbytes, target + nbytes, left - nbytes, room - nbytes
                if room == 0 or len(part) == 3 * max_segments:
                    yield np.array(part, dtype=np.int64).reshape(-1, 3)
                    part, room = [], slice_bytes
    if part:
        yield np.array(part, dtype=np.int64).reshape(-1, 3)
