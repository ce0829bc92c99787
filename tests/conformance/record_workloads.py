"""The workloads that `record.py` plays to vLLM's scheduler: requests, what a producer has of them, what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

DEFAULTS: Row = {
    "block_size": 16, "num_blocks": 60, "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512,
    "watermark": 0.0, "long_prefill_token_threshold": 0, "async_scheduling": False, "full_sequence_must_fit": True,
    "enable_caching": True, "policy": "fcfs", "kinds": ["full"], "load_failure": "fail",
}  # fmt: skip


offset = 0  # other workloads of the same kinds: set by the recorder before it asks for them


def sampled_token(request_id: str, position: int) -> int:
    """Token of a request at an output position (as in sched_traces)."""
    return (sum(request_id.encode()) * 31 + position * 7) % 997


@dataclass
class Workload:
    """One row to be: a configuration, and requests with their fates."""

    id: str
    description: str
    config: Row
    requests: list[Row]

    def by_id(self, request_id: str) -> Row:
        """One request."""
        return next(request for request in self.requests if request["id"] == request_id)


def make(
    id: str,
    description: str,
    *,
    seed: int,
    count: int = 14,
    prompt: tuple[int, int] = (20, 180),
    output: tuple[int, int] = (2, 50),
    remote: float = 0.7,  # share of requests whose prompt a producer holds
    whole: float = 0.7,  # share of those of which it holds the whole prompt
    load_steps: tuple[int, int] = (1, 6),
    fails: float = 0.0,
    aborts: float = 0.0,
    stops: float = 0.3,  # share of requests that end by a stop token, which asynchronous scheduling cannot foresee
    shared: int = 0,  # tokens of a prefix that half of the requests begin with
    spread: int = 20,  # arrivals are spread over so many steps
    priorities: int = 1,
    **config: Any,
) -> Workload:
    """A random workload; the same for the same seed and `offset`."""
    rng = random.Random(seed + offset)
    prefix = [rng.randrange(1000) for _ in range(shared)]
    requests = []
    for number in range(count):
        begin = prefix if shared and rng.random() < 0.5 else []
        tokens = begin + [rng.randrange(1000) for _ in range(rng.randint(*prompt))]
        external = 0
        if rng.random() < remote:
            external = len(tokens) if rng.random() < whole else rng.randint(1, len(tokens))
        arrival = rng.randrange(spread) if number else 0
        max_tokens, stop = rng.randint(*output), rng.random() < stops
        stop_at = [sampled_token(f"r{number}", rng.randrange(max_tokens))] if stop else []
        requests.append(
            {
                "id": f"r{number}", "arrival_step": arrival, "prompt": tokens, "max_tokens": max_tokens,
                "stop_token_ids": stop_at,
                "priority": rng.randrange(priorities), "external_tokens": external,
                "load_steps": rng.randint(*load_steps), "load_fails": rng.random() < fails,
                "abort_step": arrival + rng.randint(1, 12) if rng.random() < aborts else None,
            }
        )  # fmt: skip
    requests.sort(key=lambda request: request["arrival_step"])
    return Workload(id, description, DEFAULTS | config, requests)


def loads_fill_the_pool() -> Workload:
    """Scenario S1 of the specification: ten loads admitted although two requests may run."""
    workload = make(
        "rm-01", "loads fill the pool: 12 whole prompts of 10 blocks, two running slots", seed=1, count=12,
        prompt=(160, 160), output=(40, 40), remote=1.0, whole=1.0, spread=1, num_blocks=101, max_num_seqs=2,
    )  # fmt: skip
    for number, request in enumerate(workload.requests):
        request["load_steps"] = 1 if number < 3 else 12 + 2 * number
    workload.requests[5]["abort_step"] = 6
    return workload


def watermark_against_a_loaded_request() -> Workload:
    """Scenario S2: loaded, needs no block, and is kept waiting by the watermark."""
    workload = make(
        "rm-02", "a loaded request of 39 blocks against a watermark of 10 while another grows", seed=2, count=3,
        remote=0.0, spread=1, num_blocks=101, watermark=0.1, max_model_len=1024, max_num_batched_tokens=1024,
    )  # fmt: skip
    rng = random.Random(2)
    for request, (tokens, output, external, steps) in zip(
        workload.requests, ((799, 60, 0, 1), (624, 20, 624, 25), (70, 8, 0, 1)), strict=True
    ):
        request |= {
            "prompt": [rng.randrange(1000) for _ in range(tokens)], "max_tokens": output,
            "stop_token_ids": [], "external_tokens": external,
            "load_steps": steps, "arrival_step": 30 if tokens == 70 else 0,
        }  # fmt: skip
    return workload


def abort_behind_an_idle_hit() -> Workload:
    """The aborted load has a local hit that nobody else holds: vLLM keeps those blocks too until the load has ended."""
    workload = make(
        "rm-25", "abort of a load behind a local hit that nobody else holds", seed=25, count=4, prompt=(100, 100),
        output=(4, 4), remote=0.0, stops=0.0, num_blocks=40,
    )  # fmt: skip
    first, second, third, fourth = workload.requests
    second["prompt"] = first["prompt"][:64] + second["prompt"]
    second |= {"external_tokens": len(second["prompt"]), "load_steps": 20, "abort_step": 13}
    for request, arrival in ((first, 0), (second, 10), (third, 14), (fourth, 40)):
        request["arrival_step"] = arrival
    fourth["prompt"] = second["prompt"]
    return workload


def uniform() -> Iterator[Workload]:
    """Full attention only: everything that happens to a load."""
    yield loads_fill_the_pool()
    yield watermark_against_a_loaded_request()
    yield make("rm-03", "loads of whole prompts, enough room", seed=3, whole=1.0)
    yield make("rm-04", "loads of whole and partial prompts, tight pool, preemptions", seed=4, count=18, num_blocks=40)
    yield make("rm-05", "loads behind a shared prefix that is cached here", seed=5, count=18, shared=64, remote=0.8)
    yield make("rm-06", "loads, chunked prefills and their reservations", seed=6, count=16, num_blocks=44,
               max_num_batched_tokens=48, remote=0.5, prompt=(60, 220), load_steps=(2, 9))  # fmt: skip
    yield make("rm-07", "failed loads, policy fail", seed=7, count=18, fails=0.4, shared=32)
    yield make("rm-08", "failed loads, policy recompute", seed=8, count=18, fails=0.4, load_failure="recompute")
    yield make("rm-09", "failed loads, policy recompute, tight pool", seed=9, count=20, fails=0.5, num_blocks=36,
               load_failure="recompute", shared=48, load_steps=(1, 10))  # fmt: skip
    yield make("rm-10", "aborts, most of them while loading", seed=10, count=20, aborts=0.5, load_steps=(4, 16))
    yield make("rm-11", "aborts and failures, tight pool", seed=11, count=24, aborts=0.35, fails=0.3, num_blocks=40,
               load_steps=(2, 14))  # fmt: skip
    yield make("rm-12", "aborts of loads behind a local hit", seed=12, count=20, aborts=0.4, shared=96,
               load_steps=(4, 16), num_blocks=70)  # fmt: skip
    yield make("rm-13", "watermark 0.1", seed=13, count=20, watermark=0.1, num_blocks=50)
    yield make("rm-14", "watermark 0.25, failures recomputed", seed=14, count=20, watermark=0.25, num_blocks=60,
               fails=0.3, load_failure="recompute")  # fmt: skip
    yield make("rm-15", "priority scheduling", seed=15, count=20, priorities=4, num_blocks=40, policy="priority")
    yield make("rm-16", "asynchronous scheduling: deferred frees", seed=16, async_scheduling=True)
    yield make("rm-17", "asynchronous scheduling, tight pool: stalls instead of preemptions", seed=17, count=20,
               async_scheduling=True, num_blocks=36, output=(10, 60))  # fmt: skip
    yield make("rm-18", "asynchronous scheduling, failures under fail, aborts", seed=18, count=24, aborts=0.4,
               fails=0.3, async_scheduling=True, num_blocks=44, load_steps=(1, 10))  # fmt: skip
    yield make("rm-19", "asynchronous scheduling, failures recomputed, shared prefix", seed=19, count=20, fails=0.4,
               async_scheduling=True, load_failure="recompute", shared=48, num_blocks=50)  # fmt: skip
    yield make("rm-20", "no prefix caching", seed=20, count=18, enable_caching=False, num_blocks=40)
    yield make("rm-21", "no prefix caching, asynchronous scheduling", seed=21, count=18, enable_caching=False,
               num_blocks=40, async_scheduling=True)  # fmt: skip
    yield make("rm-22", "no full-sequence check at admission", seed=22, count=18, full_sequence_must_fit=False,
               num_blocks=36)  # fmt: skip
    yield make("rm-23", "long-prefill threshold", seed=23, count=18, long_prefill_token_threshold=24, remote=0.4,
               spread=4, max_num_batched_tokens=64)  # fmt: skip
    yield make("rm-24", "everything local: no load at all, asynchronous scheduling", seed=24, count=16, remote=0.0,
               async_scheduling=True, num_blocks=36)  # fmt: skip
    yield abort_behind_an_idle_hit()
    yield make("rm-26", "everything at once: priorities, asynchronous, threshold, watermark, failures, aborts", seed=26,
               count=26, priorities=4, policy="priority", async_scheduling=True, long_prefill_token_threshold=40,
               watermark=0.1, fails=0.3, aborts=0.3, shared=64, load_failure="recompute", load_steps=(1, 16),
               max_num_batched_tokens=64, num_blocks=44)  # fmt: skip


def hybrid() -> Iterator[Workload]:
    """Several cache groups."""
    window = {"kinds": ["full", "sw"], "sliding_window": 48, "num_blocks": 90}
    yield make("rm-31", "full and sliding window: loads", seed=31, count=16, **window)
    yield make("rm-32", "full and sliding window: tight, shared prefix, aborts", seed=32, count=20,
               shared=64, aborts=0.3, **(window | {"num_blocks": 60}))  # fmt: skip
    yield make("rm-33", "full and sliding window: asynchronous scheduling, failures recomputed", seed=33, count=18,
               fails=0.3, load_failure="recompute", async_scheduling=True, **window)  # fmt: skip
    states = {"kinds": ["full", "mamba"], "state_block_size": 16, "num_blocks": 90}
    yield make("rm-34", "full and state groups, mode none: loads", seed=34, count=14, enable_caching=False,
               **(states | {"mamba_cache_mode": "none", "state_block_size": 512}))  # fmt: skip
    yield make("rm-35", "full and state groups, mode align: loads of whole prompts, shared prefix", seed=35, count=16,
               shared=64, mamba_cache_mode="align", **states)  # fmt: skip
    yield make("rm-36", "state groups with blocks of 64 tokens and hashes of 16: partial hits, copy on write", seed=36,
               count=20, shared=88, remote=0.3, mamba_cache_mode="align", hash_block_size=16, block_size=64,
               **(states | {"state_block_size": 64, "num_blocks": 60}))  # fmt: skip
    yield make("rm-37", "the same with loads, failures and aborts", seed=37, count=20, shared=88, remote=0.7, fails=0.2,
               aborts=0.2, mamba_cache_mode="align", hash_block_size=16, block_size=64,
               **(states | {"state_block_size": 64, "num_blocks": 50}))  # fmt: skip


def lagging_states() -> Iterator[Workload]:
    """Loads that bring the state which a prefix hit lacks."""
    states = {"kinds": ["full", "mamba"], "mamba_cache_mode": "align", "divergent_hits": True, "remote": 0.8}
    for number, tight in enumerate((70, 36), start=38):
        yield make(f"rm-{number}", "full attention hits deeper than states: loads bring the state", seed=number,
                   count=24, shared=88, num_blocks=tight, aborts=0.1, fails=0.1, state_block_size=16,
                   **states)  # fmt: skip
    yield make("rm-40", "the same with blocks of 64 tokens and hashes of 16", seed=40, count=24, shared=150, fails=0.1,
               num_blocks=44, hash_block_size=16, block_size=64, state_block_size=64, **states)  # fmt: skip


def workloads() -> Iterator[Workload]:
    """All of them."""
    yield from uniform()
    yield from hybrid()
    yield from lagging_states()
