"""More workloads for `record.py`: the rules of a step, and loads of which single blocks turn out bad."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import record_workloads
from record_workloads import Workload, make


def steps() -> Iterator[Workload]:
    """What bounds a step."""
    yield make("ru-01", "fewer active requests than slots; loads", seed=101, count=16, max_num_active_seqs=3, rules=1)
    yield make("ru-02", "one active request, tight pool, priorities", seed=102, count=14, max_num_active_seqs=2,
               num_blocks=36, priorities=3, policy="priority", rules=1)  # fmt: skip
    yield make("ru-03", "adaptive long-prefill threshold", seed=103, count=18, long_prefill_token_threshold=8,
               long_prefill_token_threshold_adaptive=True, max_num_batched_tokens=96, remote=0.3, spread=30,
               prompt=(60, 300), num_blocks=120, rules=1)  # fmt: skip
    yield make("ru-04", "adaptive threshold, asynchronous scheduling", seed=104, count=18, async_scheduling=True,
               long_prefill_token_threshold=16, long_prefill_token_threshold_adaptive=True, rules=1,
               max_num_batched_tokens=64, remote=0.3, spread=24, prompt=(40, 240), num_blocks=70)  # fmt: skip
    yield make("ru-05", "fewer scheduled than batched tokens", seed=105, count=16, max_num_batched_tokens=128,
               max_num_scheduled_tokens=40, remote=0.3, rules=1)  # fmt: skip
    pauses = [[6, "PAUSED_NEW"], [14, "PAUSED_ALL"], [20, "PAUSED_NEW"], [26, "UNPAUSED"], [40, "PAUSED_ALL"],
              [44, "UNPAUSED"]]  # fmt: skip
    yield make("ru-06", "paused for new ones, for all, and back", seed=106, count=20, spread=40, pauses=pauses, rules=1)
    yield make("ru-07", "the same, asynchronous scheduling, tight pool", seed=107, count=20, spread=40, pauses=pauses,
               async_scheduling=True, num_blocks=40, rules=1)  # fmt: skip
    yield make("ru-08", "the same, priorities, aborts", seed=108, count=20, spread=40, pauses=pauses, priorities=3,
               policy="priority", aborts=0.3, num_blocks=44, rules=1)  # fmt: skip
    yield make("ru-09", "prompts in every 4th step only", seed=109, count=20, spread=50, prefill_schedule_interval=4,
               remote=0.3, max_num_batched_tokens=48, rules=1)  # fmt: skip
    yield make("ru-10", "prompts in every 3rd step only, asynchronous scheduling, loads", seed=110, count=24, spread=40,
               prefill_schedule_interval=3, remote=0.6, max_num_batched_tokens=64, async_scheduling=True,
               num_blocks=50, rules=1)  # fmt: skip
    yield make("ru-11", "prompts in every 5th step only, few slots, pauses, threshold", seed=111, count=24, spread=60,
               prefill_schedule_interval=5, remote=0.4, max_num_batched_tokens=64, max_num_seqs=4, rules=1,
               long_prefill_token_threshold=24, pauses=pauses, num_blocks=44)  # fmt: skip


def with_bad_blocks(id: str, description: str, *, seed: int, running: float = 0.0, **more: Any) -> Workload:
    """A workload in which blocks of some loads, and of some ``running`` requests, are reported bad.

    ``bad_entry`` is the first of ``bad_count`` table entries reported: ``bad_after`` steps after the load began, or
    once the request runs and has computed more than ``bad_running`` tokens. A load may fail as a whole in the end too.
    """
    workload = make(id, description, seed=seed, rules=1, **more)
    rng = random.Random(seed + record_workloads.offset + 7)
    for request in workload.requests:
        length = len(request["prompt"])
        request["bad_entry"] = None
        if request["external_tokens"] and rng.random() < 0.5:
            request |= {
                "bad_entry": rng.randrange(max(request["external_tokens"] // 16, 1)),
                "bad_count": rng.randint(1, 3),
                "bad_after": rng.randint(0, request["load_steps"]),
            }
        elif rng.random() < running:
            request |= {
                "bad_entry": rng.randrange(max(length // 16, 1)),
                "bad_count": 1,
                "bad_running": length + rng.randint(-length // 2, 8),
            }
    return workload


def bad_blocks() -> Iterator[Workload]:
    """Loads and running requests on bad blocks, under both policies."""
    for number, failure in enumerate(("fail", "recompute")):
        common: dict[str, Any] = {"load_failure": failure, "count": 20, "load_steps": (1, 8)}
        yield with_bad_blocks(f"ru-2{number}", f"{failure}: bad blocks of loads, reported early", seed=120 + number,
                              **common)  # fmt: skip
        yield with_bad_blocks(f"ru-3{number}", f"{failure}: first bad blocks, then the load fails as a whole",
                              seed=130 + number, fails=0.5, shared=48, **common)  # fmt: skip
        yield with_bad_blocks(f"ru-4{number}", f"{failure}: bad blocks under running requests, shared prefixes",
                              seed=140 + number, running=0.6, shared=64, **(common | {"remote": 0.4}))  # fmt: skip
        yield with_bad_blocks(f"ru-5{number}", f"{failure}: the same, tight pool, aborts, priorities",
                              seed=150 + number, running=0.5, shared=64, num_blocks=40, aborts=0.2, priorities=3,
                              **common)  # fmt: skip
        yield with_bad_blocks(f"ru-6{number}", f"{failure}: bad blocks of loads, asynchronous scheduling",
                              seed=160 + number, async_scheduling=True, fails=0.2, num_blocks=50, **common)  # fmt: skip
        yield with_bad_blocks(f"ru-7{number}", f"{failure}: no prefix caching", seed=170 + number, enable_caching=False,
                              running=0.4, num_blocks=44, **common)  # fmt: skip


def replays() -> Iterator[Workload]:
    """Windows that are computed again behind a prefix hit, but not behind a load, which brings them."""
    window = {"kinds": ["full", "swr"], "sliding_window": 32, "rules": 1, "shared": 96, "remote": 0.5}
    yield make("ru-80", "loads and hits, a replayed window", seed=180, count=20, num_blocks=120, **window)
    yield make("ru-81", "the same, small steps, tight pool, asynchronous scheduling, failures", seed=181, count=24,
               num_blocks=70, max_num_batched_tokens=40, async_scheduling=True, fails=0.3, load_failure="recompute",
               **window)  # fmt: skip


def workloads() -> Iterator[Workload]:
    """All of them."""
    yield from steps()
    yield from bad_blocks()
    yield from replays()
