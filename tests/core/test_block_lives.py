"""A part of the 10,000 random lives of blocks (`make proof`), and that planted bugs do not survive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.core.block_lives import BlockLives, main

from pdkv.core.blocks.holders import Hit
from pdkv.core.blocks.kinds.base import Kind
from pdkv.core.blocks.kinds.state import StateKind
from pdkv.core.blocks.kinds.window import WindowKind
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.ledger import Account, Ledger
from pdkv.core.scheduler.request import Request

Patch = Callable[[pytest.MonkeyPatch], None]


def test_lives_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(600, 0) == 0, capsys.readouterr().out


def test_a_seed_says_all() -> None:
    digests = [BlockLives(seed).run() for seed in range(40)]
    assert digests == [BlockLives(seed).run() for seed in range(40)]
    assert len(set(digests)) > 35


def replaced(owner: type, name: str, make: Callable[[Any], Any]) -> Patch:
    """``owner.name`` replaced by ``make(original)``."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def backwards(original: Any) -> Any:
    def give_back(self: BlockPool, blocks: Any, account: Account) -> None:
        original(self, blocks[::-1].copy(), account)

    return give_back


def to_the_tail(original: Any) -> Any:
    def give_back(self: BlockPool, blocks: Any, account: Account) -> None:
        self._queue.prepend = self._queue.append
        original(self, blocks, account)

    return give_back


def one_too_many(original: Any) -> Any:
    return lambda self, computed: original(self, computed) + self.block_size


def all_of_the_prompt(original: Any) -> Any:
    def lookup(self: KVCacheManager, request: Request) -> Hit:
        caching = self.pool.enable_caching
        return self._lookup.find(request.hashes, request.num_tokens) if caching else original(self, request)

    return lookup


def keeps_the_last(original: Any) -> Any:
    def release(self: KVCacheManager, key: str, **more: Any) -> int:
        return 0 if key.startswith("kept:") else original(self, key, **more)

    return release


BUGS: dict[str, Patch] = {
    "a block is handed out with its old hash": replaced(BlockPool, "_forget", lambda _: lambda self, hashed: None),
    "blocks come back the wrong way round": replaced(BlockPool, "give_back", backwards),
    "blocks without a hash go to the tail": replaced(BlockPool, "give_back", to_the_tail),
    "a window gives back a block too many": replaced(WindowKind, "skipped_tokens", one_too_many),
    "a lease is never given back": replaced(KVCacheManager, "release", keeps_the_last),
    "a hit is counted, but not taken out of the queue": replaced(
        BlockPool, "touch", lambda _: lambda self, blocks, account: self.ledger.hold(blocks, account)
    ),
    "a load's blocks can be hit before it has arrived": replaced(
        KVCacheManager, "allocate_slots",
        lambda original: lambda self, request, tokens, **more: original(
            self, request, tokens, **{**more, "delay_cache": False}
        ),
    ),
    "hits may cover the whole prompt": replaced(
        KVCacheManager,
        "lookup",
        all_of_the_prompt,
    ),
    "a shared block is not copied before it is written": replaced(
        Kind, "copy_partial", lambda _: lambda self, holder: np.empty(0, dtype=np.int32)
    ),
    "a state is given back while it is needed": replaced(StateKind, "skipped_tokens", one_too_many),
    "moves between accounts are forgotten": replaced(Ledger, "move", lambda _: lambda self, *move: None),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    for seed in range(1000):
        try:
            BlockLives(seed).run()
        except (AssertionError, IndexError, KeyError, ValueError):
            return
    pytest.fail(f"1000 lives hold although {bug}")
