"""Whole P/D systems under faults: right tokens or none, everything given back, one outcome each.

`make faults` plays many more worlds (`pdkv faults`); here are a few, and the proof that the checker sees what it must.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pdkv.core.blocks.kinds.window import WindowKind
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.config import STRICT, TRANSFER_POLICIES, VLLM
from pdkv.core.ledger import Account
from pdkv.core.ports import Int32Array, Plan
from pdkv.core.scheduler.request import Request
from pdkv.core.transfer.consumer import Consumer
from pdkv.core.transfer.lease import Lease
from pdkv.core.transfer.producer import Producer
from pdkv.simulate.faults import play_seed, play_seeds, trace
from pdkv.simulate.instance import Life
from pdkv.simulate.weather import Weather
from pdkv.simulate.world import BLOCK, MODELS, Kind, Story, World

WORLDS = 12
REQUESTS = 60


def play(seed: int, policy: str = "strict", requests: int = REQUESTS) -> Story:
    return play_seed(seed, policy, requests)


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    return [play(seed) for seed in range(WORLDS)]


def test_strict_breaks_nothing(stories: list[Story]) -> None:
    assert [(story.seed, story.violation) for story in stories if story.violation] == []


@pytest.mark.parametrize("push", [False, True])
def test_calm_worlds_waste_nothing(push: bool) -> None:
    calm = Weather(max_delay_ms=50, read_ms=200)
    for seed, groups in enumerate(MODELS):
        story = World(seed, STRICT, requests=REQUESTS, groups=groups, weather=calm, push=push).play()
        assert story.violation is None, story.violation
        assert story.counts["COMPLETED"] == REQUESTS
        assert story.counts["LoadFinished"] > REQUESTS / 3


def test_the_weather_is_bad_enough(stories: list[Story]) -> None:
    """Everything that the invariants are about does happen, or passing would mean nothing."""
    seen: Counter[str] = Counter()
    for story in stories:
        seen.update(story.counts)
        seen["calm"] += story.weather.calm
    for name in ("Preempted", "Quarantined", "Fenced", "LoadFinished", "LoadFailed", "LeaseExpired", "LeaseRenewed"):
        assert seen[name] >= 5, seen
    for name in ("COMPLETED", "ERROR", "LEFT", "killed", "stopped", "mover killed", "calm"):
        assert seen[name] >= 1, seen


def test_the_same_seed_is_the_same_story() -> None:
    told: list[list[str]] = [[], []]
    for lines in told:
        trace(5, "strict", REQUESTS, lines.append)
    assert told[0] == told[1]
    assert len(told[0]) > 100


def test_processes_tell_the_same_stories() -> None:
    alone = list(play_seeds(range(3), "strict", 20, 1))
    shared = sorted(play_seeds(range(3), "strict", 20, 2), key=lambda story: story.seed)
    assert alone == shared


# ----------------------------------------------------------------------------------- what is known to be wrong is found


def test_vllm_strands_a_load_whose_peer_hangs() -> None:
    """Spec pd-transfer 9: there is no D-side timeout, so a READ that never ends holds its blocks and its request."""
    story = World(0, VLLM, requests=20, weather=Weather(hang=0.3)).play()
    assert story.violation is not None
    assert story.violation.kind is Kind.STUCK
    assert "as loading" in story.violation.text


def test_vllm_strands_an_aborted_load() -> None:
    """The client of a hanging load leaves: the blocks are lost until the mover dies, which nobody orders."""
    kinds = set()
    for seed in range(6):
        story = World(seed, VLLM, requests=REQUESTS, weather=Weather(hang=0.05, abort=1.0)).play()
        kinds |= {story.violation.kind} if story.violation else set()
    assert Kind.STRANDED in kinds


ROUND_IN_CIRCLES = {
    "groups": MODELS[0], "weather": Weather(hang=0.1), "enable_prefix_caching": False, "full_sequence_must_fit": False,
}  # fmt: skip


def test_vllm_preempts_its_lone_runner_for_ever() -> None:
    """Hanging loads hold so much of the pool that the one running request outgrows the rest, alone, again and again."""
    for seed in range(20):
        story = World(seed, VLLM, requests=REQUESTS, **ROUND_IN_CIRCLES).play()
        if story.counts["Preempted"] > 2 * REQUESTS:
            assert story.violation is not None
            assert story.violation.kind is Kind.STUCK
            return
    pytest.fail("no world has the livelock")


def test_strict_lets_go_of_the_same_loads() -> None:
    for more in ({"weather": Weather(hang=0.2)}, {"weather": Weather(hang=0.05, abort=1.0)}, ROUND_IN_CIRCLES):
        for seed in range(3):
            story = World(seed, STRICT, requests=REQUESTS, **more).play()
            assert story.violation is None, story.violation


# -------------------------------------------------------------------------------------------------------- planted bugs


def no_slot_comparison(patch: pytest.MonkeyPatch) -> None:
    """Data is used although the lease had ended before it arrived."""
    patch.setattr(Consumer, "_judge", lambda self, load, report: None if report.slot else report.error)


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """The destination of a READ that was given up is free at once, as if cancelling were a fence."""
    real = Consumer.abandon

    def abandon(self: Consumer, request: Request, cause: str) -> None:
        real(self, request, cause)
        self._fence(max(self._given_up))

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

    def release(self: Producer, lease: Lease, *, expired: bool, gave_way: bool = False) -> None:
        del self._by_token[lease.token]
        self._manager.release(lease.key)

    patch.setattr(Producer, "_release", release)


def no_expiry(patch: pytest.MonkeyPatch) -> None:
    """Leases never expire: with a lost Done P keeps the blocks for good."""
    patch.setattr(Producer, "sweep", lambda self: None)


def one_free_skipped(patch: pytest.MonkeyPatch) -> None:
    """A batch of blocks that is given back loses its last one."""
    real = BlockPool.give_back

    def give_back(self: BlockPool, blocks: Int32Array, account: Account) -> None:
        real(self, blocks[:-1] if len(blocks) > 3 else blocks, account)

    patch.setattr(BlockPool, "give_back", give_back)


def heartbeat_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The first lease to be kept alive is left out of the beats."""
    real = Life._do

    def do(self: Life, plan: Plan) -> None:
        real(self, plan)
        self._keepalives = self._keepalives[1:]

    patch.setattr(Life, "_do", do)


def no_load_deadline(patch: pytest.MonkeyPatch) -> None:
    """A load may take for ever."""
    patch.setattr(Consumer, "overdue", lambda self: [])


def window_too_small(patch: pytest.MonkeyPatch) -> None:
    """A sliding window gives back a block that its next token still looks at."""
    real = WindowKind.skipped_tokens
    patch.setattr(WindowKind, "skipped_tokens", lambda self, computed: real(self, computed) + BLOCK)


def last_token_computed_by_p(patch: pytest.MonkeyPatch) -> None:
    """P computes the whole prompt of a model with windows: what D's last token looks back at is gone by then."""
    patch.setattr(KVCacheManager, "leaves_last_token", False)


PLANTS = [
    no_slot_comparison, no_quarantine, timer_is_a_fence, hashed_in_flight, slot_stays_armed, no_expiry,
    one_free_skipped, heartbeat_forgotten, no_load_deadline, window_too_small, last_token_computed_by_p,
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_caught(plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    weather = {
        heartbeat_forgotten: Weather(
            read_ms=2000
        ),  # in bad weather a lease may well expire, in calm weather it may not
        timer_is_a_fence: Weather(hang=0.3, read_ms=300),
    }.get(plant)
    groups = MODELS[1] if plant in (window_too_small, last_token_computed_by_p) else MODELS[0]
    for seed in range(200):
        if World(seed, STRICT, requests=REQUESTS, groups=groups, weather=weather).play().violation is not None:
            return
    pytest.fail(f"{plant.__name__} goes unnoticed in 200 worlds")


def test_policies_have_worlds() -> None:
    assert set(TRANSFER_POLICIES) == {"strict", "vllm"}
