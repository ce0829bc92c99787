"""Tables of cosines and sines that an engine keeps for rotary positions: hundreds of MiB for some long contexts.

vLLM 0.32, layers/rotary_embedding: one table for each kind of rotary section, shared by the layers, of the length that
the kind makes of ``max_position_embeddings``, in the model's type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkv.models.fields import HEADS, HIDDEN, Config, first
from pdkv.models.latent import is_latent

_TIMES_FACTOR = ("linear",)
_FROM_ORIGINAL = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
# Positions of images: tables are four times as long (mrope.py).
_MROPE_LENGTH = 4


def rope_bytes(text: Config, element_bytes: int) -> int:
    """Bytes of the model's position tables; 0 for a model without rotary positions."""
    length = text.get("max_position_embeddings")
    if not isinstance(length, int) or text.get("position_embedding_type") == "absolute":
        return 0
    return sum(
        _rows(section, length) * _width(text, section, full=full) * element_bytes for section, full in _sections(text)
    )


def _sections(text: Config) -> list[tuple[Config, bool]]:
    """The rotary sections in use, and whether each is of the full-attention layers."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return [({}, True)]
    nested = [(part, key == "full_attention") for key, part in rope.items() if isinstance(part, Mapping)]
    if nested:
        return nested
    found: list[tuple[Config, bool]] = [(rope, True)]
    if text.get("rope_local_base_freq") or text.get("swa_rope_theta"):
        found.append(({}, False))  # windows rotate by a base of their own, unscaled
    return found


def _rows(section: Config, length: int) -> int:
    kind = section.get("rope_type", section.get("type"))
    factor = section.get("factor")
    scale: Any = factor if isinstance(factor, int | float) else 1
    if section.get("mrope_section"):
        return length * _MROPE_LENGTH
    if kind in _TIMES_FACTOR:
        return int(length * scale)
    original = section.get("original_max_position_embeddings")
    if kind in _FROM_ORIGINAL:
        return int((original or length) * scale)
    if kind in ("longrope", "su"):
        return length + int(original or 0)
    return length


def _width(text: Config, section: Config, *, full: bool) -> int:
    if is_latent(text):
        return int(text.get("qk_rope_head_dim") or 0)
    head = (text.get("global_head_dim") if full else None) or first(text, ("head_dim", "attention_head_dim"))
    if head is None:
        heads, hidden = first(text, HEADS), first(text, HIDDEN)
        head = hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads else 0
    share = section.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0
    return int(text.get("rotary_dim") or int(head * share))
