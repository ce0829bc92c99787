"""How far requests are, as arrays with a column a request: what a step changes, it changes for many at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pdkv.core.scheduler.request import Request


class Counters:
    """int64[columns] each. A waiting request has counters of its own, one column; running ones share the running set's.

    ``num_tokens`` are known (prompt and sampled) and ``last_token`` is the last of them; ``num_computed`` counts tokens
    whose KV is written or will be by a plan already handed out; ``placeholders`` counts tokens that outstanding plans
    will sample; ``in_flight_tokens`` are those that outstanding plans compute; ``last_step`` is the newest plan that
    uses the request's blocks, -1 for none.
    """

    FIELDS = ("num_tokens", "last_token", "num_computed", "placeholders", "in_flight_tokens", "last_step")
    __slots__ = FIELDS

    def __init__(self, columns: int = 1) -> None:
        self.num_tokens = np.zeros(columns, dtype=np.int64)
        self.last_token = np.zeros(columns, dtype=np.int64)
        self.num_computed = np.zeros(columns, dtype=np.int64)
        self.placeholders = np.zeros(columns, dtype=np.int64)
        self.in_flight_tokens = np.zeros(columns, dtype=np.int64)
        self.last_step = np.full(columns, -1, dtype=np.int64)

    def grow(self, columns: int) -> None:
        """More columns; those there are stay."""
        wider = Counters(columns)
        for name in self.FIELDS:
            mine = getattr(self, name)
            getattr(wider, name)[: len(mine)] = mine
            setattr(self, name, getattr(wider, name))

    def copy_column(self, column: int, target: Counters, to: int) -> None:
        """Column ``to`` of ``target`` becomes what ``column`` is here."""
        for name in self.FIELDS:
            getattr(target, name)[to] = getattr(self, name)[column]


class Counter:
    """A request's own number, read and written in its column of `Counters`."""

    def __set_name__(self, owner: type[Request], name: str) -> None:
        self._name = name

    def __get__(self, request: Request, owner: type[Request]) -> int:
        value: int = getattr(request.counters, self._name).item(request.column)
        return value

    def __set__(self, request: Request, value: int) -> None:
        getattr(request.counters, self._name)[request.column] = value
