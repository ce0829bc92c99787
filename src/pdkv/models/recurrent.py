"""Layers that keep a state of fixed size (Mamba, gated delta nets, KDA, short convolutions): their sizes and places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.models.fields import Config, first, optional, positive, strings
from pdkv.models.spec import RecurrentState

STATE_TYPES = frozenset(
    {"mamba", "mamba2", "linear_attention", "linear", "conv", "kda", "recurrent", "gated_delta_net"}
)
_ATTENTION_TYPES = frozenset(
    {"attention", "full_attention", "sliding_attention", "sliding_window", "multi_latent_attention"}
)
_BOTH_TYPES = frozenset({"hybrid"})
NOTHING_TYPES = frozenset({"mlp", "moe", "ffn"})
_MARKS = (
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_value_heads",
    "attn_layer_period",
    "attn_layer_indices",
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "conv_L_cache",
    "full_attn_idxs",
    "lru_width",
)


def has_state(text: Config) -> bool:
    """Whether any layer of the model keeps a state."""
    types = set(strings(text, "layer_types"))
    linear = any(kind != 1 for kind in text.get("attn_type_list") or ())
    return linear or bool(types & STATE_TYPES) or any(text.get(mark) for mark in _MARKS)


def layer_roles(text: Config, *, name: str) -> list[tuple[bool, bool]]:
    """Per decoder layer: does it have attention, does it keep a state?

    Raises UnsupportedModel when the config does not say, or says something that is not known.
    """
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return [_role_of_letter(letter, name) for letter in pattern if letter != "|"]
    types = strings(text, "layers_block_type") or strings(text, "layer_types")
    if types:
        return [_role_of_type(kind, name) for kind in types]
    count = _layer_count(text, name)
    if text.get("model_type") == "falcon_h1":
        return [(True, True)] * count
    attention = _attention_layers(text, count, name)
    return [(index in attention, index not in attention) for index in range(count)]


def _layer_count(text: Config, name: str) -> int:
    return positive(text, ("num_hidden_layers", "n_layer"), name)


def _role_of_letter(letter: str, name: str) -> tuple[bool, bool]:
    roles = {"M": (False, True), "*": (True, False), "-": (False, False), "E": (False, False)}
    if letter not in roles:
        raise UnsupportedModel(
            f"{name}: hybrid_override_pattern has the letter {letter!r}; known are {' '.join(roles)}"
        )
    return roles[letter]


def _role_of_type(kind: str, name: str) -> tuple[bool, bool]:
    if kind in _BOTH_TYPES:
        return True, True
    if kind in STATE_TYPES:
        return False, True
    if kind in _ATTENTION_TYPES:
        return True, False
    if kind in NOTHING_TYPES:
        return False, False
    raise UnsupportedModel(f"{name}: a layer of type {kind!r} is not sized")


def _attention_layers(text: Config, count: int, name: str) -> set[int]:
    """Indices of the attention layers of a hybrid that has no list of layer types."""
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping) and linear.get("full_attn_layers"):
        return {int(index) - 1 for index in linear["full_attn_layers"]}  # counted from one
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if text.get(key) is not None:
            return {int(index) for index in text[key]}
    if text.get("attn_layer_period"):
        period, offset = int(text["attn_layer_period"]), int(text.get("attn_layer_offset") or 0)
        return set(range(offset, count, period))
    if text.get("full_attention_interval"):
        return set(range(int(text["full_attention_interval"]) - 1, count, int(text["full_attention_interval"])))
    if text.get("linear_num_value_heads"):
        return set(range(3, count, 4))  # what the Qwen3-Next code takes when its config does not say
    if text.get("attn_type_list"):
        return {index for index, kind in enumerate(text["attn_type_list"]) if kind == 1}
    if not first(text, ("num_attention_heads", "n_head")) or text.get("model_type") in (
        "mamba",
        "mamba2",
        "falcon_mamba",
    ):
        return set()
    raise UnsupportedModel(
        f"{name}: some layers keep a recurrent state, but which ones is not in the config (looked for layer_types, "
        "layers_block_type, hybrid_override_pattern, attn_layer_period, full_attention_interval)"
    )


# ---------------------------------------------------------------------------------------------------- sizes of states


def read_state(config: Config, text: Config, *, name: str) -> RecurrentState:
    """The state of the model's recurrent layers. Raises UnsupportedModel when its sizes are in no known fields."""
    if text.get("linear_num_value_heads"):
        return _gated_delta(text, name)
    if isinstance(text.get("linear_attn_config"), Mapping):
        return _kda(text["linear_attn_config"], name)
    if text.get("mamba_num_heads") and text.get("ssm_state_size"):
        return _nemotron_mamba2(text, name)
    if first(text, ("mamba_n_heads", "n_mamba_heads")) is not None:
        return _mamba2(text, name)
    if text.get("mamba_d_state"):
        return _mamba1(text, positive(text, ("mamba_d_state",), name), name)
    if text.get("conv_L_cache"):
        rows = positive(text, ("conv_L_cache",), name) - 1
        return RecurrentState(conv_rows=rows, conv_channels=positive(text, ("conv_dim", "hidden_size"), name))
    if text.get("state_size"):
        return _plain_mamba(text, name)
    if text.get("attn_type_list"):
        heads = positive(text, ("num_attention_heads",), name)
        dim = optional(text, ("head_dim",), name, positive(text, ("hidden_size",), name) // heads)
        return RecurrentState(conv_rows=0, conv_channels=0, heads=heads, cells=dim * dim)
    raise UnsupportedModel(f"{name}: a recurrent layer whose state is described by no field that is known")


def _gated_delta(text: Config, name: str) -> RecurrentState:
    value_heads = positive(text, ("linear_num_value_heads",), name)
    key_heads = positive(text, ("linear_num_key_heads",), name)
    key_dim = positive(text, ("linear_key_head_dim",), name)
    value_dim = positive(text, ("linear_value_head_dim",), name)
    # Qwen3-Next has the field too at times, and vLLM reads it for Qwen3.5 only.
    asked = first(text, ("mamba_ssm_dtype",)) if "qwen3_5" in str(text.get("model_type")) else None
    return RecurrentState(
        conv_rows=positive(text, ("linear_conv_kernel_dim",), name) - 1,
        conv_channels=2 * key_dim * key_heads + value_dim * value_heads,
        heads=value_heads,
        cells=key_dim * value_dim,
        cells_dtype=None if asked is None else str(asked),
    )


def _kda(linear: Config, name: str) -> RecurrentState:
    heads, dim = positive(linear, ("num_heads",), name), positive(linear, ("head_dim",), name)
    return RecurrentState(
        conv_rows=optional(linear, ("short_conv_kernel_size",), name, 4) - 1,
        conv_channels=3 * heads * dim,
        heads=heads,
        cells=dim * dim,
        cells_dtype="float32",
        # The prefill kernel that saves a state inside a step (NVIDIA, from Hopper on) is for these only.
        checkpoint_blocks=int(dim == 128 and linear.get("gate_lower_bound") is not None),
    )


def _nemotron_mamba2(text: Config, name: str) -> RecurrentState:
    heads, dim = positive(text, ("mamba_num_heads",), name), positive(text, ("mamba_head_dim",), name)
    state = positive(text, ("ssm_state_size",), name)
    return RecurrentState(
        conv_rows=positive(text, ("conv_kernel",), name) - 1,
        conv_channels=heads * dim,
        groups=positive(text, ("n_groups",), name),
        group_channels=2 * state,
        heads=heads,
        cells=dim * state,
        cells_dtype=str(text.get("mamba_ssm_cache_dtype") or "float32"),
        checkpoint_blocks=1,
    )


def _mamba2(text: Config, name: str) -> RecurrentState:
    heads = positive(text, ("mamba_n_heads", "n_mamba_heads"), name)
    dim = positive(text, ("mamba_d_head", "mamba_headdim"), name)
    state = positive(text, ("mamba_d_state",), name)
    inner = text.get("mamba_d_ssm") or int(_expansion(text, name) * positive(text, ("hidden_size",), name))
    return RecurrentState(
        conv_rows=positive(text, ("mamba_d_conv",), name) - 1,
        conv_channels=int(inner),
        groups=optional(text, ("mamba_n_groups", "mamba_ngroups"), name, 1),
        group_channels=2 * state,
        heads=heads,
        cells=dim * state,
        checkpoint_blocks=1,
    )


def _mamba1(text: Config, state: int, name: str) -> RecurrentState:
    inner = int(_expansion(text, name) * positive(text, ("hidden_size",), name))
    rows = positive(text, ("mamba_d_conv", "conv_kernel"), name) - 1
    return RecurrentState(conv_rows=rows, conv_channels=inner, heads=inner, cells=state)


def _plain_mamba(text: Config, name: str) -> RecurrentState:
    state = positive(text, ("state_size",), name)
    if not text.get("num_heads"):
        inner = text.get("intermediate_size")
        if not isinstance(inner, int):
            return _mamba1(text, state, name)
        rows = positive(text, ("conv_kernel",), name) - 1
        return RecurrentState(conv_rows=rows, conv_channels=inner, heads=inner, cells=state)
    heads, dim = positive(text, ("num_heads",), name), positive(text, ("head_dim",), name)
    return RecurrentState(
        conv_rows=positive(text, ("conv_kernel",), name) - 1,
        conv_channels=int(_expansion(text, name) * positive(text, ("hidden_size",), name)),
        groups=positive(text, ("n_groups",), name),
        group_channels=2 * state,
        heads=heads,
        cells=dim * state,
        checkpoint_blocks=1,
    )


def _expansion(text: Config, name: str) -> float:
    value: Any = first(text, ("mamba_expand", "expand"))
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{name}: mamba_expand is {value!r}; it must be a positive number")
    return float(value)
