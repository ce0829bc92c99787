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
from pdkv.runtime.ranks.start import begin_of, profile_of
from pdkv.serve.options import InstanceOptions


@contextmanager
def divided(
    files: ModelFiles, ranks: int, *, num_blocks: int = 128, block_size: int = 4, devices: tuple[str, ...] = ("cpu",)
) -> Iterator[Executor]:
    """Started as `boot.start_instance` starts it, with a pool of this size whose free blocks hold NaN on rank 0.

    ``devices`` are the ranks', the first taken for all if it is the only one.
    """
    first = devices[0]
    settings = InstanceOptions(
        role="decode",
        model=str(files.directory),
        device=first,
        dtype="float32",
        threads=ranks,
        tensor_parallel_size=ranks,
        kv_cache_memory_bytes=64 << 20,
    )
    baseline = MemoryBaseline.take(first)
    of_each = list(devices) if len(devices) == ranks else [first] * ranks
    processes = RankProcesses(begin_of(settings, files, first, baseline), of_each)
    try:
        with processes.explained():
            model = load_model(files, first, "float32", group=processes.group)
            shape = (num_blocks, model.num_layers, 2, block_size, model.kv_heads, model.head_dim)
            limits = ProfileLimits(
                max_num_batched_tokens=64,
                max_num_seqs=8,
                max_model_len=model.max_model_len,
                block_size=block_size,
                bytes_per_block=KvPool.nbytes_of(shape[1:], torch.float32),
            )
            processes.begin_profile(profile_of(settings, limits))
            here = ranks if first == "cpu" else 1
            determine_available_memory(
                model, baseline, limits, kv_cache_memory_bytes=settings.kv_cache_memory_bytes, ranks_here=here
            )
        assert [rank.available_kv_bytes for rank in processes.measured()] == [64 << 20] * (ranks - 1)
        pool = KvPool.create(
            num_blocks, model.num_layers, block_size, model.kv_heads, model.head_dim, model.dtype, first, ranks=ranks
        )
        pool.tensor[1:].fill_(float("nan"))
        processes.make_pools(pool)
        yield Executor(model, pool, processes)
    finally:
        processes.close()
