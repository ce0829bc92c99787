"""Gated MLPs, ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``, with what lies between their halves as one kernel."""

from __future__ import annotations

from typing import Any

import torch

from pdkv.runtime.kernels.linear import PackedLinear
from pdkv.runtime.kernels.native import Native
from pdkv.runtime.kernels.replace import replace_modules

_GATED = ("gate_proj", "up_proj", "down_proj")


class NativeGatedMlp(torch.nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))`` on packed layers; two large tensors fewer than by torch.

    ``down`` may be a rank's share of a layer, whose sum over the ranks it makes itself.
    """

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: torch.nn.Module, native: Native) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self._native = native

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] float32 -> [..., in_features] float32."""
        gate = self.gate_proj(x)
        self._native.silu_mul(gate, self.up_proj(x))
        out: torch.Tensor = self.down_proj(gate)
        return out


def replace_gated_mlps(model: Any, native: Native) -> int:
    """Replace the model's gated MLPs on packed layers by `NativeGatedMlp`; returns how many.

    Three layers of these names and a SiLU only make a candidate: each is first compared with its replacement on
    numbers (a clamp, a scale or a second input would show). Ranks of one model must all call this.
    """
    return replace_modules(model, lambda module: _replacement(module, native))


@torch.inference_mode()
def _replacement(mlp: torch.nn.Module, native: Native) -> NativeGatedMlp | None:
    gate, up, down = (getattr(mlp, name, None) for name in _GATED)
    if not (isinstance(gate, PackedLinear) and isinstance(up, PackedLinear) and isinstance(down, torch.nn.Module)):
        return None
    if type(getattr(mlp, "act_fn", None)).__name__ not in ("SiLU", "SiLUActivation"):
        return None
    replacement = NativeGatedMlp(gate, up, down, native)
    width = gate.in_features
    sample = torch.linspace(-3.0, 3.0, 2 * width).sin().view(2, -1) * torch.tensor([[0.1], [20.0]])
    try:
        expected = mlp(sample)
    except TypeError:  # it takes more than the hidden states
        return None
    same = torch.allclose(expected, replacement(sample), rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    return replacement if same else None
