"""What both sides of `benchmarks/core.py` are given to do, and their clock (the peer's interpreter imports it too)."""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np

BLOCK = 16
MILLION = 1_000_000
DECODERS, CONTEXT, WINDOW = 256, 4096, 1024
CHURN_PROMPT, CHURN_OUTPUT, CHURN_BLOCKS = 2048, 200, 20_000
VOCABULARY = 128_000


def random_tokens(count: int, seed: int) -> np.ndarray:
    """int32[count]; the same on both sides."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32)


class Stopwatch:
    """Adds up the CPU seconds of this thread within its ``with`` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> Stopwatch:
        self._since = time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.thread_time() - self._since


class Churner(Protocol):
    """A manager of blocks, ours or the peer's, that requests come to and leave."""

    num_running: int

    def arrive(self, prompt: np.ndarray) -> Any:
        """A request with its hashes."""

    def admit(self, request: Any) -> bool:
        """Lookup and blocks for its prompt, if they fit."""

    def know_output(self, request: Any, tokens: np.ndarray) -> None:
        """What it will sample, known and hashed beforehand."""

    def start(self, request: Any) -> None:
        """It runs."""

    def step(self) -> int:
        """One token for all that run; who does not fit makes the last one go, who is at its end goes. How many went."""


def churn(manager: Churner, count: int) -> float:
    """Seconds in ``manager`` for ``count`` requests of 2k prompt and 200 output; the same requests on both sides."""
    watch, arrived, done = Stopwatch(), 0, 0
    head: Any = None
    while done < count:
        while manager.num_running < DECODERS and (head is not None or arrived < count):
            if head is None:
                head = manager.arrive(random_tokens(CHURN_PROMPT, 1000 + arrived))
                arrived += 1
            with watch:
                fits = manager.admit(head)
            if not fits:
                break
            manager.know_output(head, random_tokens(CHURN_OUTPUT, arrived))
            with watch:
                manager.start(head)
            head = None
        with watch:
            done += manager.step()
    return watch.seconds
