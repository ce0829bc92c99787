"""Metrics texts: what exporters write is read, everything else is refused with the line, in bounded time and memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdkv.errors import ConfigError
from pdkv.logs.metrics_text import MAX_BYTES, parse_metrics
from pdkv.logs.scrape import fetch, fetch_json, metrics_url, scrape


def test_what_the_reference_client_writes_is_read() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("vllm:kv_cache_usage_perc", "usage", ["engine", "model_name"], registry=registry)
    gauge.labels("0", 'a "quoted" \\ name\nof two lines, {odd}').set(0.25)
    gauge.labels("1", "b").set(math.inf)
    Counter("vllm:num_preemptions", "n", registry=registry).inc(7)
    Histogram("vllm:nixl_xfer_time_seconds", "s", buckets=(0.1, 1.0), registry=registry).observe(0.5)
    metrics = parse_metrics(generate_latest(registry))
    first, second = metrics.series("vllm:kv_cache_usage_perc")
    assert first.labels["model_name"] == 'a "quoted" \\ name\nof two lines, {odd}'
    assert (first.value, second.value) == (0.25, math.inf)
    assert metrics.counter("vllm:num_preemptions") == 7
    assert metrics.values("vllm:nixl_xfer_time_seconds_bucket", "le") == {"0.1": 0.0, "1.0": 1.0, "+Inf": 1.0}
    assert metrics.total("vllm:kv_cache_usage_perc", engine="0") == 0.25
    assert "vllm:kv_cache_usage_perc" not in metrics.of(engine="7")


@pytest.mark.parametrize(
    "line",
    [
        "<html>",
        "name",
        "name{",
        'name{a="b"',
        'name{a="b} 1',
        "name{a=b} 1",
        "name one",
        "name 0x10",
        "name 1_000",
        "1name 1",
        "name{" + ",".join(f'l{i}="x"' for i in range(100)) + "} 1",
        'name{a="' + "x" * 10_000 + '"} 1',
        "a" * 300 + " 1",
        "name " + "9" * 1000,
        "name ١",
    ],
)
def test_what_is_no_sample_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2: no Prometheus sample"):
        parse_metrics(f"ok 1\n{line}\n")


def test_what_a_terminal_obeys_is_left_out_of_labels() -> None:
    (sample,) = parse_metrics('a{engine="0\x1b[31m\x07\u202eé"} 1').series("a")
    assert sample.labels == {"engine": "0?[31m??é"}


def test_long_texts_are_refused() -> None:
    with pytest.raises(ConfigError, match="longer than 32 MiB"):
        parse_metrics("a" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="more than 200000 samples"):
        parse_metrics("a 1\n" * 200_001)
    with pytest.raises(ConfigError, match="no sample"):
        parse_metrics("# only comments\n")


@given(st.binary(max_size=2000))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_samples_or_a_refusal(data: bytes) -> None:
    try:
        assert parse_metrics(data).samples
    except ConfigError:
        pass


# ----------------------------------------------------------------------------------------------------------- over HTTP


@contextmanager
def serving(status: int, body: bytes, *, endless: bool = False) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            try:
                self.wfile.write(body)
                while endless:
                    self.wfile.write(body)
            except OSError:
                pass

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_servers_address_is_enough() -> None:
    with serving(200, b"up 1\n") as url:
        assert metrics_url(url) == f"{url}/metrics"
        assert scrape(url).total("up") == 1


def test_what_is_no_endpoint_is_refused() -> None:
    with serving(404, b"no") as url, pytest.raises(ConfigError, match="answers 404"):
        scrape(url)
    with serving(200, b"<html>") as url, pytest.raises(ConfigError, match="line 1: no Prometheus sample"):
        scrape(url)
    with serving(200, b"[1,") as url, pytest.raises(ConfigError, match="did not answer JSON"):
        fetch_json(url)
    with serving(200, b"a 1\n" * 100_000, endless=True) as url, pytest.raises(ConfigError, match="more than 32 MiB"):
        scrape(url)
    with pytest.raises(ConfigError, match="cannot read"):
        scrape("http://127.0.0.1:9")
    for url in ("http://", "ftp://host/x", "http://host:99999999/", "file:///etc/passwd", "http://[::1"):
        with pytest.raises(ConfigError):
            fetch(url)


def test_an_answer_that_takes_for_ever_is_given_up() -> None:
    with serving(200, b"#", endless=True) as url, pytest.raises(ConfigError, match=r"within 0\.2 s|more than"):
        fetch(url, timeout_s=0.2)
