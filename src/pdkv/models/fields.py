"""Reading single fields of a Hugging Face config.json: aliases, nesting, context length, what a checkpoint asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pdkv.errors import ConfigError

Config = Mapping[str, Any]

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Each layer is read by itself: a number beyond this is a mistake, or meant to keep a planner busy.
MOST_LAYERS = 10_000
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
# In vLLM's order (model_arch_config_convertor.py, get_total_num_kv_heads).
KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
HIDDEN = ("hidden_size", "n_embd", "d_model")
# vLLM takes the smallest of those that a config has, but model_max_length whatever the others say (Command R;
# transformers_utils/model_arch_config_convertor.py, derive_max_model_len_and_key).
_CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_OWN_CONTEXT = "model_max_length"
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
# Rope types whose max_position_embeddings is the scaled length already; every other type multiplies by its factor.
_SCALED_ALREADY = (None, "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_MODELOPT_KV = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Make a ConfigError of whatever a field of an unexpected shape leads to.

    A config of odd shapes still is a person's input, and its fields are too many to check each before it is read.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError, ZeroDivisionError) as error:
        raise ConfigError(f"{name}: the config has a field of an unexpected shape ({error})") from error


def first(text: Config, keys: Sequence[str]) -> Any:
    """The value of the first of ``keys`` that is there and not null, else ``None``."""
    return next((text[key] for key in keys if text.get(key) is not None), None)


def positive(text: Config, keys: Sequence[str], name: str) -> int:
    """The first of ``keys`` as an integer of at least 1. Raises ConfigError when it is missing or something else."""
    key = next((key for key in keys if text.get(key) is not None), None)
    if key is None:
        others = f" (nor {', '.join(keys[1:])})" if len(keys) > 1 else ""
        raise ConfigError(f"{name}: the config has no {keys[0]}{others}; is it a decoder's config.json?")
    value = text[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}: {key} is {value!r}; it must be an integer of at least 1")
    return value


def optional(text: Config, keys: Sequence[str], name: str, default: int) -> int:
    """Like `positive`, or ``default`` when none of ``keys`` is there."""
    return default if first(text, keys) is None else positive(text, keys, name)


def strings(text: Config, key: str) -> tuple[str, ...]:
    """A list of strings; empty when the field is absent or null."""
    return tuple(str(item) for item in text.get(key) or ())


def text_config(config: Config) -> Config:
    """The part of a config that describes the language model: a nested one in multimodal configs, else all of it."""
    for key in _NESTED:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            if first(nested, LAYERS) is not None or nested.get("layers_block_type"):
                return nested
            if any(isinstance(nested.get(inner), Mapping) for inner in _NESTED):
                return text_config(nested)
    return config


def quantization(config: Config, text: Config) -> Config:
    """The quantization section of a checkpoint, wherever it stands; empty when there is none."""
    for part in (config, text):
        for key in ("quantization_config", "compression_config"):
            if isinstance(part.get(key), Mapping):
                found: Config = part[key]
                return found
    return {}


def served_context(text: Config) -> int | None:
    """The context that a model with LongRoPE is served at unless more is asked for; ``None`` for other models."""
    length = text.get("original_max_position_embeddings")
    longrope = any(rope.get("rope_type", rope.get("type")) == "longrope" for rope in _ropes(text))
    return int(length) if longrope and isinstance(length, int) else None


def max_context(text: Config, *, name: str) -> int:
    """Longest context in tokens: its own field or the smallest of the others, times the rope factor as in vLLM."""
    keys = (_OWN_CONTEXT,) if text.get(_OWN_CONTEXT) else _CONTEXT
    lengths = [int(text[key]) for key in keys if isinstance(text.get(key), int) and text[key] > 0]
    if not lengths:
        raise ConfigError(f"{name}: the config has no context length (looked for {', '.join(_CONTEXT[:4])}, ...)")
    factor: float = 1.0
    for rope in _ropes(text):
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in _SCALED_ALREADY:
            factor = rope.get("factor") or factor
    # Gemma 3 states the scaled length with any type.
    if "gemma3" in str(text.get("model_type", "")):
        factor = 1.0
    return int(min(lengths) * factor)


def _ropes(text: Config) -> list[Config]:
    """Rope sections: one, or one per kind of layer."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return []
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    return nested or [rope]


def checkpoint_dtype(config: Config, text: Config) -> str | None:
    """The element type of the checkpoint, ``None`` when its config does not say."""
    for part in (text, config):
        value = part.get("dtype") or part.get("torch_dtype")
        if isinstance(value, str):
            return value.removeprefix("torch.")
    return None


def checkpoint_kv_dtype(config: Config, text: Config) -> tuple[str | None, str | None]:
    """What a quantized checkpoint wants its KV stored as, and a warning if it names something unknown.

    ModelOpt names an algorithm; a compressed-tensors scheme always becomes fp8 (spec kv-layout, section 1.2).
    """
    section = quantization(config, text)
    inner = section.get("quantization")
    inner = inner if isinstance(inner, Mapping) else section
    scheme = inner.get("kv_cache_scheme") or section.get("kv_cache_scheme")
    if not str(section.get("quant_method", "")).startswith("modelopt"):
        return ("fp8", None) if isinstance(scheme, Mapping) else (None, None)
    asked = scheme or inner.get("kv_cache_quant_algo") or section.get("kv_cache_quant_algo")
    if not asked:
        return None, None
    if isinstance(asked, Mapping):
        if asked.get("type") == "float" and asked.get("num_bits") == 4:
            return "nvfp4", None
        # A scheme in 8 bits counts only when it says that it is static.
        if asked.get("type") == "float" and asked.get("num_bits") == 8 and asked.get("dynamic") is False:
            return "fp8_e4m3", None
    elif str(asked).lower() in _MODELOPT_KV:
        return _MODELOPT_KV[str(asked).lower()], None
    return None, f"the checkpoint asks for KV in {asked!r}, which vLLM does not know: it keeps the model's own type"
