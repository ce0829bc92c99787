"""Putting modules of ours in the place of a model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def replace_modules(model: Any, replacement: Callable[[torch.nn.Module], torch.nn.Module | None]) -> int:
    """Put what ``replacement`` returns for a module in its place, unless that is ``None``; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            new = replacement(child)
            if new is not None:
                setattr(parent, name, new)
                count += 1
    return count
