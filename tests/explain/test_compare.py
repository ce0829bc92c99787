"""Two starts: the named causes add up to the difference, and each is what the logs say it is."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from tests.explain.models import gemma_12b, llama_8b

from pdkv.explain.compare import Cause, Comparison, compare
from pdkv.explain.sources import explain_sources, start_of
from pdkv.explain.start import Start, read_start
from pdkv.logs.parser import read_startup_log
from pdkv.models.spec import ModelSpec
from pdkv.units import GIB


def start(spec: ModelSpec | None, **values: object) -> Start:
    """A start with the given numbers; the rest is an H100 with Llama's terms."""
    facts = {
        "version": "0.19.0", "length": 8192, "dtype": "auto", "batched": 8192, "util": 0.95, "requested": 75.23,
        "weights": 14.99, "peak": 1.89, "other": 0.25, "free": 78.68, "kv": 58.11, "tokens": 476016, "times": 58.11,
    } | values  # fmt: skip
    log = """\
(EngineCore pid=1) INFO [core.py:1] Initializing a V1 LLM engine (v{version}) with config: model='m', dtype=torch.bfloat16, max_seq_len={length}, tensor_parallel_size=1, kv_cache_dtype={dtype})
(EngineCore pid=1) INFO Chunked prefill is enabled with max_num_batched_tokens={batched}.
(EngineCore pid=1) DEBUG worker init memory snapshot: torch_peak=0.0GiB, free_memory={free}GiB, total_memory=79.19GiB, cuda_memory=0.51GiB
(EngineCore pid=1) DEBUG Initial free memory: {free} GiB; Requested memory: {util} (util), {requested} GiB
(EngineCore pid=1) DEBUG Memory profiling takes 1.00 seconds. Total non KV cache memory: 17.13GiB; torch peak memory increase: {peak}GiB; non-torch forward increase memory: {other}GiB; weights memory: {weights}GiB.
(EngineCore pid=1) INFO Available KV cache memory: {kv} GiB
(EngineCore pid=1) INFO GPU KV cache size: {tokens:,} tokens
(EngineCore pid=1) INFO Maximum concurrency for {length:,} tokens per request: {times}x
""".format(**facts)
    return read_start("log", read_startup_log(io.BytesIO(log.encode())), spec)


def memory(comparison: Comparison) -> dict[str, Cause]:
    change = comparison.difference
    assert sum(cause.bytes or 0 for cause in change.memory) == change.kv_bytes
    return {cause.id: cause for cause in change.memory}


def capacity(comparison: Comparison) -> dict[str, int]:
    change = comparison.difference
    assert sum(cause.tokens or 0 for cause in change.capacity) == change.kv_cache_size_tokens
    return {cause.id: cause.tokens or 0 for cause in change.capacity}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("meta-llama-llama-3-1-8b---h100-80gb--tp1pp1dp1--8192.log", "meta-llama-llama-3-1-8b---h100-80gb--tp4pp1dp1--8192.log"),
        ("meta-llama-llama-3-1-8b---h100-80gb--tp1pp1dp1--8192.log", "meta-llama-llama-3-1-8b---h100-80gb--tp1pp2dp1--8192.log"),
        ("meta-llama-llama-3--h100-80gb--tp1pp1dp1--8192-dtf32.log", "meta-llama-llama-3-1-8b--h100-80gb--tp1pp1dp1--32768.log"),
        ("google-gemma-2-27b-it--h100-80gb--tp1pp1dp1--8192.log", "microsoft-phi-4--h100-80gb--tp1pp1dp1--8192.log"),
    ],
)  # fmt: skip
def test_causes_of_real_logs_add_up_in_both_directions(shared: Path, one: str, other: str) -> None:
    folder = shared / "field" / "logs"
    for names in ((one, other), (other, one)):
        a, b = (start_of(str(folder / name), llama_8b() if "llama" in name else None) for name in names)
        found = compare(a, b)
        memory(found)
        capacity(found)


def test_nothing_changed_is_nothing() -> None:
    found = compare(start(llama_8b()), start(llama_8b()))
    assert (found.difference.kv_bytes, found.difference.memory, found.difference.capacity) == (0, (), ())
    assert [item.id for item in found.difference.findings] == ["same-settings"]


def test_a_smaller_share_of_the_device() -> None:
    found = compare(
        start(llama_8b()), start(llama_8b(), util=0.9, requested=71.27, kv=54.15, tokens=443584, times=54.15)
    )
    causes = memory(found)
    assert causes["gpu-memory-utilization"].text == "--gpu-memory-utilization 0.95 -> 0.9"
    assert causes["gpu-memory-utilization"].bytes == pytest.approx(-3.96 * GIB, abs=2)
    assert set(causes) <= {"gpu-memory-utilization", "remainder"}


def test_a_larger_batch_raises_the_activation_peak() -> None:
    found = compare(start(llama_8b()), start(llama_8b(), batched=16384, peak=3.6, kv=56.4, tokens=462016, times=56.40))
    cause = memory(found)["activation-peak"]
    assert cause.because == ("max_num_batched_tokens 8192 -> 16384",)
    assert cause.bytes == pytest.approx(-1.71 * GIB, abs=2)


def test_another_type_of_kv_doubles_the_tokens() -> None:
    found = compare(start(llama_8b()), start(llama_8b(), dtype="fp8", tokens=952064, times=116.22))
    assert found.difference.kv_bytes == 0
    steps = capacity(found)
    assert steps["kv-cache-dtype"] == pytest.approx(476_032, abs=32)
    assert abs(steps.get("remainder", 0)) < 100


def test_an_upgrade_that_only_changes_what_is_printed() -> None:
    """48,870 blocks of Gemma 3: 0.19 divides by groups, 0.25 prints concurrency x length."""
    old = start(gemma_12b(), kv=47.72, tokens=130304, times=15.88, length=65536)
    new = start(gemma_12b(), version="0.25.1", kv=47.72, tokens=130304, times=15.88, length=65536)
    found = compare(old, new)
    assert capacity(found)["version"] != 0
    assert "printed-size-means-something-else" in {item.id for item in found.difference.findings}


def test_memory_that_another_process_took_while_profiling_is_named() -> None:
    found = compare(start(llama_8b()), start(llama_8b(), free=76.58, other=2.35, kv=56.01, tokens=458816, times=56.01))
    (because,) = memory(found)["non-torch"].because
    assert because.startswith("another process on the GPU: 78.68 GiB -> 76.58 GiB free")


def test_what_no_term_explains_is_the_remainder() -> None:
    found = compare(start(llama_8b()), start(llama_8b(), kv=50.0, tokens=409600, times=50.00))
    cause = memory(found)["remainder"]
    assert cause.bytes == pytest.approx(-8.11 * GIB, abs=2)
    assert cause.text.startswith("not explained by what the logs print")


def test_a_failed_start_beside_one_that_serves(shared: Path) -> None:
    name = "meta-llama-llama-4-scout--h100-80gb--tp4pp1dp1--8192{}.log"
    found = explain_sources([str(shared / "field" / "logs" / name.format(end)) for end in ("", ".FAILED")])
    assert isinstance(found, Comparison)
    items = {item.id: item for item in found.difference.findings}
    assert items["other-process"].bytes == pytest.approx((77.12 - 60.33) * GIB, abs=2)
    assert "device-memory-in-use" in items["one-failed"].text
