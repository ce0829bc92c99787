"""Whole instances on either kind of mover and of memory: decoding from another's KV gives the same tokens as from one's
own, and an instance that cannot fence its memory says so and keeps it."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from benchmarks.transfer_half import empty_plan
from tests.e2e.harness import Flight, array, decode, idle_blocks, instance, prefill
from tests.nixl_here import needs_nixl
from tests.runtime.tiny import save_tiny

from pdkv.core.events import FinishReason, LoadFailed, LoadFinished
from pdkv.core.ports import NewRequest
from pdkv.core.transfer.messages import RemoteSource
from pdkv.errors import ConfigError, FenceLost, PdkvError
from pdkv.runtime import boot, mover_thread
from pdkv.runtime.control import Control
from pdkv.runtime.instance import Instance
from pdkv.runtime.transports.shm import ShmTransport

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[(7 * i + j) % 90 + 3 for j in range(length)] for i, length in enumerate((5, 16, 33, 100))]
SETTINGS = {"max_model_len": 256, "kv_cache_memory_bytes": 8 << 20, "dtype": "float32", "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny("llama", tmp_path_factory.mktemp("tiny") / "model").directory)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU pools get a mover thread, as GPU pools do."""
    monkeypatch.setattr(boot, "Control", functools.partial(Control, mover="thread"))


def check_tokens(consumer: Instance, sources: Iterable[RemoteSource]) -> None:
    """Tokens from the sources' KV (those of `PROMPTS`) equal D's own; every block is given back."""
    free = idle_blocks(consumer)
    for i, (prompt, source) in enumerate(zip(PROMPTS, sources, strict=True)):
        own = decode(consumer, f"own-{i}", prompt, None, 12, cache_salt="own").wait()
        other = decode(consumer, f"other-{i}", prompt, source, 12, cache_salt="other").wait()
        assert len(other.of(LoadFinished)) == 1
        assert other.tokens == own.tokens
        assert len(own.tokens) > 0
    assert consumer.stats().transfer.transfers == len(PROMPTS)
    until = time.monotonic() + 10
    while idle_blocks(consumer) != free:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("transport", ["shm", pytest.param("nixl", marks=needs_nixl)])
def test_a_mover_thread_serves_a_whole_instance(threads: None, model: str, transport: str) -> None:
    with (
        closing(instance("prefill", model, transport=transport, **SETTINGS)) as producer,
        closing(instance("decode", model, transport=transport, **SETTINGS)) as consumer,
    ):
        assert producer.control.mover_pid is None
        check_tokens(consumer, [prefill(producer, f"p-{i}", prompt) for i, prompt in enumerate(PROMPTS)])


def test_the_log_has_the_cause_of_a_failed_load(model: str, caplog: pytest.LogCaptureFixture) -> None:
    with closing(instance("prefill", model, transport="shm", **SETTINGS)) as producer:
        source = prefill(producer, "p", PROMPTS[3])
    with closing(instance("decode", model, transport="shm", **SETTINGS)) as consumer:
        flight = decode(consumer, "d", PROMPTS[3], source, 4).wait()
    (failed,) = flight.of(LoadFailed)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "pdkv.instance" and "not loaded" in r.getMessage()]
    assert line == f"the KV of 'd' was not loaded: {failed.cause}"
    assert producer.info.engine_id in line


@pytest.fixture
def unfenced(threads: None, model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    """An instance whose mover cannot promise that its transfers are over."""

    class Unclosable(ShmTransport):
        def close(self) -> None:
            raise RuntimeError("the agent lives on")

    monkeypatch.setattr(mover_thread, "make_transport", lambda name, agent, memory: Unclosable(memory))
    started = instance("decode", model, transport="shm", **SETTINGS)
    yield started
    started.executor.pool.close()


def test_an_instance_that_cannot_fence_fails_and_keeps_its_memory(unfenced: Instance) -> None:
    flight = Flight(unfenced, NewRequest(request_id="a", prompt=array(PROMPTS[3]), max_tokens=150, min_tokens=150))
    unfenced.control.submit(empty_plan(restart_mover=True))
    flight.wait(30)
    assert flight.finished.reason is FinishReason.ERROR
    assert "the agent lives on" in str(flight.finished.error)
    assert isinstance(unfenced.failed, FenceLost)
    with pytest.raises(PdkvError, match="has failed"):
        Flight(unfenced, NewRequest(request_id="b", prompt=array(PROMPTS[0]), max_tokens=1))
    with pytest.raises(FenceLost):
        unfenced.close()
    assert unfenced.executor.pool.tensor.numel() > 0  # not given back


def test_shared_memory_for_a_gpu_pool_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "choose_device", lambda device: device)  # the machine need not have one
    with pytest.raises(ConfigError, match="CPU pools only; use --transport nixl"):
        instance("decode", "/no/such/model", device="cuda", transport="shm")


_PRODUCER = """
    import sys
    sys.path.insert(0, {root!r})
    import msgspec
    from tests.e2e.harness import instance, prefill
    from tests.e2e.test_movers import PROMPTS, SETTINGS
    producer = instance("prefill", {model!r}, device={device!r}, transport="nixl", **SETTINGS)
    sources = [prefill(producer, f"p-{{i}}", prompt) for i, prompt in enumerate(PROMPTS)]
    print("SOURCES " + msgspec.json.encode(sources).decode(), flush=True)
    sys.stdin.read()
    producer.close()
"""


@pytest.fixture
def remote_sources(request: pytest.FixtureRequest, model: str) -> Iterator[list[RemoteSource]]:
    """What a prefill instance in a process of its own, on the device asked for, grants for `PROMPTS`."""
    code = textwrap.dedent(_PRODUCER).format(root=str(ROOT), model=model, device=request.param)
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("SOURCES ")), "SOURCES []")
        yield msgspec.json.decode(line.removeprefix("SOURCES "), type=list[RemoteSource])
        assert process.stdin is not None
        process.stdin.close()  # it ends


@pytest.mark.gpu
@pytest.mark.slow
@needs_nixl
@pytest.mark.parametrize(
    ("remote_sources", "device"), [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")], indirect=["remote_sources"]
)
def test_kv_moves_between_gpu_and_host_pools(remote_sources: list[RemoteSource], model: str, device: str) -> None:
    with closing(instance("decode", model, device=device, transport="nixl", **SETTINGS)) as consumer:
        assert (consumer.control.mover_pid is None) == (device == "cuda")
        check_tokens(consumer, remote_sources)
