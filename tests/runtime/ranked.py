"""An `Executor` whose model is divided over real rank processes, for the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pdkv.runtime.executor import Executor
from pdkv.runtime.kv_pool import KvPool
from pdkv.runtime.models import ModelFiles, load_model
from pdkv.runtime.profiler import MemoryBaseline, ProfileLimits, determine_available_memory
from pdkv.runtime.ranks.processes import RankProcesses
from pdkv.runtime.ranks.start import profile_of, start_ranks
from pdkv.serve.options import InstanceOptions


@contextmanager
def divided(files: ModelFiles, ranks: int, *, num_blocks: int = 128, block_size: int = 4) -> Iterator[Executor]:
    """Started as `boot.start_instance` starts it, with a pool of this size whose free blocks hold NaN on rank 0."""
    settings = InstanceOptions(
        role="decode", model=str(files.directory), device="cpu", threads=ranks, tensor_parallel_size=ranks
    )
    baseline = MemoryBaseline.take("cpu")
    processes = start_ranks(settings, files, "cpu", baseline)
    assert isinstance(processes, RankProcesses)
    try:
        with processes.explained():
            model = load_model(files, group=processes.group)
            shape = (num_blocks, model.num_layers, 2, block_size, model.kv_heads, model.head_dim)
            limits = ProfileLimits(
                max_num_batched_tokens=64,
                max_num_seqs=8,
                max_model_len=model.max_model_len,
                block_size=block_size,
                bytes_per_block=KvPool.nbytes_of(shape[1:], torch.float32),
            )
            processes.begin_profile(profile_of(settings, limits))
            determine_available_memory(model, baseline, limits, ranks_here=ranks)
        assert [rank.available_kv_bytes > 0 for rank in processes.measured()] == [True] * (ranks - 1)
        pool = KvPool.create(
            num_blocks, model.num_layers, block_size, model.kv_heads, model.head_dim, model.dtype, ranks=ranks
        )
        pool.tensor[1:].fill_(float("nan"))
        processes.make_pools(pool)
        yield Executor(model, pool, processes)
    finally:
        processes.close()
