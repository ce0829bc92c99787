"""Linear layers on packed weights: what `torch.nn.Linear` computes, from panels that stream through the cache once."""

from __future__ import annotations

import math
from typing import Any

import torch

from pdkv.runtime.kernels.native import Native
from pdkv.runtime.kernels.pages import Arena, room


class PackedLinear(torch.nn.Module):
    """``y = x W^T + b`` in fp32, with ``W`` stored packed as float32 or bfloat16."""

    def __init__(
        self, linear: torch.nn.Linear, native: Native, storage: torch.dtype, arena: Arena | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("packed", native.pack(linear.weight.detach(), storage, arena))
        bias = None if linear.bias is None else linear.bias.detach().clone()
        self.register_buffer("bias", bias)
        self._native = native

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] float32 -> [..., out_features] float32."""
        flat = x.reshape(-1, self.in_features).contiguous()
        return self._native.linear(flat, self.packed, self.bias, self.out_features).view(
            *x.shape[:-1], self.out_features
        )


class PackedEmbedding(torch.nn.Module):
    """Rows of a packed weight that an output layer shares with the embedding."""

    def __init__(self, packed: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("packed", packed)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64[...] -> [..., k] float32."""
        columns = self.packed.shape[2]
        return self.packed[ids // columns, :, ids % columns].float()


def pack_linears(model: Any, native: Native, storage: torch.dtype) -> int:
    """Replace every float32 `torch.nn.Linear` of ``model`` by a `PackedLinear`; returns how many.

    One after the other into one arena, so that the weights are never there twice. An embedding that is tied to an
    output layer reads from the packed weights, too.
    """
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    linears = [one for one in found if type(one[2]) is torch.nn.Linear and one[2].weight.dtype == torch.float32]
    shapes = [native.packed_shape(child.out_features, child.in_features) for _, _, child in linears]
    arena = Arena(sum(room(math.prod(shape) * storage.itemsize) for shape in shapes))
    packed: dict[int, torch.Tensor] = {}
    for parent, name, child in linears:
        layer = PackedLinear(child, native, storage, arena)
        packed[child.weight.data_ptr()] = layer.packed
        setattr(parent, name, layer)
    for parent, name, child in found:
        if type(child) is torch.nn.Embedding and child.weight.data_ptr() in packed:
            setattr(parent, name, PackedEmbedding(packed[child.weight.data_ptr()]))
    return len(packed)
