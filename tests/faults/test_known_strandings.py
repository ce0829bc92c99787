"""What policy ``vllm`` is known to lose (docs/faults.md) is found, and ``strict`` does not lose it."""

from __future__ import annotations

import pytest

from pdkv.core.config import STRICT, VLLM
from pdkv.simulate.weather import Weather
from pdkv.simulate.world import MODELS, Kind, World

REQUESTS = 60


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


# ------------------------------------------------------------------------------------------ WRITE push (spec 9)

OF_WRITES = {
    "the WRITE fails, and nobody tells D": Weather(fail=0.2),
    "the one registration is lost": Weather(drop=0.1),
}


@pytest.mark.parametrize("stranding", OF_WRITES)
def test_vllm_strands_what_is_to_be_written(stranding: str) -> None:
    for seed in range(30):
        story = World(seed, VLLM, requests=REQUESTS, mode="write", weather=OF_WRITES[stranding]).play()
        if story.violation is not None and story.violation.kind is Kind.STUCK:
            assert "as loading" in story.violation.text
            return
    pytest.fail("no world has it")


@pytest.mark.parametrize("stranding", OF_WRITES)
def test_strict_strands_nothing_of_it(stranding: str) -> None:
    for seed in range(3):
        story = World(seed, STRICT, requests=REQUESTS, mode="write", weather=OF_WRITES[stranding]).play()
        assert story.violation is None, story.violation


def test_strict_lets_go_of_the_same_loads() -> None:
    for more in ({"weather": Weather(hang=0.2)}, {"weather": Weather(hang=0.05, abort=1.0)}, ROUND_IN_CIRCLES):
        for seed in range(3):
            story = World(seed, STRICT, requests=REQUESTS, **more).play()
            assert story.violation is None, story.violation
