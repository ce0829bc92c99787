"""Real instances for end-to-end tests: real weights, real movers, real side channels, one process."""

from __future__ import annotations

import dataclasses
import functools
import queue
from collections.abc import Iterable
from typing import Any

import numpy as np

from pdkv.core.events import Event, Finished, TokenSampled
from pdkv.core.ports import NewRequest
from pdkv.core.transfer.messages import Peer, RemoteSource
from pdkv.runtime import boot
from pdkv.runtime.boot import start_instance
from pdkv.runtime.instance import Instance, Update
from pdkv.runtime.sampler import SamplingParams
from pdkv.serve.options import InstanceOptions

GREEDY = SamplingParams(temperature=0.0)

# Instances of one test process share the weights (nothing writes to them): loading is most of an instance's start.
boot.load_model = functools.cache(boot.load_model)


def instance(role: str, model: str = "smollm2", **changes: Any) -> Instance:
    """A started instance with a pool of 256 MiB unless told otherwise; every step recounts the ledger."""
    options = InstanceOptions(
        role=role,  # type: ignore[arg-type]
        model=model,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        threads=1,  # two thread pools on two busy cores wait for each other most of the time
        debug=True,
    )
    return start_instance(dataclasses.replace(options, **changes))


class Flight:
    """A submitted request; ``wait`` collects its events up to the last."""

    def __init__(self, target: Instance, request: NewRequest, sampling: SamplingParams = GREEDY) -> None:
        self._updates: queue.Queue[Update] = queue.Queue()
        self.request = request
        self.events: list[Event] = []
        target.submit(request, sampling, self._updates.put)

    def wait(self, timeout_s: float = 120.0) -> Flight:
        """Until the one `Finished`."""
        while not (self.events and isinstance(self.events[-1], Finished)):
            self.events += self._updates.get(timeout=timeout_s).events
        return self

    def wait_for(self, kind: type[Event], timeout_s: float = 60.0) -> Flight:
        """Until an event of ``kind`` has come."""
        while not any(isinstance(event, kind) for event in self.events):
            self.events += self._updates.get(timeout=timeout_s).events
        return self

    @property
    def tokens(self) -> list[int]:
        """Sampled token ids so far."""
        return [event.token for event in self.events if isinstance(event, TokenSampled)]

    @property
    def finished(self) -> Finished:
        """How it ended."""
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    def of(self, kind: type[Event]) -> list[Event]:
        """Events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def array(tokens: Iterable[int]) -> Any:
    """int32 token ids."""
    return np.asarray(list(tokens), dtype=np.int32)


def prefill(producer: Instance, request_id: str, prompt: Iterable[int]) -> RemoteSource:
    """P's leg: the prompt's KV is kept under a lease."""
    flight = Flight(producer, NewRequest(request_id=request_id, prompt=array(prompt), max_tokens=1, produce=True))
    return source_of(producer, flight.wait().finished)


def source_of(producer: Instance, finished: Finished) -> RemoteSource:
    """What the router carries from P's answer to D."""
    assert finished.lease is not None
    info = producer.info
    peer = Peer(info.engine_id, info.side_channel_host, info.side_channel_port)
    return RemoteSource(peer=peer, request_id=finished.request_id, grant=finished.lease)


def decode(
    consumer: Instance,
    request_id: str,
    prompt: Iterable[int],
    source: RemoteSource | None,
    max_tokens: int,
    **more: Any,
) -> Flight:
    """D's leg, under way."""
    request = NewRequest(request_id=request_id, prompt=array(prompt), max_tokens=max_tokens, source=source, **more)
    return Flight(consumer, request)


def idle_blocks(target: Instance) -> int:
    """Blocks that nobody holds."""
    accounts = target.memory().accounts
    return accounts["free"] + accounts["cached"]
