"""What the HTTP front end needs of an instance: the shape of `runtime.instance.Instance` and of the tests' fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pdkv.core.events import Event, FinishReason
from pdkv.core.ports import MemoryView, NewRequest
from pdkv.core.transfer.messages import Awaited, RemoteSource
from pdkv.runtime.sampler import SamplingParams, TokenLogprobs
from pdkv.runtime.transfer_stats import TransferStats


class InfoLike(Protocol):
    """Facts of a started instance that never change."""

    @property
    def role(self) -> str: ...
    @property
    def engine_id(self) -> str: ...
    @property
    def model_name(self) -> str: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def side_channel_host(self) -> str: ...
    @property
    def side_channel_port(self) -> int: ...
    @property
    def bidirectional(self) -> bool: ...


class StatsLike(Protocol):
    """Gauges at one instant: requests decoding or prefilling, waiting (loads included), and loading.

    ``transfer`` are the control thread's counters since the start.
    """

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def loading(self) -> int: ...
    @property
    def transfer(self) -> TransferStats: ...


class UpdateLike(Protocol):
    """What one step did to one request."""

    @property
    def request_id(self) -> str: ...
    @property
    def events(self) -> tuple[Event, ...]: ...
    @property
    def logprobs(self) -> TokenLogprobs | None: ...


class ModelLike(Protocol):
    """The loaded model: the HF tokenizer (or None) and the ids that end a text."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def vocab_size(self) -> int: ...


class ServedInstance(Protocol):
    """An instance as the API uses it; every method may be called from any thread and returns at once."""

    @property
    def info(self) -> InfoLike: ...
    @property
    def model(self) -> ModelLike: ...
    @property
    def failed(self) -> BaseException | None: ...

    def submit(self, request: NewRequest, sampling: SamplingParams, sink: Callable[[UpdateLike], None]) -> None:
        """Queue a request; ``sink`` gets its updates on the engine's thread. Raises `BadRequest`, `DoesNotFit`."""
        ...

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request (an unknown or finished one is ignored); its sink still gets the one `Finished`."""
        ...

    def release(self, offer: RemoteSource | Awaited) -> None:
        """Tell the producer that this grant, or promise, will not be used (a hint: its lease would expire anyway)."""
        ...

    def memory(self) -> MemoryView: ...

    def stats(self) -> StatsLike: ...
