"""Counters of the control thread, read by telemetry."""

from __future__ import annotations

import bisect
import copy
from dataclasses import dataclass, field

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class TransferStats:
    """Since the start. ``seconds_counts[i]`` counts finished reads of at most ``SECONDS_BUCKETS[i]`` s and more than
    the bucket before; the last entry those above all. ``transfers`` finished with a slot read, ``failed_transfers``
    did not; ``failed_handshakes`` are those of ours that were refused or got no answer, ``refusals`` the handshakes of
    peers and the grants that we refused; ``registrations_*``, ``announcements_*`` and ``gone_*`` are push mode's.
    ``refused_ns`` is when a peer refused us last, on the instance's own clock, and ``refused_because`` why; None and
    empty when none has.
    """

    transfers: int = 0
    failed_transfers: int = 0
    moved_bytes: int = 0
    seconds_sum: float = 0.0
    seconds_counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BUCKETS) + 1))
    failed_handshakes: int = 0
    refusals: int = 0
    heartbeats_sent: int = 0
    heartbeats_received: int = 0
    registrations_sent: int = 0
    registrations_received: int = 0
    announcements_sent: int = 0
    announcements_received: int = 0
    gone_sent: int = 0
    gone_received: int = 0
    dropped_frames: int = 0
    lost_messages: int = 0
    mover_restarts: int = 0
    internal_errors: int = 0
    refused_ns: int | None = None
    refused_because: str = ""

    def finished(self, moved_bytes: int, seconds: float) -> None:
        """Count one read that ended with its slot."""
        self.transfers += 1
        self.moved_bytes += moved_bytes
        self.seconds_sum += seconds
        self.seconds_counts[bisect.bisect_left(SECONDS_BUCKETS, seconds)] += 1

    def copy(self) -> TransferStats:
        """An independent copy."""
        return copy.deepcopy(self)
