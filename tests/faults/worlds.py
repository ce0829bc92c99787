"""The worlds under policy ``strict`` that CI plays: half in each of two files of tests, for two processes.

They are small, for the time of `make test`: of 40 requests each. `make faults SEEDS=0:10000` plays large ones, of 200
(docs/faults.md).
"""

from __future__ import annotations

from collections import Counter

from pdkv.simulate.faults import play_seed

REQUESTS = 40
FIRST_HALF, SECOND_HALF = (
    [range(seed, seed + 10) for seed in range(first, first + 150, 10)] for first in (0, 150)
)  # fmt: skip

#: How often each thing happens in a hundred worlds at least, or passing would mean nothing.
_IN_A_HUNDRED = {
    "Preempted": 100, "Quarantined": 100, "Fenced": 100, "LoadFinished": 1000, "LoadFailed": 500, "LeaseExpired": 200,
    "LeaseRenewed": 200, "COMPLETED": 1000, "ERROR": 50, "LEFT": 80, "killed": 10, "stopped": 20, "mover killed": 50,
    "calm": 5, "TurnRead": 2, "TurnExpired": 20, "TurnGaveWay": 200, "TurnDeclined": 20, "PeerLost": 10,
    "message lost": 1000, "message doubled": 1000, "message overtaken": 1000, "long step": 20, "leg tried again": 500,
    "READ late": 50, "READ breaks": 50, "READ hangs": 25, "READ after its lease": 40, "left while AWAITING": 10,
    "left while WAITING": 40, "left while LOADING": 3, "left while RUNNING": 10,
}  # fmt: skip


def play(seeds: range, seen: Counter[str]) -> None:
    """Nothing breaks in any of these worlds, and every request has one outcome; what happens is added to ``seen``."""
    for seed in seeds:
        story = play_seed(seed, "strict", REQUESTS)
        assert story.violation is None, f"seed {seed}: {story.violation}"
        assert sum(story.counts[outcome] for outcome in ("COMPLETED", "ERROR", "LEFT")) == REQUESTS
        seen.update(story.counts)
        seen["worlds"] += 1
        seen["calm"] += story.weather.calm


def assert_bad_weather(seen: Counter[str]) -> None:
    """All that the invariants are about has happened, and often."""
    assert seen["worlds"] == 150, "all of this file's worlds must have been played"
    rare = [name for name, least in _IN_A_HUNDRED.items() if seen[name] * 100 < least * seen["worlds"]]
    assert not rare, (rare, seen)
