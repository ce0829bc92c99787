"""What options and config.json alone decide, before torch is imported and weights are read: `check`.

It only ever refuses what the start itself would refuse later; what it cannot tell, it leaves to that.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError, DoesNotFit, PdkvError
from pdkv.layout.capacity import Capacity, size_pool
from pdkv.layout.dtypes import resolve_kv_dtype
from pdkv.layout.groups import RankLayout, group_layers
from pdkv.layout.pages import check_tensor_parallel
from pdkv.models.families import spec_from_config
from pdkv.models.fields import text_config
from pdkv.models.spec import LayerKind, LayerSpec, ModelSpec
from pdkv.runtime.models.files import ModelFiles, resolve_model
from pdkv.runtime.secret_file import transfer_secret
from pdkv.runtime.settings import InstanceSettings, engine_config
from pdkv.units import format_bytes

_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/nvmap", "/dev/kfd")


def check(settings: InstanceSettings) -> ModelFiles:
    """The model's files, found (a GGUF is converted, a hub id downloaded) and in order as far as that is cheap to see.

    Imports no torch unless a GGUF has to be converted. Raises `ConfigError` for a device that this torch cannot have,
    an unusable secret file, an unknown model, an unreadable config.json, a length beyond the model's and options that
    contradict each other, and `DoesNotFit` for a pool that was given a size in which not one request fits.
    """
    _check_device(settings.device)
    transfer_secret(settings)
    engine_config(settings, num_blocks=2, max_model_len=2)  # for what does not depend on the model
    files = resolve_model(settings.model)
    config = read_config(files.directory / "config.json")
    _check_ranks(settings, config, files.name)
    limit = _positions(config)
    if limit is None:
        return files
    longest = longest_asked(settings, limit, files.name)
    if settings.num_gpu_blocks_override is not None or settings.kv_cache_memory_bytes is not None:
        layout = _smallest_layout(settings, config, files.name)
        _check_ram(settings, layout)
        if layout is not None:
            pool_capacity(settings, layout, [settings.kv_cache_memory_bytes or 1], longest)
    return files


def read_config(path: Path) -> dict[str, Any]:
    """A model's config.json. Raises `ConfigError` when it is no JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a JSON {type(config).__name__}, not an object; download the model again")
    return config


def no_cuda(device: str, version: str) -> str:
    """The text for a CUDA device that torch ``version`` has not."""
    return f"--device {device}: this torch ({version}) has no CUDA device; use --device cpu or auto"


def longest_asked(settings: InstanceSettings, limit: int, name: str) -> int:
    """The longest request in tokens: ``--max-model-len``, or the model's ``limit``; `ConfigError` when it is more."""
    asked = settings.max_model_len
    if isinstance(asked, int) and asked > limit:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {limit} positions that {name} was made for; lower it"
        )
    return asked if isinstance(asked, int) else limit


def pool_capacity(
    settings: InstanceSettings, layout: RankLayout, available_bytes: Sequence[int], longest: int
) -> Capacity:
    """What the pool holds whose ranks have ``available_bytes`` (or ``--num-gpu-blocks-override`` blocks) each.

    Raises `DoesNotFit`, naming the option that decided, when no request of ``longest`` tokens fits (under ``auto``:
    not even one of a token).
    """
    override = settings.num_gpu_blocks_override
    capacity = size_pool(
        [layout] * len(available_bytes),
        available_bytes,
        max_model_len=None if settings.max_model_len == "auto" else longest,
        model_limit=longest,
        num_blocks_override=override,
    )
    if override is not None and not capacity.fits:
        fitting = capacity.estimated_max_model_len
        shorter = f", or lower --max-model-len to {fitting} (or say auto)" if fitting else ""
        raise DoesNotFit(
            f"one request of {capacity.max_model_len} tokens needs {capacity.blocks_per_max_len_request} blocks of "
            f"{settings.block_size} tokens and the null block; --num-gpu-blocks-override gives {override}: raise or "
            f"remove --num-gpu-blocks-override (at least {capacity.blocks_per_max_len_request + 1}){shorter}"
        )
    capacity.require_fit()
    return capacity


def _check_device(device: str) -> None:
    """Refuse CUDA for a torch whose very version says that it has none; the rest needs torch itself."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # what imports it says so
        return
    if device.partition(":")[0] == "cuda" and version.endswith("+cpu"):
        raise ConfigError(no_cuda(device, version))


def _check_ranks(settings: InstanceSettings, config: Mapping[str, Any], name: str) -> None:
    """Refuse a number of tensor-parallel ranks that this model's heads, or the device, cannot have."""
    ranks = settings.tensor_parallel_size
    if ranks == 1:
        return
    if settings.device.partition(":")[0] == "cuda":
        raise ConfigError(no_ranks_on_cuda(ranks))
    spec = _spec(config, name)
    if spec is not None:
        check_tensor_parallel(spec, ranks)


def no_ranks_on_cuda(ranks: int) -> str:
    """The text for several ranks on GPUs."""
    return (
        f"--tensor-parallel-size {ranks} on CUDA: one process moves an instance's KV, and it cannot reach the pools "
        "that the other ranks have on other GPUs; use --tensor-parallel-size 1, or --device cpu"
    )


def _spec(config: Mapping[str, Any], name: str) -> ModelSpec | None:
    """The model's layers; None where that is the loader's to say, who has the words for odd values."""
    try:
        return spec_from_config(config, name=name)
    except (PdkvError, ValueError, TypeError, KeyError):
        return None


def _check_ram(settings: InstanceSettings, layout: RankLayout | None) -> None:
    """Refuse a KV cache that no emptying of the machine could make room for; the profile compares with what is free."""
    asked, option = settings.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    if settings.num_gpu_blocks_override is not None:
        option = "--num-gpu-blocks-override"
        asked = None if layout is None else settings.num_gpu_blocks_override * layout.bytes_per_block
    if asked is None or not _surely_cpu(settings.device):
        return
    ram, ranks = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), settings.tensor_parallel_size
    if ranks * asked > ram:
        raise DoesNotFit(too_large_a_cache(asked, f"{format_bytes(ram)} of RAM that this machine has", ranks, option))


def too_large_a_cache(asked: int, there: str, ranks: int = 1, option: str = "--kv-cache-memory-bytes") -> str:
    """The text for ``option``, of each rank, beyond what is ``there`` (bytes of what, where)."""
    each = "" if ranks == 1 else f" on each of {ranks} ranks"
    return (
        f"a KV cache of {format_bytes(asked)}{each} is more than the {there}; lower {option}, or leave "
        "it out to have the size measured"
    )


def _positions(config: Mapping[str, Any]) -> int | None:
    """The model's length as the loader will read it; None when the config leaves it to a default."""
    value = text_config(config).get("max_position_embeddings")
    return value if type(value) is int and value > 0 else None


def _smallest_layout(settings: InstanceSettings, config: Mapping[str, Any], name: str) -> RankLayout | None:
    """The pages of a model whose layers are all full attention of one shape, in no more bytes than it will take.

    None for other models: whether they run at all is the loader's to say.
    """
    spec = _spec(config, name)
    if spec is None:
        return None
    layers = spec.layers
    shapes = {(layer.kind, layer.kv_heads, layer.head_dim, layer.head_dim_v) for layer in layers}
    if len(shapes) != 1 or layers[0].kind is not LayerKind.FULL_ATTENTION:
        return None
    layer = LayerSpec(LayerKind.FULL_ATTENTION, layers[0].kv_heads, layers[0].head_dim, layers[0].head_dim_v)
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if _surely_cpu(settings.device) else "bfloat16"
    return group_layers(
        (layer,) * len(layers),
        block_size=settings.block_size,
        dtype=resolve_kv_dtype("auto", dtype),
        tensor_parallel=settings.tensor_parallel_size,
    )


def _surely_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not any(Path(node).exists() for node in _GPU_NODES))
