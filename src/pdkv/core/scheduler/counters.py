"""How far requests are, as arrays with a column a request: what a step changes, it changes for many at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

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
    __slots__ = (*FIELDS, "_table")

    def __init__(self, columns: int = 1) -> None:
        table = np.zeros((len(self.FIELDS), columns), dtype=np.int64)
        table[-1] = -1
        self._name(table)

    def _name(self, table: npt.NDArray[np.int64]) -> None:
        self._table = table  # a row a field: a column is moved as a whole
        self.num_tokens, self.last_token, self.num_computed = table[0], table[1], table[2]
        self.placeholders, self.in_flight_tokens, self.last_step = table[3], table[4], table[5]

    def grow(self, columns: int) -> None:
        """More columns; those there are stay."""
        wider = Counters(columns)._table
        wider[:, : self._table.shape[1]] = self._table
        self._name(wider)

    def alone(self, column: int) -> Counters:
        """Counters of one column, a copy of ``column``."""
        counters = Counters.__new__(Counters)
        counters._name(self._table[:, column : column + 1].copy())
        return counters

    def copy_column(self, column: int, target: Counters, to: int) -> None:
        """Column ``to`` of ``target`` becomes what ``column`` is here."""
        target._table[:, to] = self._table[:, column]


class Counter:
    """A request's own number, read and written in its column of `Counters`."""

    def __set_name__(self, owner: type[Request], name: str) -> None:
        self._name = name

    def __get__(self, request: Request, owner: type[Request]) -> int:
        value: int = getattr(request.counters, self._name).item(request.column)
        return value

    def __set__(self, request: Request, value: int) -> None:
        getattr(request.counters, self._name)[request.column] = value
