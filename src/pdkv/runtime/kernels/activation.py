"""Gated MLPs without a tensor too many: ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""

from __future__ import annotations

from typing import Any

import torch

_GATED = ("gate_proj", "up_proj", "down_proj")


def overwrite_gates(model: Any) -> int:
    """Let SiLU overwrite what ``gate_proj`` has made, which nothing else reads; returns in how many MLPs.

    Only in modules of this very shape. The values are the same; a prefill of many tokens writes one large tensor fewer
    in every layer.
    """
    count = 0
    for module in model.modules():
        if all(hasattr(module, name) for name in _GATED) and _is_silu(getattr(module, "act_fn", None)):
            module.act_fn = torch.nn.SiLU(inplace=True)
            count += 1
    return count


def _is_silu(activation: object) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")
