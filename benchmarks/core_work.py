"""What both sides of `benchmarks/core.py` are given to do, and their clock (the peer's interpreter imports it too)."""

from __future__ import annotations

import time

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
