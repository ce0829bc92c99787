"""Start-up of one instance: weights, memory profile, pool, engine, side channel, in the order in which vLLM goes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from pdkv import __version__
from pdkv.core.blocks.hashing import HashFunction
from pdkv.core.config import EngineConfig
from pdkv.core.engine import Engine, Identity
from pdkv.core.events import Event
from pdkv.core.transfer.messages import Peer
from pdkv.errors import ConfigError, FenceLost
from pdkv.layout.capacity import Capacity
from pdkv.layout.dtypes import resolve_kv_dtype
from pdkv.layout.groups import RankLayout, group_layers
from pdkv.models.spec import LayerKind, LayerSpec
from pdkv.runtime.addresses import address_of
from pdkv.runtime.block_hash import block_hash
from pdkv.runtime.control import Control, PeerIdentity, TransferMemory, available_transport
from pdkv.runtime.executor import Executor
from pdkv.runtime.instance import Instance, InstanceInfo, new_boot_secret, new_engine_id
from pdkv.runtime.kv_pool import KvPool, SharedMemory
from pdkv.runtime.models.loader import LoadedModel, load_model
from pdkv.runtime.precheck import check, longest_asked, no_cuda, pool_capacity
from pdkv.runtime.profiler import MemoryBaseline, MemoryProfile, ProfileLimits, determine_available_memory
from pdkv.runtime.ranks.processes import RankProcesses
from pdkv.runtime.ranks.start import profile_of, rank_threads, start_ranks, together
from pdkv.runtime.secret_file import transfer_secret
from pdkv.runtime.settings import InstanceSettings, engine_config
from pdkv.runtime.transports.base import SLOT_BYTES
from pdkv.units import format_bytes, seconds_to_ns

Say = Callable[[str], None]


def start_instance(
    settings: InstanceSettings,
    *,
    on_events: Callable[[tuple[Event, ...]], None] | None = None,
    say: Say = lambda line: None,
) -> Instance:
    """A running instance. ``say`` gets the start-up log, line by line.

    Raises `ConfigError`, `UnsupportedModel` or `DoesNotFit` with what to change; nothing is left running then.
    """
    device = choose_device(settings.device)
    # Now, not after minutes of loading:
    available_transport(settings.transport, "VRAM" if device.startswith("cuda") else "DRAM")
    hash_function = block_hash(settings.prefix_caching_hash_algo)
    files = check(settings)
    baseline = MemoryBaseline.take(device)
    ranks = start_ranks(settings, files, device, baseline)
    with contextlib.ExitStack() as on_error:
        if ranks is not None:
            on_error.callback(ranks.close)
        torch.set_num_threads(rank_threads(settings))
        say(f"loading {settings.model} ...")
        group = None if ranks is None else ranks.group
        with together(ranks):
            model = load_model(files, device, settings.dtype, settings.weight_storage, group)
        each = "" if ranks is None else f" on each of {model.ranks} tensor-parallel ranks"
        weights = format_bytes(model.weights_bytes)
        say(f"loaded {model.name}: {weights} of weights{each} in {model.dtype} on {model.device}")
        layout = model_layout(model, settings.block_size)
        profile, capacity = plan_memory(settings, model, baseline, layout, ranks)
        for line in (*profile.lines(), *capacity_lines(capacity, settings.block_size)):
            say(line)
        info = instance_info(settings, model, profile, capacity)
        config = engine_config(settings, capacity.num_blocks, capacity.max_model_len)
        memory = allocate(model, capacity, settings.block_size)
        try:
            if ranks is not None:
                ranks.make_pools(memory.pool)
            instance = _assemble(settings, model, memory, info, config, hash_function, on_events, ranks)
        except BaseException as error:
            if not isinstance(error, FenceLost):
                memory.close()
            raise
        on_error.pop_all()
        return instance


def choose_device(device: str) -> str:
    """``cuda`` for ``auto`` where there is one, else ``cpu``; anything else as it is.

    Raises `ConfigError` for a CUDA device that is not there.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ConfigError(no_cuda(device, torch.__version__))
        if index and int(index) >= count:
            there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
            raise ConfigError(f"--device {device}: there is no such device, this machine has {there}; use one of those")
    return device


def model_layout(model: LoadedModel, block_size: int) -> RankLayout:
    """Pages of the loaded model's layers, in the dtype it runs in."""
    layer = LayerSpec(LayerKind.FULL_ATTENTION, model.total_kv_heads, model.head_dim, model.head_dim)
    dtype = resolve_kv_dtype("auto", str(model.dtype).removeprefix("torch."))
    layers = (layer,) * model.num_layers
    return group_layers(layers, block_size=block_size, dtype=dtype, tensor_parallel=model.ranks)


def plan_memory(
    settings: InstanceSettings,
    model: LoadedModel,
    baseline: MemoryBaseline,
    layout: RankLayout,
    ranks: RankProcesses | None = None,
) -> tuple[MemoryProfile, Capacity]:
    """How many bytes there are for KV on rank 0, and what the ranks hold, of which the poorest decides.

    Raises `DoesNotFit` when not even one request fits.
    """
    longest = longest_asked(settings, model.max_model_len, model.name)
    limits = ProfileLimits(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=longest,
        block_size=settings.block_size,
        bytes_per_block=layout.bytes_per_block,
    )
    if ranks is not None:
        ranks.begin_profile(profile_of(settings, limits))
    with together(ranks):
        profile = determine_available_memory(
            model,
            baseline,
            limits,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
            share=settings.memory_share,
            ranks_here=model.ranks,
        )
    others = [] if ranks is None else [rank.available_kv_bytes for rank in ranks.measured()]
    return profile, pool_capacity(settings, layout, [profile.available_kv_bytes, *others], longest)


def capacity_lines(capacity: Capacity, block_size: int) -> list[str]:
    """What the pool holds, for the start-up log (vLLM's line, then blocks)."""
    ranks = capacity.available_per_rank
    each = "" if len(ranks) == 1 else f" on each of {len(ranks)} tensor-parallel ranks"
    per_rank = ", ".join(f"rank {rank} {format_bytes(count)}" for rank, count in enumerate(ranks))
    return [
        *([f"KV cache memory: {per_rank}; the least decides"] if each else []),
        f"KV cache size: {capacity.kv_cache_size_tokens:,} tokens, Maximum concurrency for "
        f"{capacity.max_model_len:,} tokens per request: {capacity.max_concurrency:.2f}x",
        f"{capacity.num_blocks} blocks of {block_size} tokens ({capacity.usable_blocks} usable, one is the null "
        f"block), {capacity.bytes_per_block} bytes each{each}",
    ]


class InstanceMemory:
    """What one instance holds for KV: the paged pool, and the lease slots that peers read (host memory always)."""

    def __init__(self, pool: KvPool, heads: int) -> None:
        """Takes the pool over, with at least one slot a block; ``heads`` are the model's KV heads, of all ranks."""
        self.pool = pool
        self._heads = heads
        self.num_slots = max(1024, pool.num_blocks)
        self.slots = SharedMemory(self.num_slots * SLOT_BYTES)

    @property
    def slot_array(self) -> npt.NDArray[np.uint64]:
        """The slots, uint64[num_slots, 2], as the engine writes them."""
        return self.slots.array(np.dtype("<u8"), (self.num_slots, 2)).view(np.uint64)

    @property
    def transfer(self) -> TransferMemory:
        """The same memory as the mover and the peers see it."""
        return TransferMemory(self.pool.memory, self.slots, self.pool.geometry(self._heads), self.num_slots)

    def close(self) -> None:
        """Give it back; nothing may transfer any more."""
        self.pool.close()
        self.slots.close()


def allocate(model: LoadedModel, capacity: Capacity, block_size: int) -> InstanceMemory:
    """The memory that was planned, on the model's device. Raises `DoesNotFit` when it is not there after all."""
    pool = KvPool.create(
        capacity.num_blocks,
        model.num_layers,
        block_size,
        model.kv_heads,
        model.head_dim,
        model.dtype,
        str(model.device),
        ranks=model.ranks,
    )
    assert pool.bytes_per_block == capacity.bytes_per_block, "layout and pool disagree about a block's bytes"
    return InstanceMemory(pool, model.total_kv_heads)


def _assemble(
    settings: InstanceSettings,
    model: LoadedModel,
    memory: InstanceMemory,
    info: InstanceInfo,
    config: EngineConfig,
    hash_function: HashFunction,
    on_events: Callable[[tuple[Event, ...]], None] | None,
    ranks: RankProcesses | None,
) -> Instance:
    """Engine, control thread and instance on ``memory``, running; `Instance.close` gives it back and ends ``ranks``."""
    nonce, secret = new_boot_secret()
    identity = Identity(engine_id=info.engine_id, nonce=nonce, secret=secret)
    engine = Engine(config, identity, memory.slot_array, hash_function=hash_function)
    made: list[Instance] = []  # the control thread is made before the instance that it delivers to
    control = Control(
        PeerIdentity(identity, peer_facts(model)),
        memory.transfer,
        host=info.side_channel_host,
        port=settings.side_channel_port,
        transport=settings.transport,
        lease_ns=config.lease_ns,
        engine_ttl_ns=seconds_to_ns(settings.engine_ttl_s) if settings.engine_ttl_s > 0 else None,
        secret=transfer_secret(settings),
        deliver=lambda item: made[0].deliver(item),
        last_step_ns=lambda: made[0].last_step_ns,
        on_failure=lambda error: made[0].fail(error),
    )
    instance = Instance(
        engine,
        Executor(model, memory.pool, ranks),
        control,
        info,
        on_events=on_events,
        debug=settings.debug,
        on_close=memory.close,
    )
    made.append(instance)
    control.start()
    instance.info = dataclasses.replace(
        info, transport=control.transport, side_channel_port=control.port, without_nixl=control.without_nixl
    )
    here = address_of(info.side_channel_host)
    # Another process writes into a GPU's memory by itself (CUDA IPC), and nothing that ends here would stop it.
    if here is not None and isinstance(memory.pool.memory, SharedMemory):
        engine.accept_writes(Peer(info.engine_id, here, control.port))
    instance.start()
    if ranks is not None:
        ranks.watch(instance.fail)
    return instance


def instance_info(
    settings: InstanceSettings, model: LoadedModel, profile: MemoryProfile, capacity: Capacity
) -> InstanceInfo:
    """The facts of a new instance; transport and port as asked for (`_assemble` puts in what they became)."""
    return InstanceInfo(
        role=settings.role,
        engine_id=new_engine_id(settings.role),
        model_name=settings.served_model_name or model.name,
        num_blocks=capacity.num_blocks,
        bytes_per_block=capacity.bytes_per_block,
        block_size=settings.block_size,
        tensor_parallel_size=model.ranks,
        max_model_len=capacity.max_model_len,
        transport=settings.transport,
        side_channel_host=settings.side_channel_host or settings.host,
        side_channel_port=settings.side_channel_port,
        memory_profile=profile,
        bidirectional=settings.bidirectional_kv_xfer,
    )


def peer_facts(model: LoadedModel) -> dict[str, str]:
    """What must be equal on both sides for one to read the other's KV; pools are compared as `geometry.unlike` does."""
    return {
        "pdkv version": __version__,
        "model": model.fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv dtype": str(model.dtype).removeprefix("torch."),
        "layers": str(model.num_layers),
        "kv heads": str(model.total_kv_heads),
        "head dim": str(model.head_dim),
    }
