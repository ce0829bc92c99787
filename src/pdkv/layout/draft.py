"""The KV that speculative decoding adds: a draft that is part of the model keeps what `models.drafts` reads.

Methods without a draft model keep none, and that of a separate draft model (EAGLE, a smaller model) is not known from
the model's config.
"""

from __future__ import annotations

from dataclasses import replace

from pdkv.models.spec import ModelSpec

WITHOUT_DRAFT_MODEL = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
_PART_OF_MODEL = ("mtp", "deepseek_mtp", "nextn")


def is_part_of_model(method: str | None) -> bool:
    """Whether the draft of a speculative method is a multi-token-prediction layer of the model itself."""
    return method is not None and (method in _PART_OF_MODEL or method.endswith("_mtp"))


def with_draft_layers(spec: ModelSpec, method: str | None) -> ModelSpec:
    """``spec`` with the caches of the draft behind its own, on the last pipeline stage."""
    if not is_part_of_model(method) or not spec.draft_layers:
        return spec
    return replace(spec, layers=(*spec.layers, *spec.draft_layers), num_layers=spec.decoder_layers, draft_layers=())
