from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from tests.serve.dummy_supervisor import options, part

from pdkv.errors import ConfigError
from pdkv.serve import web
from pdkv.serve.http import make_app
from pdkv.serve.options import InstanceOptions
from pdkv.serve.progress import PlainProgress, Progress, open_progress
from pdkv.serve.supervisor import ChildDied, Cluster, Part, Stopped, share_machine
from pdkv.serve.web import bind, serve_app, url_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _children_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'src'}")


def gone(pid: int) -> bool:
    """The process has ended (or waits, dead, for whoever adopted it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def until_gone(*pids: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if not gone(pid)]}"
        time.sleep(0.02)


def start(cluster: Cluster, *behaviours: str) -> None:
    names = ("prefill", "decode", "router")[: len(behaviours)]
    cluster.launch([part(name, how, bind("127.0.0.1", 0)) for name, how in zip(names, behaviours, strict=True)])


# ------------------------------------------------------------------------------------------------------ in this process


def test_all_start_and_none_is_left(tmp_path: Path) -> None:
    said = io.StringIO()
    with Cluster(options(log_dir=str(tmp_path))) as cluster:
        start(cluster, "ready", "ready", "stubborn")
        cluster.await_ready(PlainProgress(said), 30)
        assert cluster.ready_line().startswith("pdkv ready: http://127.0.0.1:")
        assert "prefill_blocks=7 decode_blocks=7" in cluster.ready_line()
        pids = [facts["pid"] for facts in cluster.facts.values()] + [cluster.facts["router"]["grandchild"]]
        assert not any(gone(pid) for pid in pids)
        cluster.check()
    until_gone(*pids)
    assert "first line of stubborn" in (tmp_path / "router.log").read_text()
    assert "prefill: working" in said.getvalue()
    assert "decode: ready" in said.getvalue()


def test_the_router_is_told_what_the_whole_was_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = {"transfer_mode": "push", "prefill_fallback": "fail", "instance_timeout_s": 7.0}
    parts: list[Part] = []
    with Cluster(replace(options(log_dir=str(tmp_path)), **told)) as cluster:
        monkeypatch.setattr("pdkv.runtime.precheck.check", lambda _options: None)
        monkeypatch.setattr(cluster, "launch", parts.extend)
        monkeypatch.setattr(cluster, "await_ready", lambda *_: None)
        monkeypatch.setattr(cluster, "ready_line", lambda: "ready")
        cluster.prepare()
        cluster.start()
    for one in parts:
        one.sock.close()
    router = parts[-1].options
    assert {name: getattr(router, name) for name in told} == told


def test_own_log_directory_is_removed_after_a_clean_stop_only() -> None:
    with Cluster(options()) as clean:
        start(clean, "ready")
        clean.await_ready(Progress(), 30)
    assert not clean.log_dir.exists()
    broken = Cluster(options())
    with pytest.raises(ChildDied):
        _start_one_that_dies(broken)
    assert (broken.log_dir / "prefill.log").exists()


def _start_one_that_dies(cluster: Cluster) -> None:
    with cluster:
        start(cluster, "dies")
        cluster.await_ready(Progress(), 30)


def test_a_child_that_dies_while_starting_is_named_with_its_last_lines(tmp_path: Path) -> None:
    with Cluster(options(log_dir=str(tmp_path))) as cluster:
        start(cluster, "ready", "dies")
        with pytest.raises(ChildDied) as caught:
            cluster.await_ready(Progress(), 30)
        first = cluster.children[0].process
        assert first is not None
    assert "the decode process" in str(caught.value)
    assert "exit code 3" in str(caught.value)
    assert "| a traceback, say" in str(caught.value)
    until_gone(first.pid)


def test_a_child_that_dies_later_ends_the_wait(tmp_path: Path) -> None:
    with Cluster(options(log_dir=str(tmp_path))) as cluster:
        start(cluster, "ready", "dies-later")
        cluster.await_ready(Progress(), 30)
        with pytest.raises(ChildDied, match="killed by SIGKILL"):
            cluster.wait()
        with pytest.raises(ChildDied, match="out of memory, say"):
            cluster.check()


def test_what_a_child_refuses_is_a_config_error(tmp_path: Path) -> None:
    with Cluster(options(log_dir=str(tmp_path))) as cluster:
        start(cluster, "hangs", "refuses")
        with pytest.raises(ConfigError, match="the decode process cannot start: this model is unknown; use another"):
            cluster.await_ready(Progress(), 30)


def test_a_start_that_takes_too_long_names_who_is_late_and_keeps_the_logs() -> None:
    cluster = Cluster(options())

    def begin() -> None:
        with cluster:
            start(cluster, "ready", "hangs")
            cluster.await_ready(Progress(), 2)

    with pytest.raises(ConfigError, match=f"not ready after 2 s: decode; see the logs in {cluster.log_dir}"):
        begin()
    assert "first line of hangs" in (cluster.log_dir / "decode.log").read_text()
    shutil.rmtree(cluster.log_dir)


def test_the_public_port_is_checked_first(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            Cluster(options(port=port, log_dir=str(tmp_path))) as cluster,
            pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"),
        ):
            cluster.prepare()
    assert not cluster.children


def test_an_unknown_model_starts_nothing(tmp_path: Path) -> None:
    with Cluster(options(log_dir=str(tmp_path))) as cluster, pytest.raises(ConfigError, match="unknown model 'm'"):
        cluster.prepare()


def test_a_log_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--log-dir"), Cluster(options(log_dir=str(tmp_path / "file" / "x"))):
        pass


def test_binding() -> None:
    with bind("127.0.0.1", 0) as free:
        assert url_of(free).startswith("http://127.0.0.1:")
        port = free.getsockname()[1]
    with bind("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port
    with pytest.raises(ConfigError, match="--host"):
        bind("203.0.113.9", 0)


def test_a_stop_is_no_error_that_a_library_could_take_for_its_own() -> None:
    """A GGUF reader, say, whose every exception means a broken file."""
    with Cluster(options()) as cluster, pytest.raises(Stopped), cluster.interruptible():
        try:
            cluster.interrupt()
        except Exception as error:
            raise ConfigError("the file is broken") from error


def test_a_start_without_nixl_says_why() -> None:
    with Cluster(options()) as cluster:
        cluster.facts = {"prefill": {"without_nixl": "no UCX transport 'bogus'"}, "decode": {"without_nixl": None}}
        (warning,) = cluster.warnings()
    assert "prefill" in warning
    assert "no UCX transport 'bogus'" in warning


def test_brief_progress_leaves_out_what_is_only_worth_a_log() -> None:
    said = {brief: io.StringIO() for brief in (False, True)}
    for brief, stream in said.items():
        with open_progress(stream, brief=brief) as progress:
            progress.update("decode", "loading smollm2 ...")
            progress.update("decode", "KV cache size: 2,048 tokens")
            progress.done("decode", "ready")
    assert [line.split("decode: ")[1] for line in said[True].getvalue().splitlines()] == [
        "loading smollm2 ...",
        "ready",
    ]
    assert "KV cache size" in said[False].getvalue()


def test_a_port_is_one_s_own_from_the_moment_it_is_bound() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", port) as again, pytest.raises(ConnectionRefusedError):
        socket.create_connection(again.getsockname())


async def stops_when_asked(scope: Any, _receive: Any, send: Any) -> None:
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 204, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body"})  # and the server closes first, so that the port lingers on its side
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_port_with_a_former_server_s_connections_is_free() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        asked = threading.Thread(target=lambda: ask_and_wait(port))
        assert serve_app(stops_when_asked, sock, on_ready=asked.start) == 0
        asked.join(10)
    with pytest.raises(OSError, match="in use"), socket.socket() as plain:
        plain.bind(("127.0.0.1", port))
    with bind("127.0.0.1", port), pytest.raises(ConfigError, match="in use"):
        bind("127.0.0.1", port)


async def hangs_while_it_is_stopped(scope: Any, _receive: Any, _send: Any) -> None:
    assert scope["type"] == "http"
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(3600)


def test_a_stop_with_an_open_request_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as sock:
        asked = threading.Thread(target=ask_and_wait, args=(sock.getsockname()[1],))
        assert serve_app(hangs_while_it_is_stopped, sock, on_ready=asked.start) == 0
        asked.join(10)
    assert "ERROR" not in capfd.readouterr().err


async def is_interrupted_twice(_request: Request) -> Response:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)
    await asyncio.sleep(3600)


async def nothing() -> None:
    return


def test_a_second_ctrl_c_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as sock:
        asked = threading.Thread(target=ask_and_wait, args=(sock.getsockname()[1],))
        app = make_app("impatient", {"GET /": is_interrupted_twice}, nothing)
        assert serve_app(app, sock, on_ready=asked.start) == 0
        asked.join(10)
    assert not {"ERROR", "Traceback"} & set(capfd.readouterr().err.replace(":", " ").split())


def test_without_descriptors_one_line_says_so_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    log, rarely = logging.getLogger("asyncio"), web.FullNowAndThen()
    log.addFilter(rarely)
    try:
        for _ in range(100):
            log.error("socket.accept() out of system resource\nsocket: x")
        log.error("another thing")
    finally:
        log.removeFilter(rarely)
    first, second = caplog.messages
    assert "raise the limit (ulimit -n)" in first
    assert second == "another thing"


def test_a_server_takes_all_descriptors_that_it_may() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        web.allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def ask_and_wait(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        while client.recv(1000):
            pass


def test_memory_and_cores_are_shared_unless_said_otherwise() -> None:
    def make(role: Any, **more: Any) -> InstanceOptions:
        return InstanceOptions(role=role, model="m", **more)

    p, d = share_machine(make("prefill"), make("decode", threads=7), cores=9)
    assert (p.memory_share, d.memory_share) == (0.5, 0.5)
    assert (p.threads, d.threads) == (4, 7)
    p, d = share_machine(make("prefill", device="cuda:0"), make("decode", device="cuda:1"), cores=1)
    assert (p.memory_share, d.memory_share, p.threads) == (1.0, 1.0, 1)


def test_progress_is_plain_without_a_terminal() -> None:
    stream = io.StringIO()
    with open_progress(stream) as progress:
        progress.update("prefill", "loading")
    assert stream.getvalue().endswith("prefill: loading\n")


# ------------------------------------------------------------------------------------------------- as its own process


@pytest.fixture
def supervised() -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def go(*behaviours: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.dummy_supervisor", *behaviours],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        assert process.stdout.readline().startswith("pdkv ready: ")
        return process, facts

    yield go
    for process in started:
        process.kill()
        process.communicate()


def pids_of(facts: dict[str, Any]) -> list[int]:
    return [own[key] for own in facts.values() for key in ("pid", "grandchild") if key in own]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_stops_all_of_it(supervised: Any, number: int) -> None:
    process, facts = supervised("ready", "stubborn", "ready")
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == ""
    assert "pdkv: stopping" in err
    until_gone(*pids_of(facts))


def test_a_killed_supervisor_leaves_no_child(supervised: Any) -> None:
    process, facts = supervised("ready", "ready", "ready")
    process.kill()
    process.wait()
    until_gone(*pids_of(facts))


def test_a_dead_child_ends_the_others_with_exit_code_one(supervised: Any) -> None:
    process, facts = supervised("dies-later", "ready", "ready")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "the prefill process" in err
    assert "| out of memory, say" in err
    until_gone(*pids_of(facts))


def test_a_killed_child_ends_the_others(supervised: Any) -> None:
    process, facts = supervised("ready", "ready", "ready")
    os.kill(facts["decode"]["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "the decode process" in err
    until_gone(*pids_of(facts))
