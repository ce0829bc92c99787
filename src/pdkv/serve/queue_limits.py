"""How many requests, and prompt tokens, may wait or run at an instance before it refuses more (HTTP 503)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdkv.core.ports import NewRequest
from pdkv.serve.openai import ApiError


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of one instance; ``None`` is none. What they mean is vLLM's ``AsyncLLM.check_admission``.

    ``requests``: most that may be unfinished at a time, waiting or running; every choice of an answer is one.
    ``tokens``: once so many prompt tokens are of requests without a first output token, nobody else is let in. Such a
    request counts with its whole prompt, however much of it has been computed or was cached.
    """

    requests: int | None = None
    tokens: int | None = None


NO_LIMITS = QueueLimits()


class Rejections(Protocol):
    """Who is told of refusals (telemetry), by the name of the limit."""

    def rejected(self, limit: str) -> None: ...


class QueueGate:
    """Counts the unfinished requests of one instance, on the event loop's thread."""

    def __init__(self, limits: QueueLimits, rejections: Rejections) -> None:
        self._limits = limits
        self._rejections = rejections
        self._prefilling: dict[str, int] = {}  # prompt tokens of those without a first token
        self._decoding: set[str] = set()

    def check(self, requests: int) -> None:
        """Raises `ApiError` 503 unless an answer of so many ``requests`` may come in now."""
        most, unfinished = self._limits.requests, len(self._prefilling) + len(self._decoding)
        if most is not None and unfinished + requests > most:
            self._rejections.rejected("max_num_queued_reqs")
            raise ApiError(
                503,
                f"{unfinished} requests wait or run here and {requests} more were asked for; at most {most} may "
                "(--max-num-queued-reqs). Try again later, or at another instance",
                code="queue_full",
            )
        bound, queued = self._limits.tokens, sum(self._prefilling.values())
        if bound is not None and queued >= bound:
            self._rejections.rejected("max_num_queued_tokens")
            raise ApiError(
                503,
                f"{queued} prompt tokens wait here for their first answer; no more are taken from {bound} on "
                "(--max-num-queued-tokens). Try again later, or at another instance",
                code="queue_full",
            )

    def enter(self, request: NewRequest) -> None:
        """It is unfinished from now on."""
        self._prefilling[request.request_id] = len(request.prompt)

    def first_token(self, request: NewRequest) -> None:
        """Its prompt waits no more; a later token changes nothing."""
        if self._prefilling.pop(request.request_id, None) is not None:
            self._decoding.add(request.request_id)

    def leave(self, request: NewRequest) -> None:
        """It has ended, or nobody waits for it; doing so again changes nothing."""
        self._prefilling.pop(request.request_id, None)
        self._decoding.discard(request.request_id)
