"""Linear layers on packed weights: what `torch.nn.Linear` computes, from panels that stream through the cache once."""

from __future__ import annotations

from typing import Any

import torch

from pdkv.runtime.kernels.native import Native


class PackedLinear(torch.nn.Module):
    """``y = x W^T + b`` in fp32, with ``W`` stored packed as float32 or bfloat16."""

    def __init__(self, linear: torch.nn.Linear, native: Native, storage: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("packed", native.pack(linear.weight.detach(), storage))
        bias = None if linear.bias is None else linear.bias.detach().clone()
        self.register_buffer("bias", bias)
        self._native = native

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] float32 -> [..., out_features] float32."""
        flat = x.reshape(-1, self.in_features).contiguous()
        return self._native.linear(flat, self.packed, self.bias, self.out_features).view(
            *x.shape[:-1], self.out_features
        )


def pack_linears(model: Any, native: Native, storage: torch.dtype) -> int:
    """Replace every float32 `torch.nn.Linear` of ``model`` by a `PackedLinear`; returns how many.

    One after the other, so that the weights are never there twice. A weight that something else shares (an embedding
    tied to the output layer) stays as it is for the other.
    """
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    count = 0
    for parent, name, child in found:
        if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32:
            setattr(parent, name, PackedLinear(child, native, storage))
            count += 1
    return count
