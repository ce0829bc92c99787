"""Bytes of weights on one rank: every matrix in its format, divided, and rounded as the allocator rounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdkv.models.weights.formats import Format, plain
from pdkv.models.weights.matrices import Division, Matrix, Part, Split
from pdkv.models.weights.quantization import Quantization
from pdkv.units import MIB, cdiv

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SMALLEST = 512
# PyTorch's caching allocator (CUDACachingAllocator.cpp): a tensor of at least 10 MiB gets a segment of its own, a
# multiple of 2 MiB, and what is left of that counts as allocated unless it is more than 1 MiB.
_OWN_SEGMENT, _SEGMENT, _KEPT = 10 * MIB, 2 * MIB, MIB


@dataclass(frozen=True, slots=True)
class RankWeights:
    """``bytes`` as ``torch.cuda.memory_allocated`` counts them, of which ``rope_bytes`` are tables of positions."""

    bytes: int
    rope_bytes: int = 0


def allocated(size: int) -> int:
    """What a tensor of ``size`` bytes counts in PyTorch's allocator."""
    rounded = cdiv(size, _SMALLEST) * _SMALLEST
    if rounded < _OWN_SEGMENT:
        return rounded
    segment = cdiv(rounded, _SEGMENT) * _SEGMENT
    return segment if segment - rounded <= _KEPT else rounded


def part_bytes(part: Part, quantization: Quantization, division: Division, dtype: str) -> int:
    """Bytes of one part on the rank that has most of it. ``dtype`` is what is not quantized is kept in."""
    return sum(allocated(size) for size in _tensors(part.matrices, quantization, division, dtype))


def checkpoint_bytes(parts: Iterable[Part], quantization: Quantization, dtype: str) -> int:
    """Bytes of all weights of the model, undivided and not rounded: what the files hold."""
    whole = Division()
    return sum(
        sum(_matrix_bytes(matrix, quantization, whole, dtype))
        for part in parts
        for matrix in part.matrices
        if not matrix.derived
    )


def _tensors(matrices: Iterable[Matrix], quantization: Quantization, division: Division, dtype: str) -> Iterable[int]:
    """Bytes of every tensor that is allocated: matrices that are fused share one."""
    sizes: dict[str, int] = {}
    for matrix in matrices:
        codes, scales = _matrix_bytes(matrix, quantization, division, dtype)
        sizes[matrix.allocation] = sizes.get(matrix.allocation, 0) + codes
        if scales:
            key = f"{matrix.allocation} scales"
            sizes[key] = sizes.get(key, 0) + scales
    return sizes.values()


def _matrix_bytes(matrix: Matrix, quantization: Quantization, division: Division, dtype: str) -> tuple[int, int]:
    """(codes, scales and zero points) of one matrix on a rank."""
    own = plain(_ELEMENT_BYTES[matrix.dtype or dtype])
    kept = quantization.format_of(matrix.name) if matrix.linear else None
    chosen = own if kept is None else kept
    rows, cols, count = matrix.on_rank(division)
    rows, cols = _padded(matrix, chosen, rows, cols)
    codes = cdiv(rows * cols * chosen.bits, 8)
    return codes * count, (chosen.bytes_of(rows, cols) - codes) * count


def _padded(matrix: Matrix, chosen: Format, rows: int, cols: int) -> tuple[int, int]:
    """Experts in a format whose kernels want multiples. A column-wise one has gate and up side by side."""
    if chosen.pad_inner == 1 == chosen.pad_hidden:
        return rows, cols
    if matrix.split is Split.EXPERT_COLUMN:
        inner = cdiv(rows // 2, chosen.pad_inner) * chosen.pad_inner
        return 2 * inner, cdiv(cols, chosen.pad_hidden) * chosen.pad_hidden
    if matrix.split is Split.EXPERT_ROW:
        inner = cdiv(cols, chosen.pad_inner) * chosen.pad_inner
        return cdiv(rows, chosen.pad_hidden) * chosen.pad_hidden, inner
    return rows, cols
