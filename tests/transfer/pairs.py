"""P, which writes, and D, which it writes to: in this process, or simulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import pytest
from tests.transfer.producers import calm_world, started
from tests.transfer.sides import RealSide, SimulatedSide, ucx_held_to


@contextmanager
def real_pair(transport: str, mover_of_p: str, tls: str | None = None) -> Iterator[tuple[RealSide, RealSide]]:
    """UCX is held to ``tls``. D's mover is a process where only the end of one fences what is written to it (NIXL)."""
    with ucx_held_to(tls):
        p, d = (
            RealSide("P", transport, mover_of_p),
            RealSide("D", transport, "process" if transport == "nixl" else "thread"),
        )
        d.by_sockets = tls is not None and "tcp" in tls
        try:
            yield p, d
        finally:
            d.close()
            p.close()


def simulated_pair(
    seed: int, *, shared_memory: bool, p_hears: bool = False, **settings: Any
) -> tuple[SimulatedSide, SimulatedSide]:
    """In virtual time. ``p_hears``: P's engine runs, and hears what is said to it; else the test does."""
    world = calm_world(seed, shared_memory=shared_memory, **settings)
    return started(world, "P", 1, heard=not p_hears), started(world, "D", 2)


class Opens(Protocol):
    """What opens a simulated fixture."""

    def __call__(self, seed: int, *, shared_memory: bool) -> AbstractContextManager[Any]: ...


def simulated_kinds(opens: Opens) -> list[Any]:
    """Two seeds over shared memory, two over NIXL."""
    return [
        pytest.param(partial(opens, seed, shared_memory=shared), id=f"simulated-{name}-{seed}")
        for seed in range(2)
        for shared, name in ((True, "shm"), (False, "nixl"))
    ]
