"""The ranks' collectives: torch's gloo over loopback for CPU tensors, NCCL for GPUs.

A process group of its own, not torch's default one: a process may hold several (the tests' P and D). The ranks find
each other through a file, so that nothing listens beyond loopback and nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pdkv.errors import RankFailed

LOAD_TIMEOUT_S = 600.0
"""Most that one rank waits for another that still reads weights."""

STEP_TIMEOUT_S = 60.0
"""Most that one rank waits for another inside a forward pass; one that takes longer hangs."""


class RankGroup:
    """``size`` ranks, of which this process is ``rank``. Every rank must call the same methods in the same order.

    Each method returns when this rank's result is there (on a GPU: when it comes before whatever the stream does next).
    Raises RankFailed when another rank has died, or did not come within the timeout.
    """

    def __init__(
        self, rank: int, size: int, rendezvous: Path, device: torch.device, before_meeting: Callable[[], None]
    ) -> None:
        """Not connected yet: ``meet`` does that at the file ``rendezvous``, which no other group may have used.

        ``before_meeting`` is called first, when this rank has come so far; rank 0's waits for all the others.
        """
        self.rank, self.size, self.device = rank, size, device
        self._rendezvous, self._before_meeting = rendezvous, before_meeting
        self._step_timeout = timedelta(seconds=STEP_TIMEOUT_S)
        self._group: dist.Backend | None = None

    def meet(self) -> None:
        """Connect to the others, wherever they still are in reading weights. Comes before the collectives."""
        self._before_meeting()
        timeout = self._step_timeout if self.rank == 0 else timedelta(seconds=LOAD_TIMEOUT_S)
        with _failures("connection"):
            store = dist.FileStore(str(self._rendezvous), self.size)
            store.set_timeout(timeout)
            make = _nccl if self.device.type == "cuda" else _gloo
            self._group = make(store, self.rank, self.size, timeout)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; returns ``tensor``."""
        options = dist.AllreduceOptions()
        options.timeout = self._step_timeout
        with _failures("all-reduce"):
            assert self._group is not None, "the ranks have not met"
            self._group.allreduce([tensor], options).wait()
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """On rank 0 every rank's ``tensor`` (all of one shape), in order; elsewhere an empty list."""
        options = dist.GatherOptions()
        options.rootRank, options.timeout = 0, self._step_timeout
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        with _failures("gather"):
            assert self._group is not None, "the ranks have not met"
            self._group.gather([parts] if parts else [], [tensor], options).wait()
        return parts

    def abort(self) -> None:
        """Have whoever waits in a collective, here or elsewhere, get an error. May be called by any thread."""
        if self._group is not None:
            self._group.abort()


@contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch has no narrower one
        raise RankFailed(f"{what} with the other tensor-parallel ranks failed: {error}") from error


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    options = dist.ProcessGroupGloo._Options()
    # By itself gloo takes the address that this host's name stands for, which others may reach.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
