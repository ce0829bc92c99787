"""What has happened to requests: the log, the metrics, the simulator's output and the test oracle at once.

Times are integer nanoseconds of the instance's own monotonic clock.
"""

from __future__ import annotations

import enum

import msgspec

from pdkv.core.transfer.messages import Grant


class FinishReason(enum.Enum):
    """Why a request ended; ``value`` is the OpenAI/vLLM word for it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a request."""

    request_id: str
    at_ns: int


class Admitted(Event, frozen=True, kw_only=True):
    """Left the waiting queue for the first time or again; ``local``/``external`` tokens did not need computing."""

    prompt_tokens: int
    local_tokens: int
    external_tokens: int
    resumed: bool = False


class TokenSampled(Event, frozen=True, kw_only=True, gc=False):
    """One more output token."""

    token: int


class Finished(Event, frozen=True, kw_only=True):
    """The request's one outcome. ``lease`` is set on P when its KV was kept for a consumer.

    On D it is set when it was kept for the next turn, and ``kept_until_ns`` says for how long.
    """

    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    error: str | None = None
    lease: Grant | None = None
    kept_until_ns: int | None = None


class Preempted(Event, frozen=True, kw_only=True):
    """Lost its blocks to another request; ``lost_tokens`` must be computed again."""

    lost_tokens: int


class Registered(Event, frozen=True, kw_only=True):
    """D waits, without memory, for the engine ``producer`` to announce this prompt's KV (push)."""

    producer: str


class Announced(Event, frozen=True, kw_only=True):
    """What D waited for is kept for it; the wait took ``waited_ns``."""

    waited_ns: int


class LoadStarted(Event, frozen=True, kw_only=True):
    """Blocks were allocated and the READ was posted."""

    handle: int
    blocks: int
    tokens: int


class LoadFinished(Event, frozen=True, kw_only=True):
    """All data arrived and the slot still named the lease."""

    handle: int
    blocks: int
    moved_bytes: int
    seconds: float


class LoadFailed(Event, frozen=True, kw_only=True):
    """The KV did not arrive, or cannot be trusted; ``cause`` is shown to the operator."""

    handle: int | None
    cause: str


class LoadOverdue(Event, frozen=True, kw_only=True):
    """Policy ``vllm``: KV that was to be written here has not come in time; nothing is done about it."""

    cause: str


class WriteStarted(Event, frozen=True, kw_only=True):
    """P posted the WRITE of a prompt's KV into a consumer's memory."""

    handle: int
    blocks: int


class WriteFinished(Event, frozen=True, kw_only=True):
    """P has written all of it."""

    handle: int
    blocks: int
    moved_bytes: int
    seconds: float


class WriteFailed(Event, frozen=True, kw_only=True):
    """P's WRITE ended before all was there; ``cause`` is shown to the operator."""

    handle: int
    cause: str


class LeaseGranted(Event, frozen=True, kw_only=True):
    """P keeps ``blocks`` blocks until a peer is done or ``deadline_ns`` passes.

    ``next_turn``: D keeps them, those of an answer that has ended, for the prefill of the conversation's next turn.
    """

    lease_id: int
    blocks: int
    deadline_ns: int
    next_turn: bool = False


class LeaseRenewed(Event, frozen=True, kw_only=True):
    """A heartbeat moved the deadline (one that moved nothing makes no event)."""

    lease_id: int
    deadline_ns: int


class LeaseReleased(Event, frozen=True, kw_only=True):
    """The blocks were let go; ``expired`` when nobody said that it was done.

    ``next_turn``: they were those of `LeaseGranted.next_turn`; ``gave_way``: to somebody here who needed the memory.
    """

    lease_id: int
    blocks: int
    expired: bool
    next_turn: bool = False
    gave_way: bool = False


class TurnDeclined(Event, frozen=True, kw_only=True):
    """P does not read what D has kept of the turn before, as it expires too soon: the prompt is computed here."""

    cause: str


class Quarantined(Event, frozen=True, kw_only=True):
    """A transfer that was given up may still write to these blocks."""

    handle: int
    blocks: int
    cause: str


class Fenced(Event, frozen=True, kw_only=True):
    """The transfer is over for certain; its blocks are free again."""

    handle: int
    blocks: int
