"""`pdkv serve smollm2` as a user runs it: processes, HTTP, faults from outside, and a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from tests.e2e.processes import until
from tests.e2e.reference import Reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "The lighthouse keeper wrote the weather down every evening, because his father had done so. " * 4


class Cluster:
    """A running `pdkv serve`, its URL, and its processes."""

    def __init__(self, model: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pdkv", "serve", model, "--port", "0", "--threads", "1"),
                *(
                    "--kv-cache-memory-bytes",
                    "256MiB",
                    "--max-model-len",
                    "2048",
                    "--kv-lease-duration",
                    "6",
                    "--debug",
                ),
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"no ready line: {line!r}"
        self.ready = line
        self.client = httpx.Client(base_url=found[0], timeout=90)

    def complete(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 6, "temperature": 0, **body})

    def memory(self) -> dict[str, dict[str, Any]]:
        """`/debug/memory` by role."""
        report = self.client.get("/debug/memory").json()
        return {one["role"]: one for one in report["instances"]}

    def idle(self) -> bool:
        """Every block of both instances is free or cached."""
        return all(
            one["accounts"]["free"] + one["accounts"]["cached"] == one["num_blocks"] - 1
            for one in self.memory().values()
        )

    def child(self, what: str) -> psutil.Process:
        """The process whose command line holds ``what``."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if what in " ".join(process.cmdline()):
                return process
        raise AssertionError(f"no child process with {what!r}")

    def tree(self) -> list[psutil.Process]:
        """All processes of the cluster."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()


@pytest.fixture(scope="module")
def cluster(smollm2: str) -> Iterator[Cluster]:
    running = Cluster("smollm2")
    yield running
    running.close()


@pytest.fixture(scope="module")
def truth(reference: Reference) -> str:
    """transformers' own continuation of the prompt."""
    return reference.text(reference.generate(reference.tokenize(PROMPT), 6))


def test_the_answer_is_transformers_own_and_its_kv_came_from_p(cluster: Cluster, truth: str) -> None:
    answer = cluster.complete()
    assert answer.status_code == 200
    body = answer.json()
    assert body["choices"][0]["text"] == truth
    assert body.get("kv_transfer_params") is None
    metrics = cluster.client.get("/metrics").text
    loaded = re.findall(r"vllm:prompt_tokens_by_source_total\{[^}]*external_kv_transfer[^}]*\} (\S+)", metrics)
    assert sum(map(float, loaded)) >= body["usage"]["prompt_tokens"]
    until(cluster.idle)


def test_streaming_gives_the_same_text_and_usage(cluster: Cluster, truth: str) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, usage, done = "", None, False
    with cluster.client.stream("POST", "/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                text += "".join(choice["text"] for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
    assert (text, done) == (truth, True)
    assert usage["completion_tokens"] == 6
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def speaks_http(port: int) -> bool:
    """Whether who listens there does; a side channel greets with other bytes, or says nothing."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        try:
            return sock.recv(4) == b"HTTP"
        except (TimeoutError, ConnectionError):
            return False


def test_a_client_s_own_kv_transfer_params_are_stripped_and_refused(cluster: Cluster, truth: str) -> None:
    forged = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "prefill-x",
        "remote_request_id": "x",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
    }
    assert cluster.complete(kv_transfer_params=forged).json()["choices"][0]["text"] == truth
    ports = [c.laddr.port for p in cluster.tree() for c in p.net_connections("tcp") if c.status == "LISTEN"]
    refused = 0
    for port in filter(speaks_http, set(ports)):
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 2, "kv_transfer_params": forged},
            timeout=60,
        )
        if answer.status_code == 400:
            assert "token" in answer.json()["error"]["message"]
            refused += 1
    assert refused == 2, "P and D themselves refuse block ids without the token"


def test_clients_that_hang_up_leave_nothing_behind(cluster: Cluster) -> None:
    for delay_s in (0.01, 0.1, 0.3, 1.0):
        with pytest.raises(httpx.ReadTimeout):
            cluster.client.post(
                "/v1/completions",
                json={"prompt": f"{delay_s} {PROMPT}", "max_tokens": 1500, "ignore_eos": True},
                timeout=httpx.Timeout(30, read=delay_s),
            )
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with cluster.client.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())  # so D is at work
    until(cluster.idle, timeout_s=30)
    assert cluster.memory()["decode"]["holders"] == []
    metrics = cluster.client.get("/metrics").text
    assert re.search(r"vllm:request_success_total\{[^}]*abort[^}]*decode-0[^}]*\} [1-9]", metrics)


def test_a_dead_child_is_named_and_the_rest_is_stopped(smollm2: str) -> None:
    running = Cluster("smollm2", "--transport", "shm")
    tree = running.tree()
    try:
        assert "transport=shm" in running.ready
        assert running.complete().status_code == 200
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(running.complete, max_tokens=1500, ignore_eos=True)
            until(lambda: running.memory()["decode"]["accounts"]["running"] > 0)
            running.child("decode").kill()
            cut_off = waiting.result(30)
        assert (cut_off.status_code, cut_off.json()["error"]["type"]) == (503, "server_error")
        assert running.process.wait(30) == 1
        until(lambda: not any(process.is_running() and process.status() != "zombie" for process in tree))
    finally:
        running.close()


def test_ctrl_c_ends_everything(cluster: Cluster) -> None:
    tree = cluster.tree()
    assert len(tree) >= 6, "supervisor, router, P, D and two movers"
    os.kill(cluster.process.pid, signal.SIGINT)
    assert cluster.process.wait(30) in (0, 130)
    until(lambda: not any(process.is_running() and process.status() != "zombie" for process in tree))
