"""How a READ is cut: every byte once, in order, merged where both sides are adjacent, never above the slice size."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.runtime.transports.base import cut_slices


def _ids(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30),
    st.integers(1, 7),
    st.integers(1, 25),
)
def test_slices_cover_the_pairs(pairs: list[tuple[int, int]], block: int, limit: int) -> None:
    remote, local = [r for r, _ in pairs], [at for _, at in pairs]
    slices = list(cut_slices(_ids(remote), _ids(local), block, limit))
    moved = [(r + i, at + i) for part in slices for r, at, nbytes in part.tolist() for i in range(nbytes)]
    assert moved == [(r * block + i, at * block + i) for r, at in pairs for i in range(block)]
    sizes = [int(part[:, 2].sum()) for part in slices]
    assert all(size == limit for size in sizes[:-1])
    assert all(0 < size <= limit for size in sizes)


def test_neighbours_become_one_segment() -> None:
    (part,) = cut_slices(_ids([3, 4, 5, 9]), _ids([0, 1, 2, 3]), 10, 1000)
    assert part.tolist() == [[30, 0, 30], [90, 30, 10]]


def test_neighbours_on_one_side_only_stay_apart() -> None:
    (part,) = cut_slices(_ids([3, 4]), _ids([7, 2]), 10, 1000)
    assert part.tolist() == [[30, 70, 10], [40, 20, 10]]


def test_nothing_to_move_makes_no_slice() -> None:
    assert list(cut_slices(_ids([]), _ids([]), 10, 1000)) == []
