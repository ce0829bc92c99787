"""Transfers between GPU pools, and between a GPU's and the host's: the promises of test_control on VRAM."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from benchmarks.transfer_half import Half

from pdkv.core.ports import MoverRestarted, ReadEnded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13", "nixl")),
        reason="no NIXL wheel is installed",
    ),
]
BLOCKS = 96
BLOCK_BYTES = 1 << 20
DEVICES = [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")]


@pytest.fixture(params=DEVICES, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Half, Half]]:
    """(producer, consumer), each on its device; every block of the producer is full of its number plus one."""
    sizes = {"num_blocks": BLOCKS, "bytes_per_block": BLOCK_BYTES}
    producer = Half("producer", transport="nixl", device=request.param[0], **sizes).start()
    consumer = Half("consumer", transport="nixl", device=request.param[1], **sizes).start()
    for block in range(BLOCKS):
        producer.blocks[block] = block + 1
    _synchronize()
    yield producer, consumer
    consumer.close()
    producer.close()


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def _host(blocks: Any) -> np.ndarray:
    return blocks.copy() if isinstance(blocks, np.ndarray) else blocks.cpu().numpy()


def test_a_read_moves_exactly_the_right_blocks(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    source = producer.grant((5, 6, 7, 20, 0))
    ended = consumer.read(source, (1, 2, 3, 9, 63))
    assert ended.error is None
    assert ended.slot == (source.grant.nonce, source.grant.lease_id)
    assert ended.moved_bytes == 5 * BLOCK_BYTES
    expected = np.zeros(BLOCKS, np.uint8)
    expected[[1, 2, 3, 9, 63]] = [6, 7, 8, 21, 1]
    arrived = _host(consumer.blocks)
    assert np.array_equal(arrived, np.broadcast_to(expected[:, None], arrived.shape))


def test_a_released_lease_shows_in_the_slot_or_is_refused(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    source = producer.grant((1, 2), lease_id=55, slot=9)
    producer.slot_words[9] = 0
    assert consumer.read(source, (4, 5)).slot is None


def test_a_restart_during_a_read_is_a_fence(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    source = producer.grant(tuple(range(BLOCKS)))
    assert consumer.read(source, (0,), remote=(0,)).error is None
    handle = consumer.post(source, tuple(reversed(range(BLOCKS))))
    until = time.monotonic() + 30
    while not consumer.blocks[BLOCKS - 1].any():
        assert time.monotonic() < until
        time.sleep(0.001)
    consumer.submit(restart_mover=True)
    item = consumer.inbox.get(timeout=60)
    if isinstance(item, ReadEnded):  # it was quicker
        item = consumer.wait(MoverRestarted)
    else:
        assert item == MoverRestarted(handles=(handle,))
    consumer.blocks[:] = 0
    _synchronize()
    time.sleep(0.5)
    assert not consumer.blocks.any()
    assert consumer.read(source, tuple(range(BLOCKS))).error is None
    assert np.array_equal(_host(consumer.blocks), _host(producer.blocks))
    assert not consumer.failures
