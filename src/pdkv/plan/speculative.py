"""The KV that speculative decoding adds: a draft that is part of the model keeps layers like the model's own.

Methods without a draft model (ngram, suffix) keep none, and that of a separate draft
model (EAGLE, a smaller model) is not known from the model's config: it is named in a warning, never guessed.
"""

from __future__ import annotations

from dataclasses import replace

from pdkv.models.spec import LayerKind, LayerSpec, ModelSpec
from pdkv.plan.options import PlanOptions

_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
_PART_OF_MODEL = ("mtp", "deepseek_mtp", "nextn")


def is_part_of_model(method: str | None) -> bool:
    """Whether the draft is a multi-token-prediction layer of the model itself."""
    return method is not None and (method in _PART_OF_MODEL or method.endswith("_mtp"))


def with_draft_layers(spec: ModelSpec, options: PlanOptions) -> ModelSpec:
    """``spec`` with the caches of the draft behind its own, on the last pipeline stage."""
    added = _draft_layers(spec, options)
    return spec if not added else replace(spec, layers=(*spec.layers, *added), num_layers=spec.decoder_layers)


def draft_warnings(spec: ModelSpec, options: PlanOptions) -> tuple[str, ...]:
    """What a person should know about how the draft was counted."""
    method = options.speculative_method
    if is_part_of_model(method):
        return (f"speculative method {method}: one more layer like the model's last is counted",)
    if options.speculative_model is None or method in _WITHOUT_MODEL:
        return ()
    return (
        f"the KV of the draft model {options.speculative_model} is not counted; subtract its bytes from the memory, or "
        "plan it by itself",
    )


def _draft_layers(spec: ModelSpec, options: PlanOptions) -> tuple[LayerSpec, ...]:
    if not is_part_of_model(options.speculative_method):
        return ()
    attention = [layer for layer in spec.layers if layer.kind is not LayerKind.MAMBA]
    if not attention:
        return ()
    last = max(layer.layer for layer in attention)
    return tuple(replace(layer, layer=spec.decoder_layers) for layer in attention if layer.layer == last)
