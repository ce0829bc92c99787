"""What a person should know about the KV of speculative decoding."""

from __future__ import annotations

from pdkv.layout.draft import WITHOUT_DRAFT_MODEL, is_part_of_model
from pdkv.models.spec import ModelSpec
from pdkv.plan.options import PlanOptions


def draft_warnings(spec: ModelSpec, options: PlanOptions) -> tuple[str, ...]:
    """How the draft was counted; the KV of a separate draft model is named, never guessed."""
    method = options.speculative_method
    if is_part_of_model(method):
        added = sorted({layer.layer for layer in spec.layers if layer.layer >= spec.decoder_layers})
        return (f"speculative method {method}: {len(added)} draft layer(s) counted behind the model's own",)
    if options.speculative_model is None or method in WITHOUT_DRAFT_MODEL:
        return ()
    return (
        f"the KV of the draft model {options.speculative_model} is not counted; subtract its bytes from the memory, or "
        "plan it by itself",
    )
