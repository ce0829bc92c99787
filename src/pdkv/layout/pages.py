"""From a model's layer to a cache on one rank: heads divided, type chosen, packed by the backend (section 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pdkv.errors import ConfigError
from pdkv.layout.dtypes import DS_MLA_RECORD_BYTES, KvDtype
from pdkv.layout.specs import AttentionCache, StateCache
from pdkv.models.spec import LayerKind, LayerSpec, ModelSpec, Record, RecurrentState

_V4_RECORD_BYTES = 584
_V4_PACKED_ALIGNMENT = 576
_V4_PLAIN_ALIGNMENT = 512


def kv_heads_per_rank(kv_heads: int, tensor_parallel: int) -> int:
    """KV heads that one tensor-parallel rank keeps: divided down to one, then replicated."""
    return max(1, kv_heads // tensor_parallel)


def page_bytes(layer: LayerSpec, *, block_size: int, dtype: KvDtype, tensor_parallel: int) -> int:
    """Bytes an attention layer stores for a block of ``block_size`` tokens on one rank, packed as ``dtype`` wants."""
    heads = 1 if layer.replicated else kv_heads_per_rank(layer.kv_heads, tensor_parallel)
    return block_size * heads * dtype.cell_bytes(layer.head_dim, layer.head_dim_v)


def attention_cache(
    layer: LayerSpec, *, block_size: int, dtype: KvDtype, tensor_parallel: int, storage: str = "auto"
) -> AttentionCache:
    """The cache of an attention layer on one rank, before its backend packs it.

    ``storage`` is the resolved ``--kv-cache-dtype``, which latent caches must agree on. ``dtype`` is not looked at by
    records that have a type of their own.
    """
    heads = layer.kv_heads if layer.replicated else kv_heads_per_rank(layer.kv_heads, tensor_parallel)
    windowed = layer.kind in (LayerKind.SLIDING_WINDOW, LayerKind.SLIDING_WINDOW_MLA, LayerKind.RSWA)
    cache = AttentionCache(
        kind=layer.kind,
        block_size=layer.fixed_block or block_size,
        kv_heads=heads,
        head_dim=layer.head_dim,
        head_dim_v=layer.head_dim_v,
        element=dtype.element,
        quant=dtype.quant,
        tokens_per_state=layer.tokens_per_state,
        max_tp_shards=1 if layer.replicated else None,
        reach=layer.reach if windowed else None,
        chunk=layer.reach if layer.kind is LayerKind.CHUNKED_LOCAL else None,
        leads_index=layer.leads_index,
    )
    if layer.record is not Record.PLAIN:
        return _record(cache, layer.record, dtype, storage)
    if layer.kind is LayerKind.MLA:
        return replace(cache, storage=storage, role="SPARSE")
    return cache


def _record(cache: AttentionCache, record: Record, dtype: KvDtype, storage: str) -> AttentionCache:
    """``cache`` with the bytes of its record (section 3.4)."""
    packed = storage == "fp8_ds_mla"
    alignment = _V4_PACKED_ALIGNMENT if packed else _V4_PLAIN_ALIGNMENT
    if record is Record.DEEPSEEK_SPARSE:
        return replace(cache, storage=storage, role="SPARSE", state_bytes=DS_MLA_RECORD_BYTES.get(storage))
    if record is Record.INDEXER:
        return replace(cache, element="uint8", quant="NONE", role="INDEXER")
    if record is Record.V4_INDEXER:
        return replace(cache, element="uint8", quant="NONE", role="SPARSE", page_alignment=alignment)
    if record is Record.V4_COMPRESSOR:
        return replace(cache, element="float32", quant="NONE", page_alignment=alignment)
    return replace(
        cache,
        element="uint8" if packed else dtype.element,
        storage=storage,
        role="SPARSE" if record is Record.V4_COMPRESSED else None,
        state_bytes=_V4_RECORD_BYTES if packed else None,
        model_version="deepseek_v4",
        page_alignment=alignment,
    )


def state_cache(
    state: RecurrentState,
    *,
    block_size: int,
    tensor_parallel: int,
    conv_dtype: str,
    cells_dtype: str,
    mode: str,
    speculative_tokens: int = 0,
    padded_page_bytes: int | None = None,
) -> StateCache:
    """The cache of a recurrent layer on one rank. Raises ConfigError when the ranks do not divide it."""
    # Groups that the ranks do not divide are replicated, so that every rank has those of its heads.
    groups = state.groups if state.groups % tensor_parallel == 0 else tensor_parallel
    channels = state.conv_channels + groups * state.group_channels
    for what, size in (("convolution channels", channels), ("heads", state.heads)):
        if size % tensor_parallel:
            raise ConfigError(
                f"{size} {what} of a recurrent layer do not divide over --tensor-parallel-size {tensor_parallel}"
            )
    tensors: list[tuple[tuple[int, ...], str]] = []
    if channels:
        tensors.append(((state.conv_rows + speculative_tokens, channels // tensor_parallel), conv_dtype))
    if state.heads:
        tensors.append(((state.heads // tensor_parallel, state.cells), cells_dtype))
    return StateCache(
        block_size=block_size,
        tensors=tuple(tensors),
        padded_page_bytes=padded_page_bytes,
        mode=mode,
        speculative_blocks=speculative_tokens,
        checkpoint_blocks=state.checkpoint_blocks,
        checkpoint_alignment=1 if state.checkpoint_blocks else None,
    )


def check_tensor_parallel(spec: ModelSpec, tensor_parallel: int) -> None:
    """Raise ConfigError unless the model's heads can be split or replicated over that many ranks, as vLLM asks."""
    shared = [layer.kv_heads for layer in spec.layers if layer.kv_heads and not layer.replicated]
    check_heads(spec.name, spec.attention_heads, shared, tensor_parallel)


def check_heads(name: str, attention_heads: int, kv_heads: Iterable[int], tensor_parallel: int) -> None:
    """`check_tensor_parallel` of a model called ``name``, whose layers have ``kv_heads`` KV heads."""
    if attention_heads % tensor_parallel:
        possible = ", ".join(str(size) for size in range(1, attention_heads + 1) if attention_heads % size == 0)
        raise ConfigError(
            f"{name}: {attention_heads} attention heads do not divide over --tensor-parallel-size {tensor_parallel}; "
            f"possible: {possible}"
        )
    for heads in kv_heads:
        if max(heads, tensor_parallel) % min(heads, tensor_parallel):
            raise ConfigError(
                f"{name}: {heads} KV heads can neither be divided nor replicated evenly over "
                f"--tensor-parallel-size {tensor_parallel}; use a divisor or a multiple of {heads}"
            )


def stage_layers(count: int, pipeline_parallel: int) -> tuple[range, ...]:
    """Layer indices of each pipeline stage: equal shares, the remainder to the stages before the last.

    (vLLM, distributed/utils.py, get_pp_indices.) Raises ConfigError when there are more stages than layers.
    """
    if pipeline_parallel > count:
        raise ConfigError(f"--pipeline-parallel-size {pipeline_parallel} is more than the model's {count} layers")
    share, remainder = divmod(count, pipeline_parallel)
    sizes = [share] * pipeline_parallel
    for back in range(2, remainder + 2):
        sizes[-back] += 1
    starts = [sum(sizes[:stage]) for stage in range(pipeline_parallel)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
