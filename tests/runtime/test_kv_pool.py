"""The KV pool: where a block lies, and that another process sees and changes the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from pdkv.errors import ConfigError
from pdkv.runtime.device_memory import DeviceMemory
from pdkv.runtime.kv_pool import KvPool, SharedMemory

_CHILD = """
import sys
import numpy as np
from pdkv.runtime.shared_memory import SharedMemory
fd, nbytes, offset, count = map(int, sys.argv[1:])
memory = SharedMemory.attach(fd, nbytes)
floats = memory.array(np.float32, (nbytes // 4,))[offset // 4 : offset // 4 + count]
assert floats.tolist() == list(range(count)), floats[:8]
floats[:] = -floats
"""


def test_a_block_is_one_contiguous_piece_that_another_process_shares() -> None:
    pool = KvPool.create(6, num_layers=3, block_size=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    assert isinstance(pool.memory, SharedMemory)
    assert pool.tensor.shape == (6, 3, 2, 4, 2, 8)
    assert pool.bytes_per_block == 3 * 2 * 4 * 2 * 8 * 4
    assert pool.memory.nbytes == 6 * pool.bytes_per_block
    assert pool.tensor.data_ptr() == pool.memory.address
    assert not pool.tensor.any()
    count = pool.bytes_per_block // 4
    pool.tensor[4] = torch.arange(count, dtype=torch.float32).view(pool.tensor.shape[1:])
    arguments = (pool.memory.fd, pool.memory.nbytes, 4 * pool.bytes_per_block, count)
    subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, arguments)], pass_fds=(pool.memory.fd,), check=True, timeout=60
    )
    assert torch.equal(pool.tensor[4].flatten(), -torch.arange(count, dtype=torch.float32))
    assert not pool.tensor[[0, 1, 2, 3, 5]].any()
    pool.close()
    pool.close()


def test_bfloat16_pool_is_a_view_of_the_memory() -> None:
    pool = KvPool.create(2, 1, 2, 1, 4, torch.bfloat16)
    assert isinstance(pool.memory, SharedMemory)
    pool.tensor[1] = 1.0
    raw = pool.memory.array(np.uint16, (2, pool.bytes_per_block // 2))
    assert set(raw[1].tolist()) == {0x3F80}
    assert not raw[0].any()


def test_a_large_pool_costs_nothing_until_it_is_used() -> None:
    pool = KvPool.create(100_000, 30, 16, 3, 64, torch.float32)
    assert pool.memory.nbytes == 100_000 * 737_280
    pool.tensor[99_999, 29, 1, 15, 2, 63] = 7.0
    assert pool.tensor[99_999].sum() == 7.0
    pool.close()


def test_impossible_pools_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        KvPool.create(1, 2, 16, 3, 64, torch.float32)


@pytest.mark.gpu
def test_on_cuda_the_pool_is_an_ordinary_tensor() -> None:
    pool = KvPool.create(4, 2, 16, 2, 8, torch.bfloat16, "cuda")
    assert pool.tensor.is_cuda
    assert pool.tensor.is_contiguous()
    assert isinstance(pool.memory, DeviceMemory)
    assert (pool.memory.kind, pool.memory.device) == ("VRAM", pool.tensor.get_device())
    assert pool.memory.address == pool.tensor.data_ptr()
    assert pool.memory.nbytes == 4 * pool.bytes_per_block
    pool.close()


def test_the_ranks_of_an_instance_share_one_file_and_write_each_into_its_own_part() -> None:
    pool = KvPool.create(5, 2, 4, 1, 8, torch.float32, ranks=3)
    assert isinstance(pool.memory, SharedMemory)
    assert pool.memory.nbytes == 3 * 5 * pool.bytes_per_block
    other = KvPool.attach(os.dup(pool.memory.fd), 2, 3, (5, 2, 2, 4, 1, 8), torch.float32)
    assert (other.ranks, other.num_blocks, other.bytes_per_block) == (3, 5, pool.bytes_per_block)
    other.tensor[4] = 7.0
    everything = pool.memory.array(np.float32, (3 * 5, pool.bytes_per_block // 4))
    assert np.flatnonzero(everything.any(axis=1)).tolist() == [2 * 5 + 4]
    assert not pool.tensor.any()
    with pytest.raises(ValueError, match="2 ranks of shape"):
        KvPool.attach(pool.memory.fd, 1, 2, (5, 2, 2, 4, 1, 8), torch.float32)
