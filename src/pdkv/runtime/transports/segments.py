"""Where the bytes of KV lie in two pools that need not be alike: pairs of transfer units become slices to copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdkv.runtime.geometry import Geometry
from pdkv.runtime.transports.base import SLICE_BYTES, Grid, Images, Slice

MAX_SEGMENTS = 8192
"""Copies in a slice: each may become a descriptor that NIXL checks and UCX posts, and nothing else moves meanwhile."""

REGROUPED_BYTES = 4 << 20
"""Most of a slice between unlike pools: what a transport needs at a time to regroup it in memory of its own."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Mapping:
    """Copies between a peer's pool and our ``own``, inward or (``writes``) outward; `geometry.unlike` must have nothing
    against them.

    They go in *transfer units* of ``unit_tokens`` tokens, the smaller of the two block sizes: where a block holds ``k``
    of them, unit ``u`` is the part ``u % k`` of block ``u // k``, of all layers, heads and ranks. Every rank of the
    target gets its heads, also those that other ranks have, too; of several sources one is read.
    """

    def __init__(self, peer: Geometry, own: Geometry, *, writes: bool = False) -> None:
        self._peer, self._own = peer, own
        self.unit_tokens = min(peer.block_size, own.block_size)
        self.peer_units = peer.num_blocks * (peer.block_size // self.unit_tokens)
        self.own_units = own.num_blocks * (own.block_size // self.unit_tokens)
        runs = list(_runs_of_heads(own, peer) if writes else _runs_of_heads(peer, own))
        #: int64[k, 2]: where the runs of heads of block 0 begin in the peer's pool and in ours.
        self._runs = np.array(runs, dtype=np.int64)[:, [1, 0] if writes else [0, 1]]
        self._whole = peer.rank_heads == own.rank_heads and peer.block_size == own.block_size
        if not self._whole:
            self._parts = peer.block_size // self.unit_tokens
            self._single = _Pattern(peer, own, self._runs, parts=1)
            self._of_block = _Pattern(peer, own, self._runs, parts=self._parts)

    def slices(
        self,
        peer_units: Int32Array,
        own_units: Int32Array,
        slice_bytes: int = SLICE_BYTES,
        max_segments: int = MAX_SEGMENTS,
    ) -> Iterator[Slice]:
        """Slices of at most ``slice_bytes`` and ``max_segments`` copies (but of one token in one layer at least) that
        copy unit ``i`` of one list to, or from, unit ``i`` of the other.

        The units must exist (`peer_units`, `own_units`). Each target byte is written once if its unit is named once. No
        copy reaches from one rank's memory into the next.
        """
        if self._whole:
            blocks = list(zip(peer_units.tolist(), own_units.tolist(), strict=True))
            yield from _merged(blocks, self._peer.bytes_per_block, self._runs.tolist(), slice_bytes, max_segments)
            return
        slice_bytes = min(slice_bytes, REGROUPED_BYTES)
        starts = np.stack(
            (_starts(peer_units, self._peer, self.unit_tokens), _starts(own_units, self._own, self.unit_tokens)), axis=1
        )
        lone = np.ones(len(starts), dtype=np.bool_)
        if self._of_block.fits(slice_bytes, max_segments):
            firsts = _whole_blocks(peer_units, self._parts)
            together = firsts[:, None] + np.arange(self._parts)
            lone[together] = False
            yield from self._of_block.slices(starts[together], slice_bytes, max_segments)
        yield from self._single.slices(starts[lone][:, None], slice_bytes, max_segments)


def _starts(units: Int32Array, pool: Geometry, unit_tokens: int) -> Int64Array:
    """int64[n]: the offset of each unit's first token, in the memory of one rank."""
    blocks, parts = np.divmod(units.astype(np.int64), pool.block_size // unit_tokens)
    return blocks * pool.bytes_per_block + parts * (unit_tokens * pool.token_bytes)


def _whole_blocks(units: Int32Array, parts: int) -> Int64Array:
    """Where in ``units`` all parts of one block follow each other: the places of the first ones."""
    firsts = np.flatnonzero(units % parts == 0)
    firsts = firsts[firsts + parts <= len(units)]
    ours = units[firsts[:, None] + np.arange(parts)] == units[firsts][:, None] + np.arange(parts)
    return firsts[ours.all(axis=1)]


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


@dataclass(frozen=True, slots=True)
class _Tile:
    """Part of a unit: so many planes (layers and vectors) and tokens, from these on."""

    first_plane: int
    planes: int
    first_token: int
    tokens: int


class _Pattern:
    """What the copies of one *item* are: of one unit, or of the ``parts`` units that make up a block of the peer's.

    An item's *image* is all that the peer has of it, rank by rank, packed: what can be moved in few pieces (one a rank
    if it is a block), while the copies, which tell heads apart, are one for each plane and token.
    """

    def __init__(self, peer: Geometry, own: Geometry, runs: Int64Array, parts: int) -> None:
        self._peer, self._own, self._runs, self._parts = peer, own, runs, parts
        self._tokens = min(peer.block_size, own.block_size)
        self._planes = peer.layers * peer.vectors
        self._run_bytes = min(peer.token_bytes, own.token_bytes)
        self._ranks, self._rank_of_run = np.unique(runs[:, 0] // peer.rank_bytes, return_inverse=True)
        self._cells = parts * self._planes * self._tokens  # each of ``runs``

    def fits(self, slice_bytes: int, max_segments: int) -> bool:
        """Whether a slice has room for an item."""
        return self._cells <= _most_cells(self._runs, self._run_bytes, slice_bytes, max_segments)

    def slices(self, starts: Int64Array, slice_bytes: int, max_segments: int) -> Iterator[Slice]:
        """Of the items whose units begin at ``starts``, int64[n, parts, 2], in both pools. Large ones are cut up."""
        most = _most_cells(self._runs, self._run_bytes, slice_bytes, max_segments)
        step = max(1, most // self._cells)
        for first in range(0, len(starts), step):
            for tile in self._tiles(most):
                yield self._slice(starts[first : first + step], tile)

    def _tiles(self, most_cells: int) -> Iterator[_Tile]:
        """All of an item, or of a single unit the parts that it must be moved in."""
        if self._cells <= most_cells:
            yield _Tile(0, self._planes, 0, self._tokens)
            return
        tokens = min(self._tokens, most_cells)
        planes = max(1, most_cells // self._tokens)
        for plane in range(0, self._planes, planes):
            for token in range(0, self._tokens, tokens):
                yield _Tile(plane, min(planes, self._planes - plane), token, min(tokens, self._tokens - token))

    def _slice(self, starts: Int64Array, tile: _Tile) -> Slice:
        peer, own, parts = self._peer, self._own, self._parts
        strides = np.array([[pool.block_size * pool.token_bytes, pool.token_bytes] for pool in (peer, own)])
        begin = starts + strides @ [tile.first_plane, tile.first_token]
        segments = np.empty((*begin.shape[:2], len(self._runs), 3), dtype=np.int64)
        together = peer.token_bytes == own.token_bytes  # the tokens of a plane, on both sides
        segments[..., :2] = begin[:, :, None] + self._runs
        segments[..., 2] = self._run_bytes * (tile.tokens if together else 1)

        plane_bytes = parts * tile.tokens * peer.token_bytes  # of an image
        rank_bytes = tile.planes * plane_bytes
        image_bytes = len(self._ranks) * rank_bytes
        places = (
            np.arange(len(starts))[:, None, None] * image_bytes
            + np.arange(parts)[:, None] * (tile.tokens * peer.token_bytes)
            + self._rank_of_run * rank_bytes
            + self._runs[:, 0] % peer.rank_bytes
        )
        pieces = begin[:, 0, 0][:, None, None] + (self._ranks * peer.rank_bytes)[:, None]
        size = rank_bytes
        if parts * tile.tokens != peer.block_size:  # planes lie apart
            pieces, size = pieces + np.arange(tile.planes) * strides[0, 0], plane_bytes
        grid = Grid(
            planes=tile.planes,
            tokens=1 if together else tile.tokens,
            peer=(int(strides[0, 0]), peer.token_bytes),
            own=(int(strides[1, 0]), own.token_bytes),
            image=(plane_bytes, peer.token_bytes),
        )
        return Slice(segments.reshape(-1, 3), grid, Images(pieces.reshape(-1), size, places.reshape(-1)))


def _most_cells(runs: Int64Array, run_bytes: int, slice_bytes: int, max_segments: int) -> int:
    """For how many planes and tokens of all ``runs`` a slice has room: one at least."""
    return max(1, min(slice_bytes // (len(runs) * run_bytes), max_segments // len(runs)))


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
    for peer_base, own_base in ranks:
        at = 0
        while at < len(blocks):
            first = at
            at += 1
            while (
                at < len(blocks) and blocks[at][0] == blocks[at - 1][0] + 1 and blocks[at][1] == blocks[at - 1][1] + 1
            ):
                at += 1
            peer = peer_base + blocks[first][0] * bytes_per_block
            own = own_base + blocks[first][1] * bytes_per_block
            left = (at - first) * bytes_per_block
            while left:
                nbytes = min(left, room)
                part += (peer, own, nbytes)
                peer, own, left, room = peer + nbytes, own + nbytes, left - nbytes, room - nbytes
                if room == 0 or len(part) == 3 * max_segments:
                    yield Slice(np.array(part, dtype=np.int64).reshape(-1, 3))
                    part, room = [], slice_bytes
    if part:
        yield Slice(np.array(part, dtype=np.int64).reshape(-1, 3))
