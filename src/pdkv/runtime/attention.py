"""Paged attention: registered with transformers as ``pdkv``, so that any decoder model reads and writes our KV pool.

A step is one ragged batch flattened to ``[1, T]``. Everything that depends only on the batch (slots, masks, block
tables) is built once in `build_step`; each layer then writes its K/V by slot and attends: all prefill chunks together
and all decode rows together in the C kernels, where there are kernels; else prefill chunks one by one (gather + SDPA)
and decode rows by groups (`decode_attention`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from pdkv.core.ports import Batch
from pdkv.errors import UnsupportedModel
from pdkv.runtime.kernels.native import Native
from pdkv.runtime.kv_pool import KvPool
from pdkv.units import MIB, cdiv

ATTENTION_NAME = "pdkv"
"""``attn_implementation`` of every loaded model; no mask is registered under it, so the model builds none."""

STEP_KWARG = "pdkv_step"
"""The keyword that carries the `Step` through the model's forward to the attention function."""

_MAX_GATHER_BYTES = 64 * MIB  # of K (V is as much again) that one decode group copies per layer

# Features whose keyword changes the result; a model that passes one is refused instead of answered wrongly.
_UNSUPPORTED_KWARGS = ("softcap", "s_aux", "position_bias", "cu_seq_lens_q", "indices")


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRow:
    """Tokens ``start:stop`` of the flat batch belong to one row and see ``context`` tokens in all.

    ``blocks`` int64[ceil(context / block_size)] and ``mask`` bool[stop - start, context] (True = visible) are ``None``
    when the row has no earlier tokens: its K/V are this step's own, and plain causal attention is right.
    """

    start: int
    stop: int
    context: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """Rows with one token each, of similar length. ``positions`` int64[n] index the flat batch.

    ``block_tables`` int64[n, width], ``context_lens`` int64[n], ``mask`` bool[n, 1, 1, width * block_size].
    ``last`` int64[n] is each row's last table entry in use, ``stale`` bool[n, block_size, 1, 1] its slots beyond the
    context: what an earlier owner left there may be NaN, which a mask does not stop.
    """

    positions: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    mask: torch.Tensor
    last: torch.Tensor
    stale: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class NativeDecodes:
    """All rows with one token each, for the C kernel. ``tables`` int32[batch, width] are the batch's block tables.

    int32[n]: ``rows`` index ``tables``, ``tokens`` the flat batch; ``lengths`` are contexts with this step's token.
    """

    tables: torch.Tensor
    rows: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class NativePrefills:
    """All rows with several tokens each, for the C kernel. ``tables`` int32[batch, width] are the batch's block tables.

    int32[n]: ``rows`` index ``tables``; ``starts`` and ``counts`` are each chunk's tokens in the flat batch;
    ``contexts`` end with them.
    """

    tables: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    contexts: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """All that attention needs to know about one ragged batch.

    ``pool`` is the KV tensor (`KvPool.tensor`); ``None`` runs without a cache: each prefill row attends to itself
    (profile runs). ``slot_blocks``/``slot_offsets`` int64[T] say where each token's K/V go. When there are ``kernels``,
    the rows are in ``native_prefills`` and ``native_decodes``, else in ``prefills`` and ``decodes``. ``seen`` collects
    the layers that attended, with their (kv_heads, head_dim): how the loader checks a model.
    """

    position_ids: torch.Tensor
    pool: torch.Tensor | None
    slot_blocks: torch.Tensor | None
    slot_offsets: torch.Tensor | None
    prefills: tuple[PrefillRow, ...]
    decodes: tuple[DecodeGroup, ...]
    kernels: Native | None = None
    native_prefills: NativePrefills | None = None
    native_decodes: NativeDecodes | None = None
    seen: dict[int, tuple[int, int]] | None = None


def scratch_bytes(
    heads: int, kv_heads: int, head_dim: int, itemsize: int, *, chunk_tokens: int, max_model_len: int
) -> int:
    """Bytes that one layer's attention may hold beside the activations, at most: gathered K/V and masks.

    The larger of a prefill chunk at the end of the longest context (K/V as stored and repeated for its query heads,
    the mask as bool and as float) and of a full decode group.
    """
    gathered = 2 * max_model_len * (kv_heads + heads) * head_dim * itemsize
    mask = min(chunk_tokens, max_model_len) * max_model_len * (1 + itemsize)
    return max(gathered + mask, 2 * min(_MAX_GATHER_BYTES, gathered * chunk_tokens))


def cacheless_step(lengths: list[int], device: torch.device, *, record: bool = False) -> Step:
    """A step of fresh prompts of these lengths that touches no pool (profiling, model checks)."""
    bounds = np.cumsum([0, *lengths])
    rows = tuple(PrefillRow(int(a), int(b), int(b - a), None, None) for a, b in pairwise(bounds))
    position_ids = torch.cat([torch.arange(n) for n in lengths]).to(device)[None]
    return Step(position_ids, None, None, None, rows, (), seen={} if record else None)


def build_step(batch: Batch, pool: KvPool, kernels: Native | None = None) -> Step:
    """The `Step` of a batch on the pool's device. Rows of one token are decodes, longer ones prefill chunks.

    ``kernels`` attend for all of them; they must serve the model's heads and the pool (`Native.can_attend`).
    """
    device, block_size = pool.tensor.device, pool.block_size
    scheduled = batch.num_scheduled.astype(np.int64)
    computed = batch.num_computed.astype(np.int64)
    contexts, stops = computed + scheduled, np.cumsum(scheduled)
    starts = stops - scheduled
    rows = np.repeat(np.arange(len(batch)), scheduled)
    positions = np.arange(int(scheduled.sum())) - np.repeat(starts - computed, scheduled)
    slot_blocks = batch.block_tables[rows, positions // block_size].astype(np.int64)

    chunks, singles = np.flatnonzero(scheduled > 1), np.flatnonzero(scheduled == 1)
    prefills: tuple[PrefillRow, ...] = ()
    decodes: tuple[DecodeGroup, ...] = ()
    native_prefills: NativePrefills | None = None
    native_decodes: NativeDecodes | None = None
    if kernels is not None:
        (tables,) = _int32(batch.block_tables)
        if len(chunks):
            places = _int32(chunks, starts[chunks], scheduled[chunks], contexts[chunks])
            native_prefills = NativePrefills(tables, *places)
        if len(singles):
            native_decodes = NativeDecodes(tables, *_int32(singles, starts[singles], contexts[singles]))
    else:
        table_ids = torch.from_numpy(batch.block_tables.astype(np.int64)).to(device)
        prefills = tuple(
            _prefill_row(int(starts[i]), int(stops[i]), int(contexts[i]), table_ids[i], block_size) for i in chunks
        )
        row_bytes = block_size * pool.kv_heads * pool.head_dim * pool.tensor.element_size()
        decodes = tuple(
            _decode_group(group, starts, contexts, table_ids, block_size)
            for group in _decode_groups(singles, contexts, block_size, row_bytes)
        )
    return Step(
        position_ids=torch.from_numpy(positions).to(device)[None],
        pool=pool.tensor,
        slot_blocks=torch.from_numpy(slot_blocks).to(device),
        slot_offsets=torch.from_numpy(positions % block_size).to(device),
        prefills=prefills,
        decodes=decodes,
        kernels=kernels,
        native_prefills=native_prefills,
        native_decodes=native_decodes,
    )


def _int32(*arrays: np.ndarray[Any, np.dtype[Any]]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)) for array in arrays]


def _prefill_row(start: int, stop: int, context: int, table: torch.Tensor, block_size: int) -> PrefillRow:
    queries = stop - start
    if context == queries:
        return PrefillRow(start, stop, context, None, None)
    mask = torch.ones(queries, context, dtype=torch.bool, device=table.device).tril_(context - queries)
    return PrefillRow(start, stop, context, table[: cdiv(context, block_size)], mask)


def _decode_groups(
    rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    contexts: np.ndarray[tuple[int], np.dtype[np.int64]],
    block_size: int,
    block_bytes: int,
) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Split decode rows so that padding at most doubles a row's blocks and a gather stays below its byte limit."""
    groups: list[list[int]] = []
    limit = 0
    for row in rows[np.argsort(-contexts[rows], kind="stable")]:
        blocks = cdiv(int(contexts[row]), block_size)
        if not groups or 2 * blocks < limit or (len(groups[-1]) + 1) * limit * block_bytes > _MAX_GATHER_BYTES:
            groups.append([])
            limit = blocks
        groups[-1].append(int(row))
    return [np.asarray(group, dtype=np.int64) for group in groups]


def _decode_group(
    rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    starts: np.ndarray[tuple[int], np.dtype[np.int64]],
    contexts: np.ndarray[tuple[int], np.dtype[np.int64]],
    tables: torch.Tensor,
    block_size: int,
) -> DecodeGroup:
    device = tables.device
    width = cdiv(int(contexts[rows].max()), block_size)
    lens = torch.from_numpy(contexts[rows]).to(device)
    mask = torch.arange(width * block_size, device=device)[None] < lens[:, None]
    selected = torch.from_numpy(rows).to(device)
    return DecodeGroup(
        positions=torch.from_numpy(starts[rows]).to(device),
        block_tables=tables[selected, :width].contiguous(),
        context_lens=lens,
        mask=mask[:, None, None],
        last=(lens - 1) // block_size,
        stale=torch.arange(block_size, device=device)[None, :, None, None]
        > ((lens - 1) % block_size)[:, None, None, None],
    )


def decode_attention(query: torch.Tensor, pool_layer: torch.Tensor, group: DecodeGroup, scale: float) -> torch.Tensor:
    """One new token per row against its paged context: gather, then one padded SDPA over all rows.

    ``query`` [n, heads, head_dim]; ``pool_layer`` [num_blocks, 2, block_size, kv_heads, head_dim] (strided). Returns
    [n, heads, head_dim]. Query heads that share a KV head become SDPA's query axis, so K/V are never repeated.
    """
    n, heads, head_dim = query.shape
    kv_heads = pool_layer.shape[3]
    key, value = (
        _gather(pool_layer[:, plane], group).view(n, -1, kv_heads, head_dim).transpose(1, 2) for plane in (0, 1)
    )
    packed = query.view(n, kv_heads, heads // kv_heads, head_dim)
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=group.mask, scale=scale)
    return out.reshape(n, heads, head_dim)


def _gather(plane: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
    """Rows' blocks [n, width, block_size, kv_heads, head_dim], copied, zero where the last block is not written yet."""
    blocks = plane[group.block_tables]
    rows = torch.arange(len(blocks), device=blocks.device)
    blocks[rows, group.last] = blocks[rows, group.last].masked_fill_(group.stale, 0)
    return blocks


def _prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: torch.Tensor | None,
    row: PrefillRow,
    scale: float,
) -> torch.Tensor:
    """One chunk: query/key/value [1, heads or kv_heads, n, head_dim] of its tokens. Returns [1, heads, n, head_dim]."""
    if row.blocks is not None:
        assert layer is not None
        _, kv_heads, _, head_dim = key.shape
        key, value = (
            layer[:, plane][row.blocks].view(-1, kv_heads, head_dim)[: row.context].transpose(0, 1)[None]
            for plane in (0, 1)
        )
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=row.mask, is_causal=row.mask is None, scale=scale, enable_gqa=True
    )


def _write_kv(step: Step, layer: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    assert step.slot_blocks is not None
    assert step.slot_offsets is not None
    if step.kernels is not None and layer.dtype == torch.float32:
        step.kernels.write_kv(key[0], value[0], layer, step.slot_blocks, step.slot_offsets)
        return
    where = (step.slot_blocks, step.slot_offsets)
    layer[:, 0].index_put_(where, key[0].transpose(0, 1).to(layer.dtype))
    layer[:, 1].index_put_(where, value[0].transpose(0, 1).to(layer.dtype))


def _native_attention(
    step: Step, kernels: Native, query: torch.Tensor, out: torch.Tensor, layer: torch.Tensor, scale: float
) -> None:
    """All rows of the step by the C kernels: ``query`` [T, heads, head_dim] against ``layer`` of the pool."""
    if (p := step.native_prefills) is not None:
        kernels.prefill_attention(query, out, layer, p.tables, p.rows, p.starts, p.counts, p.contexts, scale)
    if (d := step.native_decodes) is not None:
        kernels.decode_attention(query, out, layer, d.tables, d.rows, d.tokens, d.lengths, scale)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, heads, T, head_dim], key/value [1, kv_heads, T, head_dim].

    Writes K/V of this step into the pool, then attends. Returns ([1, T, heads, head_dim], None).
    Raises UnsupportedModel when the model asks for a feature that this attention does not compute.
    """
    step = kwargs.get(STEP_KWARG)
    if not isinstance(step, Step):
        raise RuntimeError(f"a model loaded by pdkv runs through its Executor only ({STEP_KWARG} is missing)")
    for name in _UNSUPPORTED_KWARGS:
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} needs attention with {name!r}; pdkv does not compute it")
    window = kwargs.get("sliding_window")
    if isinstance(window, int) and window < module.config.max_position_embeddings:
        raise UnsupportedModel(f"{type(module).__name__} attends to a window of {window} tokens; pdkv does not")
    if key.shape[-1] != value.shape[-1]:
        raise UnsupportedModel(
            f"{type(module).__name__} has K heads of {key.shape[-1]} and V heads of {value.shape[-1]}; "
            f"pdkv's paged attention needs them equal"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_index = int(module.layer_idx)
    if step.seen is not None:
        step.seen[layer_index] = (key.shape[1], key.shape[3])
    layer = None
    if step.pool is not None:
        layer = step.pool[:, layer_index]
        _write_kv(step, layer, key, value)

    out = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
    for row in step.prefills:
        tokens = slice(row.start, row.stop)
        chunk = _prefill_attention(query[:, :, tokens], key[:, :, tokens], value[:, :, tokens], layer, row, scale)
        out[tokens] = chunk[0].transpose(0, 1)
    if step.kernels is not None:
        assert layer is not None
        _native_attention(step, step.kernels, query[0].transpose(0, 1), out, layer, float(scale))
    for group in step.decodes:
        assert layer is not None
        rows = query[0].transpose(0, 1)[group.positions]
        out[group.positions] = decode_attention(rows, layer, group, scale)
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
