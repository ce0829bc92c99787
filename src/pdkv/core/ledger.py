"""The ledger: at every instant each block is in exactly one account, and the accounts add up to the pool (design 4).

Owners hold blocks in accounts; a block that several owners hold is counted once, in the account of the highest
precedence. Everything that shows memory (`/debug/memory`, metrics, reports, fault tests) reads this.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from pdkv.core.ports import Int32Array


class Account(enum.IntEnum):
    """Where a block is. The value is the precedence: of several holds on a block the largest is what it counts as."""

    FREE = 0  # no content
    CACHED = 1  # free, but its content can still be hit
    RETAINED = 2  # finished, kept for a peer
    LOADED_WAITING = 3  # KV arrived, request not yet running
    DRAFT = 4  # lookahead
    RUNNING = 5
    DEFERRED = 6  # given back, but an outstanding plan may still use it
    LOADING = 7  # allocated, KV in flight
    QUARANTINE = 8  # a transfer that was given up may still touch it
    NULL = 9  # block 0


_HELD = slice(Account.RETAINED, Account.QUARANTINE + 1)


class Ledger:
    """Counts holds per block and account, and blocks per account; every change costs O(blocks that changed).

    ``counts`` and ``peaks`` are int64[10] by `Account`. A hold is one owner's claim: the same owner may not hold a
    block twice in one call (tables never repeat a block).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holds = np.zeros((len(Account), num_blocks), dtype=np.uint32)
        self._hashed = np.zeros(num_blocks, dtype=np.bool_)
        self._account: npt.NDArray[np.uint8] = np.zeros(num_blocks, dtype=np.uint8)
        self._account[0] = Account.NULL
        self.counts = np.bincount(self._account, minlength=len(Account)).astype(np.int64)
        self.peaks = self.counts.copy()

    def hold(self, blocks: Int32Array, account: Account) -> None:
        """One more owner of ``blocks`` in ``account``."""
        self._holds[account, blocks] += 1
        self._settle(blocks)

    def release(self, blocks: Int32Array, account: Account) -> None:
        """One owner fewer; raises ``AssertionError`` if there was none (our own bug)."""
        assert bool((self._holds[account, blocks] > 0).all()), f"release of blocks not held in {account.name}"
        self._holds[account, blocks] -= 1
        self._settle(blocks)

    def move(self, blocks: Int32Array, source: Account, target: Account) -> None:
        """The same owner, another account."""
        assert bool((self._holds[source, blocks] > 0).all()), f"move of blocks not held in {source.name}"
        self._holds[source, blocks] -= 1
        self._holds[target, blocks] += 1
        self._settle(blocks)

    def set_hashed(self, blocks: Int32Array, hashed: bool) -> None:
        """Content of ``blocks`` can (no longer) be hit: decides between CACHED and FREE when nobody holds them."""
        self._hashed[blocks] = hashed
        self._settle(blocks)

    def hashed(self, blocks: Int32Array) -> npt.NDArray[np.bool_]:
        """bool[n]: which of ``blocks`` carry content that can be hit."""
        return self._hashed[blocks]

    @property
    def num_hashed(self) -> int:
        """Blocks that carry a hash, held or not."""
        return int(self._hashed.sum())

    def holders(self, blocks: Int32Array) -> npt.NDArray[np.int64]:
        """int64[n]: owners of each block over all accounts (its reference count)."""
        owners: npt.NDArray[np.int64] = self._holds[:, blocks].sum(axis=0, dtype=np.int64)
        return owners

    def account_of(self, block: int) -> Account:
        """The one account ``block`` is in."""
        return Account(int(self._account[block]))

    def _settle(self, blocks: Int32Array) -> None:
        held = self._holds[_HELD, blocks] > 0
        top = Account.QUARANTINE - np.argmax(held[::-1], axis=0)
        after = np.where(held.any(axis=0), top, self._hashed[blocks].astype(np.int64)).astype(np.uint8)
        before = self._account[blocks]
        self.counts -= np.bincount(before, minlength=len(Account))
        self.counts += np.bincount(after, minlength=len(Account))
        self._account[blocks] = after
        np.maximum(self.peaks, self.counts, out=self.peaks)

    def as_dict(self) -> dict[str, int]:
        """Blocks per account, by the account's lower-case name; sums to ``num_blocks``."""
        return {account.name.lower(): int(self.counts[account]) for account in Account}

    def peaks_as_dict(self) -> dict[str, int]:
        """Largest number of blocks each account ever had, by name."""
        return {account.name.lower(): int(self.peaks[account]) for account in Account}

    def check(self) -> None:
        """Recount from the holds; raises ``AssertionError`` on any difference."""
        expected = self._hashed.astype(np.uint8)
        for account in range(Account.RETAINED, Account.NULL):
            expected[self._holds[account] > 0] = account
        expected[0] = Account.NULL
        assert np.array_equal(expected, self._account), "ledger: an account differs from its holds"
        assert np.array_equal(np.bincount(expected, minlength=len(Account)), self.counts), "ledger: counts differ"
        assert int(self.counts.sum()) == self.num_blocks, "ledger: accounts do not add up to the pool"
