"""What goes wrong between a real P and a real D, and that no block and no client is left behind.

Both are in this process, so that their memory can be looked at; `test_processes` kills whole instances.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from tests.e2e.harness import decode, idle_blocks, instance, prefill
from tests.e2e.processes import until

from pdkv.core.config import EngineConfig
from pdkv.core.events import Admitted, Fenced, FinishReason, LoadFailed, LoadFinished, LoadStarted, Quarantined
from pdkv.core.ports import Batch
from pdkv.core.transfer.messages import RemoteSource
from pdkv.runtime import settings as runtime_settings
from pdkv.runtime.executor import StepResult
from pdkv.runtime.instance import Instance
from pdkv.units import NS_PER_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = list(range(1000, 1600))  # 600 tokens: 38 blocks, 28 MB: several slices
SMALL = {"max_model_len": 1024, "kv_cache_memory_bytes": 96 << 20}


def all_idle(*sides: Instance) -> bool:
    """Every block of every side is free or cached."""
    return all(idle_blocks(side) == side.info.num_blocks - 1 for side in sides)


class Watch:
    """Every event of an instance, also of requests that have ended."""

    def __init__(self, target: Instance) -> None:
        self.events: list[object] = []
        target._on_events = self.events.extend

    def of(self, kind: type) -> list[object]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def tcp() -> Iterator[None]:
    """NIXL over TCP, where a READ needs the stopped peer's help (on one host the kernel copies without it)."""
    pytest.importorskip("nixl_cu12")
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = "tcp,self"
    yield
    if before is None:
        del os.environ["UCX_TLS"]
    else:
        os.environ["UCX_TLS"] = before


def fence_after(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances wait so long for a READ's end before they replace their mover."""
    monkeypatch.setattr(
        runtime_settings, "EngineConfig", functools.partial(EngineConfig, fence_timeout_ns=seconds * NS_PER_S)
    )


@pytest.fixture
def pair(stand_in: str, tcp: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Instance, Instance]]:
    """A fresh P and D over NIXL/TCP, with leases of 6 s, and no fence but the READ's own end, however slow this is."""
    fence_after(240, monkeypatch)
    producer = instance("prefill", stand_in, transport="nixl", kv_lease_duration_s=6, **SMALL)
    consumer = instance("decode", stand_in, transport="nixl", kv_lease_duration_s=6, **SMALL)
    yield producer, consumer
    consumer.close()
    producer.close()


def mover_of(target: Instance) -> int:
    pid = target.control.mover_pid
    assert pid is not None
    return pid


def warm(producer: Instance, consumer: Instance) -> None:
    """The first READ sets connections up; later ones only move data."""
    decode(consumer, "warm", [7] * 20, prefill(producer, "warm", [7] * 20), 1).wait()


def test_an_aborted_read_keeps_its_blocks_in_quarantine_until_it_has_ended(pair) -> None:
    """P's mover is stopped in the middle of a READ; D's request is aborted; D goes on with other blocks only."""
    producer, consumer = pair
    watch = Watch(consumer)
    warm(producer, consumer)
    truth = decode(consumer, "truth", LONG[:200], None, 6, cache_salt="truth").wait().tokens
    source = prefill(producer, "p", LONG)
    os.kill(mover_of(producer), signal.SIGSTOP)
    try:
        flight = decode(consumer, "victim", LONG, source, 4).wait_for(LoadStarted)
        time.sleep(1.0)  # the READ is under way and cannot end
        consumer.abort("victim")
        assert flight.wait().finished.reason is FinishReason.ABORT
        memory = consumer.memory()
        (held,) = [holder for holder in memory.holders if holder.account == "quarantine"]
        assert held.blocks == memory.accounts["quarantine"] == 38
        assert "READ may still write" in held.cause
        (load,) = flight.of(LoadStarted)
        quarantined = consumer.engine.manager.blocks_of(f"read:{load.handle}").tolist()  # type: ignore[attr-defined]
        assert len(quarantined) == 38
        others = [block for block in range(consumer.info.num_blocks) if block not in quarantined]
        # Everything that is free is used, and used again, while the quarantined blocks stay out of reach.
        for index in range(3):
            assert decode(consumer, f"other{index}", LONG[:200], None, 6, cache_salt=str(index)).wait().tokens == truth
            assert consumer.memory().accounts["quarantine"] == 38
        pool = consumer.executor.pool.tensor
        before = pool.clone()
    finally:
        os.kill(mover_of(producer), signal.SIGCONT)
    until(lambda: bool(watch.of(Fenced)))
    assert not pool[quarantined].equal(before[quarantined]), "the READ went on and wrote, long after the abort"
    assert pool[others].equal(before[others]), "and nowhere else"
    assert decode(consumer, "after", LONG[:200], None, 6, cache_salt="after").wait().tokens == truth
    assert len(watch.of(Quarantined)) == 1
    until(lambda: all_idle(producer, consumer))


def test_a_read_that_never_ends_is_fenced_by_a_new_mover(
    stand_in: str, tcp: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence_after(2, monkeypatch)
    producer = instance("prefill", stand_in, transport="nixl", **SMALL)
    consumer = instance("decode", stand_in, transport="nixl", kv_load_timeout_s=2.0, **SMALL)
    try:
        watch = Watch(consumer)
        warm(producer, consumer)
        before = mover_of(consumer)
        source = prefill(producer, "p", LONG[:300])
        os.kill(mover_of(producer), signal.SIGSTOP)
        try:
            flight = decode(consumer, "d", LONG[:300], source, 4).wait()
            assert "not there 2 s after its READ was posted" in flight.of(LoadFailed)[0].cause  # type: ignore[attr-defined]
            assert flight.finished.reason is FinishReason.LENGTH, "strict recomputes"
            until(lambda: bool(watch.of(Fenced)), timeout_s=30)
            assert mover_of(consumer) != before
        finally:
            os.kill(mover_of(producer), signal.SIGCONT)
        assert decode(consumer, "truth", LONG[:300], None, 4, cache_salt="x").wait().tokens == flight.tokens
        until(lambda: all_idle(producer, consumer))
    finally:
        consumer.close()
        producer.close()


def test_p_s_mover_is_killed_during_the_read(pair) -> None:
    producer, consumer = pair
    warm(producer, consumer)
    source = prefill(producer, "p", LONG)
    mover = mover_of(producer)
    os.kill(mover, signal.SIGSTOP)
    flight = decode(consumer, "d", LONG, source, 4).wait_for(LoadStarted)
    time.sleep(1.0)
    os.kill(mover, signal.SIGKILL)
    flight.wait()
    # It is tried once more, from P's new mover, if that is there in time; else D computes the prompt.
    assert len(flight.of(LoadFailed)) + len(flight.of(LoadFinished)) == 1
    assert flight.finished.reason is FinishReason.LENGTH
    assert decode(consumer, "truth", LONG, None, 4, cache_salt="x").wait().tokens == flight.tokens
    until(lambda: all_idle(producer, consumer))


def test_a_lease_that_ended_before_the_read_is_never_used(pair) -> None:
    """The router was slow: P has freed, and maybe reused, the blocks that D is told to read."""
    producer, consumer = pair
    warm(producer, consumer)
    source = prefill(producer, "p", LONG[:100])
    until(lambda: all_idle(producer), timeout_s=15)
    flight = decode(consumer, "d", LONG[:100], source, 4).wait()
    assert flight.of(LoadFailed)
    assert not flight.of(LoadFinished)
    assert decode(consumer, "truth", LONG[:100], None, 4, cache_salt="x").wait().tokens == flight.tokens
    until(lambda: all_idle(consumer))


def test_forged_block_ids_are_refused(pair) -> None:
    producer, consumer = pair
    source = prefill(producer, "p", LONG[:100])
    moved = tuple(block + 1 for block in source.grant.block_ids)
    forged = msgspec.structs.replace(source, grant=msgspec.structs.replace(source.grant, block_ids=moved))
    flight = decode(consumer, "d", LONG[:100], forged, 4).wait()
    (failed,) = flight.of(LoadFailed)
    assert "did not give this grant" in failed.cause  # type: ignore[attr-defined]
    mixed_up = decode(consumer, "mixed up", LONG[100:200], prefill(producer, "q", LONG[:100]), 4).wait()
    assert "this prompt" in mixed_up.of(LoadFailed)[0].cause  # type: ignore[attr-defined]
    honest = prefill(producer, "honest", LONG[:100])
    assert decode(consumer, "honest", LONG[:100], honest, 4, cache_salt="x").wait().of(LoadFinished)
    until(lambda: all_idle(producer, consumer))


def test_heartbeats_go_on_through_a_queue_and_a_long_step(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D is full for longer than P's lease (its own is longer); the queued request's KV is there when its turn comes."""
    producer = instance("prefill", stand_in, transport="shm", kv_lease_duration_s=6, **SMALL)
    consumer = instance("decode", stand_in, transport="shm", **{**SMALL, "max_num_seqs": 1})
    try:
        blocker = decode(consumer, "blocker", LONG[:32], None, 400).wait_for(Admitted)
        source = prefill(producer, "p", LONG[:100])
        flight = decode(consumer, "queued", LONG[:100], source, 4)
        execute = consumer.executor.execute

        def slowly(batch: Batch) -> StepResult:
            time.sleep(1.5)
            return execute(batch)

        monkeypatch.setattr(consumer.executor, "execute", slowly)
        time.sleep(9.0)
        assert producer.memory().accounts["retained"] == 7, "the lease of 6 s has been renewed"
        consumer.abort("blocker")
        blocker.wait()
        monkeypatch.undo()
        flight.wait()
        assert flight.of(LoadFinished)
        until(lambda: all_idle(producer, consumer))
    finally:
        consumer.close()
        producer.close()


def test_models_that_differ_are_refused_at_the_handshake(stand_in: str, tmp_path) -> None:
    """Same shapes, another dtype: D names the fact with both values and computes the prompt itself."""
    producer = instance("prefill", stand_in, transport="shm", dtype="bfloat16", **SMALL)
    consumer = instance("decode", stand_in, transport="shm", **SMALL)
    try:
        source = prefill(producer, "p", LONG[:40])
        flight = decode(consumer, "d", LONG[:40], source, 2).wait()
        (failed,) = flight.of(LoadFailed)
        assert "bfloat16" in failed.cause  # type: ignore[attr-defined]
        assert "float32" in failed.cause  # type: ignore[attr-defined]
        assert flight.finished.reason is FinishReason.LENGTH
    finally:
        consumer.close()
        producer.close()


def test_instances_may_name_their_blocks_by_different_hashes(stand_in: str) -> None:
    """A peer's KV is known by its lease, not by a hash; each side's prefix cache works by its own."""
    producer = instance("prefill", stand_in, transport="shm", prefix_caching_hash_algo="sha256_cbor", **SMALL)
    consumer = instance("decode", stand_in, transport="shm", prefix_caching_hash_algo="xxhash", **SMALL)
    try:
        truth = decode(consumer, "truth", LONG[:100], None, 4, cache_salt="truth").wait().tokens
        for index, moved in enumerate((7, 1)):
            flight = decode(consumer, f"d{index}", LONG[:100], prefill(producer, f"p{index}", LONG[:100]), 4).wait()
            assert [event.blocks for event in flight.of(LoadFinished)] == [moved]  # type: ignore[attr-defined]
            assert flight.tokens == truth
        until(lambda: all_idle(producer, consumer))
    finally:
        consumer.close()
        producer.close()


def test_aborts_in_every_state(pair) -> None:
    """Queued, loading, decoding: each ends once, and every block comes back."""
    producer, consumer = pair
    warm(producer, consumer)

    def abort_after(delay_s: float, index: int) -> None:
        source: RemoteSource = prefill(producer, f"p{index}", LONG[index : index + 200])
        flight = decode(consumer, f"d{index}", LONG[index : index + 200], source, 64)
        threading.Timer(delay_s, consumer.abort, [f"d{index}"]).start()
        assert flight.wait().finished.reason in (FinishReason.ABORT, FinishReason.LENGTH)

    for index, delay_s in enumerate((0.0, 0.0, 0.002, 0.005, 0.01, 0.05, 0.3)):
        abort_after(delay_s, index)
    until(lambda: all_idle(producer, consumer))
