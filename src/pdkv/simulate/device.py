"""A device whose memory can be judged: every KV slot carries a tag of the tokens that it stands for.

The tag of a position names *all* tokens up to it, as real KV depends on them. `Device.run` executes a batch as a
device would (all rows write, then all rows read) and complains when a row attends to a tag that its own tokens do not
say: that token would have been computed from somebody else's KV, or from a block freed and filled again. It knows
nothing of leases, slots or accounts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pdkv.core.blocks.groups import ChunkedGroup, FullGroup, Group, WindowGroup
from pdkv.core.ports import Batch, Int32Array, Outputs

VOCABULARY = 1000
TAG_BYTES = 8  # of the "KV" of one token

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
    """A request's tokens as the device knows them, and the tag of each."""

    def __init__(self, prompt: Int32Array) -> None:
        self.tokens: list[int] = prompt.tolist()
        self.tags = array("q")
        tag: int | None = None
        for token in self.tokens:
            tag = prefix_tag(tag, token)
            self.tags.append(tag)

    def extend(self) -> int:
        """Sample one more token."""
        last = self.tags[-1]
        token = sampled(last)
        self.tokens.append(token)
        self.tags.append(prefix_tag(last, token))
        return token


def expected_output(prompt: Int32Array, count: int) -> list[int]:
    """The ``count`` tokens that must follow ``prompt``."""
    tokens = Tokens(prompt)
    return [tokens.extend() for _ in range(count)]


class Device:
    """A tag in place of each token's KV; -1 where nothing was ever written.

    ``tags`` are those of block 0, of block 1 and so on, one behind the other: for blocks as small as here that is
    faster than numpy. A block belongs to one of the model's ``groups`` at a time, all of one block size; of each, a
    token sees what its kind of layer looks at. Raises ``ValueError`` for groups of several block sizes.
    """

    def __init__(self, num_blocks: int, groups: Sequence[Group]) -> None:
        self.block_size, *others = {group.block_size for group in groups}
        if others:
            raise ValueError("the simulated device knows one block size for all groups")
        self.num_blocks = num_blocks
        self.tags = array("q", [-1]) * (num_blocks * self.block_size)
        self._groups = groups
        self._requests: dict[str, Tokens] = {}

    def add(self, request_id: str, prompt: Int32Array) -> None:
        """A request whose rows will come."""
        self._requests[request_id] = Tokens(prompt)

    def forget(self, request_ids: Iterable[str]) -> None:
        """No row of these requests will come any more."""
        for request_id in request_ids:
            del self._requests[request_id]

    def copy(self, target: int, source: Device, number: int) -> int:
        """Unit ``number`` of ``source`` comes to unit ``target`` of this one; returns its bytes.

        Units are blocks, the smaller ones where the two devices' differ (`PostRead`).
        """
        content = source.unit(number, self)
        self.fill(target, content)
        return len(content) * TAG_BYTES

    def unit(self, number: int, other: Device) -> array[int]:
        """What unit ``number`` holds now; units as in `copy`."""
        unit = self.unit_of(other)
        return self.tags[number * unit : (number + 1) * unit]

    def fill(self, number: int, content: array[int]) -> None:
        """Unit ``number``, of the length of ``content``, holds that from now on."""
        self.tags[number * len(content) : (number + 1) * len(content)] = content

    def unit_of(self, other: Device) -> int:
        """How many tokens are moved between the two as one."""
        return min(self.block_size, other.block_size)

    def run(self, batch: Batch) -> Outputs:
        """Sampled tokens of the batch. Raises `ForeignKV` for a row that attends to content that is not its own."""
        if not len(batch):
            return _NO_OUTPUTS
        rows = list(self._rows(batch))
        for row in rows:
            self._write(row)
        sampled_tokens = [0] * len(rows)
        for number, row in enumerate(rows):
            self._read(row)
            if row.samples:
                assert row.end == len(row.known.tokens), f"{row.request_id}: samples before its last token"
                sampled_tokens[number] = row.known.extend()
        return Outputs(tokens=np.array(sampled_tokens, dtype=np.int32))

    def _rows(self, batch: Batch) -> Iterator[_Row]:
        tokens, at = batch.tokens.tolist(), 0
        columns = (batch.num_computed.tolist(), batch.num_scheduled.tolist(), batch.pending.tolist())
        tables = zip(*(tables.tolist() for tables in batch.group_tables), strict=True)
        rest = (batch.samples.tolist(), tables)
        for request_id, start, count, pending, samples, own in zip(batch.request_ids, *columns, *rest, strict=True):
            known, end = self._requests[request_id], start + count
            given = tokens[at : at + count]
            at += count
            if pending:
                given[-1] = known.tokens[end - 1]
            assert given == known.tokens[start:end], f"{request_id}: wrong input tokens at {start}"
            yield _Row(request_id, known, start, end, samples, own)

    def _write(self, row: _Row) -> None:
        size, tags = self.block_size, self.tags
        for table in row.tables:
            for position in range(row.start, row.end):
                block = table[position // size]
                assert block, f"{row.request_id}: writes to the null block"
                tags[block * size + position % size] = row.known.tags[position]

    def _read(self, row: _Row) -> None:
        size, tags = self.block_size, self.tags
        for number, (group, table) in enumerate(zip(self._groups, row.tables, strict=True)):
            first = first_seen(group, row.start)
            entry = first // size
            seen = array("q")
            for block in table[entry : (row.end - 1) // size + 1]:
                seen += tags[block * size : block * size + size]
            seen, known = seen[first - entry * size : row.end - entry * size], row.known.tags[first : row.end]
            if seen != known:
                at = first + next(index for index, tag in enumerate(known) if seen[index] != tag)
                where = f"block {table[at // size]} of group {number}"
                raise ForeignKV(f"{row.request_id}: position {at} of {row.end}, {where}")


class _Row(NamedTuple):
    """Tokens ``start:end`` of a request are computed, with a table (block ids) by group."""

    request_id: str
    known: Tokens
    start: int
    end: int
    samples: bool
    tables: tuple[list[int], ...]


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
