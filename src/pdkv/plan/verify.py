"""A plan against a running server: every prediction is put beside what the server says, with a verdict.

What a server answers is read from ``/metrics`` (``vllm:cache_config_info``, ``vllm:kv_cache_usage_perc``) and
``/v1/models``, of vLLM and pdkv alike. With a probe, one request of known length is sent and the usage while it runs is
compared with the blocks that the plan gives it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from pdkv.errors import ConfigError
from pdkv.logs.metrics_text import Metrics, Sample
from pdkv.plan.report import PlanReport, UsageFacts

_INFO = "vllm:cache_config_info"
# What a connector calls a side, and what pdkv's instances call themselves.
_ROLES = {"kv_consumer": "decode", "kv_producer": "prefill"}
_USAGE = "vllm:kv_cache_usage_perc"
_MOST_PLAN_BYTES = 32 << 20
_POLL_S = 0.02


class Verdict(Enum):
    """What came of one prediction; ``value`` is the word for it."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_SHOWN = "not shown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One prediction, what was observed (``None``: the server does not say), and what a difference means."""

    what: str
    predicted: str
    observed: str | None
    verdict: Verdict
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    """All findings about one server; ``agrees`` is false when any prediction differs."""

    url: str
    engines: int
    findings: tuple[Finding, ...]

    @property
    def agrees(self) -> bool:
        return all(finding.verdict is not Verdict.DIFFERS for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server as seen from outside: what it answers now, the models it lists, and a way to send a request.

    ``complete(prompt_tokens, output_tokens)`` sends one request and returns when it is answered.
    """

    url: str
    scrape: Callable[[], Metrics]
    models: Callable[[], Any]
    complete: Callable[[int, int], None]


def read_plan(path: Path) -> PlanReport:
    """The answer of ``pdkv plan --json`` in a file. Raises ConfigError when it is none."""
    try:
        data = path.read_bytes() if path.stat().st_size <= _MOST_PLAN_BYTES else b""
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        return msgspec.json.decode(data, type=PlanReport)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a plan ({error}); write one with `pdkv plan MODEL ... --json > {path.name}`"
        ) from error


def verify(plan: PlanReport, server: Server, *, probe: bool = False) -> Verification:
    """Every prediction of ``plan`` against ``server``. Raises ConfigError when it cannot be asked at all."""
    metrics = server.scrape()
    infos = _engines(plan, metrics)
    if not infos:
        raise ConfigError(f"{server.url} shows no {_INFO}; give the address of a vLLM or pdkv server")
    findings = [
        Finding(
            "engines",
            str(plan.deployment.engines),
            str(len(infos)),
            _verdict(plan.deployment.engines == len(infos)),
            "each data-parallel rank, and each instance behind a router, shows as one engine",
        )
    ]
    for index, info in enumerate(infos):
        name = f"engine {info.labels.get('engine', index)}: " if len(infos) > 1 else ""
        findings += _capacity(plan, info.labels, name)
    findings += _length(plan, server)
    findings += _load(plan, metrics)
    if probe:
        findings.append(_probe(plan, server))
    return Verification(server.url, len(infos), tuple(findings))


def _engines(plan: PlanReport, metrics: Metrics) -> list[Sample]:
    """The engines that the plan is for: behind pdkv's router, those of its role."""
    infos = metrics.series(_INFO)
    role = "" if plan.decode is None else _ROLES.get(plan.decode.role or "", "")
    return [info for info in infos if role and info.labels.get("role") == role] or infos


def _verdict(agrees: bool) -> Verdict:
    return Verdict.AGREES if agrees else Verdict.DIFFERS


def _capacity(plan: PlanReport, labels: dict[str, str], name: str) -> Iterator[Finding]:
    capacity = plan.capacity
    estimated = plan.memory.basis != "given"
    less = (
        "the KV budget was estimated; plan again with the server's own 'Available KV cache memory' "
        "(--kv-cache-memory-bytes), or --calibrate with its log"
        if estimated
        else "other KV bytes, dtype or parallelism than planned: `pdkv explain` on its start-up log says which"
    )
    numbers = (
        ("blocks", "num_gpu_blocks", capacity.num_blocks, less),
        ("tokens", "kv_cache_size_tokens", capacity.kv_cache_size_tokens, less),
        ("tokens per block", "block_size", plan.kv.block_size, "another backend, or --block-size"),
    )
    for what, label, predicted, meaning in numbers:
        observed = labels.get(label, "")
        if not observed.isdecimal():
            yield Finding(name + what, f"{predicted:,}", None, Verdict.NOT_SHOWN)
            continue
        low, high = _allowed(plan, label)
        agrees = (
            low <= int(observed) <= high
            if estimated and low is not None and high is not None
            else (int(observed) == predicted)
        )
        yield Finding(name + what, f"{predicted:,}", f"{int(observed):,}", _verdict(agrees), "" if agrees else meaning)
    shown = _number(labels.get("kv_cache_max_concurrency"))
    if shown is None:
        yield Finding(name + "requests at once", f"{capacity.max_concurrency:.4f}", None, Verdict.NOT_SHOWN)
        return
    low, high = _allowed(plan, "kv_cache_max_concurrency")
    agrees = (
        low <= shown <= high
        if estimated and low is not None and high is not None
        else math.isclose(shown, capacity.max_concurrency, rel_tol=1e-6)
    )
    meaning = "" if agrees else less
    yield Finding(
        name + "requests at once", f"{capacity.max_concurrency:.4f}", f"{shown:.4f}", _verdict(agrees), meaning
    )


def _allowed(plan: PlanReport, label: str) -> tuple[float | None, float | None]:
    """What an estimated budget allows: the interval of its bytes, in the unit of ``label``."""
    low, high = plan.memory.low_bytes, plan.memory.high_bytes
    per_block = plan.capacity.bytes_per_block
    if low is None or high is None or not per_block or label == "block_size":
        return (None, None)
    capacity = plan.capacity
    scale = {
        "num_gpu_blocks": 1.0,
        "kv_cache_size_tokens": capacity.kv_cache_size_tokens / capacity.num_blocks,
        "kv_cache_max_concurrency": capacity.max_concurrency / capacity.num_blocks,
    }[label]
    return (low // per_block * scale - 1, (high // per_block + 1) * scale + 1)


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _length(plan: PlanReport, server: Server) -> Iterator[Finding]:
    predicted = plan.capacity.max_model_len
    try:
        listed = server.models()
    except ConfigError:
        listed = None
    models = listed.get("data") if isinstance(listed, dict) else None
    lengths = [entry.get("max_model_len") for entry in models or [] if isinstance(entry, dict)]
    found = [length for length in lengths if isinstance(length, int)]
    if not found:
        yield Finding("longest request", f"{predicted:,}", None, Verdict.NOT_SHOWN)
        return
    agrees = predicted in found
    shown = ", ".join(f"{length:,}" for length in found)
    yield Finding(
        "longest request", f"{predicted:,}", shown, _verdict(agrees), "" if agrees else "another --max-model-len"
    )


def _load(plan: PlanReport, metrics: Metrics) -> Iterator[Finding]:
    """Usage under a load that is known without sending one: none, and at most what running requests can hold."""
    usage = [sample.value for sample in metrics.series(_USAGE)]
    if not usage:
        yield Finding("usage", "0% when idle", None, Verdict.NOT_SHOWN)
        return
    running = metrics.total("vllm:num_requests_running") or 0
    waiting = metrics.total("vllm:num_requests_waiting") or 0
    most = max(usage)
    if not running and not waiting:
        meaning = "blocks are held though no request is there: finished ones kept for a peer, or leaked"
        idle = most <= 0
        yield Finding("usage when idle", "0%", f"{most:.2%}", _verdict(idle), "" if idle else meaning)
        return
    usable = plan.capacity.usable_blocks
    bound = min(1.0, (running + waiting) * plan.capacity.blocks_per_max_len_request / usable) if usable else 0.0
    within = most <= bound + 1e-6
    meaning = "" if within else "more blocks are held than these requests can need: others are kept, or leaked"
    yield Finding(
        f"usage with {running:g} running, {waiting:g} waiting", f"at most {bound:.2%}", f"{most:.2%}",
        _verdict(within), meaning,
    )  # fmt: skip


def _probe(plan: PlanReport, server: Server) -> Finding:
    """One request of known length: the most that usage rises while it runs."""
    facts = plan.usage
    if facts is None:
        return Finding("usage of one request", "nothing short enough to send", None, Verdict.NOT_SHOWN)
    what = f"usage of one request of {facts.prompt_tokens:,} + {facts.output_tokens} tokens"
    predicted = _usage_text(facts, plan.capacity.usable_blocks)
    before = server.scrape()
    if (before.total("vllm:num_requests_running") or 0) + (before.total("vllm:num_requests_waiting") or 0):
        return Finding(what, predicted, None, Verdict.NOT_SHOWN, "other requests are running; probe an idle server")
    start = before.total(_USAGE) or 0.0
    peak = _peak_usage(server, facts) - start
    usable = plan.capacity.usable_blocks
    # A gauge that was read before the request began, or after it ended, shows nothing.
    if peak <= 0:
        return Finding(what, predicted, None, Verdict.NOT_SHOWN, "the answer came before its usage could be read")
    low, high = facts.blocks_low / usable, facts.blocks_high / usable
    agrees = low - 1e-6 <= peak <= high + 1e-6
    meaning = "" if agrees else "a request takes other blocks than planned: block size, groups, or prefix caching"
    return Finding(what, predicted, f"{peak:.4%}", _verdict(agrees), meaning)


def _peak_usage(server: Server, facts: UsageFacts) -> float:
    """The highest usage seen while one request is answered. Raises what sending it raised."""
    failure: list[Exception] = []

    def send() -> None:
        try:
            server.complete(facts.prompt_tokens, facts.output_tokens)
        except Exception as error:
            failure.append(error)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    peak = 0.0
    while sender.is_alive():
        peak = max(peak, server.scrape().total(_USAGE) or 0.0)
        sender.join(_POLL_S)
    if failure:
        raise failure[0]
    return peak


def _usage_text(facts: UsageFacts, usable: int) -> str:
    low, high = facts.blocks_low / usable, facts.blocks_high / usable
    return f"{low:.4%}" if low == high else f"{low:.4%} to {high:.4%}"
