"""Readings of running servers -> what is stuck, leaked, thrashing or idle, with the numbers that show it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pdkv.explain.reading import EngineReading, Reading, read
from pdkv.explain.report import Finding, Severity
from pdkv.explain.usage import Share, split

LEASE_S = 30.0
"""How long P keeps a finished prefill unless heartbeats extend it (kv_lease_duration's default)."""
LOAD_DEADLINE_S = 60.0
"""After this, pdkv itself gives up a load; vLLM never does (spec pd-transfer, section 5.1)."""
_STORM_PER_FINISHED = 0.1
_FULL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One engine: what it said, where its blocks are, what to know. ``rates`` are per second over the interval."""

    url: str
    name: str
    role: str | None
    observed: dict[str, Any]
    rates: dict[str, float] | None
    split: tuple[Share, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """All engines behind the URLs; ``interval_s`` lies between the two readings (0: there was one)."""

    interval_s: float
    instances: tuple[Instance, ...]
    findings: tuple[Finding, ...]


def watch(urls: Sequence[str], interval_s: float, sleep: Callable[[float], None] = time.sleep) -> Live:
    """Read every URL, twice when ``interval_s`` is not 0, and diagnose. Raises ConfigError as `read` does."""
    first = read_all(urls)
    if interval_s <= 0:
        return diagnose(first, None)
    sleep(interval_s)
    return diagnose(read_all(urls), first)


def read_all(urls: Sequence[str]) -> tuple[Reading, ...]:
    """One reading of every URL."""
    return tuple(read(url, time.monotonic()) for url in urls)


def diagnose(now: Sequence[Reading], before: Sequence[Reading] | None) -> Live:
    """What two readings of the same servers say; one alone has no rates."""
    earlier = {
        (engine.url, *sorted(engine.labels.items())): (engine, reading.at_s)
        for reading in before or ()
        for engine in reading.engines
    }
    instances, interval = [], 0.0
    engines = [engine for reading in now for engine in reading.engines]
    for reading in now:
        for engine in reading.engines:
            last, at_s = earlier.get((engine.url, *sorted(engine.labels.items())), (None, reading.at_s))
            look = _Look(engine, last, max(0.0, reading.at_s - at_s))
            interval = max(interval, look.seconds)
            instances.append(
                Instance(
                    url=engine.url,
                    name=engine.name,
                    role=engine.role,
                    observed=_observed(engine),
                    rates=look.rates(),
                    split=split(engine),
                    findings=tuple(_engine_findings(look)),
                )
            )
    return Live(interval_s=interval, instances=tuple(instances), findings=tuple(_between(engines)))


@dataclass(frozen=True, slots=True)
class _Look:
    """An engine now, the same engine before (``None``: there is no earlier reading), and the seconds between."""

    now: EngineReading
    before: EngineReading | None
    seconds: float

    def grew(self, name: str) -> float:
        """By how much a counter grew; since the start of the server when there is one reading or it was restarted."""
        whole = self.now.counter(name)
        last = 0.0 if self.before is None else self.before.counter(name)
        return whole - last if whole >= last else whole

    @property
    def period(self) -> str:
        """The time that `grew` is about, in words."""
        return "since the server started" if self.before is None else f"in {self.seconds:.0f} s"

    def rates(self) -> dict[str, float] | None:
        """Growth per second of every counter."""
        if self.before is None or self.seconds <= 0:
            return None
        return {name: round(self.grew(name) / self.seconds, 3) for name in self.now.counters}

    def size(self, blocks: int) -> int | None:
        """Bytes of so many blocks, where the size of one is known."""
        return None if self.now.bytes_per_block is None else blocks * self.now.bytes_per_block


def _observed(engine: EngineReading) -> dict[str, Any]:
    return {
        "num_blocks": engine.num_blocks,
        "block_size": engine.block_size,
        "bytes_per_block": engine.bytes_per_block,
        "kv_cache_size_tokens": engine.kv_cache_size_tokens,
        "usage": engine.usage,
        "pinned_blocks": engine.pinned_blocks,
        "running": engine.running,
        "waiting": engine.waiting,
        "fetch_stages": engine.stages,
        "leases_held": engine.leases_held,
        "counters": dict(engine.counters),
    }


def _engine_findings(look: _Look) -> Iterator[Finding]:
    """Everything about one engine, the worst first."""
    if look.now.sleeping:
        yield Finding(id="sleeping", text="the engine sleeps: its KV is discarded, and it serves nothing until woken")
        return
    for check in (_stuck, _leaked, _after_expiry, _storm, _expiring, _idle_transfers, _failing, _full, _offload):
        yield from check(look)


def _stuck(look: _Look) -> Iterator[Finding]:
    """Loads in flight while nothing arrives. pdkv says who and since when; vLLM only how many."""
    engine = look.now
    late = [holder for holder in engine.holders if holder.account == "loading" and holder.since_s > LOAD_DEADLINE_S]
    if late:
        longest = max(late, key=lambda holder: holder.since_s)
        blocks = sum(holder.blocks for holder in late)
        yield Finding(
            id="stuck-loads",
            severity=Severity.ERROR,
            text=f"{len(late)} requests wait for their KV longer than {LOAD_DEADLINE_S:.0f} s and hold {blocks:,} "
            f"blocks; {longest.request_id} for {longest.since_s:.0f} s ({longest.cause})",
            bytes=look.size(blocks),
            effect="look at the prefill instance that holds them, and at the network between",
        )
        return
    loads = 0 if engine.stages is None else engine.stages.get("in_progress", 0)
    if not loads or look.before is None or look.grew("transfers") or engine.holders:
        return
    earlier = look.before.stages or {}
    if not earlier.get("in_progress"):
        return
    lease = look.seconds >= LEASE_S
    yield Finding(
        id="stuck-loads",
        severity=Severity.ERROR if lease else Severity.WARNING,
        text=f"{loads:,} requests load their KV and no transfer ended {look.period}"
        + (", longer than a lease lives" if lease else ""),
        effect="vLLM has no deadline for a load: their blocks stay held until the clients give up"
        if lease
        else f"look again over {LEASE_S:.0f} s (--interval {LEASE_S:.0f}): a load longer than a lease is lost",
    )


def _leaked(look: _Look) -> Iterator[Finding]:
    """Blocks in use while there is nobody to use them."""
    engine = look.now
    pinned = engine.pinned_blocks
    if engine.accounts is not None:
        # pdkv's ledger says what they are held for.
        kept = engine.accounts.get("quarantine", 0)
        if kept:
            yield Finding(
                id="quarantined-blocks",
                severity=Severity.WARNING,
                text=f"{kept:,} blocks wait behind transfers that were given up and may still write to them",
                bytes=look.size(kept),
                effect="they come back when the transfer reports its end, or when the mover is restarted",
            )
        return
    if engine.running or engine.waiting or not engine.usage:
        return
    still = (
        look.before is not None
        and look.before.running == look.before.waiting == 0
        and look.before.usage == engine.usage
        and not look.grew("finished")
    )
    amount = f"{engine.usage:.1%} of the pool" if pinned is None else f"{pinned:,} blocks"
    if still and look.seconds >= LEASE_S and engine.role != "prefill":
        yield Finding(
            id="leaked-blocks",
            severity=Severity.ERROR,
            text=f"{amount} stayed in use {look.period} with nothing running or waiting: longer than a lease, so they "
            "are lost or kept for a second turn (bidirectional transfers: 480 s)",
            bytes=None if pinned is None else look.size(pinned),
            effect="restart the engine if they do not come back",
        )
        return
    yield Finding(
        id="usage-without-requests",
        severity=Severity.WARNING,
        text=f"{amount} are in use with nothing running or waiting"
        + (f", unchanged {look.period}" if still else "")
        + (": finished prefills that no decode instance has read yet" if engine.role == "prefill" else ""),
        bytes=None if pinned is None else look.size(pinned),
        effect=f"look again over {LEASE_S:.0f} s: what is kept for a peer ends with its lease, what is lost does not",
    )


def _after_expiry(look: _Look) -> Iterator[Finding]:
    count = look.grew("after_expiry")
    if count:
        yield Finding(
            id="read-after-expiry",
            severity=Severity.ERROR,
            text=f"{count:,.0f} decode instances said that they had read KV whose lease was over {look.period}: they "
            "may have read other requests' KV, and nothing marks those answers",
            effect="lengthen kv_lease_duration; pdkv reads the lease slot after the data and never uses such KV",
        )


def _storm(look: _Look) -> Iterator[Finding]:
    """Preemptions throw KV away; on a decode instance it cannot be loaded again, only computed."""
    count, finished = look.grew("preemptions"), look.grew("finished")
    if not count:
        return
    ratio = count / max(1.0, finished)
    storm = ratio > _STORM_PER_FINISHED
    computed = ": each computes its prompt again, on an instance that is sized to decode"
    yield Finding(
        id="preemption-storm" if storm else "preemptions",
        severity=Severity.WARNING if storm else Severity.INFO,
        text=f"{count:,.0f} preemptions for {finished:,.0f} finished requests {look.period}"
        + (computed if look.now.role == "decode" else ""),
        effect="lower --max-num-seqs or raise the watermark until it stops; pdkv plan says how many requests fit"
        if storm
        else None,
    )


def _expiring(look: _Look) -> Iterator[Finding]:
    count = look.grew("expired")
    if count:
        yield Finding(
            id="leases-expiring",
            severity=Severity.WARNING,
            text=f"{count:,.0f} leases ran out {look.period} before a decode instance had read their KV: the prefill "
            "was in vain, and the request failed or was computed again",
            effect="decode instances queue longer than the lease, or died: look at their waiting requests, then raise "
            "kv_lease_duration",
        )


def _idle_transfers(look: _Look) -> Iterator[Finding]:
    """A connector that is configured and never used: clients or the router do not hand over kv_transfer_params."""
    engine = look.now
    done = engine.counter("finished")
    if not engine.connector or engine.only_prefills or not done:
        return
    moved = engine.counter("transfers") or engine.counter("external_hits") or engine.counter("leases_granted")
    if not moved:
        yield Finding(
            id="pd-configured-nothing-transfers",
            severity=Severity.WARNING,
            text=f"a KV connector is configured, {done:,.0f} requests finished, and not one transfer was made: this "
            "instance computes every prompt itself",
            effect="send requests through a P/D router; the decode leg needs all of remote_engine_id, remote_host, "
            "remote_port and remote_request_id",
        )
        return
    local, remote = look.grew("prompt_local_compute"), look.grew("prompt_external_kv_transfer")
    loads = engine.counter("prompt_external_kv_transfer")
    if engine.role == "decode" and loads and local > remote:
        yield Finding(
            id="decode-computes-prompts",
            severity=Severity.WARNING,
            text=f"{local / (local + remote):.0%} of the prompt tokens {look.period} were computed here rather "
            "than loaded",
            effect="look for failed or expired transfers, and for requests that reach this instance directly",
        )


def _failing(look: _Look) -> Iterator[Finding]:
    count = look.grew("failed_transfers")
    if count:
        yield Finding(
            id="transfers-failing",
            severity=Severity.WARNING,
            text=f"{count:,.0f} transfers, handshakes or notices failed {look.period} ({look.grew('transfers'):,.0f} "
            "ended well)",
            effect="the engine's log names the peer and the reason",
        )


def _full(look: _Look) -> Iterator[Finding]:
    engine = look.now
    if engine.usage is not None and engine.usage >= _FULL and engine.waiting:
        yield Finding(
            id="pool-full",
            severity=Severity.WARNING,
            text=f"{engine.usage:.1%} of the pool is in use and {engine.waiting:,} requests wait",
            effect="more memory for KV, shorter requests or another decode instance: pdkv plan says what each gives",
        )


def _offload(look: _Look) -> Iterator[Finding]:
    stored, loaded = look.now.counter("offload_store_bytes"), look.now.counter("offload_load_bytes")
    if stored and not loaded:
        yield Finding(
            id="offload-not-hitting",
            severity=Severity.WARNING,
            text=f"the offload tier took {stored / 1e9:,.2f} GB and gave nothing back since the server started",
            effect="prompts do not repeat, or leave the tier before they do: a larger tier, or none",
        )
    queries, hits = look.grew("tier_queries"), look.grew("tier_hits")
    if queries and hits / queries < 0.01:
        yield Finding(
            id="offload-tiers-not-hitting",
            severity=Severity.WARNING,
            text=f"{hits:,.0f} of {queries:,.0f} chunks asked of the lower tiers were there {look.period}",
        )
    if refused := look.grew("offload_refused"):
        yield Finding(
            id="offload-full",
            severity=Severity.WARNING,
            text=f"{refused:,.0f} stores were refused {look.period}: the tier is full of chunks that are being copied",
        )


def _between(engines: Sequence[EngineReading]) -> Iterator[Finding]:
    """What only P and D together show."""
    prefill = [engine for engine in engines if engine.role == "prefill"]
    decode = [engine for engine in engines if engine.role == "decode"]
    if not decode or not prefill:
        return
    queued = sum((engine.stages or {}).get("waiting_to_start", 0) for engine in decode)
    pinned = sum(engine.pinned_blocks or 0 for engine in prefill)
    if queued and pinned:
        yield Finding(
            id="prefills-wait-for-decode",
            text=f"{queued:,} requests wait for room on decode instances while prefill instances hold {pinned:,} "
            "blocks, their KV among them",
            effect="more room on decode gives both back",
        )
    if sum(engine.counter("expired") for engine in prefill) and queued:
        yield Finding(
            id="decode-queues-past-leases",
            severity=Severity.WARNING,
            text=f"leases expire on prefill instances and {queued:,} requests wait on decode instances",
            effect="the queue is longer than the lease: raise kv_lease_duration or add decode memory",
        )
