"""Running requests as arrays, so that a step which only decodes costs a few array operations however many there are."""

from __future__ import annotations

from collections import Counter as Multiset
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.ports import BoolArray, Int32Array, Int64Array
from pdkv.core.scheduler.counters import Counters
from pdkv.core.scheduler.request import Request, Status

Columns = npt.NDArray[np.intp]


class PlanRows(msgspec.Struct, frozen=True, eq=False):
    """What a plan computes, in running order: ``tokens[i]`` tokens of ``requests[i]`` from ``start[i]`` on.

    Arrays have n entries. ``known`` tokens it had when the plan was made, the last of them ``last_token``. ``beyond``
    is how far its share reaches beyond the last known or expected one, up to where it ``samples``; with speculation
    ``drafts[i]`` int32[k] stand there (else the list is empty). ``columns`` are the places of requests ``sequence`` in
    the running set, unless they have left since.
    """

    requests: Sequence[Request]
    columns: Columns
    sequence: Int64Array
    start: Int64Array
    tokens: Int64Array
    known: Int64Array
    last_token: Int64Array
    beyond: Int64Array
    drafts: list[Int32Array] = []

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def samples(self) -> BoolArray:
        """bool[n]: which rows sample a token."""
        return self.beyond >= 0

    @property
    def num_drafts(self) -> Int32Array:
        """int32[n]: how many of each row's last tokens are drafts."""
        return np.fromiter(map(len, self.drafts), dtype=np.int32) if self.drafts else np.zeros(len(self), np.int32)


_NONE = np.empty(0, dtype=np.int64)
NO_ROWS = PlanRows((), _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE)


class RunningSet(Sequence[Request]):
    """The running requests, most recently admitted last; ``columns`` intp[n] are their places in ``counters``.

    A request's numbers move into ``counters`` when it comes in and out again when it leaves, its block tables likewise
    (`KVCacheManager.seat`). Arrays by column, for the request that stands there: ``sequence`` (-1: nobody), ``prompt``
    tokens, ``end`` (tokens with which it ends by length), ``decode_end`` (the same, 0 for requests that are planned one
    by one), ``scheduled`` (tokens of the plan being made).
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.counters = Counters(0)
        self.columns: Columns = np.empty(0, dtype=np.intp)
        self._all: Columns = np.empty(0, dtype=np.intp)
        self.sequence = self.prompt = self.end = self.decode_end = self.scheduled = np.empty(0, dtype=np.int64)
        self._manager = manager
        self._requests: list[Request] = []
        self._vacant: list[int] = []
        self._stops: Multiset[int] = Multiset()  # in how many requests a token is a stop token
        self._disowned = -1

    # -------------------------------------------------------------------------------------------------- as a sequence

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self._requests[index]

    def at(self, numbers: Int64Array) -> list[Request]:
        """The requests of these numbers in running order."""
        return list(map(self._requests.__getitem__, numbers.tolist()))

    def append(self, request: Request) -> None:
        """``request`` runs from now on; it must hold blocks."""
        if not self._vacant:
            self._grow()
        column = self._vacant.pop()
        request.move_counters(self.counters, column)
        self._manager.seat(request.request_id, column)
        self._requests.append(request)
        self.columns = np.concatenate((self.columns, self._all[column : column + 1]))
        self.sequence[column] = request.sequence
        self.prompt[column] = request.num_prompt
        self.end[column] = end = request.end_tokens(self._manager.max_request_tokens)
        self.decode_end[column] = 0 if request.new.produce else end
        if request.new.stop_token_ids:
            self._stops.update(request.new.stop_token_ids)

    def remove(self, request: Request) -> None:
        """``request`` runs no longer. Its column may be another's from now on."""
        at, column = self._requests.index(request), request.column
        del self._requests[at]
        self.columns = np.concatenate((self.columns[:at], self.columns[at + 1 :]))
        request.leave_counters()
        self._manager.unseat(column)
        self.sequence[column], self.scheduled[column] = -1, 0
        for token in request.new.stop_token_ids:
            self._stops[token] -= 1
            if not self._stops[token]:
                del self._stops[token]
        self._vacant.append(column)

    def disown(self, request: Request) -> None:
        """What outstanding plans compute for ``request``, which goes on running, counts for nothing."""
        self._disowned -= 1
        request.sequence = self._disowned  # as if another request stood in its column
        self.sequence[request.column] = self._disowned
        request.in_flight_tokens = request.placeholders = 0
        self._manager.growth.look_again(request.column)

    def _grow(self) -> None:
        before = len(self.sequence)
        columns = max(16, 2 * before)
        self.counters.grow(columns)
        for name in ("sequence", "prompt", "end", "decode_end", "scheduled"):
            grown = np.zeros(columns, dtype=np.int64)
            grown[:before] = getattr(self, name)
            setattr(self, name, grown)
        self.sequence[before:] = -1
        self._all = np.arange(columns)
        self._vacant += reversed(range(before, columns))

    # ----------------------------------------------------------------------------------------------- planning a step

    def decoding(self, first: int, limit: int) -> int:
        """How many requests from number ``first`` on, at most ``limit``, want just the next token behind the prompt."""
        columns = self.columns[first : first + limit]
        computed = self.counters.num_computed[columns]
        known = self.counters.num_tokens[columns] + self.counters.placeholders[columns]
        others = (known - computed != 1) | (computed < self.prompt[columns]) | (known >= self.decode_end[columns])
        return int(others.argmax()) if np.count_nonzero(others) else len(columns)

    def fewest_tokens_left(self) -> int:
        """How many more tokens the first request to end by length can have; somebody must run."""
        known = self.counters.num_tokens[self.columns] + self.counters.placeholders[self.columns]
        return int((self.end[self.columns] - known).min())

    def commit(self, step_id: int) -> PlanRows:
        """What was ``scheduled`` becomes plan ``step_id``: its tokens count as computed from now on."""
        columns, requests = self.columns, self._requests
        tokens = self.scheduled[columns]
        chosen = tokens > 0
        count = np.count_nonzero(chosen)  # faster than any and all
        if not count:
            return NO_ROWS
        if count == len(tokens):
            requests = requests.copy()
        else:
            columns, tokens = columns[chosen], tokens[chosen]
            requests = [requests[at] for at in np.flatnonzero(chosen)]
        counters = self.counters
        start, known = counters.num_computed[columns], counters.num_tokens[columns]
        beyond = start + tokens - known - counters.placeholders[columns]
        counters.num_computed[columns] += tokens
        counters.in_flight_tokens[columns] += tokens
        counters.placeholders[columns] += beyond >= 0
        counters.last_step[columns] = step_id
        self.scheduled[columns] = 0
        last = counters.last_token[columns]
        return PlanRows(requests, columns, self.sequence[columns], start, tokens, known, last, beyond)

    # ----------------------------------------------------------------------------------------------- after the step

    def settle(self, rows: PlanRows) -> Columns:
        """``rows`` have been computed; returns the numbers of those that sampled a token and still run."""
        present, sampled = self.sequence[rows.columns] == rows.sequence, rows.samples
        if np.count_nonzero(present) == len(present):
            self.counters.in_flight_tokens[rows.columns] -= rows.tokens
        else:
            self.counters.in_flight_tokens[rows.columns[present]] -= rows.tokens[present]
            sampled = present & sampled
        numbers: Columns = sampled.nonzero()[0]
        return numbers

    def append_tokens(self, requests: Sequence[Request], columns: Columns, tokens: Int32Array) -> None:
        """The token that each of ``requests``, which stand in ``columns``, had a placeholder for."""
        at = self.counters.num_tokens[columns]
        for request, position, token in zip(requests, at.tolist(), tokens.tolist(), strict=True):
            try:
                request.memory[position] = token
            except IndexError:
                request.widen()
                request.memory[position] = token
        self.counters.placeholders[columns] -= 1
        self.counters.num_tokens[columns] = at + 1
        self.counters.last_token[columns] = tokens

    def append_steps(self, tokens: Int32Array) -> None:
        """``tokens`` int32[k, n]: what each has sampled in k steps."""
        known = self.counters.num_tokens[self.columns]
        for request, start, own in zip(self._requests, known.tolist(), np.ascontiguousarray(tokens.T), strict=True):
            request.write(start, own)
        self.counters.num_tokens[self.columns] = known + len(tokens)
        self.counters.last_token[self.columns] = tokens[-1]

    def may_end(self, columns: Columns, tokens: Int32Array) -> Columns:
        """Which of these requests have all their tokens now, or a last one that is a stop token for somebody."""
        full = self.counters.num_tokens[columns] >= self.end[columns]
        if self._stops and not self._stops.keys().isdisjoint(tokens.tolist()):
            full |= np.isin(tokens, np.fromiter(self._stops, dtype=np.int32, count=len(self._stops)))
        ending: Columns = full.nonzero()[0]
        return ending

    def check(self) -> None:
        """Compare the arrays with the requests, and with their tables; raises ``AssertionError`` on any difference."""
        self.check_requests()
        self._manager.growth.check(self)

    def check_requests(self) -> None:
        """Compare the arrays with the requests only."""
        columns = self.columns.tolist()
        assert len(set(columns)) == len(columns) == len(self._requests), "running: columns differ"
        assert len(columns) + len(self._vacant) == len(self.sequence), "running: a column is lost"
        assert not np.count_nonzero(self.scheduled), "running: something is scheduled between plans"
        if not self._requests:
            assert not self._stops, "running: stop tokens differ"
            return
        stops: list[int] = []
        sequence, ends = self.sequence[self.columns].tolist(), self.end[self.columns].tolist()
        for request, column, number, end in zip(self._requests, columns, sequence, ends, strict=True):
            stops += request.new.stop_token_ids
            assert request.status is Status.RUNNING
            assert request.counters is self.counters, f"{request.request_id}: misplaced"
            assert request.column == column, f"{request.request_id}: misplaced"
            assert request.sequence == number
            assert request.end_tokens(self._manager.max_request_tokens) == end
            assert request.last_token == request.memory[request.num_tokens - 1], f"{request.request_id}: last token"
        assert not stops or Multiset(stops) == self._stops, "running: stop tokens differ"
        assert stops or not self._stops, "running: stop tokens differ"
