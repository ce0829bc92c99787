"""What rank 0 and the other ranks of one instance tell each other, over a socket pair each: msgpack, never pickled."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.core.ports import Batch
from pdkv.errors import ConfigError, DoesNotFit, PdkvError, UnsupportedModel
from pdkv.runtime.wire import FrameBuffer

_MOST_BYTES = 1 << 30  # a batch's block tables may be large
_ERRORS: dict[str, type[PdkvError]] = {kind.__name__: kind for kind in (ConfigError, DoesNotFit, UnsupportedModel)}


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Be rank ``rank`` of ``ranks``: load your share of the model, and say how much memory that leaves.

    The fields are those of `load_model` and `determine_available_memory`; ``total_bytes`` and ``free_bytes`` are the
    host's before anything was loaded (on a GPU each rank measures its own).
    """

    rank: int
    ranks: int
    rendezvous: str
    model_name: str
    directory: str
    device: str
    dtype: str
    weight_storage: str
    threads: int
    debug: bool
    total_bytes: int
    free_bytes: int


class Profile(msgspec.Struct, frozen=True, kw_only=True, tag="profile"):
    """Measure: the fields of `ProfileLimits`, and of `determine_available_memory`."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    bytes_per_block: int
    gpu_memory_utilization: float | None
    kv_cache_memory_bytes: int | None
    share: float


class MakePool(msgspec.Struct, frozen=True, kw_only=True, tag="make_pool"):
    """Have a pool of this shape (`KvPool`). On CPU it is a part of the memory whose descriptor comes along."""

    shape: tuple[int, int, int, int, int, int]


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Run a batch: what a forward pass looks at of a `Batch`, the arrays as bytes. Not answered: the collectives keep
    the ranks together.
    """

    num_scheduled: bytes
    num_computed: bytes
    tokens: bytes
    samples: bytes
    block_tables: bytes


class Here(msgspec.Struct, frozen=True, tag="here"):
    """The rank has its share of the weights, and is about to meet the others."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """What this rank has for KV."""

    available_kv_bytes: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """This rank cannot start, for a reason that a person can change."""

    kind: str
    text: str


ToRank = Begin | Profile | MakePool | Step
FromRank = Here | Measured | Failed

_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def from_rank(frame: bytes) -> FromRank:
    """A frame of another rank, decoded."""
    message: FromRank = _from_rank.decode(frame)
    return message


def step_of(batch: Batch) -> Step:
    """A batch without pending tokens, of a model with one group of layers, as the other ranks get it."""
    assert not batch.pending.any(), "only rank 0 knows what was sampled"
    assert not len(batch.copies), "no forward pass copies blocks"
    return Step(
        num_scheduled=_bytes(batch.num_scheduled),
        num_computed=_bytes(batch.num_computed),
        tokens=_bytes(batch.tokens),
        samples=batch.samples.astype(np.bool_).tobytes(),
        block_tables=_bytes(batch.block_tables),
    )


def batch_of(step: Step) -> Batch:
    """The batch that `step_of` was given; its rows have no names here."""
    num_scheduled = _int32(step.num_scheduled)
    rows = len(num_scheduled)
    return Batch(
        request_ids=("",) * rows,
        num_scheduled=num_scheduled,
        num_computed=_int32(step.num_computed),
        tokens=_int32(step.tokens),
        pending=np.zeros(rows, dtype=np.bool_),
        block_tables=_int32(step.block_tables).reshape(rows, -1),
        samples=np.frombuffer(step.samples, dtype=np.bool_),
    )


def failure(error: PdkvError) -> Failed:
    """An error for people, to be raised on rank 0."""
    return Failed(kind=type(error).__name__, text=str(error))


def error_of(failed: Failed, rank: int) -> PdkvError:
    """The error that rank ``rank`` had."""
    return _ERRORS.get(failed.kind, PdkvError)(f"rank {rank}: {failed.text}")


class Inbox:
    """A rank's side: messages from rank 0, one by one, and the descriptors that came with them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameBuffer(_MOST_BYTES)
        self.descriptors: list[int] = []

    def messages(self) -> Iterator[ToRank]:
        """Each message as it comes; ends when rank 0 closes its side."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._sock, 1 << 20, 4)
            self.descriptors += descriptors
            if not data:
                return
            for frame in self._frames.feed(data):
                yield _to_rank.decode(frame)


def _bytes(array: npt.NDArray[np.int32]) -> bytes:
    return np.ascontiguousarray(array, dtype="<i4").tobytes()


def _int32(data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(data, dtype="<i4").astype(np.int32)
