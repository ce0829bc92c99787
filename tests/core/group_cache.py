"""A device for models of several groups, whose content can be judged: what a row reads must be its own tokens' KV.

Attention groups keep a tag per slot, state groups one tag per block: the state after all tokens so far.
"""

from __future__ import annotations

import numpy as np
from tests.core.helpers import next_token, prefix_tags

from pdkv.core.blocks.groups import ChunkedGroup, Group, ReferenceWindowGroup, RingGroup, StateGroup, WindowGroup
from pdkv.core.ports import Batch, Int32Array, NewRequest, Outputs
from pdkv.core.scheduler.request import Request


class GroupCache:
    """One pool that the groups overlay: a block has slots *and* a state, whoever owns it uses his."""

    def __init__(self, num_blocks: int, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self.slots = np.full((num_blocks, max(group.block_size for group in groups)), -1, dtype=np.int64)
        self.states = np.full(num_blocks, -1, dtype=np.int64)
        self.known: dict[str, list[int]] = {}
        self._prompts: dict[str, int] = {}
        self._tags: dict[str, list[int]] = {}

    def add(self, new: NewRequest) -> None:
        """The executor's own record of a request's tokens."""
        self.known[new.request_id] = new.prompt.tolist()
        self._prompts[new.request_id] = len(new.prompt)

    def run(self, batch: Batch) -> Outputs:
        """Sampled tokens; raises ``AssertionError`` when a row reads foreign content or writes where it must not."""
        for source, target in batch.copies.tolist():
            assert 0 not in (source, target), "copy of the null block"
            self.slots[target], self.states[target] = self.slots[source], self.states[source]
        tables = batch.group_tables
        assert len(tables) == len(self.groups)
        assert np.array_equal(batch.block_tables, tables[0])
        before = self.states.copy()
        written: set[int] = set()
        for row in range(len(batch)):
            for group, table in zip(self.groups, tables, strict=True):
                if isinstance(group, StateGroup):
                    self._run_state(batch, row, group, table[row], before, written)
                else:
                    self._write(batch, row, group, table[row])
        tokens = np.zeros(len(batch), dtype=np.int32)
        for row, request_id in enumerate(batch.request_ids):
            for group, table in zip(self.groups, tables, strict=True):
                if not isinstance(group, StateGroup):
                    self._read(batch, row, group, table[row])
            if batch.samples[row]:
                tokens[row] = next_token(self.known[request_id])
        for row, request_id in enumerate(batch.request_ids):
            if batch.samples[row]:
                self.known[request_id].append(int(tokens[row]))
        return Outputs(tokens=tokens)

    def _span(self, batch: Batch, row: int) -> tuple[int, int, list[int]]:
        start = int(batch.num_computed[row])
        known = self.known[batch.request_ids[row]]
        tags = self._tags.setdefault(batch.request_ids[row], [])
        tags += prefix_tags(known[len(tags) :], tags[-1] if tags else None)
        return start, start + int(batch.num_scheduled[row]), tags

    def _replay_end(self, batch: Batch, row: int) -> int:
        return int(batch.replay_ends[row]) if len(batch.replay_ends) else 0

    def _write(self, batch: Batch, row: int, group: Group, table: Int32Array) -> None:
        start, end, tags = self._span(batch, row)
        if isinstance(group, RingGroup):
            assert table[0] != 0, f"{batch.request_ids[row]}: no block for {group}"
            return
        if not (isinstance(group, WindowGroup) and group.replayed):
            start = max(start, self._replay_end(batch, row))  # hit blocks are shared: nothing is written to them
        for position in range(start, end):
            block = int(table[position // group.block_size])
            assert block != 0, f"{batch.request_ids[row]}: token {position} has no block in {group}"
            self.slots[block, position % group.block_size] = tags[position]

    def _read(self, batch: Batch, row: int, group: Group, table: Int32Array) -> None:
        start, end, tags = self._span(batch, row)
        if isinstance(group, RingGroup):
            return
        first, gap = 0, range(0)
        if isinstance(group, WindowGroup):
            first = max(0, start + 1 - group.window)
            if group.replayed and self._replay_end(batch, row):
                first = max(first, self._replay_end(batch, row) - group.window)
        elif isinstance(group, ChunkedGroup):
            first = start // group.chunk * group.chunk
        elif isinstance(group, ReferenceWindowGroup):
            gap = range(self._prompts[batch.request_ids[row]], start + 1 - group.window)
        for position in range(first, end):
            if position in gap:
                continue
            seen = self.slots[table[position // group.block_size], position % group.block_size]
            assert seen == tags[position], f"{batch.request_ids[row]}: foreign KV at {position} in {group}"

    def _run_state(
        self, batch: Batch, row: int, group: StateGroup, table: Int32Array, before: np.ndarray, written: set[int]
    ) -> None:
        start, end, tags = self._span(batch, row)
        if start:
            source = int(table[(start - 1) // group.block_size])
            assert source not in written, f"{batch.request_ids[row]}: its state is written in this very step"
            assert before[source] == tags[start - 1], f"{batch.request_ids[row]}: foreign state after {start} tokens"
        target = int(table[(end - 1) // group.block_size])
        assert target != 0, f"{batch.request_ids[row]}: no block for its state after {end} tokens"
        self.states[target] = tags[end - 1]
        written.add(target)


def one_row(request: Request, start: int, tokens: int, tables: tuple[Int32Array, ...], copies: Int32Array) -> Batch:
    """A batch of one request that computes ``tokens`` known tokens from ``start`` on and samples nothing."""
    return Batch(
        request_ids=(request.request_id,),
        num_scheduled=np.asarray([tokens], dtype=np.int32),
        num_computed=np.asarray([start], dtype=np.int32),
        tokens=request.tokens[start : start + tokens].copy(),
        pending=np.zeros(1, dtype=np.bool_),
        block_tables=tables[0],
        samples=np.zeros(1, dtype=np.bool_),
        group_tables=tables,
        copies=copies,
    )
