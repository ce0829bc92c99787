"""Processes stopped or killed at the worst moment: reads end or are fenced, later ones work, nobody is left."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from benchmarks.transfer_half import Half
from tests.nixl_here import needs_nixl

from pdkv.core.ports import MoverRestarted, ReadEnded
from pdkv.core.transfer.messages import RemoteSource
from pdkv.runtime.mover_host import MoverKind
from pdkv.runtime.wire import Cancel

pytestmark = pytest.mark.slow

TRANSPORTS = ["shm", pytest.param("nixl", marks=needs_nixl)]
MOVERS = [  # of the consumer: the one that writes, so the one that fences; the producer's is a process to be killed
    ("shm", "process"),
    ("shm", "thread"),
    pytest.param(("nixl", "process"), marks=needs_nixl),
    pytest.param(("nixl", "thread"), marks=needs_nixl),
]
BLOCK_BYTES = 1 << 20
BLOCKS = 96

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=MOVERS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Half, Half]]:
    yield from _pair(*request.param)


@pytest.fixture(params=TRANSPORTS)
def process_pair(request: pytest.FixtureRequest) -> Iterator[tuple[Half, Half]]:
    """Both movers can be stopped and killed."""
    yield from _pair(request.param, "process")


@pytest.fixture(params=["process", "thread"])
def tcp_pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Half, Half]]:
    """NIXL over TCP, where a read needs the producer's mover all the time (between hosts it is the same)."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    yield from _pair("nixl", request.param)


def _pair(transport: str, mover: MoverKind) -> Iterator[tuple[Half, Half]]:
    sizes = {"num_blocks": BLOCKS, "bytes_per_block": BLOCK_BYTES}
    producer = Half("producer", transport=transport, **sizes).start()
    consumer = Half("consumer", transport=transport, mover=mover, **sizes).start()
    producer.blocks[:] = np.arange(1, BLOCKS + 1, dtype=np.uint8)[:, None]
    yield producer, consumer
    consumer.close()
    producer.close()


def _wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.001)


def _begin_big_read(producer: Half, consumer: Half) -> int:
    """A read of the whole pool of which the first blocks have arrived."""
    consumer.blocks[:] = 0
    source = producer.grant(tuple(range(BLOCKS)))
    assert consumer.read(source, (0,), remote=(0,)).error is None  # handshakes are over
    handle = consumer.post(source, tuple(reversed(range(BLOCKS))))
    last = consumer.blocks[BLOCKS - 1]
    _wait_for(lambda: bool(last.any()))
    return handle


def _read_all(producer: Half, consumer: Half) -> ReadEnded:
    ended = consumer.read(producer.grant(tuple(range(BLOCKS))), tuple(range(BLOCKS)))
    if ended.error is None:
        assert np.array_equal(consumer.blocks[:, ::4096], producer.blocks[:, ::4096])
    return ended


def _report(consumer: Half, timeout_s: float) -> object | None:
    try:
        return consumer.inbox.get(timeout=timeout_s)
    except queue.Empty:
        return None


@needs_nixl
def test_a_failed_read_leaves_other_reads_alone(tcp_pair: tuple[Half, Half]) -> None:
    """One peer's death replaces the agent; what came from another peer meanwhile still arrives whole."""
    doomed, consumer = tcp_pair
    healthy = Half("healthy", transport="nixl", num_blocks=BLOCKS, bytes_per_block=BLOCK_BYTES).start()
    try:
        healthy.blocks[:] = np.arange(BLOCKS, 0, -1, dtype=np.uint8)[:, None]
        half = BLOCKS // 2
        from_doomed, from_healthy = doomed.grant(tuple(range(BLOCKS))), healthy.grant(tuple(range(half)))
        consumer.read(from_doomed, (0,), remote=(0,))
        consumer.read(from_healthy, (0,), remote=(0,))
        consumer.blocks[:] = 0
        bad = consumer.post(from_doomed, tuple(range(half, BLOCKS)), remote=tuple(range(half)))
        good = consumer.post(from_healthy, tuple(range(half)))
        _wait_for(lambda: bool(consumer.blocks[half].any()))
        os.kill(doomed.control.mover_pid, signal.SIGKILL)
        reports = {item.handle: item for item in (consumer.wait(ReadEnded), consumer.wait(ReadEnded))}
        assert reports[good].slot == (healthy.identity.nonce, 7)
        assert np.array_equal(consumer.blocks[:half, ::4096], healthy.blocks[:half, ::4096])
        if reports[bad].error is None:  # tried once more, from the mover that the doomed peer has by now
            assert reports[bad].slot == (doomed.identity.nonce, 7)
            assert np.array_equal(consumer.blocks[half:, ::4096], doomed.blocks[:half, ::4096])
        assert consumer.control.stats().mover_restarts == 0
    finally:
        healthy.close()


@needs_nixl
def test_a_stopped_producer_is_fenced_by_restarting_the_mover(tcp_pair: tuple[Half, Half]) -> None:
    producer, consumer = tcp_pair
    handle = _begin_big_read(producer, consumer)
    os.kill(producer.control.mover_pid, signal.SIGSTOP)
    try:
        consumer.submit(cancels=(handle,))
        item = _report(consumer, 1.0)
        if item is None:  # the slice under way cannot end: that is what the core's deadline is for
            consumer.submit(restart_mover=True)
            item = consumer.wait(MoverRestarted)
            assert item == MoverRestarted(handles=(handle,))
        else:
            assert isinstance(item, ReadEnded)  # it was stopped just between two slices
        consumer.blocks[:] = 0
    finally:
        os.kill(producer.control.mover_pid, signal.SIGCONT)
    time.sleep(1.0)
    assert not consumer.blocks.any()  # reused memory was not touched by what the producer went on to send
    assert _read_all(producer, consumer).error is None
    assert consumer.inbox.empty()


@needs_nixl
def test_a_cancelled_read_that_fails_is_not_tried_again(
    tcp_pair: tuple[Half, Half], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel comes too late for our mover, which has seen the producer's die: the READ is not begun anew."""
    producer, consumer = tcp_pair
    mover, told = consumer.control._mover, []
    send = mover.send
    monkeypatch.setattr(mover, "send", lambda one: told.append(one) if isinstance(one, Cancel) else send(one))
    source = producer.grant(tuple(range(BLOCKS)))
    assert consumer.read(source, (0,), remote=(0,)).error is None  # both are connected now
    os.kill(producer.control.mover_pid, signal.SIGSTOP)
    handle = consumer.post(source, tuple(range(BLOCKS)))
    time.sleep(0.2)  # it is under way and cannot end
    consumer.submit(cancels=(handle,))
    _wait_for(lambda: bool(told))
    os.kill(producer.control.mover_pid, signal.SIGKILL)
    ended = consumer.wait(ReadEnded)
    assert ended.handle == handle
    assert ended.slot is None
    assert "the read failed" in ended.error


def test_a_new_mover_of_the_producer_costs_no_read(process_pair: tuple[Half, Half]) -> None:
    """What the consumer knows of the peer's memory is out of date: it asks once and reads from the new mover."""
    producer, consumer = process_pair
    assert _read_all(producer, consumer).error is None
    os.kill(producer.control.mover_pid, signal.SIGKILL)
    assert producer.wait(MoverRestarted).handles == ()
    _wait_for(lambda: producer.control._mover.ready)
    assert _read_all(producer, consumer).error is None
    assert consumer.control.stats().failed_transfers == 0


def test_a_stopped_mover_of_ours_is_replaced(process_pair: tuple[Half, Half]) -> None:
    producer, consumer = process_pair
    source = producer.grant(tuple(range(BLOCKS)))
    consumer.read(source, (0,), remote=(0,))
    stopped, restarts = consumer.control.mover_pid, consumer.control.stats().mover_restarts
    os.kill(stopped, signal.SIGSTOP)
    handles = tuple(consumer.post(source, tuple(range(BLOCKS))) for _ in range(3))
    _wait_for(lambda: len(consumer.control._moves._moves) == 3)
    assert _report(consumer, 0.5) is None
    consumer.submit(restart_mover=True)
    fenced = consumer.wait(MoverRestarted).handles
    for _ in set(handles) - set(fenced):
        assert consumer.wait(ReadEnded).handle in handles
    assert _read_all(producer, consumer).error is None
    assert consumer.control.mover_pid != stopped
    assert consumer.control.stats().mover_restarts == restarts + 1


# --------------------------------------------------------------------------------- whole processes come and go

_PRODUCER = """
    import sys, time
    import msgspec
    sys.path.insert(0, {root!r})
    from benchmarks.transfer_half import Half
    half = Half("child", transport={transport!r}, num_blocks={blocks}, bytes_per_block={block_bytes}).start()
    half.blocks[:] = 9
    source = half.grant(tuple(range({blocks})))
    print(half.control.port, half.control.mover_pid, msgspec.json.encode(source).decode(), flush=True)
    {end}
"""


def _producer_process(transport: str, end: str = "time.sleep(60)") -> tuple[subprocess.Popen[str], list[str]]:
    code = textwrap.dedent(_PRODUCER).format(
        root=str(ROOT), transport=transport, blocks=BLOCKS, block_bytes=BLOCK_BYTES, end=end
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("movers", MOVERS, ids="-".join)
def test_the_mover_dies_with_a_killed_instance_and_reads_from_it_end(movers: tuple[str, MoverKind]) -> None:
    transport, mover = movers
    process, (_, mover_pid, granted) = _producer_process(transport)
    consumer = Half(
        "consumer", transport=transport, mover=mover, num_blocks=BLOCKS, bytes_per_block=BLOCK_BYTES
    ).start()
    try:
        source = msgspec.json.decode(granted, type=RemoteSource)
        assert consumer.read(source, (0,), remote=(0,)).slot == (source.grant.nonce, 7)
        handle = consumer.post(source, tuple(range(BLOCKS)))
        process.kill()
        process.wait()
        _wait_for(lambda: _gone(int(mover_pid)))
        ended = consumer.wait(ReadEnded)
        assert ended.handle == handle
        assert (ended.slot is None) == (ended.error is not None)
        again = consumer.read(source, (0,), remote=(0,))
        assert again.slot is None
        assert "gone" in again.error
    finally:
        process.kill()
        consumer.close()


@pytest.mark.parametrize("end", ["sys.exit(0)", "half.close()"])
def test_no_mover_is_left_when_an_instance_ends(end: str) -> None:
    process, (_, mover_pid, *_) = _producer_process("shm", end)
    assert process.wait(20) == 0
    _wait_for(lambda: _gone(int(mover_pid)))


def test_the_mover_process_needs_neither_torch_nor_transformers(process_pair: tuple[Half, Half]) -> None:
    producer, consumer = process_pair
    assert _read_all(producer, consumer).error is None
    maps = Path(f"/proc/{consumer.control.mover_pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "numpy" in maps


def test_close_leaves_no_child() -> None:
    half = Half("p", transport="shm").start()
    pid = half.control.mover_pid
    half.close()
    assert _gone(pid)
