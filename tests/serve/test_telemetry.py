from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families
from tests.serve.fake import FakeInstance

from pdkv.core.events import (
    Admitted,
    Announced,
    Fenced,
    Finished,
    FinishReason,
    LeaseGranted,
    LeaseReleased,
    LeaseRenewed,
    LoadFailed,
    LoadFinished,
    LoadStarted,
    Preempted,
    Quarantined,
    TokenSampled,
)
from pdkv.serve.telemetry import Telemetry


def samples(telemetry: Telemetry) -> dict[tuple[str, ...], float]:
    text = telemetry.render(FakeInstance()).decode()
    hidden = ("model_name", "engine")
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [value for key, value in sorted(sample.labels.items()) if key not in hidden]
            found[(sample.name, *own)] = sample.value
    return found


def test_a_wait_for_an_announcement_is_measured() -> None:
    telemetry = Telemetry("tiny")
    telemetry.on_events((Announced(request_id="r", at_ns=time.monotonic_ns(), waited_ns=3 * 10**9),))
    found = samples(telemetry)
    assert found[("pdkv:kv_announcement_wait_seconds_sum",)] == 3
    assert found[("pdkv:kv_announcement_wait_seconds_count",)] == 1
    assert found[("pdkv:num_requests_awaiting_announcement",)] == 0
    assert found[("pdkv:transfer_announcements_sent_total",)] == 0


def test_one_life_from_arrival_to_finish() -> None:
    telemetry = Telemetry("tiny")
    telemetry.arrived("r")
    at = time.monotonic_ns()
    second = 10**9
    telemetry.on_events(
        (
            LoadStarted(request_id="r", at_ns=at, handle=1, blocks=3, tokens=48),
            LoadFinished(request_id="r", at_ns=at + second, handle=1, blocks=3, moved_bytes=3000, seconds=0.5),
            Admitted(request_id="r", at_ns=at + second, prompt_tokens=80, local_tokens=16, external_tokens=48),
            TokenSampled(request_id="r", at_ns=at + 2 * second, token=1),
            TokenSampled(request_id="r", at_ns=at + 3 * second, token=2),
            Preempted(request_id="r", at_ns=at + 3 * second, lost_tokens=82),
            Admitted(
                request_id="r", at_ns=at + 3 * second, prompt_tokens=80, local_tokens=0, external_tokens=0, resumed=True
            ),
            TokenSampled(request_id="r", at_ns=at + 5 * second, token=3),
            Finished(
                request_id="r",
                at_ns=at + 5 * second,
                reason=FinishReason.STOP,
                prompt_tokens=80,
                output_tokens=3,
                cached_tokens=64,
            ),
        )
    )
    found = samples(telemetry)
    assert found["vllm:prompt_tokens_total",] == 80
    assert found["vllm:prefix_cache_hits_total",] == 16
    assert found["vllm:external_prefix_cache_hits_total",] == 48
    assert found["vllm:prompt_tokens_by_source_total", "local_compute"] == 16
    assert found["vllm:num_preemptions_total",] == 1
    assert found["vllm:generation_tokens_total",] == 3
    assert found["vllm:request_success_total", "stop"] == 1
    assert found["vllm:inter_token_latency_seconds_count",] == 2
    assert found["vllm:inter_token_latency_seconds_sum",] == 3
    assert found["vllm:request_time_per_output_token_seconds_sum",] == 1.5
    assert found["vllm:request_decode_time_seconds_sum",] == 3
    assert 2 <= found["vllm:time_to_first_token_seconds_sum",] < 2.5
    assert found["vllm:nixl_xfer_time_seconds_sum",] == 0.5
    assert found["vllm:nixl_bytes_transferred_sum",] == 3000
    assert found["pdkv:kv_load_blocks_total",] == 3


def test_leases_loads_and_quarantine() -> None:
    telemetry = Telemetry("tiny")
    telemetry.on_events(
        (
            LeaseGranted(request_id="a", at_ns=1, lease_id=1, blocks=2, deadline_ns=9),
            LeaseGranted(request_id="b", at_ns=1, lease_id=2, blocks=2, deadline_ns=9),
            LeaseGranted(request_id="c", at_ns=1, lease_id=3, blocks=2, deadline_ns=9),
            LeaseRenewed(request_id="a", at_ns=2, lease_id=1, deadline_ns=20),
            LeaseReleased(request_id="a", at_ns=3, lease_id=1, blocks=2, expired=False),
            LeaseReleased(request_id="b", at_ns=9, lease_id=2, blocks=2, expired=True),
            LoadFailed(request_id="x", at_ns=3, handle=4, cause="gone"),
            Quarantined(request_id="x", at_ns=3, handle=4, blocks=5, cause="aborted"),
            Fenced(request_id="x", at_ns=4, handle=4, blocks=5),
        )
    )
    found = samples(telemetry)
    assert found["pdkv:leases_granted_total",] == 3
    assert found["pdkv:leases_renewed_total",] == 1
    assert found["pdkv:leases_released_total", "done"] == 1
    assert found["pdkv:leases_released_total", "expired"] == 1
    assert found["vllm:nixl_num_kv_expired_reqs_total",] == 1
    assert found["pdkv:leases_held",] == 1
    assert found["vllm:nixl_num_failed_transfers_total",] == 1
    assert found["pdkv:quarantined_blocks_total",] == 5
    assert found["pdkv:fenced_blocks_total",] == 5


def test_gauges_come_from_the_ledger() -> None:
    found = samples(Telemetry("tiny"))
    assert found["pdkv:kv_blocks", "running"] == 10
    assert sum(value for key, value in found.items() if key[0] == "pdkv:kv_blocks") == 100
    assert found["vllm:kv_cache_usage_perc",] == 14 / 99
    assert found["vllm:num_requests_waiting",] == 3
    assert found["vllm:num_requests_waiting_by_reason", "capacity"] == 1
    assert found["vllm:num_requests_waiting_by_reason", "deferred"] == 2
    assert found["vllm:num_requests_kv_fetch_by_stage", "in_progress"] == 1
    assert found["pdkv:transfer_heartbeats_sent_total",] == 9


def test_refused_requests_leave_nothing_behind() -> None:
    telemetry = Telemetry("tiny")
    telemetry.arrived("r")
    telemetry.refused("r")
    assert not telemetry._lives


def test_who_waits_for_its_fetch_to_begin() -> None:
    telemetry = Telemetry("tiny")

    def ahead() -> float:
        return samples(telemetry)["vllm:num_requests_kv_fetch_by_stage", "waiting_to_start"]

    assert ahead() == 0
    for request_id in ("loads", "fails", "held", "leaves"):
        telemetry.arrived(request_id, fetches=True)
    telemetry.arrived("ordinary")
    assert ahead() == 4
    telemetry.on_events((LoadStarted(request_id="loads", at_ns=1, handle=1, blocks=2, tokens=32),))
    assert ahead() == 3
    telemetry.on_events((LoadFailed(request_id="fails", at_ns=1, handle=None, cause="P is gone"),))
    telemetry.on_events((Admitted(request_id="held", at_ns=1, prompt_tokens=9, local_tokens=8, external_tokens=0),))
    assert ahead() == 1
    telemetry.on_events(
        (
            Finished(
                request_id="leaves", at_ns=2, reason=FinishReason.ABORT, prompt_tokens=9, output_tokens=0,
                cached_tokens=0,
            ),
        )
    )  # fmt: skip
    assert ahead() == 0
