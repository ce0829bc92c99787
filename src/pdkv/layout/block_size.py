"""Tokens per block: what the backends share, then raised for states and for layers in a larger type (section 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.layout.backends import Backend, common_block_size
from pdkv.layout.dtypes import KvDtype
from pdkv.layout.specs import AttentionCache
from pdkv.models.spec import LayerKind, LayerSpec
from pdkv.units import cdiv

# Latent kernels want whole kernel blocks in 128 tokens when states decide the block size.
_LATENT_HYBRID_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """``block_size`` of the attention layers, and what states and windows are padded to where they must be."""

    block_size: int
    state_page_bytes: int | None = None
    window_page_bytes: int | None = None


def token_bytes(
    layer: LayerSpec, dtype: KvDtype, backend: Backend, tensor_parallel: int, *, packed: bool = True
) -> int:
    """Bytes of one token in one attention layer of a rank, as vLLM reckons it here: K and V of equal head size."""
    latent = layer.kind is LayerKind.MLA
    cache = AttentionCache(
        kind=layer.kind,
        block_size=1,
        kv_heads=1 if latent else max(1, layer.kv_heads // tensor_parallel),
        head_dim=layer.head_dim,
        head_dim_v=0 if latent else layer.head_dim,
        element=dtype.element,
        quant=dtype.quant,
    )
    return (backend.pack(cache) if packed and not latent else cache).page_bytes


def resolve_block_size(
    backends: Sequence[Backend],
    asked: int | None,
    default: int,
    *,
    attention: LayerSpec | None,
    dtype: KvDtype,
    model_dtype: KvDtype,
    tensor_parallel: int,
    state_bytes: int | None,
    skip_layers: bool,
) -> BlockSizes:
    """The sizes for a model whose attention layers read through ``backends`` (in layer order, the first decides).

    ``asked`` is --block-size; states (``state_bytes`` each) and skip layers may raise it all the same. ``attention`` is
    a layer that stands for the model's heads. Raises ConfigError when a raised size is not one that all backends take.
    """
    if not backends:
        return BlockSizes(asked or default)
    found = BlockSizes(asked if asked is not None else common_block_size(backends, default))
    before = found.block_size
    if attention is not None and state_bytes:
        per_token = token_bytes(attention, dtype, backends[0], tensor_parallel)
        if skip_layers and dtype.quant.startswith(("TURBOQUANT", "ULTRAQUANT")):
            per_token = math.lcm(per_token, token_bytes(attention, model_dtype, backends[0], tensor_parallel))
        found = _covering_states(found, backends, per_token, state_bytes, attention.kind is LayerKind.MLA)
    if attention is not None and skip_layers:
        primary = token_bytes(attention, dtype, backends[0], tensor_parallel)
        skipped = token_bytes(attention, model_dtype, backends[0], tensor_parallel)
        found = _covering_skip_layers(found, backends[0], primary, skipped)
    rejecting = [backend.name for backend in backends if not backend.accepts_block(found.block_size)]
    if found.block_size != before and rejecting:
        raise ConfigError(
            f"the block size had to be raised from {before} to {found.block_size} tokens, which {', '.join(rejecting)} "
            "does not take; choose another --block-size or --attention-backend"
        )
    return found


def _covering_states(
    sizes: BlockSizes, backends: Sequence[Backend], per_token: int, state_bytes: int, latent: bool
) -> BlockSizes:
    """Attention pages at least as large as a state, and states padded to them."""
    step = max(backends[0].smallest_block, sizes.block_size, _LATENT_HYBRID_ALIGNMENT if latent else 1)
    shared = math.lcm(*(backend.smallest_block for backend in backends))
    wanted = step * cdiv(state_bytes, step * per_token)
    wanted = shared * cdiv(wanted, shared)
    block_size = max(sizes.block_size, wanted)
    page = block_size * per_token
    return BlockSizes(block_size, None if page == state_bytes else page)


def _covering_skip_layers(sizes: BlockSizes, backend: Backend, primary: int, skipped: int) -> BlockSizes:
    """Quantized pages at least as large as a kernel block of the layers that are not quantized."""
    if skipped == primary:
        return sizes
    if skipped < primary:
        raise ConfigError(
            f"--kv-cache-dtype-skip-layers: a layer in the model's own type takes {skipped} bytes a token, less than "
            f"the {primary} of the quantized ones"
        )
    step = max(backend.smallest_block, sizes.block_size)
    needed = max(skipped * backend.smallest_block, sizes.state_page_bytes or 0)
    block_size = max(sizes.block_size, step * cdiv(needed, step * primary))
    page = block_size * primary
    return BlockSizes(block_size, None if sizes.state_page_bytes is None else page, page)
