"""The parser of start-up logs: real logs, releases from 0.6 on, and everything that happens to a log on its way."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.logs import samples

from pdkv.errors import ConfigError
from pdkv.logs.parser import ANCHORS, parse_startup, read_startup_log
from pdkv.logs.printed import Printed
from pdkv.logs.startup import FailureKind, StartupLog
from pdkv.logs.text import MAX_LINE_BYTES, matching_lines
from pdkv.units import GIB


def read(text: str | bytes) -> StartupLog:
    return read_startup_log(io.BytesIO(text.encode() if isinstance(text, str) else text))


def real_logs(shared: Path) -> dict[str, dict[str, Any]]:
    """The rows that were read off the logs of the field folder, by log name."""
    rows = map(json.loads, (shared / "field" / "startup_observations.jsonl").read_text().splitlines())
    return {row["url"].rsplit("/", 1)[1]: row for row in rows if row.get("url", "").endswith(".log")}


def test_every_real_log_says_what_a_person_read_off_it(shared: Path) -> None:
    rows = real_logs(shared)
    assert len(rows) == 35
    for name, row in rows.items():
        log = read_startup_log(shared / "field" / "logs" / name)
        ranks, engine = log.ranks, log.engine
        assert (log.settings.version, log.settings.model) == (row["vllm"], row["model"]), name
        for fact in ("dtype", "kv_cache_dtype", "max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            assert getattr(log.settings, fact) == row.get(fact, getattr(log.settings, fact)), (name, fact)
        assert log.settings.gpu_memory_utilization == row["gpu_memory_utilization"], name
        for field, fact in (
            ("non_kv_gib_per_rank", "non_kv"),
            ("weights_gib_per_rank", "weights"),
            ("activation_peak_gib_per_rank", "activation_peak"),
            ("non_torch_gib_per_rank", "non_torch"),
            ("cudagraph_estimate_gib_per_rank", "graph_estimate"),
        ):
            if field in row:
                assert [float(getattr(rank, fact).text.split()[0]) for rank in ranks] == row[field], (name, field)
        if "available_kv_gib_logged" in row:
            assert ranks[0].available_kv == Printed.of(f"{row['available_kv_gib_logged']}"), name
        if engine is not None:
            assert engine.kv_cache_size_tokens == row["kv_cache_size_tokens"], name
            assert engine.max_concurrency == row["max_concurrency"], name
        assert (log.failure is None) == ("error" not in row), name
        assert log.ready == ("FAILED" not in name), name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("codellama-codellama-34b---h100-80gb--tp2pp1dp1--8192.FAILED.log", FailureKind.DEVICE_SHARED),
        ("google-gemma-3-4b-it--h100-80gb--tp1pp1dp1--8192.FAILED.log", FailureKind.MODEL_NOT_FOUND),
        ("meta-llama-llama-3-1-8b---h100-80gb--tp1pp1dp2--8192.FAILED.log", FailureKind.MISSING_DEVICE),
        ("microsoft-phi-2--h100-80gb--tp1pp1dp1--8192.FAILED.log", FailureKind.LENGTH_ABOVE_MODEL),
        ("openai-gpt-oss-20b--h100-80gb--tp2pp1dp1--8192.FAILED.log", FailureKind.SAMPLER_OOM),
    ],
)
def test_the_cause_of_a_failed_start_is_told_from_what_it_led_to(shared: Path, name: str, kind: FailureKind) -> None:
    failure = read_startup_log(shared / "field" / "logs" / name).failure
    assert failure is not None
    assert failure.kind is kind


# ------------------------------------------------------------------------------------------------------- other releases


def test_v0_of_06() -> None:
    log = read(samples.V0_6)
    assert (log.settings.version, log.settings.engine, log.settings.max_model_len) == ("0.6.2", "V0", 20000)
    assert log.ranks[0].weights == Printed.of("14.9888")
    assert log.engine is not None
    assert (log.engine.num_blocks, log.engine.concurrency_text) == (1952, "1.56")


def test_v0_of_065_prints_a_table() -> None:
    (rank,) = read(samples.V0_6_TABLE).ranks
    assert rank.total is not None
    assert rank.weights is not None
    assert rank.available_kv == Printed.of("58.97")
    assert (rank.total.text, rank.weights.text) == ("79.22 GiB", "7.48 GiB")


def test_ranks_without_a_name_are_told_apart() -> None:
    log = read(samples.V0_8_TP)
    available = [rank.available_kv for rank in log.ranks]
    assert sorted(size.text for size in available if size is not None) == ["1.37 GiB", "1.57 GiB"]
    assert log.engine is not None
    assert log.engine.num_blocks == 7191


def test_lines_without_any_prefix() -> None:
    log = read(samples.V0_6_TOO_LONG)
    (rank,) = log.ranks
    assert (rank.total, rank.available_kv) == (Printed.of("23.58"), Printed.of("2.89"))
    assert log.failure is not None
    assert log.failure.count("kv_cache_size_tokens") == 1478 * 16


def test_wrapped_sentences_belong_together() -> None:
    log = read(samples.V0_8_WRAPPED)
    (rank,) = log.ranks
    assert (rank.weights, rank.non_torch) == (Printed.of("6.59"), Printed.of("8.29"))
    assert (rank.activation_peak, rank.available_kv) == (Printed.of("4.93"), Printed.of("-7.83"))
    assert log.failure is not None
    assert log.failure.kind is FailureKind.NO_KV_MEMORY


def test_processes_of_several_hosts_may_share_a_number() -> None:
    ranks = read(samples.RAY).ranks
    weights = [rank.weights.text for rank in ranks if rank.weights is not None]
    assert sorted(weights) == ["12.01 GiB", "12.02 GiB", "51.1453 GiB"]
    assert [rank.data_rank for rank in ranks if rank.available_kv is not None] == [1]


def test_v1_before_and_after_tokens_were_printed() -> None:
    old, new = read(samples.V1_0_7).engine, read(samples.V1_0_9)
    assert old is not None
    assert new.engine is not None
    assert (old.num_blocks, old.kv_cache_size_tokens) == (127626, None)
    assert (new.engine.num_blocks, new.engine.kv_cache_size_tokens) == (None, 178880)
    assert [(rank.rank, rank.available_kv) for rank in new.ranks] == [
        (0, Printed.of("12.57")),
        (1, Printed.of("12.54")),
    ]


def test_032_prints_capacity_on_one_line() -> None:
    log = read(samples.V1_0_32)
    assert log.engine is not None
    assert (log.engine.kv_cache_size_tokens, log.engine.concurrency_text) == (449645, "1.72")
    assert log.engine.group_block_sizes == (16, 16, 32)
    (rank,) = log.ranks
    assert (rank.consumed, rank.non_torch) == (Printed.of("15.24"), None)
    assert (rank.suggested_bytes, rank.suggested_full_bytes) == (57817825280, 64077633536)


def test_032_on_a_cpu() -> None:
    log = read(samples.V1_0_32_CPU)
    assert log.engine is not None
    assert (log.engine.device, log.engine.kv_cache_size_tokens, log.engine.layout) == ("CPU", 524288, "LBHNC")
    assert [rank.reserved for rank in log.ranks] == [Printed.of("1.0")]
    assert log.ready


def test_the_numbers_of_a_request_that_does_not_fit() -> None:
    failure = read(samples.TOO_LONG).failure
    assert failure is not None
    assert failure.kind is FailureKind.REQUEST_TOO_LONG
    assert failure.memory("needed") == Printed.of("14.00")
    assert failure.count("estimated_max_model_len") == 117392


def test_the_small_cache_of_the_graph_estimate_is_no_override() -> None:
    line = "INFO [kv_cache_utils.py:829] Overriding num_gpu_blocks={} with num_gpu_blocks_override=512\n"
    assert read(samples.V1_0_7 + line.format(0)).engines[0].override_blocks is None
    assert read(samples.V1_0_7 + line.format(127626)).engines[0].override_blocks == (127626, 512)


def test_a_restarted_server_is_read_at_its_last_start_with_an_outcome() -> None:
    second = samples.V1_0_32.replace("pid=9", "pid=10")
    log = read(samples.TOO_LONG + second)
    assert (log.starts, log.settings.version, log.failure) == (2, "0.32.0", None)
    again_and_cut = samples.V1_0_9 + samples.V1_0_9.splitlines()[0]
    log = read(again_and_cut)
    assert log.starts == 2
    assert log.engine is not None
    assert log.engine.kv_cache_size_tokens == 178880


# ----------------------------------------------------------------------------------------------- what happens to a log


def facts(log: StartupLog) -> Any:
    return (log.settings, log.ranks, log.engines, [(f.kind, dict(f.numbers)) for f in log.failures], log.ready)


def coloured(line: str) -> str:
    return re.sub(r"(INFO|DEBUG|ERROR|WARNING)", "\x1b[32m\\1\x1b[0m", "\x1b[0;36m" + line + "\x1b[0m")


WRAPPINGS = {
    "as it is": lambda line: line,
    "CRLF": lambda line: line + "\r",
    "colours": coloured,
    "docker compose": lambda line: f"vllm-1  | {line}",
    "kubernetes": lambda line: f"2026-04-22T00:25:57.123456789Z stderr F {line}",
    "a pod's name": lambda line: f"[pod/decode-0/vllm] {line}",
    "docker's json-file": lambda line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-04-22"}),
    "cloud logging": lambda line: json.dumps({"severity": "INFO", "textPayload": line}),
    "a terminal's frame": lambda line: f"│ {line}      │",
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("sample", ["V0_6", "V0_8_TP", "V1_0_9", "V1_0_32", "TOO_LONG", "V0_6_TOO_LONG"])
def test_prefixes_colours_and_json_change_nothing(wrapping: str, sample: str) -> None:
    plain = getattr(samples, sample)
    wrapped = "\n".join(WRAPPINGS[wrapping](line) for line in plain.splitlines()) + "\n"
    assert facts(read(wrapped)) == facts(read(plain))


@pytest.mark.parametrize("sample", ["V0_6", "V1_0_32", "TOO_LONG"])
def test_compressed_and_utf16_logs_are_read(sample: str) -> None:
    plain = getattr(samples, sample)
    packed = gzip.compress(plain[:300].encode()) + gzip.compress(plain[300:].encode())
    assert facts(read(packed)) == facts(read(plain)) == facts(read(plain.encode("utf-16")))


@pytest.mark.parametrize("seed", range(8))
def test_ranks_may_be_interleaved_and_written_over_each_other(shared: Path, seed: int) -> None:
    """Lines of different processes in any order, sometimes without the line end between them."""
    name = "meta-llama-llama-3-1-8b---h100-80gb--tp4pp1dp1--8192.log"
    text = (shared / "field" / "logs" / name).read_text()
    by_process: dict[str, list[str]] = {}
    for line in text.splitlines():
        by_process.setdefault((re.match(r"\(\w+ pid=\d+\)", line) or [""])[0], []).append(line)
    by_process.pop("", None)
    draw = random.Random(seed)
    queues = [lines for _, lines in sorted(by_process.items())]
    mixed = [queues[0].pop(0) for _ in range(20)]
    while queues := [queue for queue in queues if queue]:
        mixed.append(draw.choice(queues).pop(0) + ("" if draw.random() < 0.02 else "\n"))
    log = read("\n".join(mixed[:20]) + "\n" + "".join(mixed[20:]))
    expected = read(text)
    assert log.ranks == expected.ranks
    assert [engine.kv_cache_size_tokens for engine in log.engines if engine.sized] == [2209792]


@given(st.binary(max_size=4096))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_refused_and_never_crash(data: bytes) -> None:
    with pytest.raises(ConfigError):
        read(data)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_logs_are_read_or_refused(data: st.DataObject) -> None:
    """Bytes changed, pieces cut out and doubled: the answer is facts or a ConfigError."""
    raw = bytearray((samples.V1_0_32 + samples.TOO_LONG + samples.V0_8_TP).encode())
    for _ in range(data.draw(st.integers(1, 20))):
        at, length = data.draw(st.integers(0, len(raw))), data.draw(st.integers(0, 200))
        raw[at : at + length] = data.draw(st.binary(max_size=40)) * data.draw(st.integers(0, 3))
    try:
        log = read(bytes(raw))
    except ConfigError:
        return
    assert log.has_outcome


@pytest.mark.parametrize("number", ["9" * 400, "-", "1.2.3", "1e99", "٣"])
def test_hostile_numbers_are_no_numbers(number: str) -> None:
    line = f"(EngineCore pid=1) INFO Available KV cache memory: {number} GiB, GPU KV cache size: {number} tokens\n"
    with pytest.raises(ConfigError):
        read(line)


def test_a_foreign_log_and_a_cut_one_are_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError, match="no line of a vLLM start-up"):
        read("Traceback\nValueError: nothing to do with it\ntorch.OutOfMemoryError: CUDA out of memory. Tried to ...\n")
    with pytest.raises(ConfigError, match=r"cut off: vLLM 0\.32\.0 printed its configuration"):
        read(samples.V1_0_32.splitlines()[0] + "\n")
    with pytest.raises(ConfigError, match=r"cannot read /no/such: No such file"):
        read_startup_log("/no/such")
    with pytest.raises(ConfigError, match="is broken"):
        read(b"\x1f\x8b" + b"x" * 100)


class Endless(io.RawIOBase):
    """A log, then so many bytes of one line after another, made as they are read."""

    def __init__(self, head: bytes, noise: bytes, size: int) -> None:
        self._head, self._noise, self._left = head, noise, size
        self.largest = 0

    def read(self, size: int = -1, /) -> bytes:
        assert size > 0, "a log is read in pieces"
        self.largest = max(self.largest, size)
        if self._head:
            piece, self._head = self._head[:size], self._head[size:]
            return piece
        self._left -= size
        return (self._noise * (size // len(self._noise) + 1))[:size] if self._left >= 0 else b""


@pytest.mark.parametrize("noise", [b"x" * 1000, b'INFO: 127.0.0.1 - "POST /v1/completions" 200 OK\n' * 20, b"\r"])
def test_memory_does_not_grow_with_the_log(noise: bytes) -> None:
    stream = Endless(samples.V1_0_32.encode(), noise, 64 << 20)
    lines = list(matching_lines(stream, ANCHORS))  # type: ignore[arg-type]
    assert len(lines) == len(samples.V1_0_32.splitlines())
    assert stream.largest <= 1 << 20


def test_a_line_without_end_is_cut() -> None:
    line = "Available KV cache memory: 1.0 GiB " + "x" * (4 * MAX_LINE_BYTES)
    (found,) = matching_lines(io.BytesIO(line.encode()), ANCHORS)
    assert len(found) == MAX_LINE_BYTES
    assert parse_startup([found]).ranks[0].available_kv == Printed.of("1.0")


# -------------------------------------------------------------------------------------------------------- printed sizes


@given(st.integers(-(1 << 45), 1 << 45))
@settings(max_examples=300)
def test_a_printed_size_holds_the_size_it_was_printed_from(count: int) -> None:
    """vLLM's own way of printing, with the zeros that it drops."""
    assert Printed.of(f"{round(count / GIB, 2)}").holds(count)
    assert Printed.of(f"{count / GIB:.2f}").holds(count)


def test_the_interval_is_as_wide_as_the_rounding() -> None:
    size = Printed.of("37.28")
    assert size.high_bytes - size.low_bytes == pytest.approx(GIB / 100, abs=2)
    assert not size.holds(size.high_bytes + 1)
    assert Printed.of("75.23").minus(Printed.of("9.6")).holds(round(65.63 * GIB))
