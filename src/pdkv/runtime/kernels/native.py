"""The compiled kernels as Python functions on torch tensors. All of them are for CPU tensors and fp32 arithmetic."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch

from pdkv.errors import ConfigError
from pdkv.runtime.kernels.build import build
from pdkv.runtime.kernels.pages import Arena
from pdkv.units import cdiv

log = logging.getLogger("pdkv.kernels")

_MAX_HEAD_DIM = 512  # as in paged.h
_MAX_GROUP = 32
_MAX_VECTOR = 16  # floats; a head's size is a multiple of it, whatever the CPU's own vector is
_POINTER: Any
_LONG: Any
_INT: Any
_FLOAT: Any
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class Native:
    """The loaded library. ``panel_columns`` is how many outputs a packed panel of weights holds."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.panel_columns = int(library.pdkv_panel_columns())
        self._linear = {torch.float32: library.pdkv_linear_f32, torch.bfloat16: library.pdkv_linear_bf16}
        for function in self._linear.values():
            function.argtypes = [_POINTER] * 4 + [_LONG] * 3 + [_INT]
            function.restype = None
        self._decode = library.pdkv_decode_attention
        self._decode.argtypes = [
            *[_POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT, _LONG, _LONG, _LONG, _POINTER, _LONG],
            *[_POINTER] * 3,
            *[_LONG, _INT, _INT, _INT, _INT, _FLOAT, _INT],
        ]
        self._decode.restype = _INT
        self._prefill = library.pdkv_prefill_attention
        self._prefill.argtypes = [
            *[_POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT, _LONG, _LONG, _LONG, _POINTER, _LONG],
            *[_POINTER] * 4,
            *[_LONG, _INT, _INT, _INT, _INT, _FLOAT, _INT],
        ]
        self._prefill.restype = _INT
        self._write_kv = library.pdkv_write_kv
        self._write_kv.argtypes = (
            [_POINTER] * 2 + [_LONG] * 4 + [_POINTER] * 2 + [_LONG] * 3 + [_POINTER] * 2 + [_LONG, _INT, _INT]
        )
        self._write_kv.restype = None
        self._rms_norm = library.pdkv_rms_norm
        self._rms_norm.argtypes = [_POINTER] * 3 + [_LONG] * 2 + [_FLOAT, _INT]
        self._rms_norm.restype = None
        self._silu_mul = library.pdkv_silu_mul
        self._silu_mul.argtypes = [_POINTER] * 2 + [_LONG, _INT]
        self._silu_mul.restype = None

    def packed_shape(self, n: int, k: int) -> tuple[int, int, int]:
        """Of a packed weight [n, k]: [ceil(n / panel_columns), k, panel_columns]."""
        return cdiv(n, self.panel_columns), k, self.panel_columns

    def pack(self, weight: torch.Tensor, storage: torch.dtype, arena: Arena | None = None) -> torch.Tensor:
        """``weight`` [n, k] as panels of `packed_shape` in ``storage``, out of ``arena`` when there is one.

        ``storage`` is float32 or bfloat16; columns beyond n are zero.
        """
        n, k = weight.shape
        shape = self.packed_shape(n, k)
        panels, _, columns = shape
        padded = weight.new_zeros(panels * columns, k) if n % columns else weight
        if n % columns:
            padded[:n] = weight
        packed = torch.empty(shape, dtype=storage) if arena is None else arena.empty(shape, storage)
        return packed.copy_(padded.view(panels, columns, k).transpose(1, 2))

    def linear(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, n: int) -> torch.Tensor:
        """``x`` [rows, k] float32, contiguous, times packed weights of ``n`` outputs, plus ``bias`` [n]: [rows, n]."""
        rows, k = x.shape
        out = torch.empty(rows, n, dtype=torch.float32)
        if rows:
            self._linear[packed.dtype](
                x.data_ptr(),
                packed.data_ptr(),
                None if bias is None else bias.data_ptr(),
                out.data_ptr(),
                rows,
                k,
                n,
                torch.get_num_threads(),
            )
        return out

    @staticmethod
    def can_attend(heads: int, kv_heads: int, head_dim: int, pool_dtype: torch.dtype) -> bool:
        """Whether `decode_attention` and `prefill_attention` serve such heads on such a pool."""
        return (
            pool_dtype in (torch.float32, torch.bfloat16)
            and head_dim % _MAX_VECTOR == 0
            and head_dim <= _MAX_HEAD_DIM
            and heads // kv_heads <= _MAX_GROUP
        )

    def decode_attention(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        layer: torch.Tensor,
        tables: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
    ) -> None:
        """One new token per row against its paged context, written to ``out[tokens]``.

        ``query`` float32 [T, heads, head_dim] (any strides, last 1), ``out`` the same, contiguous; ``layer``
        [num_blocks, 2, block_size, kv_heads, head_dim] of float32 or bfloat16, heads and head_dim contiguous.
        ``tables`` int32[batch, width]; int32[n]: ``rows`` of it, ``tokens`` in the flat batch, context ``lengths``.
        """
        status = self._decode(
            *_flat(query, out),
            *_pool(layer),
            tables.data_ptr(),
            tables.stride(0),
            rows.data_ptr(),
            tokens.data_ptr(),
            lengths.data_ptr(),
            len(rows),
            *_shape(query, layer),
            scale,
            torch.get_num_threads(),
        )
        if status != 0:
            raise MemoryError("no memory for the partial results of decode attention")

    def prefill_attention(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        layer: torch.Tensor,
        tables: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        contexts: torch.Tensor,
        scale: float,
    ) -> None:
        """Chunks of new tokens against their paged contexts, each token seeing the context up to itself.

        Tensors as for `decode_attention`. int32[n]: ``rows`` of ``tables``; chunk i is ``counts[i]`` tokens from
        ``starts[i]`` of the flat batch, the last of ``contexts[i]`` tokens, all of them already in the pool.
        """
        status = self._prefill(
            *_flat(query, out),
            *_pool(layer),
            tables.data_ptr(),
            tables.stride(0),
            rows.data_ptr(),
            starts.data_ptr(),
            counts.data_ptr(),
            contexts.data_ptr(),
            len(rows),
            *_shape(query, layer),
            scale,
            torch.get_num_threads(),
        )
        if status != 0:
            raise MemoryError("no memory for the list of pieces of prefill attention")

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        """Put each token's K and V into its slot of a float32 pool's ``layer`` (shaped as above).

        ``key``/``value`` float32 [kv_heads, T, head_dim], any strides, the last 1; ``blocks``/``offsets`` int64[T].
        """
        kv_heads, count, head_dim = key.shape
        block_stride, plane_stride, token_stride, head_stride, _ = layer.stride()
        base = layer.data_ptr()
        self._write_kv(
            key.data_ptr(),
            value.data_ptr(),
            key.stride(1),
            key.stride(0),
            value.stride(1),
            value.stride(0),
            base,
            base + plane_stride * layer.element_size(),
            block_stride,
            token_stride,
            head_stride,
            blocks.data_ptr(),
            offsets.data_ptr(),
            count,
            kv_heads,
            head_dim,
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + epsilon) * weight over the last axis of ``x`` (float32, contiguous)."""
        out = torch.empty_like(x)
        dim = x.shape[-1]
        self._rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // dim,
            dim,
            epsilon,
            torch.get_num_threads(),
        )
        return out

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        """gate = gate / (1 + exp(-gate)) * up in place, float32 tensors of one shape, both contiguous."""
        self._silu_mul(gate.data_ptr(), up.data_ptr(), gate.numel(), torch.get_num_threads())


def _flat(query: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
    return query.data_ptr(), query.stride(0), query.stride(1), out.data_ptr()


def _pool(layer: torch.Tensor) -> tuple[int, ...]:
    """Both planes of a layer, whether they are bf16, and the strides of a block, a token and a head."""
    block_stride, plane_stride, token_stride, head_stride, _ = layer.stride()
    base, bf16 = layer.data_ptr(), int(layer.dtype == torch.bfloat16)
    return base, base + plane_stride * layer.element_size(), bf16, block_stride, token_stride, head_stride


def _shape(query: torch.Tensor, layer: torch.Tensor) -> tuple[int, ...]:
    """Heads, KV heads, head size and block size."""
    _, _, block_size, kv_heads, head_dim = layer.shape
    return query.shape[1], kv_heads, head_dim, block_size


@functools.cache
def load() -> Native | None:
    """The kernels, compiled first when need be; ``None`` (said once in the log) where they cannot be."""
    try:
        return Native(ctypes.CDLL(str(build())))
    except (ConfigError, OSError) as error:
        log.warning("CPU kernels are not available, decoding will be slower: %s", error)
        return None
