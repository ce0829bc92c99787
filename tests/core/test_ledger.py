"""The ledger against a recount by hand: every block in one account, by precedence, and sums that hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.core.ledger import Account, Ledger

HELD = [account for account in Account if Account.RETAINED <= account <= Account.QUARANTINE]
#: design 4, highest first
PRECEDENCE = ["quarantine", "loading", "deferred", "running", "draft", "loaded_waiting", "retained", "cached", "free"]


def test_precedence_is_the_design_s() -> None:
    by_value = sorted((account for account in Account if account is not Account.NULL), reverse=True)
    assert [account.name.lower() for account in by_value] == PRECEDENCE


def test_every_pair_of_holds_counts_once_by_precedence() -> None:
    block = np.asarray([3], dtype=np.int32)
    for low in HELD:
        for high in HELD:
            ledger = Ledger(5)
            ledger.hold(block, low)
            ledger.hold(block, high)
            assert ledger.account_of(3) is max(low, high)
            assert ledger.holders(block).tolist() == [2]
            ledger.release(block, max(low, high))
            assert ledger.account_of(3) is min(low, high)
            ledger.check()


OPERATION = st.tuples(
    st.sampled_from(["hold", "release", "move", "hash", "unhash"]), st.integers(0, 2**31), st.sampled_from(HELD)
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(OPERATION, max_size=80))
def test_equals_a_recount(operations: list[tuple[str, int, Account]]) -> None:
    size = 9
    ledger = Ledger(size)
    holds: list[Counter[Account]] = [Counter() for _ in range(size)]
    hashed: set[int] = set()
    peaks = Counter({"free": size - 1, "null": 1})
    for name, seed, account in operations:
        rng = np.random.default_rng(seed)
        blocks = [block for block in range(1, size) if rng.random() < 0.4]
        if name in ("release", "move"):
            blocks = [block for block in blocks if holds[block][account] > 0]
        array = np.asarray(blocks, dtype=np.int32)
        if name == "hold":
            ledger.hold(array, account)
        elif name == "release":
            ledger.release(array, account)
        elif name == "move":
            target = HELD[seed % len(HELD)]
            ledger.move(array, account, target)
            for block in blocks:
                holds[block][target] += 1
        else:
            ledger.set_hashed(array, name == "hash")
            hashed = hashed | set(blocks) if name == "hash" else hashed - set(blocks)
        for block in blocks:
            holds[block][account] += {"hold": 1, "release": -1, "move": -1}.get(name, 0)
        ledger.check()
        counted = Counter({"null": 1})
        for block in range(1, size):
            owners = [account for account, count in holds[block].items() if count > 0]
            counted["cached" if block in hashed and not owners else max(owners).name.lower() if owners else "free"] += 1
            assert int(ledger.holders(np.asarray([block]))[0]) == sum(holds[block].values())
        assert {key: count for key, count in ledger.as_dict().items() if count} == dict(counted)
        peaks |= counted
        assert {key: count for key, count in ledger.peaks_as_dict().items() if count} == dict(peaks)
        assert sum(ledger.as_dict().values()) == size


def test_states_that_no_block_is_in_are_forgotten() -> None:
    """Owners come and go in ever new combinations; what is known of them does not grow for ever."""
    ledger, block, other = Ledger(3), np.asarray([1], dtype=np.int32), np.asarray([2], dtype=np.int32)
    ledger._most_states = 12
    ledger.hold(other, Account.LOADING)
    for account in HELD:
        for _ in range(10):
            ledger.hold(block, account)
        assert len(ledger._states) <= 13
        ledger.check()
    assert ledger.holders(np.asarray([0, 1, 2])).tolist() == [0, 10 * len(HELD), 1]
    for account in HELD:
        for _ in range(10):
            ledger.release(block, account)
    assert (ledger.account_of(1), ledger.account_of(2)) == (Account.FREE, Account.LOADING)
    ledger.check()


def test_many_states_at_once_keep_their_order() -> None:
    """More stretches of states than a table has: what comes back is in the order of the blocks."""
    ledger, blocks = Ledger(60), np.random.default_rng(1).permutation(np.arange(1, 60, dtype=np.int32))
    for step in (2, 3, 5):
        ledger.set_hashed(blocks[::step], True)
        ledger.hold(blocks[step::step], Account.RETAINED)
    ledger.hold(blocks, Account.RUNNING)
    idle = {int(block) for block in blocks if ledger.holders(blocks[blocks == block])[0] == 1}
    hashed = ledger.hashed(blocks)
    empty, cached = ledger.release(blocks, Account.RUNNING)
    assert empty.tolist() == [
        block for block, full in zip(blocks.tolist(), hashed, strict=True) if block in idle and not full
    ]
    assert cached.tolist() == [
        block for block, full in zip(blocks.tolist(), hashed, strict=True) if block in idle and full
    ]
    assert ledger.idle(blocks).tolist() == [block for block in blocks.tolist() if block in idle]
    ledger.check()


def test_release_without_a_hold_is_our_own_bug() -> None:
    ledger = Ledger(4)
    ledger.hold(np.asarray([1], dtype=np.int32), Account.RUNNING)
    with pytest.raises(AssertionError, match="not held in LOADING"):
        ledger.release(np.asarray([1], dtype=np.int32), Account.LOADING)
    with pytest.raises(AssertionError, match="not held in LOADING"):
        ledger.move(np.asarray([1], dtype=np.int32), Account.LOADING, Account.RUNNING)
