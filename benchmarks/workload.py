"""What both engines are given to do, and the line protocol in which they are told (standard library only: the peer's
interpreter imports this file, too)."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

CONTEXT_TOKENS = 513
"""Decode contexts: 512 tokens whose KV is cached (both engines' block sizes divide 512) and one to start from."""

_TEXT = (
    "the of and to in is was for on that with as it by at from his an were are which this be had has first one their "
    "its new after but who they two her she been other when time during there into school more years over only"
)
WORDS = _TEXT.split()
"""Each is one token of SmolLM2's vocabulary with its leading space; prompts are random sequences of them."""


def make_prompt(word_ids: Sequence[int], length: int, seed: int) -> list[int]:
    """``length`` token ids that no other seed gives: plain words, so that every answer decodes to text."""
    rng = random.Random(seed)
    return [rng.choice(word_ids) for _ in range(length)]


class Clock:
    """Wall seconds and this process's CPU seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """(wall, CPU) seconds so far."""
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


class DecodeWindow:
    """Counts tokens while the whole batch decodes: from the last request's first token to the first one's end."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._started: set[str] = set()
        self._clock: Clock | None = None
        self._tokens = 0
        self.result: dict[str, float] | None = None

    def step(self, counts: dict[str, int], *, ended: bool) -> None:
        """One engine step gave ``counts`` new tokens per request; ``ended`` when a request finished in it."""
        if self.result is not None:
            return
        if self._clock is None:
            self._started.update(counts)
            if len(self._started) == self._batch:
                self._clock = Clock()
            return
        self._tokens += sum(counts.values())
        if ended:
            wall_s, cpu_s = self._clock.read()
            self.result = rates(self._tokens, wall_s, cpu_s)


def rates(tokens: int, wall_s: float, cpu_s: float) -> dict[str, float]:
    """Tokens per wall second and per CPU second."""
    return {
        "tokens": tokens,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "per_wall_s": tokens / wall_s,
        "per_cpu_s": tokens / max(cpu_s, 1e-9),
    }


def answer_commands(start: Callable[[dict[str, Any]], dict[str, Callable[..., Any]]]) -> None:
    """The child's side: JSON lines in on stdin, one answer line each on the stdout it was started with.

    The first line configures ``start``, which returns the commands by name. Whatever libraries print goes to stderr.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    commands: dict[str, Callable[..., Any]] | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if commands is None:
                commands = start(message)
                answer: Any = commands["facts"]()
            else:
                answer = commands[message.pop("do")](**message)
            reply = {"answer": answer}
        except Exception as error:
            if commands is None:
                out.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
                raise
            reply = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(reply) + "\n")


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and the runs themselves."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": list(values)}


def percentile(values: Sequence[float], percent: int) -> float:
    """By nearest rank: the smallest of ``values`` that at least ``percent`` (1 to 100) of 100 do not exceed."""
    return sorted(values)[-(-percent * len(values) // 100) - 1]


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """ours/theirs pair by pair: median, extremes, and the half-width of the middle half (the spread)."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    result = summary(ratios)
    low, high = (ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4])
    result["spread"] = (high - low) / 2
    return result
