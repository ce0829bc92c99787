"""A device whose memory can be judged: every KV slot carries a tag of the tokens that it stands for.

The tag of a position names *all* tokens up to it, as real KV depends on them. `Device.run` executes a batch as a
device would (all rows write, then all rows read) and complains when a row attends to a tag that its own tokens do not
say: that token would have been computed from somebody else's KV, or from a block freed and filled again. It knows
nothing of leases, slots or accounts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdkv.core.blocks.groups import ChunkedGroup, FullGroup, Group, WindowGroup
from pdkv.core.ports import Batch, Int32Array, Int64Array, Outputs

VOCABULARY = 1000

_OFFSET = 1469598103934665603
_PRIME = 1099511628211
_MASK = (1 << 62) - 1
_NO_OUTPUTS = Outputs(tokens=np.empty(0, dtype=np.int32))


class ForeignKV(AssertionError):
    """A token was about to be computed from KV that is not its own prompt's."""


def prefix_tag(tag: int | None, token: int) -> int:
    """The tag of a prefix that ends with ``token``, behind one tagged ``tag``; equal exactly when the prefixes are."""
    value = _OFFSET if tag is None else tag
    return ((value ^ (token + 1)) * _PRIME + 12345) & _MASK


def sampled(tag: int) -> int:
    """The fake model: the next token depends on all known ones, and on nothing else."""
    return (tag >> 20) % VOCABULARY


class Tokens:
    """A request's tokens as the device knows them, each with its tag: ``tags`` int64[num_tokens], a view."""

    def __init__(self, prompt: Int32Array) -> None:
        self.tokens: list[int] = prompt.tolist()
        tags: list[int] = []
        tag: int | None = None
        for token in self.tokens:
            tag = prefix_tag(tag, token)
            tags.append(tag)
        self._last = tags[-1]
        self._memory = np.array(tags + tags, dtype=np.int64)

    def extend(self) -> int:
        """Sample one more token."""
        token = sampled(self._last)
        self._last = prefix_tag(self._last, token)
        if len(self.tokens) == len(self._memory):
            self._memory = np.concatenate((self._memory, self._memory))
        self._memory[len(self.tokens)] = self._last
        self.tokens.append(token)
        return token

    @property
    def tags(self) -> Int64Array:
        return self._memory[: len(self.tokens)]


def expected_output(prompt: Int32Array, count: int) -> list[int]:
    """The ``count`` tokens that must follow ``prompt``."""
    tokens = Tokens(prompt)
    return [tokens.extend() for _ in range(count)]


class Device:
    """Tags int64[num_blocks, largest block] in place of KV; -1 where nothing was ever written.

    A block belongs to one of the model's ``groups`` at a time; of each, a token sees what its kind of layer looks at.
    """

    def __init__(self, num_blocks: int, groups: Sequence[Group]) -> None:
        self._groups = groups
        width = max(group.block_size for group in groups)
        self.tags: npt.NDArray[np.int64] = np.full((num_blocks, width), -1, dtype=np.int64)
        self._requests: dict[str, Tokens] = {}
        self._places: dict[int, tuple[Int64Array, Int64Array]] = {}  # by block size: see `_slots`

    def add(self, request_id: str, prompt: Int32Array) -> None:
        """A request whose rows will come."""
        self._requests[request_id] = Tokens(prompt)

    def forget(self, request_ids: Iterable[str]) -> None:
        """No row of these requests will come any more."""
        for request_id in request_ids:
            del self._requests[request_id]

    def run(self, batch: Batch) -> Outputs:
        """Sampled tokens of the batch. Raises `ForeignKV` for a row that attends to content that is not its own."""
        if not len(batch):
            return _NO_OUTPUTS
        rows = list(self._rows(batch))
        for row in rows:
            self._write(row)
        sampled_tokens = np.zeros(len(batch), dtype=np.int32)
        for number, row in enumerate(rows):
            self._read(row)
            if row.samples:
                assert row.end == len(row.known.tokens), f"{row.request_id}: samples before its last token"
                sampled_tokens[number] = row.known.extend()
        return Outputs(tokens=sampled_tokens)

    def _rows(self, batch: Batch) -> Iterator[_Row]:
        tokens, at = batch.tokens.tolist(), 0
        columns = (batch.num_computed.tolist(), batch.num_scheduled.tolist(), batch.pending.tolist())
        samples = batch.samples.tolist()
        for number, (request_id, start, count, pending) in enumerate(zip(batch.request_ids, *columns, strict=True)):
            known, end = self._requests[request_id], start + count
            given = tokens[at : at + count]
            at += count
            if pending:
                given[-1] = known.tokens[end - 1]
            assert given == known.tokens[start:end], f"{request_id}: wrong input tokens at {start}"
            tables = [tables[number] for tables in batch.group_tables]
            yield _Row(request_id, known, start, end, samples[number], tables)

    def _write(self, row: _Row) -> None:
        for group, table in zip(self._groups, row.tables, strict=True):
            if row.end - row.start == 1:
                entry, slot = divmod(row.start, group.block_size)
                assert table[entry], f"{row.request_id}: writes to the null block"
                self.tags[table[entry], slot] = row.known.tags[row.start]
                continue
            entries, slots = self._slots(group, row.start, row.end)
            blocks = table[entries]
            assert blocks.all(), f"{row.request_id}: writes to the null block"
            self.tags[blocks, slots] = row.known.tags[row.start : row.end]

    def _read(self, row: _Row) -> None:
        for number, (group, table) in enumerate(zip(self._groups, row.tables, strict=True)):
            first = first_seen(group, row.start)
            entries, slots = self._slots(group, first, row.end)
            wrong = self.tags[table[entries], slots] != row.known.tags[first : row.end]
            if np.count_nonzero(wrong):
                at = first + int(wrong.argmax())
                where = f"block {int(table[at // group.block_size])} of group {number}"
                raise ForeignKV(f"{row.request_id}: position {at} of {row.end}, {where}")

    def _slots(self, group: Group, first: int, end: int) -> tuple[Int64Array, Int64Array]:
        """int64[end - first] each: of these positions the table's entries, and the slots inside their blocks."""
        places = self._places.get(group.block_size)
        if places is None or len(places[0]) < end:
            positions = np.arange(2 * end)
            places = self._places[group.block_size] = (positions // group.block_size, positions % group.block_size)
        return places[0][first:end], places[1][first:end]


@dataclass(slots=True)
class _Row:
    """Tokens ``start:end`` of a request are computed, with ``tables`` int32[m] by group."""

    request_id: str
    known: Tokens
    start: int
    end: int
    samples: bool
    tables: list[Int32Array]


def first_seen(group: Group, position: int) -> int:
    """The first position that the token at ``position`` looks at. Raises ``TypeError`` for kinds not simulated."""
    match group:
        case FullGroup():
            return 0
        case WindowGroup():
            return max(position - group.window + 1, 0)
        case ChunkedGroup():
            return position // group.chunk * group.chunk
        case _:
            raise TypeError(f"the simulated device has no {type(group).__name__}")
