"""Prometheus metrics of one instance: counters fed by the core's events, gauges read from the ledger at scrape time.

vLLM's names where the meaning is vLLM's (shared/spec/metrics.md), so existing dashboards and routers keep working;
``pdkv:`` names for what is new. Requests that queue twice (preempted, loading) are counted as vLLM counts them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdkv.core.events import (
    Admitted,
    Announced,
    Event,
    Fenced,
    Finished,
    LeaseGranted,
    LeaseReleased,
    LeaseRenewed,
    LoadFailed,
    LoadFinished,
    LoadStarted,
    Preempted,
    Quarantined,
    TokenSampled,
    TurnDeclined,
    WriteFailed,
    WriteFinished,
)
from pdkv.core.ports import MemoryView
from pdkv.serve.engine import InfoLike, ServedInstance
from pdkv.serve.merge import Snapshot
from pdkv.serve.transfer_counters import transfer_counters
from pdkv.units import NS_PER_S, cdiv

LOG = logging.getLogger("pdkv.transfer")

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_TRANSFER_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
_BYTES = tuple(float(2**exponent) for exponent in range(11, 34, 2))
_BLOCKS = (1, 2, 5, 10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_CAPACITY = ("kv_cache_size_tokens", "kv_cache_max_concurrency")
_PINNED = frozenset({"running", "draft", "loading", "loaded_waiting", "retained", "deferred", "quarantine"})


@dataclass(slots=True)
class _Life:
    """Times of one request, nanoseconds of `time.monotonic_ns` (the instance's clock).

    ``fetch_ahead``: its KV is at a prefill instance, and nothing of it was asked for yet.
    """

    arrived_ns: int
    fetch_ahead: bool = False
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    output_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0


class Telemetry:
    """One instance's metrics. ``on_events`` is the instance's event listener (called on the engine's thread)."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._labels = {"model_name": model_name, "engine": "0"}
        self._lives: dict[str, _Life] = {}
        self._make_counters()
        self._make_histograms()
        self._make_gauges()
        self._handlers = {
            Admitted: self._admitted,
            Announced: self._announced,
            TokenSampled: self._token,
            Finished: self._finished,
            Preempted: self._preempted,
            TurnDeclined: self._turn_declined,
            LoadStarted: self._load_started,
            LoadFinished: self._load_finished,
            LoadFailed: self._load_failed,
            LeaseGranted: self._lease_granted,
            LeaseRenewed: self._lease_renewed,
            LeaseReleased: self._lease_released,
            WriteFinished: self._write_finished,
            WriteFailed: self._write_failed,
            Quarantined: self._quarantined,
            Fenced: self._fenced,
        }

    # ------------------------------------------------------------------------------------------------- what exists

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(name, text, [*self._labels, *labels], registry=self.registry)
        return counter if labels else counter.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(name, text, list(self._labels), registry=self.registry, buckets=tuple(buckets))
        return histogram.labels(**self._labels)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        gauge = Gauge(name, text, [*self._labels, *labels], registry=self.registry)
        return gauge if labels else gauge.labels(**self._labels)

    def _make_counters(self) -> None:
        counter = self._counter
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of admitted requests")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated")
        self._num_preemptions = counter("vllm:num_preemptions", "Preemptions")
        self._success = counter("vllm:request_success", "Finished requests", "finished_reason")
        self._rejections = counter("vllm:admission_rejections", "Answers refused by a queue limit", "reason")
        for limit in ("max_num_queued_reqs", "max_num_queued_tokens"):
            self._rejections.labels(**self._labels, reason=limit)
        self._prefix_queries = counter("vllm:prefix_cache_queries", "Tokens looked up in the local prefix cache")
        self._prefix_hits = counter("vllm:prefix_cache_hits", "Tokens found in the local prefix cache")
        self._external_queries = counter("vllm:external_prefix_cache_queries", "Tokens asked of a prefill instance")
        self._external_hits = counter("vllm:external_prefix_cache_hits", "Tokens got from a prefill instance")
        self._cached_tokens = counter("vllm:prompt_tokens_cached", "Prompt tokens not computed here")
        self._by_source = counter("vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from", "source")
        self._failed_transfers = counter("vllm:nixl_num_failed_transfers", "KV loads that failed, handshakes included")
        self._expired = counter("vllm:nixl_num_kv_expired_reqs", "KV that expired before it was read")
        self._load_blocks = counter("pdkv:kv_load_blocks", "Blocks loaded from a prefill instance")
        self._leases_granted = counter("pdkv:leases_granted", "Leases granted on finished prefills")
        self._leases_renewed = counter("pdkv:leases_renewed", "Heartbeats that moved a lease's deadline")
        self._leases_released = counter("pdkv:leases_released", "Leases ended, by how", "how")
        self._turns_kept = counter("pdkv:turns_kept", "Answers whose KV was kept for the conversation's next turn")
        self._turns_released = counter("pdkv:turns_released", "Kept answers let go, by how", "how")
        self._written_bytes = counter(
            "pdkv:kv_written_bytes", "Bytes of KV written into consumers' memory (WRITE push)"
        )
        self._writes_failed = counter("pdkv:kv_writes_failed", "WRITEs that ended before all was there")
        self._quarantines = counter("pdkv:quarantined_blocks", "Blocks put into quarantine behind a given-up transfer")
        self._fences = counter("pdkv:fenced_blocks", "Blocks that left quarantine because the transfer was over")
        self._recomputed = counter("pdkv:preempted_tokens", "Computed tokens lost to preemption")
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(**self._labels, finished_reason=reason)
        for how in ("done", "expired"):
            self._leases_released.labels(**self._labels, how=how)
        for how in ("done", "expired", "gave_way"):
            self._turns_released.labels(**self._labels, how=how)

    def _make_histograms(self) -> None:
        histogram = self._histogram
        self._queue_s = histogram("vllm:request_queue_time_seconds", "Arrival to first admission", _LATENCY_S)
        self._prefill_s = histogram("vllm:request_prefill_time_seconds", "Admission to first token", _LATENCY_S)
        self._decode_s = histogram("vllm:request_decode_time_seconds", "First to last token", _LATENCY_S)
        self._inference_s = histogram("vllm:request_inference_time_seconds", "Admission to last token", _LATENCY_S)
        self._e2e_s = histogram("vllm:e2e_request_latency_seconds", "Arrival to finish", _LATENCY_S)
        self._ttft_s = histogram("vllm:time_to_first_token_seconds", "Arrival to first token", _LATENCY_S)
        self._itl_s = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request", _TOKEN_S)
        self._tpot_s = histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean time per token after the first", _TOKEN_S
        )
        self._request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens per request", _TOKENS)
        self._request_output = histogram("vllm:request_generation_tokens", "Generated tokens per request", _TOKENS)
        self._computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed per request", _TOKENS
        )
        self._request_preemptions = histogram("vllm:request_num_preemptions", "Preemptions per request", _PREEMPTIONS)
        self._announce_s = histogram(
            "pdkv:kv_announcement_wait_seconds", "Arrival at the decode instance to P's announcement", _LATENCY_S
        )
        self._transfer_s = histogram("vllm:nixl_xfer_time_seconds", "Seconds per KV load", _TRANSFER_S)
        self._transfer_bytes = histogram("vllm:nixl_bytes_transferred", "Bytes per KV load", _BYTES)
        self._transfer_blocks = histogram("pdkv:kv_load_size_blocks", "Blocks per KV load", _BLOCKS)

    def _make_gauges(self) -> None:
        gauge = self._gauge
        self._running = gauge("vllm:num_requests_running", "Requests running (loading ones not included)")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests waiting, loads included")
        self._by_reason = gauge("vllm:num_requests_waiting_by_reason", "Waiting requests by reason", "reason")
        self._by_stage = gauge("vllm:num_requests_kv_fetch_by_stage", "Requests fetching KV, by stage", "stage")
        self._awaiting = gauge("pdkv:num_requests_awaiting_announcement", "Requests whose KV is still to be announced")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Pinned share of the usable blocks, 0 to 1")
        self._kv_blocks = gauge("pdkv:kv_blocks", "Blocks per account of the ledger; they sum to the pool", "account")
        self._kv_peak = gauge("pdkv:kv_blocks_peak", "Most blocks ever in an account", "account")
        self._pool = gauge("pdkv:kv_pool_blocks", "Blocks of the pool, the null block included")
        self._block_bytes = gauge("pdkv:kv_block_bytes", "Bytes of one block over all layers, on one rank")
        self._ranks = gauge("pdkv:tensor_parallel_ranks", "Ranks that each have a part of every block")
        self._leases_held = gauge("pdkv:leases_held", "Leases outstanding on this instance")
        self._turns_held = gauge("pdkv:turns_held", "Answers kept on this instance for a next turn")
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "Facts of the KV cache",
            [*self._labels, "num_gpu_blocks", "block_size", *_CAPACITY, "role", "transport"],
            registry=self.registry,
        )
        self._held = self._turns = 0

    # ---------------------------------------------------------------------------------------------------- arrivals

    def arrived(self, request_id: str, *, fetches: bool = False) -> None:
        """A request is about to be submitted; ``fetches``: with KV that a prefill instance holds."""
        self._lives[request_id] = _Life(time.monotonic_ns(), fetches)

    def rejected(self, limit: str) -> None:
        """A queue limit turned an answer away."""
        self._rejections.labels(**self._labels, reason=limit).inc()

    def refused(self, request_id: str) -> None:
        """The instance would not take it."""
        self._lives.pop(request_id, None)

    # ------------------------------------------------------------------------------------------------------ events

    def on_events(self, events: tuple[Event, ...]) -> None:
        """Count what happened. Unknown kinds of events are ignored."""
        for event in events:
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event)  # type: ignore[operator]

    def _admitted(self, event: Admitted) -> None:
        life = self._lives.get(event.request_id)
        if life is not None:
            life.fetch_ahead = False  # it may have needed nothing of it
        if event.resumed:
            return
        computed = event.prompt_tokens - event.local_tokens - event.external_tokens
        self._prompt_tokens.inc(event.prompt_tokens)
        self._prefix_queries.inc(event.prompt_tokens)
        self._prefix_hits.inc(event.local_tokens)
        self._external_hits.inc(event.external_tokens)
        self._cached_tokens.inc(event.local_tokens + event.external_tokens)
        for source, tokens in (
            ("local_compute", computed),
            ("local_cache_hit", event.local_tokens),
            ("external_kv_transfer", event.external_tokens),
        ):
            self._by_source.labels(**self._labels, source=source).inc(tokens)
        if life is not None and life.admitted_ns is None:
            life.admitted_ns = event.at_ns
            life.prompt_tokens, life.computed_tokens = event.prompt_tokens, computed
            self._queue_s.observe(_seconds(event.at_ns - life.arrived_ns))

    def _token(self, event: TokenSampled) -> None:
        self._generation_tokens.inc()
        life = self._lives.get(event.request_id)
        if life is None:
            return
        life.output_tokens += 1
        if life.first_token_ns is None:
            life.first_token_ns = event.at_ns
            self._ttft_s.observe(_seconds(event.at_ns - life.arrived_ns))
            self._prefill_s.observe(_seconds(event.at_ns - (life.admitted_ns or life.arrived_ns)))
        elif life.last_token_ns is not None:
            self._itl_s.observe(_seconds(event.at_ns - life.last_token_ns))
        life.last_token_ns = event.at_ns

    def _finished(self, event: Finished) -> None:
        self._success.labels(**self._labels, finished_reason=event.reason.value).inc()
        life = self._lives.pop(event.request_id, None)
        if life is None:
            return
        self._e2e_s.observe(_seconds(event.at_ns - life.arrived_ns))
        self._request_prompt.observe(event.prompt_tokens)
        self._request_output.observe(event.output_tokens)
        self._request_preemptions.observe(life.preemptions)
        if life.admitted_ns is not None:
            self._computed.observe(life.computed_tokens)
        if life.first_token_ns is None or life.last_token_ns is None:
            return
        decode_ns = life.last_token_ns - life.first_token_ns
        self._decode_s.observe(_seconds(decode_ns))
        self._inference_s.observe(_seconds(life.last_token_ns - (life.admitted_ns or life.arrived_ns)))
        if life.output_tokens > 1:
            self._tpot_s.observe(_seconds(decode_ns) / (life.output_tokens - 1))

    def _preempted(self, event: Preempted) -> None:
        self._num_preemptions.inc()
        self._recomputed.inc(event.lost_tokens)
        if (life := self._lives.get(event.request_id)) is not None:
            life.preemptions += 1

    def _announced(self, event: Announced) -> None:
        self._announce_s.observe(_seconds(event.waited_ns))

    def _load_started(self, event: LoadStarted) -> None:
        self._external_queries.inc(event.tokens)
        if (life := self._lives.get(event.request_id)) is not None:
            life.fetch_ahead = False

    def _load_finished(self, event: LoadFinished) -> None:
        self._load_blocks.inc(event.blocks)
        self._transfer_s.observe(event.seconds)
        self._transfer_bytes.observe(event.moved_bytes)
        self._transfer_blocks.observe(event.blocks)

    def _load_failed(self, event: LoadFailed) -> None:
        self._failed_transfers.inc()
        LOG.warning("%s: its KV did not arrive: %s", event.request_id, event.cause)
        if (life := self._lives.get(event.request_id)) is not None:
            life.fetch_ahead = False

    def _lease_granted(self, event: LeaseGranted) -> None:
        if event.next_turn:
            self._turns_kept.inc()
            self._turns += 1
            return
        self._leases_granted.inc()
        self._held += 1

    def _lease_renewed(self, _event: LeaseRenewed) -> None:
        self._leases_renewed.inc()

    def _turn_released(self, event: LeaseReleased) -> None:
        how = "gave_way" if event.gave_way else "expired" if event.expired else "done"
        self._turns_released.labels(**self._labels, how=how).inc()
        self._turns -= 1

    def _turn_declined(self, _event: TurnDeclined) -> None:
        self._expired.inc()

    def _lease_released(self, event: LeaseReleased) -> None:
        if event.next_turn:
            self._turn_released(event)
            return
        self._leases_released.labels(**self._labels, how="expired" if event.expired else "done").inc()
        self._held -= 1
        if event.expired:
            self._expired.inc()

    def _write_finished(self, event: WriteFinished) -> None:
        self._written_bytes.inc(event.moved_bytes)

    def _write_failed(self, _event: WriteFailed) -> None:
        self._writes_failed.inc()

    def _quarantined(self, event: Quarantined) -> None:
        self._quarantines.inc(event.blocks)

    def _fenced(self, event: Fenced) -> None:
        self._fences.inc(event.blocks)

    # ------------------------------------------------------------------------------------------------------ scrape

    def render(self, instance: ServedInstance) -> bytes:
        """Every metric in Prometheus' text format, the gauges read from ``instance`` now."""
        info, view, stats = instance.info, instance.memory(), instance.stats()
        self._set_memory(info, view)
        self._leases_held.set(self._held)
        self._turns_held.set(self._turns)
        self._running.set(stats.running)
        self._awaiting.set(len(view.awaiting))
        self._waiting.set(stats.waiting)
        deferred = min(stats.loading, stats.waiting)
        self._by_reason.labels(**self._labels, reason="deferred").set(deferred)
        self._by_reason.labels(**self._labels, reason="capacity").set(stats.waiting - deferred)
        if info.role == "decode":
            ahead = sum(life.fetch_ahead for life in list(self._lives.values()))
            self._by_stage.labels(**self._labels, stage="waiting_to_start").set(ahead)
            for stage, account in (("in_progress", "loading"), ("completed_waiting", "loaded_waiting")):
                count = len({h.request_id for h in view.holders if h.account == account})
                self._by_stage.labels(**self._labels, stage=stage).set(count)
        self._cache_config.labels(
            **self._labels,
            num_gpu_blocks=str(info.num_blocks),
            block_size=str(info.block_size),
            **_capacity(info),
            role=info.role,
            transport=info.transport,
        ).set(1)
        return generate_latest(self.registry) + generate_latest(
            Snapshot(transfer_counters(stats.transfer, self._labels))
        )

    def _set_memory(self, info: InfoLike, view: MemoryView) -> None:
        for account, blocks in view.accounts.items():
            self._kv_blocks.labels(**self._labels, account=account).set(blocks)
        for account, blocks in view.peaks.items():
            self._kv_peak.labels(**self._labels, account=account).set(blocks)
        pinned = sum(blocks for account, blocks in view.accounts.items() if account in _PINNED)
        self._usage.set(pinned / max(1, view.num_blocks - 1))
        self._pool.set(view.num_blocks)
        self._block_bytes.set(info.bytes_per_block)
        self._ranks.set(info.tensor_parallel_size)


def _seconds(ns: int) -> float:
    return max(0, ns) / NS_PER_S


def _capacity(info: InfoLike) -> dict[str, str]:
    """vLLM's two figures: concurrency by blocks (the null block counted), and that many longest requests in tokens."""
    concurrency = info.num_blocks / cdiv(info.max_model_len, info.block_size)
    tokens = int(concurrency * info.max_model_len)
    return dict(zip(_CAPACITY, (str(tokens), repr(concurrency)), strict=True))
