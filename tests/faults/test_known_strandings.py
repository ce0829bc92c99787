"""What policy ``vllm`` is known to lose (docs/faults.md) is found, and ``strict`` does not lose it."""

from __future__ import annotations

from typing import Any

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

SCARCE = {"num_blocks": 12, "max_num_seqs": 1}

#: What happens to a WRITE that the reference has no word for: the world, how it ends, and what still holds memory.
OF_WRITES: dict[str, tuple[dict[str, Any], Kind, str]] = {
    "the WRITE fails, and nobody tells D": ({"weather": Weather(fail=0.2)}, Kind.STUCK, "as loading"),
    "the one registration is lost": ({"weather": Weather(drop=0.1)}, Kind.STUCK, "as loading"),
    "D has memory for it only after the lease, and is parked for good": (
        {"weather": Weather(read_ms=300, max_delay_ms=20), "groups": MODELS[0], "unlike": False, **SCARCE},
        Kind.STUCK,
        "as loading (granted to P",
    ),
    "the client leaves, and P does not begin": ({"weather": Weather(abort=0.5)}, Kind.STRANDED, "as quarantine"),
    "P dies, and the request goes on elsewhere": ({"weather": Weather(crash=0.3)}, Kind.STRANDED, "as quarantine"),
}


@pytest.mark.parametrize("stranding", OF_WRITES)
def test_vllm_strands_what_is_to_be_written(stranding: str) -> None:
    settings, kind, held = OF_WRITES[stranding]
    for seed in range(30):
        story = World(seed, VLLM, requests=REQUESTS, mode="write", **settings).play()
        if story.violation is not None and story.violation.kind is kind:
            assert held in story.violation.text
            return
    pytest.fail("no world has it")


@pytest.mark.parametrize("stranding", OF_WRITES)
def test_strict_strands_nothing_of_it(stranding: str) -> None:
    settings, _, _ = OF_WRITES[stranding]
    for seed in range(5):
        story = World(seed, STRICT, requests=REQUESTS, mode="write", **settings).play()
        assert story.violation is None, story.violation


def test_vllm_loses_memory_and_nothing_else() -> None:
    """No answer is wrong, no engine fails, no account is off, whatever comes."""
    found = (World(seed, VLLM, requests=40).play().violation for seed in range(40))
    kinds = {violation.kind for violation in found if violation is not None}
    assert kinds <= {Kind.STUCK, Kind.STRANDED, Kind.WASTE}, kinds
    assert Kind.STUCK in kinds


def test_strict_lets_go_of_the_same_loads() -> None:
    for more in ({"weather": Weather(hang=0.2)}, {"weather": Weather(hang=0.05, abort=1.0)}, ROUND_IN_CIRCLES):
        for seed in range(3):
            story = World(seed, STRICT, requests=REQUESTS, **more).play()
            assert story.violation is None, story.violation
