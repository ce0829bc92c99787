"""Many worlds, one a seed, on all cores; and the timeline of a single one."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context, parent_process
from threading import Thread

from pdkv.core.config import TRANSFER_POLICIES
from pdkv.core.events import Event
from pdkv.simulate.world import Story, World

_CHUNK = 8  # seeds that a worker is given at a time


def play_seed(seed: int, policy: str, requests: int) -> Story:
    """The story of one world under the transfer policy of that name."""
    with _no_garbage_collection():
        return World(seed, TRANSFER_POLICIES[policy], requests=requests).play()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A world is small and short: looking through it again and again for cycles is a tenth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def play_seeds(seeds: range, policy: str, requests: int, jobs: int) -> Iterator[Story]:
    """The stories of ``seeds``, as they end, from ``jobs`` processes (1: from this one, in order)."""
    if jobs == 1:
        yield from (play_seed(seed, policy, requests) for seed in seeds)
        return
    workers = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_end_with_the_parent)
    try:
        chunks = iter([seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)])
        pending = {workers.submit(_play_chunk, chunk, policy, requests) for chunk in islice(chunks, 2 * jobs)}
        while pending:
            done = next(as_completed(pending))
            pending.remove(done)
            pending |= {workers.submit(_play_chunk, chunk, policy, requests) for chunk in islice(chunks, 1)}
            yield from done.result()
    finally:  # also when the caller is interrupted, or reads no further: what is queued is not played then
        workers.shutdown(cancel_futures=True)


def _end_with_the_parent() -> None:
    """Of a worker: Ctrl-C ends it at once, and it does not outlive a parent that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _play_chunk(seeds: Iterable[int], policy: str, requests: int) -> list[Story]:
    return [play_seed(seed, policy, requests) for seed in seeds]


def trace(seed: int, policy: str, requests: int, line: Callable[[str], None]) -> Story:
    """Play one world again; ``line`` gets each line of its timeline: virtual seconds, who, what, details."""

    def note(at_ns: int, who: str, what: str, details: object) -> None:
        line(f"{at_ns / 1e9:11.6f} s  {who:8} {what:14} {_in_words(details)}")

    return World(seed, TRANSFER_POLICIES[policy], requests=requests, note=note).play()


def _in_words(details: object) -> str:
    if not isinstance(details, Event):
        return str(details)
    facts = (
        (name, getattr(details, name))
        for name in details.__struct_fields__
        if name not in ("request_id", "at_ns", "lease")
    )
    return " ".join([details.request_id, *(f"{name}={value}" for name, value in facts if value is not None)])
