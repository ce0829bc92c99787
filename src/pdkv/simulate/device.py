"""A device whose memory can be judged: every KV slot carries a tag of the tokens that it stands for.

The tag of a position names *all* tokens up to it, as real KV depends on them. `Device.run` executes a batch as a
device would (all rows write, then all rows read) and complains when a row attends to a tag that its own tokens do not
say: that token would have been computed from somebody else's KV, or from a block freed and filled again. It knows
nothing of leases, slots or accounts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pdkv.core.ports import Batch, Int32Array, NewRequest, Outputs
from pdkv.units import cdiv

VOCABULARY = 1000

_OFFSET = 1469598103934665603
_PRIME = 1099511628211
_MASK = (1 << 62) - 1


class ForeignKV(AssertionError):
    """A token was about to be computed from KV that is not its own prompt's."""


def prefix_tag(tag: int | None, token: int) -> int:
    """The tag of a prefix that ends with ``token``, behind one tagged ``tag``; equal exactly when the prefixes are."""
    value = _OFFSET if tag is None else tag
    return ((value ^ (token + 1)) * _PRIME + 12345) & _MASK


def sampled(tag: int) -> int:
    """The fake model: the next token depends on all known ones, and on nothing else."""
    return (tag >> 20) % VOCABULARY


class Sequence:
    """A request's tokens as the device knows them, each with its tag."""

    def __init__(self, prompt: Int32Array) -> None:
        self.tokens: list[int] = prompt.tolist()
        self.tags: list[int] = []
        tag: int | None = None
        for token in self.tokens:
            tag = prefix_tag(tag, token)
            self.tags.append(tag)

    def extend(self) -> int:
        """Sample one more token."""
        token = sampled(self.tags[-1])
        self.tokens.append(token)
        self.tags.append(prefix_tag(self.tags[-1], token))
        return token


def expected_output(prompt: Int32Array, count: int) -> list[int]:
    """The ``count`` tokens that must follow ``prompt``."""
    sequence = Sequence(prompt)
    return [sequence.extend() for _ in range(count)]


class Device:
    """Tags int64[num_blocks, block_size] in place of KV; -1 where nothing was ever written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.tags: npt.NDArray[np.int64] = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self._block_size = block_size
        self._sequences: dict[str, Sequence] = {}

    def add(self, new: NewRequest) -> None:
        """A request whose rows will come."""
        self._sequences[new.request_id] = Sequence(new.prompt)

    def forget(self, request_ids: Iterable[str]) -> None:
        """No row of these requests will come any more."""
        for request_id in request_ids:
            del self._sequences[request_id]

    def run(self, batch: Batch) -> Outputs:
        """Sampled tokens of the batch. Raises `ForeignKV` for a row that attends to content that is not its own."""
        offsets = np.concatenate(([0], np.cumsum(batch.num_scheduled)))
        spans = []
        for row, request_id in enumerate(batch.request_ids):
            start = int(batch.num_computed[row])
            end = start + int(batch.num_scheduled[row])
            given = batch.tokens[offsets[row] : offsets[row + 1]].tolist()
            spans.append((request_id, self._sequence(request_id, start, end, given, bool(batch.pending[row])), end))
            self._write(row, batch.block_tables[row], spans[-1][1], start, end, request_id)
        tokens = np.zeros(len(batch), dtype=np.int32)
        for row, (request_id, sequence, end) in enumerate(spans):
            self._read(batch.block_tables[row], sequence, end, request_id)
            if batch.samples[row]:
                assert end == len(sequence.tokens), f"{request_id}: samples before its last token"
                tokens[row] = sequence.extend()
        return Outputs(tokens=tokens)

    def _sequence(self, request_id: str, start: int, end: int, given: list[int], pending: bool) -> Sequence:
        sequence = self._sequences[request_id]
        if pending:
            given[-1] = sequence.tokens[end - 1]
        assert given == sequence.tokens[start:end], f"{request_id}: wrong input tokens at {start}"
        return sequence

    def _write(self, row: int, table: Int32Array, sequence: Sequence, start: int, end: int, request_id: str) -> None:
        positions = np.arange(start, end)
        blocks = table[positions // self._block_size]
        assert blocks.all(), f"{request_id}: row {row} writes to the null block"
        self.tags[blocks, positions % self._block_size] = sequence.tags[start:end]

    def _read(self, table: Int32Array, sequence: Sequence, end: int, request_id: str) -> None:
        blocks = table[: cdiv(end, self._block_size)]
        wrong = np.flatnonzero(self.tags[blocks].reshape(-1)[:end] != np.asarray(sequence.tags[:end]))
        if len(wrong):
            at = int(wrong[0])
            raise ForeignKV(f"{request_id}: position {at} of {end}, block {int(blocks[at // self._block_size])}")
