"""Running servers: blocks by cause with true bounds, and a finding for each way in which D's memory goes wrong."""

from __future__ import annotations

import gzip
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.logs.test_metrics_text import serving
from typer.testing import CliRunner

from pdkv.cli.main import app
from pdkv.errors import ConfigError
from pdkv.explain.live import Instance, Live, diagnose, watch
from pdkv.explain.reading import Holder, Reading, engines_of
from pdkv.explain.report import Severity
from pdkv.explain.usage import split
from pdkv.logs.metrics_text import parse_metrics

DATA = Path(__file__).resolve().parents[1] / "data" / "field"
LABELS = 'engine="0",model_name="m"'


def text(
    *, usage: float = 0.0, running: int = 0, waiting: int = 0, stages: dict[str, int] | None = None,
    blocks: int = 1001, labels: str = LABELS, **counters: float,
) -> str:  # fmt: skip
    """What a vLLM engine answers; a name of ``counters`` with two underscores has a label: ``name__label__value``."""
    lines = [
        f"vllm:kv_cache_usage_perc{{{labels}}} {usage}",
        f"vllm:num_requests_running{{{labels}}} {running}",
        f"vllm:num_requests_waiting{{{labels}}} {waiting}",
        f'vllm:cache_config_info{{engine="0",num_gpu_blocks="{blocks}",block_size="16"}} 1.0',
    ]
    for stage, count in (stages or {}).items():
        lines.append(f'vllm:num_requests_kv_fetch_by_stage{{{labels},stage="{stage}"}} {count}')
    for name, value in counters.items():
        base, *label = name.split("__")
        extra = f',{label[0]}="{label[1]}"' if label else ""
        lines.append(f"vllm:{base}{{{labels}{extra}}} {value}")
    return "\n".join(lines) + "\n"


def reading(body: str, at_s: float = 0.0, url: str = "http://d") -> Reading:
    return Reading(url, at_s, engines_of(parse_metrics(body), url))


def seen(now: str, before: str | None = None, seconds: float = 2.0) -> Live:
    return diagnose([reading(now, seconds)], None if before is None else [reading(before)])


def ids(live: Live) -> dict[str, Severity]:
    return {finding.id: finding.severity for instance in live.instances for finding in instance.findings}


NONE = {"waiting_to_start": 0, "in_progress": 0, "completed_waiting": 0}
LOADING = {"waiting_to_start": 1, "in_progress": 3, "completed_waiting": 1}


# ----------------------------------------------------------------------------------------------------------- the split


def shares(body: str) -> dict[str, tuple[int, int]]:
    (engine,) = engines_of(parse_metrics(body), "http://d")
    return {share.cause: (share.low_blocks, share.high_blocks) for share in split(engine)}


def test_what_nobody_uses_is_known_exactly() -> None:
    found = shares(text(usage=0.25, stages=NONE))
    assert found["without a request"] == (250, 250)
    assert found["running"] == found["loading"] == (0, 0)
    assert found["free or cached"] == (750, 750)


def test_loads_beside_running_requests_have_bounds() -> None:
    found = shares(text(usage=0.5, running=10, waiting=5, stages=LOADING))
    assert found["loading"] == (4, 490)
    assert found["running"] == (10, 496)
    assert found["without a request"] == (0, 486)


@given(blocks=st.integers(2, 5000), running=st.integers(0, 40), loading=st.integers(0, 40), data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_truth_lies_within_the_bounds(blocks: int, running: int, loading: int, data: Any) -> None:
    """Hold blocks for every cause at random, each request at least one, and ask for the split from outside."""
    most = blocks - 1 - running - loading
    if most < 0:
        return
    held = data.draw(st.integers(0, most))
    of_running = running + (data.draw(st.integers(0, most - held)) if running else 0)
    of_loading = loading + (data.draw(st.integers(0, most - held - of_running + running)) if loading else 0)
    pinned = held + of_running + of_loading
    stages = {"waiting_to_start": 0, "in_progress": loading, "completed_waiting": 0}
    body = text(usage=pinned / (blocks - 1), running=running, waiting=loading, stages=stages, blocks=blocks)
    found = shares(body)
    for cause, truth in (("running", of_running), ("loading", of_loading), ("without a request", held)):
        assert found[cause][0] <= truth <= found[cause][1], (cause, truth, found)
    assert found["free or cached"] == (blocks - 1 - pinned,) * 2


def test_the_ledger_of_pdkv_is_exact() -> None:
    body = text(usage=0.3) + "".join(
        f'pdkv:kv_blocks{{{LABELS},account="{account}"}} {count}\n'
        for account, count in {"null": 1, "free": 700, "cached": 50, "running": 200, "loading": 50}.items()
    )
    body += f"pdkv:kv_block_bytes{{{LABELS}}} 4096\n"
    (engine,) = engines_of(parse_metrics(body), "http://d")
    found = split(engine)
    assert all(share.exact for share in found)
    assert sum(share.low_blocks for share in found) == 1001
    assert {share.cause: share.low_bytes for share in found}["loading"] == 50 * 4096


# ---------------------------------------------------------------------------------------------------------- the findings


def test_a_healthy_engine_has_no_warning() -> None:
    before = text(usage=0.5, running=10, stages=NONE, nixl_xfer_time_seconds_count=100, request_success_total=90)
    now = text(usage=0.6, running=12, stages=NONE, nixl_xfer_time_seconds_count=110, request_success_total=99)
    assert ids(seen(now, before)) == {}


def test_loads_without_transfers_are_stuck_only_when_both_readings_show_it() -> None:
    loads = text(usage=0.4, running=1, waiting=5, stages=LOADING, nixl_xfer_time_seconds_count=100)
    moved = text(usage=0.4, running=1, waiting=5, stages=LOADING, nixl_xfer_time_seconds_count=101)
    fresh = text(usage=0.1, running=1, stages=NONE, nixl_xfer_time_seconds_count=100)
    assert ids(seen(loads, loads))["stuck-loads"] is Severity.WARNING
    assert ids(seen(loads, loads, seconds=31))["stuck-loads"] is Severity.ERROR
    assert "stuck-loads" not in ids(seen(moved, loads, seconds=31))
    assert "stuck-loads" not in ids(seen(loads, fresh, seconds=31))
    assert "stuck-loads" not in ids(seen(loads))


def test_usage_without_requests_is_leaked_when_it_outlives_a_lease() -> None:
    idle = text(usage=0.25, stages=NONE)
    assert ids(seen(idle))["usage-without-requests"] is Severity.WARNING
    assert ids(seen(idle, idle, seconds=5)) == {"usage-without-requests": Severity.WARNING}
    live = seen(idle, idle, seconds=31)
    assert ids(live) == {"leaked-blocks": Severity.ERROR}
    assert "250 blocks" in live.instances[0].findings[0].text
    assert "leaked-blocks" not in ids(seen(idle, text(usage=0.3, stages=NONE), seconds=31))
    assert ids(seen(text(usage=0.25, running=1, stages=NONE), idle, seconds=31)) == {}


@pytest.mark.parametrize(
    ("counter", "finding", "severity"),
    [
        ("nixl_num_kv_expired_reqs_total", "leases-expiring", Severity.WARNING),
        ("nixl_num_notifications_after_expiry_total", "read-after-expiry", Severity.ERROR),
        ("nixl_num_failed_transfers_total", "transfers-failing", Severity.WARNING),
        ("kv_offload_allocation_failure_total", "offload-full", Severity.WARNING),
    ],
)
def test_counters_count_within_the_interval(counter: str, finding: str, severity: Severity) -> None:
    assert ids(seen(text(**{counter: 3})))[finding] is severity
    assert ids(seen(text(**{counter: 4}), text(**{counter: 3})))[finding] is severity
    assert finding not in ids(seen(text(**{counter: 3}), text(**{counter: 3})))
    # A restarted server counts from 0 again.
    assert "2 " in next(
        item.text
        for item in seen(text(**{counter: 2}), text(**{counter: 3})).instances[0].findings
        if item.id == finding
    )


def test_a_storm_is_a_tenth_of_the_finished_requests() -> None:
    def counts(preemptions: float, finished: float) -> str:
        return text(num_preemptions_total=preemptions, request_success_total__finished_reason__stop=finished)

    assert ids(seen(counts(11, 100)))["preemption-storm"] is Severity.WARNING
    assert ids(seen(counts(10, 100))) == {"preemptions": Severity.INFO}
    assert ids(seen(counts(10, 100), counts(10, 0))) == {}


def test_a_connector_that_nothing_uses() -> None:
    idle = text(stages=NONE, request_success_total=50, nixl_xfer_time_seconds_count=0)
    used = text(stages=NONE, request_success_total=50, nixl_xfer_time_seconds_count=1)
    mixed = text(request_success_total=50)
    assert "pd-configured-nothing-transfers" in ids(seen(idle))
    assert "pd-configured-nothing-transfers" not in ids(seen(used))
    assert "pd-configured-nothing-transfers" not in ids(seen(mixed))


def test_the_prefill_side_is_not_told_that_it_transfers_nothing() -> None:
    """Pull transfers count on D. P is known by its role, by what it lacks, or by answers of one token."""
    counts = {"request_success_total": 50, "nixl_xfer_time_seconds_count": 0}
    producer = text(**counts, num_requests_waiting_by_reason__reason__capacity=0)
    both = text(stages=NONE, generation_tokens_total=50, **counts)
    assert seen(producer).instances[0].role == "prefill"
    assert "pd-configured-nothing-transfers" not in ids(seen(producer))
    assert "pd-configured-nothing-transfers" not in ids(seen(both))
    assert "pd-configured-nothing-transfers" in ids(seen(text(stages=NONE, generation_tokens_total=51, **counts)))


def test_prompts_that_decode_computes_itself() -> None:
    def prompts(local: float, remote: float) -> str:
        return text(
            stages=NONE, request_success_total=9, nixl_xfer_time_seconds_count=5,
            prompt_tokens_by_source_total__source__local_compute=local,
            prompt_tokens_by_source_total__source__external_kv_transfer=remote,
        )  # fmt: skip

    assert "decode-computes-prompts" in ids(seen(prompts(600, 400)))
    assert "decode-computes-prompts" not in ids(seen(prompts(10, 990)))


def test_an_offload_tier_that_only_takes() -> None:
    assert "offload-not-hitting" in ids(seen(text(kv_offload_store_bytes_total=1e9)))
    assert ids(seen(text(kv_offload_store_bytes_total=1e9, kv_offload_load_bytes_total=1))) == {}


def test_pdkv_says_who_is_stuck() -> None:
    holder = Holder(request_id="r1", account="loading", blocks=7, cause="READ", since_s=75.0, deadline_s=-15.0)
    body = text(usage=0.1, waiting=1) + f'pdkv:kv_blocks{{{LABELS},account="loading"}} 7\n'
    (engine,) = engines_of(parse_metrics(body), "http://d", {"": [holder]})
    (instance,) = diagnose([Reading("http://d", 0.0, (engine,))], None).instances
    assert "r1 for 75 s (READ)" in instance.findings[0].text


def test_prefill_and_decode_together() -> None:
    decode = reading(text(usage=0.9, running=50, waiting=9, stages={**NONE, "waiting_to_start": 9}), url="http://d")
    prefill = text(usage=0.4, nixl_num_kv_expired_reqs_total=2).replace(
        'block_size="16"', 'block_size="16",kv_role="kv_producer"'
    )
    live = diagnose([decode, reading(prefill, url="http://p")], None)
    assert {item.id for item in live.findings} == {"prefills-wait-for-decode", "decode-queues-past-leases"}


def test_a_real_decode_instance_that_was_asked_directly() -> None:
    """vLLM 0.32 with NIXL as a consumer, before and after one request of 18 tokens that no router sent."""
    before, after = (
        gzip.decompress((DATA / f"vllm-0.32-nixl-{name}.metrics.gz").read_bytes()).decode()
        for name in ("before", "after")
    )
    live = seen(after, before)
    (instance,) = live.instances
    assert (instance.role, instance.observed["num_blocks"], instance.observed["block_size"]) == ("decode", 4096, 128)
    assert instance.observed["kv_cache_size_tokens"] == 524288
    assert instance.rates is not None
    assert (instance.rates["finished"], instance.rates["generation_tokens"]) == (0.5, 2.5)
    assert ids(live) == {"pd-configured-nothing-transfers": Severity.WARNING}


# ------------------------------------------------------------------------------------------------------ texts from outside


def test_engines_of_a_merged_text_are_told_apart() -> None:
    body = text(usage=0.1, labels='engine="0",instance="p"') + text(usage=0.2, labels='engine="0",instance="d"')
    names = {instance.name: instance for instance in seen(body).instances}
    assert set(names) == {"p", "d"}
    assert all(isinstance(instance, Instance) for instance in names.values())


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e300", "-Inf"])
def test_numbers_that_cannot_be_do_no_harm(value: str) -> None:
    body = text(usage=0.5, stages=NONE).replace(" 0.5", f" {value}").replace("running{", "running{") + "\n".join(
        f"vllm:{name}{{{LABELS}}} {value}"
        for name in ("num_preemptions_total", "request_success_total", "nixl_xfer_time_seconds_count")
    )
    live = seen(body, body, seconds=31)
    for share in live.instances[0].split:
        assert 0 <= share.low_blocks <= share.high_blocks <= 1001
    assert live.instances[0].observed["usage"] is None
    assert "preemption-storm" not in {finding.id for finding in (*live.findings, *live.instances[0].findings)}


@given(st.text(alphabet='vllm:kv_cache_usage_perc{}=",0.5 \n\\eNaInf', max_size=300))
@settings(max_examples=200, deadline=None)
def test_noise_is_refused_or_read(noise: str) -> None:
    try:
        diagnose([reading(noise)], None)
    except ConfigError:
        pass


def test_metrics_of_something_else_are_refused() -> None:
    with pytest.raises(ConfigError, match="none of vLLM or pdkv"):
        seen("go_goroutines 7\n")


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_top_ends_at_a_key(key: str) -> None:
    """In a terminal of its own; the terminal is as it was afterwards."""
    with serving(200, text(usage=0.25, stages=NONE).encode()) as url:
        ours, theirs = pty.openpty()
        before = termios.tcgetattr(theirs)
        command = [sys.executable, "-m", "pdkv", "top", url, "--interval", "30"]
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's children ignore it
        )  # fmt: skip
        try:
            shown = b""
            while b"250 blocks" not in shown:
                ready, _, _ = select.select([ours], [], [], 30)
                assert ready, shown
                shown += os.read(ours, 65536)
            os.write(ours, key.encode()) if key == "q" else process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert termios.tcgetattr(theirs)[3] == before[3]
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)


def test_top_into_a_pipe_shows_every_frame() -> None:
    with serving(200, text(usage=0.25, stages=NONE).encode()) as url:
        command = [sys.executable, "-m", "pdkv", "top", url, "--interval", "0.1"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            shown = [line for line in islice(process.stdout, 60) if "usage 25.0%" in line]
            process.kill()
    assert len(shown) > 1


def test_over_http_once_and_by_the_command_line() -> None:
    body = text(usage=0.25, stages=NONE).encode()
    with serving(200, body) as url:
        live = watch([url], 0.5, sleep=lambda _: None)
        assert live.instances[0].split
        runner = CliRunner()
        shown = runner.invoke(app, ["explain", url, "--interval", "0"])
        assert shown.exit_code == 0
        assert "usage-without-requests" in shown.output
        once = runner.invoke(app, ["top", url, "--once", "--interval", "0.1"])
        assert once.exit_code == 0
        assert "usage 25.0%" in once.output
        assert "250 blocks" in once.output
