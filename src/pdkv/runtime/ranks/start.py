"""Start-up of an instance's other ranks, in step with rank 0's own."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager

from pdkv.errors import ConfigError
from pdkv.runtime.models.files import ModelFiles
from pdkv.runtime.precheck import no_ranks_on_cuda
from pdkv.runtime.profiler import MemoryBaseline, ProfileLimits
from pdkv.runtime.ranks.messages import Begin, Profile
from pdkv.runtime.ranks.processes import RankProcesses
from pdkv.runtime.settings import InstanceSettings


def rank_threads(settings: InstanceSettings) -> int:
    """CPU threads of each rank: the instance's, divided."""
    threads = settings.threads or len(os.sched_getaffinity(0))
    return max(1, threads // settings.tensor_parallel_size)


def start_ranks(
    settings: InstanceSettings, files: ModelFiles, device: str, baseline: MemoryBaseline
) -> RankProcesses | None:
    """The processes of ranks 1 and on, which begin to load; None where there are none. Call on a thread that stays.

    Raises ConfigError on a GPU: what moves an instance's KV reaches one process's GPU memory only.
    """
    ranks = settings.tensor_parallel_size
    if ranks == 1:
        return None
    if device.startswith("cuda"):
        raise ConfigError(no_ranks_on_cuda(ranks))
    return RankProcesses(begin_of(settings, files, device, baseline), [device] * ranks)


def begin_of(settings: InstanceSettings, files: ModelFiles, device: str, baseline: MemoryBaseline) -> Begin:
    """What every rank must know to load; its own number and device are put in by `RankProcesses`."""
    return Begin(
        rank=0,
        ranks=settings.tensor_parallel_size,
        rendezvous="",
        model_name=files.name,
        directory=str(files.directory),
        device=device,
        dtype=settings.dtype,
        weight_storage=settings.weight_storage,
        threads=rank_threads(settings),
        debug=settings.debug,
        total_bytes=baseline.total_bytes,
        free_bytes=baseline.free_bytes,
    )


def profile_of(settings: InstanceSettings, limits: ProfileLimits) -> Profile:
    """What the other ranks must know to measure as rank 0 does."""
    return Profile(
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        bytes_per_block=limits.bytes_per_block,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        share=settings.memory_share,
    )


def together(ranks: RankProcesses | None) -> AbstractContextManager[None]:
    """`RankProcesses.explained`, where there are other ranks."""
    return contextlib.nullcontext() if ranks is None else ranks.explained()
