"""Waiting requests that hold no blocks, in the order in which they are tried."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Protocol

from pdkv.core.scheduler.request import Request


class WaitingQueue(Protocol):
    """What the scheduler needs of a queue."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def append(self, request: Request) -> None:
        """A new arrival."""
        ...

    def put_back(self, request: Request) -> None:
        """A preempted request: next to be tried, as far as the order allows."""
        ...

    def put_all_back(self, requests: Sequence[Request]) -> None:
        """Skipped requests, as they were taken out."""
        ...

    def head(self) -> Request:
        """The request to try next."""
        ...

    def pop(self) -> Request:
        """Take the head out."""
        ...

    def pop_while(self, condition: Callable[[Request], bool]) -> list[Request]:
        """Take out, in order, those before the first that does not meet ``condition``."""
        ...

    def remove(self, request: Request) -> None:
        """Take any request out."""
        ...


class FcfsQueue:
    """First come, first served; requests put back go to the front."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def append(self, request: Request) -> None:
        """A new arrival: last."""
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """First."""
        self._requests.appendleft(request)

    def put_all_back(self, requests: Sequence[Request]) -> None:
        """First, in this order."""
        self._requests.extendleft(reversed(requests))

    def head(self) -> Request:
        """The first."""
        return self._requests[0]

    def pop(self) -> Request:
        """Take the first out."""
        return self._requests.popleft()

    def pop_while(self, condition: Callable[[Request], bool]) -> list[Request]:
        """Take the first ones out."""
        taken = list(takewhile(condition, self._requests))
        if len(taken) == len(self._requests):
            self._requests.clear()
        else:
            for _ in taken:
                self._requests.popleft()
        return taken

    def remove(self, request: Request) -> None:
        """Take any request out."""
        self._requests.remove(request)


def priority_key(request: Request) -> tuple[int, int, str]:
    """Smaller is served first: priority, then arrival, then id (spec scheduler section 9)."""
    return request.new.priority, request.arrival_ns, request.request_id


class PriorityQueue:
    """Smallest `priority_key` first; a request put back stands where its key says, so it may be overtaken."""

    def __init__(self) -> None:
        self._requests: list[Request] = []  # in order

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def append(self, request: Request) -> None:
        """A new arrival."""
        insort(self._requests, request, key=priority_key)

    def put_back(self, request: Request) -> None:
        """Where its key says."""
        self.append(request)

    def put_all_back(self, requests: Sequence[Request]) -> None:
        """Where their keys say."""
        if not requests:
            return
        if not self._requests or priority_key(requests[-1]) < priority_key(self._requests[0]):  # in order, and first
            self._requests[:0] = requests
            return
        for request in requests:
            self.append(request)

    def head(self) -> Request:
        """The smallest key."""
        return self._requests[0]

    def pop(self) -> Request:
        """Take the smallest key out."""
        return self._requests.pop(0)

    def pop_while(self, condition: Callable[[Request], bool]) -> list[Request]:
        """Take the smallest keys out."""
        taken = list(takewhile(condition, self._requests))
        del self._requests[: len(taken)]
        return taken

    def remove(self, request: Request) -> None:
        """Take any request out."""
        self._requests.remove(request)
