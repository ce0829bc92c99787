"""One look at a running server: its /metrics (and pdkv's /debug/memory) -> what every engine behind it said."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdkv.errors import ConfigError
from pdkv.logs.metrics_text import Metrics
from pdkv.logs.scrape import fetch_json, metrics_url, scrape, sibling_url

# The name until about 0.10, and since.
# More than any counter of a server reaches: what is above, infinite or NaN is not known.
_MOST = 1e18
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_STAGE = "vllm:num_requests_kv_fetch_by_stage"
_MOST_WORK = 10_000_000
"""Samples times engines: each engine picks its own among all."""
_ROLES = {"kv_consumer": "decode", "kv_producer": "prefill", "decode": "decode", "prefill": "prefill"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A request that holds blocks, from pdkv's /debug/memory."""

    request_id: str
    account: str
    blocks: int
    cause: str
    since_s: float
    deadline_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """One engine at one instant. ``None``: the server does not say. Counters are since the server started.

    ``role`` is ``decode``, ``prefill`` or ``None`` (a mixed engine, or not known). ``connector`` is whether a KV
    connector is configured. ``accounts`` is pdkv's ledger in blocks, ``stages`` are requests by stage of their KV load.
    """

    url: str
    labels: Mapping[str, str]
    role: str | None = None
    connector: bool = False
    num_blocks: int | None = None
    block_size: int | None = None
    bytes_per_block: int | None = None
    kv_cache_size_tokens: int | None = None
    usage: float | None = None
    running: int = 0
    waiting: int = 0
    deferred: int | None = None
    stages: Mapping[str, int] | None = None
    accounts: Mapping[str, int] | None = None
    holders: tuple[Holder, ...] = ()
    leases_held: int | None = None
    sleeping: bool = False
    mean_prompt_tokens: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tells it from others."""
        instance = self.labels.get("instance", "")
        parts = [instance, "" if self.role is None or self.role in instance else self.role]
        engine = self.labels.get("engine")
        if engine not in (None, "0"):
            parts.append(f"engine {engine}")
        return " ".join(part for part in parts if part) or self.url

    @property
    def usable_blocks(self) -> int | None:
        """Blocks that can hold KV: all but the null block."""
        return None if self.num_blocks is None else max(0, self.num_blocks - 1)

    @property
    def pinned_blocks(self) -> int | None:
        """Blocks in use. The gauge is their share of the usable ones, so their number is exact."""
        if self.usable_blocks is None or self.usage is None:
            return None
        return min(self.usable_blocks, max(0, round(self.usage * self.usable_blocks)))

    @property
    def loading(self) -> int | None:
        """Requests whose KV is on its way or has come, and that do not run yet: they hold blocks."""
        if self.stages is None:
            return None
        return self.stages.get("in_progress", 0) + self.stages.get("completed_waiting", 0)

    @property
    def only_prefills(self) -> bool:
        """Whether requests end with their first token: the prefill legs of a router, whatever the role is called."""
        finished = self.counter("finished")
        return self.role == "prefill" or bool(
            finished and self.counters.get("generation_tokens", 2 * finished) <= finished
        )

    def counter(self, name: str) -> float:
        """A counter, 0 when the server does not have it."""
        return self.counters.get(name, 0.0)


@dataclass(frozen=True, slots=True)
class Reading:
    """All engines behind one URL at ``at_s`` (seconds of any clock that only goes forward)."""

    url: str
    at_s: float
    engines: tuple[EngineReading, ...]


_COUNTERS = {
    "preemptions": "vllm:num_preemptions",
    "finished": "vllm:request_success",
    "generation_tokens": "vllm:generation_tokens",
    "prompt_tokens": "vllm:prompt_tokens",
    "prefix_queries": "vllm:prefix_cache_queries",
    "prefix_hits": "vllm:prefix_cache_hits",
    "external_queries": "vllm:external_prefix_cache_queries",
    "external_hits": "vllm:external_prefix_cache_hits",
    "transfers": "vllm:nixl_xfer_time_seconds_count",
    "transfer_seconds": "vllm:nixl_xfer_time_seconds_sum",
    "transfer_bytes": "vllm:nixl_bytes_transferred_sum",
    "failed_transfers": "vllm:nixl_num_failed_transfers",
    "failed_notifications": "vllm:nixl_num_failed_notifications",
    "expired": "vllm:nixl_num_kv_expired_reqs",
    "after_expiry": "vllm:nixl_num_notifications_after_expiry",
    "offload_load_bytes": "vllm:kv_offload_load_bytes",
    "offload_store_bytes": "vllm:kv_offload_store_bytes",
    "offload_refused": "vllm:kv_offload_allocation_failure",
    "tier_queries": "vllm:kv_offload_tiering_chunk_queries",
    "tier_hits": "vllm:kv_offload_tiering_chunk_hits",
    "leases_granted": "pdkv:leases_granted",
    "quarantined_blocks": "pdkv:quarantined_blocks",
    "fenced_blocks": "pdkv:fenced_blocks",
}


def read(url: str, at_s: float, timeout_s: float = 10.0) -> Reading:
    """Read a server's metrics, and pdkv's ledger where there is one. Raises ConfigError as `scrape` does."""
    metrics = scrape(url, timeout_s)
    holders: dict[str, list[Holder]] = {}
    if "pdkv:kv_blocks" in metrics:
        try:
            holders = _holders(fetch_json(sibling_url(metrics_url(url), "/debug/memory"), timeout_s))
        except ConfigError:
            # The metrics hold the split; who holds the blocks is an extra.
            holders = {}
    return Reading(url, at_s, engines_of(metrics, url, holders))


def engines_of(
    metrics: Metrics, url: str, holders: Mapping[str, list[Holder]] | None = None
) -> tuple[EngineReading, ...]:
    """Every engine that a text is about. Raises ConfigError when it is of neither vLLM nor pdkv."""
    usage = next((name for name in _USAGE if name in metrics), None)
    if usage is None:
        raise ConfigError(f"{url} answers metrics, but none of vLLM or pdkv (there is no {_USAGE[0]})")
    gauges, samples = metrics.series(usage), sum(map(len, metrics.samples.values()))
    if len(gauges) * samples > _MOST_WORK:
        raise ConfigError(f"{url} answers {samples} samples of {len(gauges)} engines; give the URL of fewer engines")
    return tuple(
        _engine(metrics.about(gauge.labels), gauge.labels, gauge.value, url, holders or {}) for gauge in gauges
    )


def _engine(
    metrics: Metrics, labels: Mapping[str, str], usage: float, url: str, holders: Mapping[str, list[Holder]]
) -> EngineReading:
    config = next((sample.labels for sample in metrics.series("vllm:cache_config_info")), {})
    stages = _whole_values(metrics, _STAGE, "stage") if _STAGE in metrics else None
    accounts = _whole_values(metrics, "pdkv:kv_blocks", "account") if "pdkv:kv_blocks" in metrics else None
    reasons = _whole_values(metrics, "vllm:num_requests_waiting_by_reason", "reason")
    role = _ROLES.get(config.get("role", "")) or _ROLES.get(config.get("kv_role", ""))
    if role is None and stages is not None:
        role = "decode"
    if role is None and reasons and "vllm:nixl_xfer_time_seconds_count" in metrics:
        # Consumers have the stages of their loads, releases that know reasons to wait have them: this one only sends.
        role = "prefill"
    prompts = metrics.total("vllm:request_prompt_tokens_count")
    return EngineReading(
        url=url,
        labels=labels,
        role=role,
        connector=stages is not None or "vllm:nixl_xfer_time_seconds_count" in metrics or accounts is not None,
        num_blocks=_whole(metrics.total("pdkv:kv_pool_blocks")) or _digits(config.get("num_gpu_blocks")),
        block_size=_digits(config.get("block_size")),
        bytes_per_block=_whole(metrics.total("pdkv:kv_block_bytes")),
        kv_cache_size_tokens=_digits(config.get("kv_cache_size_tokens")),
        usage=usage if 0 <= usage <= 1 else None,
        running=_whole(metrics.total("vllm:num_requests_running")) or 0,
        waiting=_whole(metrics.total("vllm:num_requests_waiting")) or 0,
        deferred=reasons.get("deferred"),
        stages=stages,
        accounts=accounts,
        holders=tuple(holders.get(labels.get("instance", ""), []) or holders.get("", [])),
        leases_held=_whole(metrics.total("pdkv:leases_held")),
        sleeping=any(sample.value == 0 for sample in metrics.series("vllm:engine_sleep_state", sleep_state="awake")),
        mean_prompt_tokens=(metrics.total("vllm:request_prompt_tokens_sum") or 0) / prompts if prompts else None,
        counters={name: count for name, of in _COUNTERS.items() if (count := _finite(metrics.counter(of))) is not None}
        | {f"prompt_{source}": count for source, count in _sources(metrics).items()},
    )


def _sources(metrics: Metrics) -> dict[str, float]:
    """Prompt tokens by where their KV came from."""
    name = "vllm:prompt_tokens_by_source"
    found = metrics.values(f"{name}_total", "source") or metrics.values(name, "source")
    return {source: count for source, count in found.items() if math.isfinite(count)}


def _whole_values(metrics: Metrics, name: str, label: str) -> dict[str, int]:
    return {key: _whole(value) or 0 for key, value in metrics.values(name, label).items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and 0 <= value < _MOST else None


def _whole(value: float | None) -> int | None:
    """A count; what is no count (NaN, infinite, negative, more than any pool has) is not known."""
    return int(value) if value is not None and math.isfinite(value) and 0 <= value < 1 << 53 else None


def _digits(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else None


def _holders(answer: Any) -> dict[str, list[Holder]]:
    """The holders of every instance of a /debug/memory, by engine id and under "" when there is one instance.

    Raises ConfigError when the answer is no such report.
    """
    try:
        instances = answer["instances"]
        found = {
            str(instance.get("instance") or instance["engine_id"]): [
                Holder(
                    request_id=str(holder["request_id"]),
                    account=str(holder["account"]),
                    blocks=int(holder["blocks"]),
                    cause=str(holder["cause"]),
                    since_s=float(holder["since_s"]),
                    deadline_s=None if holder["deadline_s"] is None else float(holder["deadline_s"]),
                )
                for holder in instance["holders"][:10_000]
            ]
            for instance in instances
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"/debug/memory answers something else than a ledger ({error!r})") from error
    if len(found) == 1:
        found[""] = next(iter(found.values()))
    return found
