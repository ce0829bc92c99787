"""How KV is cut up to move it: every byte of every wanted token once, to where it belongs, whatever the pools are like.

The model keeps KV as it is meant, by token and head, and lays it out for a geometry by slicing: no offset is computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from benchmarks.plain_pool import plain
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.kv_model import Bytes, laid_out, meant

from pdkv.runtime.geometry import Geometry, unlike
from pdkv.runtime.transports.base import Slice, check_ends
from pdkv.runtime.transports.bounce import copy_cells
from pdkv.runtime.transports.segments import Mapping


def ids(values: list[int]) -> npt.NDArray[np.int32]:
    return np.asarray(values, dtype=np.int32)


@dataclass
class Pair:
    source: Geometry
    target: Geometry
    units: list[tuple[int, int]]


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    possible = [ranks for ranks in range(1, 9) if heads % ranks == 0 or ranks % heads == 0]
    ranks = draw(st.sampled_from(possible))
    others = [other for other in possible if other % ranks == 0 or ranks % other == 0]
    size, factor = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    one, other = (
        Geometry(
            ranks=count,
            num_blocks=draw(st.integers(1, 5)),
            layers=1,
            vectors=1,
            block_size=block_size,
            heads=heads,
            head_bytes=1,
        )
        for count, block_size in ((ranks, size), (draw(st.sampled_from(others)), size * factor))
    )
    shape = {
        "layers": draw(st.integers(1, 3)),
        "vectors": draw(st.integers(1, 2)),
        "head_bytes": draw(st.integers(1, 5)),
    }
    one, other = msgspec.structs.replace(one, **shape), msgspec.structs.replace(other, **shape)
    source, target = (one, other) if draw(st.booleans()) else (other, one)
    most = target.num_blocks * target.block_size // size
    targets = draw(st.lists(st.integers(0, most - 1), unique=True, max_size=most))
    wanted = st.integers(0, source.num_blocks * source.block_size // size - 1)
    if draw(st.booleans()):  # neighbours, which become one segment
        start = draw(wanted)
        targets = sorted(targets)
        units = [(start + at, unit) for at, unit in enumerate(targets)]
        units = [pair for pair in units if pair[0] < source.num_blocks * source.block_size // size]
    else:
        units = [(draw(wanted), unit) for unit in targets]
    return Pair(source, target, units)


def moved_through_images(part: Slice, peer: Bytes, own: Bytes, *, outward: bool) -> None:
    """Do what ``part`` says in few pieces of the peer's, packed one behind the other, and copies within that."""
    assert part.images is not None
    assert part.grid is not None
    images, grid = part.images, part.grid
    places = [slice(at, at + images.size) for at in images.pieces.tolist()]
    packed = np.concatenate([peer[place] for place in places])
    starts = np.column_stack((images.places, part.segments[:, 1]))
    ways = (packed, own), (grid.image, grid.own)
    size = int(part.segments[0, 2])
    if outward:
        starts, ways = starts[:, ::-1], (ways[0][::-1], ways[1][::-1])
    copy_cells(*ways[0], starts, ways[1], grid, size)
    if outward:
        for i, place in enumerate(places):
            peer[place] = packed[i * images.size : (i + 1) * images.size]


@settings(deadline=None, max_examples=300)
@given(pairs(), st.integers(1, 400), st.integers(1, 80), st.booleans(), st.integers(0, 2**32 - 1))
def test_every_wanted_byte_arrives_where_it_belongs_and_nothing_else(
    pair: Pair, slice_bytes: int, max_segments: int, outward: bool, seed: int
) -> None:
    """Copy by copy, and through images of the peer's side; whether the peer is the source, or (outward) the target."""
    source, target = pair.source, pair.target
    assert unlike(source, target) is None
    rng = np.random.default_rng(seed)
    kv, wanted = meant(source, rng), meant(target, rng)
    memory, result = laid_out(kv, source), laid_out(wanted, target)
    mapping = Mapping(target, source, writes=True) if outward else Mapping(source, target)
    size = mapping.unit_tokens
    assert size == min(source.block_size, target.block_size)
    for at, to in pair.units:
        (block, part), (own_block, own_part) = (
            divmod(unit, pool.block_size // size) for unit, pool in ((at, source), (to, target))
        )
        moved = kv[block, :, :, part * size : (part + 1) * size]
        wanted[own_block, :, :, own_part * size : (own_part + 1) * size] = moved

    other = result.copy()
    written = np.zeros(target.nbytes, dtype=np.int64)
    units = np.asarray(pair.units, dtype=np.int32).reshape(-1, 2)
    # A token of a plane, of all ranks, is the least that a slice can hold between unlike pools.
    least = max(source.ranks * source.rank_heads, target.ranks * target.rank_heads)
    slice_bytes, max_segments = max(slice_bytes, least * source.head_bytes), max(max_segments, least)
    remote, local = (1, 0) if outward else (0, 1)
    for part in mapping.slices(units[:, remote], units[:, local], slice_bytes, max_segments):
        copies = part.expanded()
        assert 0 < len(copies) == part.copies <= max_segments
        assert 0 < copies[:, 2].sum() == part.nbytes <= slice_bytes
        check_ends("p", part, (target if outward else source).nbytes, (source if outward else target).nbytes)
        for at, to, nbytes in copies[:, [remote, local, 2]].tolist():
            assert nbytes > 0
            assert at // source.rank_bytes == (at + nbytes - 1) // source.rank_bytes
            assert to // target.rank_bytes == (to + nbytes - 1) // target.rank_bytes
            result[to : to + nbytes] = memory[at : at + nbytes]
            written[to : to + nbytes] += 1
        if part.images is None:
            other = result.copy()
        else:
            assert part.images.nbytes <= part.nbytes
            assert len(part.images.pieces) <= part.copies
            ways = (other, memory) if outward else (memory, other)
            moved_through_images(part, *ways, outward=outward)
    assert np.array_equal(result, laid_out(wanted, target))
    assert np.array_equal(other, result)
    assert written.max(initial=0) <= 1
    assert written.sum() == len(pair.units) * target.ranks * target.bytes_per_block * size // target.block_size


def test_a_whole_block_of_the_peers_is_one_piece_where_its_parts_are_wanted_one_after_the_other() -> None:
    """And a lone part is one a plane."""
    peer, own = (msgspec.structs.replace(LATENT, block_size=size, num_blocks=24 // size) for size in (8, 4))
    together, lone = Mapping(peer, own).slices(ids([5, 2, 3, 0]), ids([0, 1, 2, 3]))
    assert together.images is not None
    assert (together.images.pieces.tolist(), together.images.size) == ([96], 96)
    assert lone.images is not None
    assert (lone.images.pieces.tolist(), lone.images.size) == ([2 * 96 + 24, 2 * 96 + 72, 0, 48], 24)


def test_neighbours_become_one_segment() -> None:
    pool = plain(16, 10)
    (part,) = Mapping(pool, pool).slices(ids([3, 4, 5, 9]), ids([0, 1, 2, 3]))
    assert part.segments.tolist() == [[30, 0, 30], [90, 30, 10]]


def test_neighbours_on_one_side_only_stay_apart() -> None:
    pool = plain(16, 10)
    (part,) = Mapping(pool, pool).slices(ids([3, 4]), ids([7, 2]))
    assert part.segments.tolist() == [[30, 70, 10], [40, 20, 10]]


def test_slices_of_whole_blocks_are_full_but_for_the_last() -> None:
    pool = plain(16, 10)
    slices = Mapping(pool, pool).slices(ids([0, 1, 2, 9, 4]), ids([5, 6, 7, 8, 9]), slice_bytes=16)
    assert [part.nbytes for part in slices] == [16, 16, 16, 2]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30), st.integers(1, 7), st.integers(1, 25))
def test_slices_of_whole_blocks_are_in_order_and_full(blocks: list[tuple[int, int]], size: int, limit: int) -> None:
    pool = plain(21, size)
    units = (ids([pair[side] for pair in blocks]) for side in (0, 1))
    slices = list(Mapping(pool, pool).slices(*units, slice_bytes=limit))
    moved = [(a + i, b + i) for part in slices for a, b, n in part.segments.tolist() for i in range(n)]
    assert moved == [(a * size + i, b * size + i) for a, b in blocks for i in range(size)]
    sizes = [part.nbytes for part in slices]
    assert all(moved_bytes == limit for moved_bytes in sizes[:-1])
    assert all(0 < moved_bytes <= limit for moved_bytes in sizes)


def test_nothing_to_move_makes_no_slice() -> None:
    for source, target in ((plain(16, 10), plain(16, 10)), (LATENT, msgspec.structs.replace(LATENT, block_size=2))):
        assert list(Mapping(source, target).slices(ids([]), ids([]))) == []


LATENT = Geometry(ranks=1, num_blocks=3, layers=2, vectors=1, block_size=4, heads=1, head_bytes=6)


def test_an_mla_latent_is_read_once_for_each_rank_and_from_one_source() -> None:
    """It is on every rank: two ranks read it from one, four ranks' worth of it is read for two."""
    two, four = (msgspec.structs.replace(LATENT, ranks=ranks) for ranks in (2, 4))
    (part,) = Mapping(LATENT, two).slices(ids([1]), ids([2]))
    assert part.expanded().tolist() == [[48, 2 * 48, 48], [48, (3 + 2) * 48, 48]]
    (part,) = Mapping(four, two).slices(ids([1]), ids([2]))
    assert part.expanded().tolist() == [[48, 2 * 48, 48], [(3 + 1) * 48, (3 + 2) * 48, 48]]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layers": 3}, "its KV pool has 3 layers, ours 2"),
        ({"vectors": 2}, "its KV pool has 2 vectors a token, layer and head, ours 1"),
        ({"heads": 2}, "its KV pool has 2 KV heads, ours 1"),
        ({"head_bytes": 8}, "its KV pool has 8 bytes a head's vector, ours 6"),
        ({"block_size": 6}, r"it has 6 tokens a block, we have 4: one must be a multiple .*--block-size"),
        ({"ranks": 3}, r"it has 3 tensor-parallel ranks, we have 2: .*--tensor-parallel-size"),
    ],
)
def test_pools_between_which_nothing_can_move_are_refused_with_both_numbers(changes: dict[str, int], text: str) -> None:
    ours = msgspec.structs.replace(LATENT, ranks=2)
    assert unlike(ours, ours) is None
    assert re.search(text, unlike(msgspec.structs.replace(ours, **changes), ours) or "it is let in")


def test_heads_that_ranks_cannot_share_are_no_geometry() -> None:
    with pytest.raises(ValueError, match="3 KV heads cannot be shared out over 2 ranks"):
        msgspec.structs.replace(LATENT, heads=3, ranks=2)
    with pytest.raises(ValueError, match="bytes"):
        msgspec.structs.replace(LATENT, num_blocks=2**31 - 1, block_size=2**30)
