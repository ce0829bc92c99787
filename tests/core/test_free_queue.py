"""The free queue against a plain list, the prefix index and the ledger against naive twins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.core.blocks.free_queue import FreeQueue


def ids(blocks: list[int]) -> np.ndarray:
    return np.asarray(blocks, dtype=np.int32)


OPERATION = st.tuples(st.sampled_from(["pop", "append", "prepend", "remove"]), st.integers(0, 2**31))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 24), st.lists(OPERATION, max_size=250))
def test_equals_a_plain_list(size: int, operations: list[tuple[str, int]]) -> None:
    queue, model, out = FreeQueue(ids(list(range(size))), size), list(range(size)), []
    for name, seed in operations:
        rng = np.random.default_rng(seed)
        if name == "pop":
            count = int(rng.integers(0, len(model) + 1))
            assert queue.pop(count).tolist() == model[:count]
            out += model[:count]
            del model[:count]
        elif name == "remove":
            gone = rng.permutation(model)[: rng.integers(0, len(model) + 1)].astype(int).tolist()
            queue.remove(ids(gone))
            model = [block for block in model if block not in gone]
            out += gone
        else:
            back = rng.permutation(out)[: rng.integers(0, len(out) + 1)].astype(int).tolist()
            out = [block for block in out if block not in back]
            getattr(queue, name)(ids(back))
            model = model + back if name == "append" else back + model
        queue.check()
        assert len(queue) == len(model)
        assert queue.order().tolist() == model


@pytest.mark.parametrize("end", ["append", "prepend"])
def test_the_ring_is_rewritten_many_times(end: str) -> None:
    queue, model = FreeQueue(ids(list(range(7))), 7), list(range(7))
    for turn in range(500):
        if turn % 3 == 0:  # a prefix hit takes one out of the middle, then it comes back
            queue.remove(ids([model[3]]))
            block = model.pop(3)
        else:
            block = model.pop(0)
            assert queue.pop(1).tolist() == [block]
        getattr(queue, end)(ids([block]))
        model = [*model, block] if end == "append" else [block, *model]
        assert queue.order().tolist() == model
    queue.check()


def test_nothing_is_popped_on_request() -> None:
    queue = FreeQueue(ids([1, 2, 3]), 4)
    queue.remove(ids([1]))
    assert queue.pop(0).tolist() == []
    assert queue.order().tolist() == [2, 3]


def test_misuse_is_caught() -> None:
    queue = FreeQueue(ids([1, 2, 3]), 4)
    with pytest.raises(AssertionError, match="4 blocks asked, 3 free"):
        queue.pop(4)
    queue.append(ids([2]))
    with pytest.raises(AssertionError, match="length differs"):
        queue.check()
    queue = FreeQueue(ids([1, 2, 3]), 4)
    queue.pop(1)
    with pytest.raises(AssertionError, match="not free"):
        queue.remove(ids([1]))
