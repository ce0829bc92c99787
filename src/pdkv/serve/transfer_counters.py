"""What the side channel and the mover have counted, as Prometheus counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from pdkv.runtime.transfer_stats import TransferStats

_TEXTS = {
    "failed_handshakes": "Handshakes of ours that were refused or got no answer",
    "refusals": "Handshakes of peers, and grants, that this instance refused",
    "heartbeats_sent": "Heartbeats sent for leases at peers",
    "heartbeats_received": "Heartbeats received for leases here",
    "dropped_frames": "Side-channel frames that were no message, or not sealed as they had to be",
    "registrations_sent": "Registrations sent for KV that peers are to announce, repetitions included",
    "registrations_received": "Registrations received for KV that is to be announced here",
    "announcements_sent": "Announcements of finished prefills sent to consumers",
    "announcements_received": "Announcements of finished prefills received from peers",
    "gone_sent": "Answers to registrations that nothing stands, or will come",
    "gone_received": "Answers of peers that nothing stands, or will come",
    "lost_messages": "Messages to peers that could not be sent (hints: they cost time, not correctness)",
    "mover_restarts": "Movers that ended, killed to fence a transfer or by themselves, and were replaced",
}


def transfer_counters(stats: TransferStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    """``pdkv:transfer_*_total`` of one instance, with these ``labels``."""
    for name, text in _TEXTS.items():
        family = CounterMetricFamily(f"pdkv:transfer_{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), getattr(stats, name))
        yield family
