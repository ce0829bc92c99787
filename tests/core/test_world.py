"""P and D together under faults: right tokens or none, everything given back, one outcome each. See `world`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
from tests.core.world import World

from pdkv.core.ports import Finished, LeaseReleased, LoadFailed, LoadFinished, Preempted, Quarantined
from pdkv.core.scheduler.request import Request
from pdkv.core.transfer.consumer import Consumer
from pdkv.core.transfer.producer import Lease, Producer

SEEDS = int(os.environ.get("PDKV_SEEDS", "50"))


SEEN: Counter[str] = Counter()  # what happened in all the worlds of this session


def play(seed: int) -> World:
    world = World(seed)
    world.run()
    return world


def note(world: World) -> None:
    SEEN.update(type(event).__name__ for event in (*world.d.events, *world.p.events))
    SEEN["worlds"] += 1
    SEEN["restarts"] += world.restarts
    SEEN["expired"] += sum(isinstance(event, LeaseReleased) and event.expired for event in world.p.events)
    failures = [event.cause for event in world.d.events if isinstance(event, LoadFailed)]
    SEEN["lease ended first"] += sum("the lease ended" in cause for cause in failures)
    SEEN["timed out"] += sum("after its READ was posted" in cause for cause in failures)


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_faults(first: int) -> None:
    for seed in range(first, min(first + 10, SEEDS)):
        try:
            note(play(seed))
        except Exception as error:
            raise AssertionError(f"World({seed}).run() fails: {error!r}") from error


def test_the_weather_is_bad_enough() -> None:
    """Everything that the invariants are about does happen, or passing would mean nothing."""
    for seed in range(20 if SEEN["worlds"] < 20 else 0):
        note(play(seed))
    for kind in (Preempted, Quarantined, LoadFinished, LoadFailed, Finished):
        assert SEEN[kind.__name__] >= 5, SEEN
    for name in ("restarts", "expired", "lease ended first", "timed out"):
        assert SEEN[name] >= 3, SEEN


def test_the_same_seed_is_the_same_story() -> None:
    stories = []
    for _ in range(2):
        world = play(3)
        stories.append((world.p.events, world.d.events))
    assert stories[0] == stories[1]


# -------------------------------------------------------------------------------------------------- planted bugs


def no_slot_comparison(patch: pytest.MonkeyPatch) -> None:
    """Data is used although the lease had ended before it arrived."""
    patch.setattr(Consumer, "_judge", lambda self, load, report: None if report.slot else report.error)


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """The destination of a READ that was given up is free at once, as if cancelling were a fence."""
    real = Consumer.abandon

    def abandon(self: Consumer, request: Request, cause: str) -> None:
        real(self, request, cause)
        handle = max(self._given_up)
        self._manager.release(self._given_up.pop(handle).key(handle))

    patch.setattr(Consumer, "abandon", abandon)


def timer_is_a_fence(patch: pytest.MonkeyPatch) -> None:
    """Quarantine ends on its timer instead of with the mover."""

    def sweep(self: Consumer) -> None:
        for handle, given_up in list(self._given_up.items()):
            if given_up.deadline_ns <= self._journal.now_ns:
                self._fence(handle)

    patch.setattr(Consumer, "sweep", sweep)


def hashed_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a load can be hit while their KV is still on its way."""
    real = Consumer.begin

    def begin(self: Consumer, request: Request, local_blocks: int, tokens: int) -> None:
        real(self, request, local_blocks, tokens)
        self._manager.cache_blocks(request, request.num_computed)

    patch.setattr(Consumer, "begin", begin)


def slot_stays_armed(patch: pytest.MonkeyPatch) -> None:
    """P frees the blocks of an expired lease without clearing its slot."""

    def release(self: Producer, lease: Lease, *, expired: bool) -> None:
        del self._by_token[lease.token]
        self.leased_blocks -= lease.blocks
        self._manager.release(lease.key)

    patch.setattr(Producer, "_release", release)


def lost_done(patch: pytest.MonkeyPatch) -> None:
    """Leases never expire: with a lost Done P keeps the blocks for good."""
    patch.setattr(Producer, "sweep", lambda self: None)


PLANTS = [no_slot_comparison, no_quarantine, timer_is_a_fence, hashed_in_flight, slot_stays_armed, lost_done]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(60):
        try:
            play(seed)
        except Exception:
            return
    pytest.fail(f"{plant.__name__} goes unnoticed")
