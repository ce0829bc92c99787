"""config.json -> ModelSpec, read by its fields rather than by a list of architectures.

A model is taken when its config shows uniform full attention. Everything that keeps KV in another way (windows, chunks,
a latent, a recurrent state) is refused with the name of what is not sized: a wrong number would be worse than none.
Each such kind is one probe in `_PROBES`; sizing a kind later means to replace its probe by a reader of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.models.spec import LayerKind, LayerSpec, ModelSpec

Config = Mapping[str, Any]

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
# vLLM takes the smallest of those that a config has (config/model.py, get_and_verify_max_len).
_CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_RECURRENT_MARKS = (
    "hybrid_override_pattern",
    "layers_block_type",
    "ssm_state_size",
    "state_size",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "mamba_num_heads",
    "attn_layer_period",
    "lru_width",
)
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


def spec_from_config(config: Config, *, name: str) -> ModelSpec:
    """The ModelSpec of a Hugging Face ``config.json``; ``name`` is only shown.

    Raises UnsupportedModel, naming the feature, for a model with any layer that is not plain full attention, and
    ConfigError for a config that lacks a field that is needed or holds one that cannot be.
    """
    text = text_config(config)
    for probe in _PROBES:
        if found := probe(text):
            raise UnsupportedModel(
                f"{name}: {found} is not sized yet; pdkv sizes models whose layers all use full attention "
                "(Llama, Qwen2/3, Mistral and Mixtral without a window, and others like them)"
            )
    heads = _positive(text, _HEADS, name)
    kv_heads = _kv_heads(text, heads, name)
    head_dim = _head_dim(text, heads, name)
    layer = LayerSpec(LayerKind.FULL_ATTENTION, kv_heads, head_dim, head_dim)
    architectures = config.get("architectures") or text.get("architectures") or ["unknown"]
    return ModelSpec(
        name=name,
        architecture=str(architectures[0]),
        layers=(layer,) * _positive(text, _LAYERS, name),
        attention_heads=heads,
        max_model_len=max_context(text, name=name),
        dtype=_dtype(config, text),
        kv_dtype=_checkpoint_kv_dtype(config, text),
    )


def text_config(config: Config) -> Config:
    """The part of a config that describes the language model: a nested one in multimodal configs, else all of it."""
    for key in _NESTED:
        nested = config.get(key)
        if isinstance(nested, Mapping) and _first(nested, _LAYERS) is not None:
            return nested
        if isinstance(nested, Mapping) and any(key in nested for key in _NESTED):
            return text_config(nested)
    return config


def max_context(text: Config, *, name: str) -> int:
    """Longest context in tokens: the smallest length field, times the rope factor where vLLM multiplies it."""
    lengths = [int(text[key]) for key in _CONTEXT if isinstance(text.get(key), int) and text[key] > 0]
    if not lengths:
        raise ConfigError(f"{name}: the config has no context length (looked for {', '.join(_CONTEXT[:4])}, ...)")
    length: float = min(lengths)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    # These types already state the scaled length in max_position_embeddings (as Gemma 3 does with any type).
    if kind in (None, "default", "su", "longrope", "llama3", "mrope") or "gemma3" in str(text.get("model_type", "")):
        return int(length)
    if kind == "yarn":
        length = rope.get("original_max_position_embeddings", length)
    return int(length * rope.get("factor", 1.0))


# ------------------------------------------------------------------------------------------------ what is not sized


def _encoder_decoder(text: Config) -> str | None:
    return "an encoder-decoder model (cross-attention KV)" if text.get("is_encoder_decoder") else None


def _latent(text: Config) -> str | None:
    rank = text.get("kv_lora_rank")
    return f"multi-head latent attention (kv_lora_rank {rank})" if rank else None


def _compressed(text: Config) -> str | None:
    return "compressed sparse attention (compress_ratios)" if text.get("compress_ratios") else None


def _recurrent(text: Config) -> str | None:
    for mark in _RECURRENT_MARKS:
        if text.get(mark):
            return f"a recurrent or linear-attention layer ({mark})"
    if any(kind != 1 for kind in text.get("attn_type_list") or ()):
        return "a recurrent or linear-attention layer (attn_type_list)"
    return None


def _chunked(text: Config) -> str | None:
    size = text.get("attention_chunk_size")
    return f"chunked local attention (attention_chunk_size {size})" if size else None


def _layer_types(text: Config) -> str | None:
    others = sorted({str(kind) for kind in text.get("layer_types") or ()} - {"full_attention", "attention"})
    return f"a layer of type {', '.join(others)} (layer_types)" if others else None


def _windowed(text: Config) -> str | None:
    window = text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return None
    if text.get("layer_types"):
        return None  # `_layer_types` has seen that none of them is a sliding one
    return f"sliding-window attention (sliding_window {window})"


def _uneven(text: Config) -> str | None:
    for mark in ("block_configs", "global_head_dim", "num_global_key_value_heads"):
        if text.get(mark):
            return f"layers with different KV heads or head sizes ({mark})"
    if isinstance(text.get("num_key_value_heads"), list):
        return "layers with different KV heads (num_key_value_heads is a list)"
    return None


def _shared_kv(text: Config) -> str | None:
    count = text.get("num_kv_shared_layers")
    return f"layers that share another layer's KV (num_kv_shared_layers {count})" if count else None


def _uneven_value_head(text: Config) -> str | None:
    value = text.get("v_head_dim")
    if value and text.get("head_dim") and value != text["head_dim"]:
        return f"a value head size ({value}) that differs from the key's ({text['head_dim']})"
    return None


_PROBES: tuple[Callable[[Config], str | None], ...] = (
    _encoder_decoder,
    _latent,
    _compressed,
    _recurrent,
    _chunked,
    _layer_types,
    _windowed,
    _uneven,
    _shared_kv,
    _uneven_value_head,
)

# ---------------------------------------------------------------------------------------------------------- fields


def _first(text: Config, keys: tuple[str, ...]) -> Any:
    return next((text[key] for key in keys if text.get(key) is not None), None)


def _positive(text: Config, keys: tuple[str, ...], name: str) -> int:
    value = _first(text, keys)
    if value is None:
        raise ConfigError(
            f"{name}: the config has no {keys[0]} (nor {', '.join(keys[1:])}); is it a decoder's config.json?"
        )
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}: {keys[0]} is {value!r}; it must be an integer of at least 1")
    return value


def _kv_heads(text: Config, heads: int, name: str) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1  # Falcon 7B, StarCoder: one KV head, not in a field of its own
    kv_heads = heads if _first(text, _KV_HEADS) is None else _positive(text, _KV_HEADS, name)
    if heads % kv_heads:
        raise ConfigError(f"{name}: {heads} attention heads do not divide into {kv_heads} KV heads")
    return kv_heads


def _head_dim(text: Config, heads: int, name: str) -> int:
    if text.get("head_dim") is not None:
        return _positive(text, ("head_dim",), name)
    hidden = _positive(text, _HIDDEN, name)
    if hidden % heads:
        raise ConfigError(f"{name}: hidden_size {hidden} does not divide by {heads} heads, and there is no head_dim")
    return hidden // heads


def _dtype(config: Config, text: Config) -> str | None:
    for part in (text, config):
        value = part.get("dtype") or part.get("torch_dtype")
        if isinstance(value, str):
            return value.removeprefix("torch.")
    return None


def _checkpoint_kv_dtype(config: Config, text: Config) -> str | None:
    """What a quantized checkpoint says about its KV (spec kv-layout, section 1.2): ModelOpt and compressed-tensors."""
    quantization: Config = config.get("quantization_config") or text.get("quantization_config") or {}
    algorithm = (quantization.get("quantization") or quantization).get("kv_cache_quant_algo")
    if isinstance(algorithm, str):
        return {"fp8": "fp8", "nvfp4": "nvfp4"}.get(algorithm.lower())
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("type") == "float":
        return {8: "fp8", 4: "nvfp4"}.get(scheme.get("num_bits", 0))
    return None
