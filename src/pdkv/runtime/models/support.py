"""Can pdkv's uniform paged attention run this model? Answered from its config, before gigabytes are read.

What a config cannot tell (a model that bypasses the attention registry, an odd shape) the loader finds out with a
short forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pdkv.errors import UnsupportedModel

_FULL_ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a decoder whose layers are all full attention (the KV shape is seen in the loader's test pass)."""

    num_layers: int
    heads: int
    vocab_size: int
    max_model_len: int


def read_facts(config: PretrainedConfig, name: str) -> ModelFacts:
    """The sizes in a config. Raises UnsupportedModel naming the layer kind or feature that pdkv cannot run yet."""
    text: Any = config.get_text_config(decoder=True)
    kind = getattr(config, "model_type", "?")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} ({kind}) is an encoder-decoder model; pdkv serves decoder-only models")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{name} ({kind}) has no causal language model in transformers; pdkv serves decoders")
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModel(f"{name} ({kind}) uses latent attention (MLA, rank {text.kv_lora_rank}); {_ONLY}")
    _check_layer_types(text, name, kind)
    missing = [f for f in ("num_hidden_layers", "num_attention_heads", "hidden_size") if not hasattr(text, f)]
    if missing:
        raise UnsupportedModel(f"{name} ({kind}) has no {', '.join(missing)} (no attention layers?); {_ONLY}")
    shared = getattr(text, "num_kv_shared_layers", None)
    if shared:
        raise UnsupportedModel(f"{name} ({kind}) shares KV between layers (num_kv_shared_layers={shared}); {_ONLY}")
    return ModelFacts(
        num_layers=int(text.num_hidden_layers),
        heads=int(text.num_attention_heads),
        vocab_size=int(text.vocab_size),
        max_model_len=int(getattr(text, "max_position_embeddings", None) or 2048),
    )


_ONLY = "this version runs models whose layers are all full attention of one shape (Llama, Qwen2/3, Mistral, ...)"


def _check_layer_types(text: Any, name: str, kind: str) -> None:
    """Refuse windows, chunks, linear and state-space layers; a window that covers the whole context changes nothing."""
    types = list(getattr(text, "layer_types", None) or [])
    longest = getattr(text, "max_position_embeddings", None)
    window = getattr(text, "sliding_window", None)
    harmless = window is None or getattr(text, "use_sliding_window", True) is False or (longest and window >= longest)
    others = sorted({t for t in types if t != _FULL_ATTENTION and not (t == "sliding_attention" and harmless)})
    if others:
        counts = ", ".join(f"{types.count(t)} of {len(types)} layers are {t}" for t in others)
        raise UnsupportedModel(f"{name} ({kind}): {counts}; {_ONLY}")
    if not types and not harmless:
        raise UnsupportedModel(f"{name} ({kind}): every layer has a sliding window of {window} tokens; {_ONLY}")
