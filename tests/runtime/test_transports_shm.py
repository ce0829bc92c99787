"""Shared memory between processes: only the very files a living peer on this host announced, and only for reading."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from benchmarks.plain_pool import plain

from pdkv.errors import DoesNotFit
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import Copy, Slice, TransferMemory, TransportError
from pdkv.runtime.transports.shm import ShmTransport, shm_offer
from pdkv.runtime.wire import PeerMemory


@pytest.fixture
def local() -> Iterator[TransferMemory]:
    memory = TransferMemory(SharedMemory(8 * 64), SharedMemory(4 * 16), plain(8, 64), 4)
    yield memory
    memory.pool.close()
    memory.slots.close()


@pytest.fixture
def remote() -> Iterator[TransferMemory]:
    memory = TransferMemory(SharedMemory(8 * 64), SharedMemory(4 * 16), plain(8, 64), 4)
    memory.pool.array(np.uint8, 512)[:] = np.arange(512) % 251
    memory.slots.array(np.uint64, (4, 2))[2] = (2**64 - 1, 12)
    yield memory
    memory.pool.close()
    memory.slots.close()


def offered(memory: TransferMemory, **changes: object) -> PeerMemory:
    shm = msgspec.structs.replace(shm_offer(memory.pool, memory.slots), **changes)
    return PeerMemory(geometry=plain(8, 64), num_slots=4, shm=shm)


def posted(transport: ShmTransport, *segments: tuple[int, int, int]) -> Copy:
    (copy,) = transport.prepare("p", [Slice(np.array(segments, dtype=np.int64))])
    transport.post(copy)
    return copy


def test_segments_and_slots_are_copied(local: TransferMemory, remote: TransferMemory) -> None:
    transport = ShmTransport(local)
    transport.connect("p", offered(remote))
    transport.check_peer("p")
    assert transport.done(posted(transport, (64, 128, 64), (0, 3, 5)))
    expected = np.zeros(512, np.uint8)
    expected[128:192] = remote.pool.array(np.uint8, 512)[64:128]
    expected[3:8] = remote.pool.array(np.uint8, 512)[:5]
    assert np.array_equal(local.pool.array(np.uint8, 512), expected)
    slot = transport.prepare_slot("p", 2)
    transport.post(slot)
    assert transport.slot_value(slot) == (2**64 - 1, 12)
    transport.close()
    with pytest.raises(TransportError, match="not connected"):
        posted(transport, (0, 0, 1))


@pytest.mark.parametrize("segment", [(500, 0, 13), (0, 500, 13)])
def test_segments_outside_a_pool_are_refused(
    local: TransferMemory, remote: TransferMemory, segment: tuple[int, int, int]
) -> None:
    transport = ShmTransport(local)
    transport.connect("p", offered(remote))
    with pytest.raises(TransportError, match="outside"):
        posted(transport, segment)
    transport.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"boot_id": "elsewhere"}, "another host.*--transport nixl"),
        ({"pid": 2**22 + 1}, "is gone"),
        ({"pool_fd": 9999}, "cannot open"),
        ({"pool_inode": 1}, "another file"),
    ],
    ids=["host", "process", "descriptor", "file"],
)
def test_what_is_not_the_announced_file_is_refused(
    local: TransferMemory, remote: TransferMemory, changes: dict[str, object], text: str
) -> None:
    transport = ShmTransport(local)
    with pytest.raises(TransportError, match=text):
        transport.connect("p", offered(remote, **changes))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError):
        transport.connect("p", offered(remote, **changes))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_smaller_file_than_announced_is_refused(local: TransferMemory, remote: TransferMemory) -> None:
    memory = msgspec.structs.replace(offered(remote), geometry=plain(9, 64))
    with pytest.raises(TransportError, match="512 bytes, 576 were announced"):
        ShmTransport(local).connect("p", memory)


def test_a_dead_peer_is_seen_before_a_read(local: TransferMemory, remote: TransferMemory) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(remote.pool.fd, remote.slots.fd)
    )
    transport = ShmTransport(local)
    transport.connect("p", offered(remote, pid=child.pid))
    transport.check_peer("p")
    child.kill()
    child.wait()
    with pytest.raises(TransportError, match="p is gone"):
        transport.check_peer("p")
    assert transport.done(posted(transport, (0, 0, 64)))  # what is mapped stays readable: the slot decides
    transport.close()


def test_a_mapping_for_reading_cannot_be_written(remote: TransferMemory) -> None:
    view = SharedMemory.attach(os.dup(remote.pool.fd), 512, writable=False)
    array = view.array(np.uint8, 512)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    del array
    view.close()


def test_the_file_cannot_shrink_under_a_reader(remote: TransferMemory) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(remote.pool.fd, 10)
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 512)
    with pytest.raises(ValueError, match="sealed"):
        SharedMemory.attach(loose, 512)
    os.close(loose)


def test_memory_that_cannot_be_had_says_so() -> None:
    with pytest.raises(DoesNotFit, match="smaller KV pool"):
        SharedMemory(1 << 62)


def test_views_stay_valid_after_close() -> None:
    memory = SharedMemory(64)
    view = memory.array(np.uint8, 64)
    memory.close()
    memory.close()
    view[:] = 3
    assert view.sum() == 192
