"""What the KV memory of a model depends on, and nothing else about the model."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class LayerKind(enum.Enum):
    """How a layer keeps KV; ``value`` is vLLM's word for it (spec kv-layout, section 3)."""

    FULL_ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's KV over the whole model, before any parallelism: heads and the two head sizes in elements."""

    kind: LayerKind
    kv_heads: int
    head_dim: int
    head_dim_v: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as the layout sees it. ``layers`` holds one entry per layer that owns KV, in order.

    ``dtype`` is the checkpoint's own element type (``None`` when its config does not say); ``max_model_len`` is the
    longest context in tokens that its position encoding allows. ``kv_dtype`` is what a quantized checkpoint
    wants its KV stored as, ``None`` for most models.
    """

    name: str
    architecture: str
    layers: tuple[LayerSpec, ...]
    attention_heads: int
    max_model_len: int
    dtype: str | None
    kv_dtype: str | None = None
