"""What multi-token-prediction layers keep (vLLM 0.32, models/*_mtp.py)."""

from __future__ import annotations

from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.layout.draft import with_draft_layers
from pdkv.models.families import spec_from_config
from pdkv.models.spec import LayerKind, ModelSpec
from pdkv.source import find_spec

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
WINDOWS = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 2}


def drafted(spec: ModelSpec, method: str = "mtp") -> list[tuple[int, str, LayerKind]]:
    """(layer, part, kind) of what drafting adds."""
    added = with_draft_layers(spec, method).layers[len(spec.layers) :]
    return [(layer.layer, layer.part, layer.kind) for layer in added]


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({}, [LayerKind.FULL_ATTENTION]),
        ({"num_nextn_predict_layers": 3}, [LayerKind.FULL_ATTENTION] * 3),
        (WINDOWS | {"num_nextn_predict_layers": 1}, [LayerKind.FULL_ATTENTION]),
        # A list that goes on behind the decoder layers says what the drafts are (Step-3.5).
        (
            WINDOWS
            | {"layer_types": WINDOWS["layer_types"] + ["sliding_attention"] * 2, "num_nextn_predict_layers": 2},
            [LayerKind.SLIDING_WINDOW] * 2,
        ),
        ({"num_nextn_predict_layers": -1}, [LayerKind.FULL_ATTENTION]),
        ({"num_nextn_predict_layers": "many"}, [LayerKind.FULL_ATTENTION]),
    ],
)
def test_drafts_are_counted_and_kept_as_their_lists_say(more: dict[str, Any], kinds: list[LayerKind]) -> None:
    added = drafted(spec_from_config(DENSE | more, name="m"))
    assert [kind for _, _, kind in added] == kinds
    assert [layer for layer, _, _ in added] == list(range(4, 4 + len(kinds)))


def test_more_drafts_than_any_model_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="17 multi-token-prediction layers"):
        spec_from_config(DENSE | {"num_nextn_predict_layers": 17}, name="m")


def test_a_draft_of_deepseek_v4_is_a_window() -> None:
    """compress_ratios has one entry more than there are layers, and it is 0."""
    spec = find_spec("deepseek-ai/DeepSeek-V4-Flash").spec
    assert drafted(spec) == [(spec.decoder_layers, "window", LayerKind.SLIDING_WINDOW_MLA)]


def test_a_draft_of_sparse_attention_has_its_indexer() -> None:
    spec = find_spec("deepseek-ai/DeepSeek-V3.2").spec
    assert {part for _, part, _ in drafted(spec)} == {"attn", "indexer"}


def test_others_and_a_second_time_add_nothing() -> None:
    spec = spec_from_config(DENSE | {"num_nextn_predict_layers": 1}, name="m")
    assert drafted(spec, "ngram") == drafted(spec, "eagle3") == []
    once = with_draft_layers(spec, "deepseek_mtp")
    assert with_draft_layers(once, "deepseek_mtp") == once
