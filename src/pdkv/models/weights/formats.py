"""How a checkpoint stores its linear layers: bytes of a matrix in each quantization format.

A format says what a matrix of ``rows`` x ``cols`` takes as the engine keeps it: codes, scales, zero points. Sources:
the formats' own packing (compressed-tensors, AutoAWQ, GPTQ, ModelOpt, OCP MX) and vLLM 0.32's loaders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdkv.units import cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """``bits`` of a code. Scales of ``scale_bytes`` are one for the tensor, for each output row (``channel``), for
    ``group`` inputs of a row, or for a square of ``group`` x ``group`` (``block``). ``zero_bits`` are one zero point's.
    Where kernels need that, experts are padded to a multiple of ``pad_hidden`` of the model's channels and of
    ``pad_inner`` of their own.
    """

    name: str
    bits: int
    scale: Literal["none", "tensor", "channel", "group", "block"] = "none"
    scale_bytes: int = 0
    group: int = 0
    zero_bits: int = 0
    pad_hidden: int = 1
    pad_inner: int = 1

    def bytes_of(self, rows: int, cols: int) -> int:
        """Bytes of one matrix, scales and zero points included."""
        total = cdiv(rows * cols * self.bits, 8)
        match self.scale:
            case "tensor":
                return total + self.scale_bytes
            case "channel":
                return total + rows * self.scale_bytes
            case "group":
                groups = cdiv(cols, self.group or cols)
                return total + rows * groups * self.scale_bytes + cdiv(rows * groups * self.zero_bits, 8)
            case "block":
                return total + cdiv(rows, self.group) * cdiv(cols, self.group) * self.scale_bytes
        return total


def plain(element_bytes: int) -> Format:
    """No quantization."""
    return Format(name="plain", bits=8 * element_bytes)


def fp8_block(size: int) -> Format:
    """DeepSeek's: e4m3 with a float32 scale for every square."""
    return Format(name=f"fp8 ({size}x{size} blocks)", bits=8, scale="block", scale_bytes=4, group=size)


def eight_bit(kind: str, scale: Literal["tensor", "channel", "group"], group: int = 0) -> Format:
    """fp8 or int8 with float32 scales."""
    return Format(name=kind, bits=8, scale=scale, scale_bytes=4, group=group)


def packed(kind: str, bits: int, group: int, *, zero_points: bool, scale_bytes: int = 2) -> Format:
    """Integers of 2 to 8 bits, a 16-bit scale for every ``group`` inputs (0: for the row); AWQ, GPTQ, w4a16."""
    return Format(
        name=kind, bits=bits, scale="group", scale_bytes=scale_bytes, group=group, zero_bits=bits if zero_points else 0
    )


NVFP4 = Format(name="nvfp4", bits=4, scale="group", scale_bytes=1, group=16)
"""4-bit floats with an 8-bit scale for every 16."""

MXFP4 = Format(name="mxfp4", bits=4, scale="group", scale_bytes=1, group=32, pad_hidden=256, pad_inner=128)
"""4-bit floats with an 8-bit scale for every 32. The experts' kernels (Marlin, TensorRT-LLM) want a multiple of 256
channels and of 128 of an expert's own (fused_moe/oracle/mxfp4.py)."""

MXFP8 = Format(name="mxfp8", bits=8, scale="group", scale_bytes=1, group=32)
"""8-bit floats with an 8-bit scale for every 32."""
