"""Matrices of one feed-forward layer: dense, or a router, experts and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.models.fields import HIDDEN, Config, first, optional, positive
from pdkv.models.weights.matrices import Matrix, Split, linear, norm
from pdkv.models.weights.traits import Traits

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_DENSE = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "share_expert_dim", "share_expert_dims",
                 "shared_intermediate_size", "moe_shared_expert_intermediate_size")  # fmt: skip
# Families whose experts have the width that the config calls intermediate_size.
_WIDTH_IS_EXPERTS = ("mixtral", "minimax", "minimax_m2", "granitemoe", "granitemoeshared", "granitemoehybrid",
                     "gpt_oss", "llama4_text", "jamba", "phimoe", "olmoe")  # fmt: skip
# Families whose router corrects its scores with a bias for each expert (noaux_tc), without a field that says so.
_CORRECTED = """
    deepseek_v3 deepseek_v32 deepseek_v4 dots1 ernie4_5_moe exaone_moe glm4_moe glm4_moe_lite glm4v_moe_text glm_moe_dsa
    kimi_k2 kimi_linear mimo_v2 mimo_v2_flash minimax_m2 nemotron_h step3p5 step3p7
"""


@dataclass(frozen=True, slots=True)
class _Experts:
    """``count`` routed experts of ``width``, and shared ones of ``shared`` together (0: none)."""

    count: int
    width: int
    shared: int
    shared_gate: bool


def feed_forward_matrices(text: Config, index: int, traits: Traits, path: str, name: str) -> list[Matrix]:
    """The feed-forward matrices of layer ``index``; ``path`` is the layer's (``layers.3``)."""
    hidden = positive(text, HIDDEN, name)
    if text.get("block_configs"):
        return _searched(text, index, hidden, path, name)
    experts = _experts(text, name)
    if text.get("model_type") == "gemma4_text":
        return _gemma4(text, index, experts if text.get("enable_moe_block") else None, traits, path, hidden, name)
    if experts is None or not _is_sparse(text, index):
        return _dense(text, _dense_width(text, experts, name), hidden, traits, f"{path}.mlp")
    return _sparse(text, experts, hidden, traits, f"{path}.mlp")


def _experts(text: Config, name: str) -> _Experts | None:
    count = first(text, _EXPERTS)
    if isinstance(count, list):
        raise UnsupportedModel(f"{name}: experts that differ by layer are not counted")
    if not count or count == 1:
        return None
    kind = text.get("model_type")
    named = ("moe_intermediate_size", "expert_hidden_dim", "moe_ffn_hidden_size")
    if isinstance(first(text, named), list):
        raise UnsupportedModel(f"{name}: experts whose widths differ by layer are not counted")
    width = positive(text, _DENSE if kind in _WIDTH_IS_EXPERTS else (*named, *_DENSE), name)
    return _Experts(int(count), width, *_shared(text, width))


def _shared(text: Config, width: int) -> tuple[int, bool]:
    """(width of the shared experts together, whether a gate weighs them)."""
    for key in _SHARED_WIDTH:
        value = text.get(key)
        if value:
            return int(value), key == "shared_expert_intermediate_size"
        if value == 0:
            return 0, False
    if text.get("model_type") == "llama4_text":
        return width, False
    shared = first(text, ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"))
    count = shared[0] if isinstance(shared, list) else shared
    return int(count or 0) * width, False


def _dense_width(text: Config, experts: _Experts | None, name: str) -> int:
    if experts is not None and text.get("intermediate_size_mlp"):
        return positive(text, ("intermediate_size_mlp",), name)
    width = positive(text, _DENSE, name)
    if text.get("block_auto_adjust_ff_dim"):  # LFM2
        width = int(float(text.get("block_ffn_dim_multiplier") or 1) * (2 * width // 3))
        width += -width % optional(text, ("block_multiple_of",), name, 256)
    return width


def _is_sparse(text: Config, index: int) -> bool:
    """Whether layer ``index`` has experts: six ways in which configs say it."""
    types = text.get("mlp_layer_types")
    if isinstance(types, list) and index < len(types):
        return bool(types[index] == "sparse")
    listed = text.get("moe_layers") or text.get("moe_layers_enum")
    if isinstance(listed, str):
        return index in {int(part) for part in listed.split(",") if part.strip()}
    if isinstance(listed, list):
        return index in listed
    frequency = text.get("moe_layer_freq")
    if isinstance(frequency, list):
        return bool(index < len(frequency) and frequency[index])
    if text.get("expert_layer_period"):
        return index % int(text["expert_layer_period"]) == int(text.get("expert_layer_offset") or 0)
    if text.get("interleave_moe_layer_step"):
        return (index + 1) % int(text["interleave_moe_layer_step"]) == 0
    if text.get("moe_layer_interval"):
        start, end = int(text.get("moe_layer_start_index") or 0), text.get("moe_layer_end_index")
        last = index if end in (None, -1) else int(end)
        return start <= index <= last and (index + 1) % int(text["moe_layer_interval"]) == 0
    if index in (text.get("mlp_only_layers") or ()):
        return False
    if text.get("decoder_sparse_step"):
        return (index + 1) % int(text["decoder_sparse_step"]) == 0
    if text.get("is_first_layer_dense") or text.get("num_dense_layers"):
        return index >= int(text.get("num_dense_layers") or 1)
    if index < int(text.get("first_k_dense_replace") or 0):
        return False
    return index % int(frequency or 1) == 0


def _dense(text: Config, width: int, hidden: int, traits: Traits, path: str) -> list[Matrix]:
    bias = bool(traits.mlp_bias or text.get("mlp_bias") or (not traits.gated and text.get("use_bias")))
    if not traits.gated:
        return [
            *linear(f"{path}.up_proj", width, hidden, Split.COLUMN, bias=bias),
            *linear(f"{path}.down_proj", hidden, width, Split.ROW, bias=bias),
        ]
    fused = f"{path}.gate_up_proj"
    return [
        *linear(f"{path}.gate_proj", width, hidden, Split.COLUMN, bias=bias, fused=fused),
        *linear(f"{path}.up_proj", width, hidden, Split.COLUMN, bias=bias, fused=fused),
        *linear(f"{path}.down_proj", hidden, width, Split.ROW, bias=bias),
    ]


def _sparse(text: Config, experts: _Experts, hidden: int, traits: Traits, path: str) -> list[Matrix]:
    kind = text.get("model_type")
    # Nemotron 3, Kimi K3: experts work on fewer channels.
    latent = int(first(text, ("moe_latent_size", "routed_expert_hidden_size")) or hidden)
    found = [Matrix(f"{path}.gate", experts.count, hidden)]
    if kind in _CORRECTED.split() or text.get("use_moe_router_bias") or text.get("use_routing_bias"):
        found.append(Matrix(f"{path}.gate.e_score_correction_bias", experts.count, 1, dtype="float32"))
    elif kind == "gpt_oss":
        found.append(Matrix(f"{path}.gate.bias", experts.count, 1))
    up = experts.width * (2 if traits.gated and kind != "nemotron_h" else 1)
    found.append(_expert(f"{path}.experts.gate_up_proj", up, latent, Split.EXPERT_COLUMN, experts.count))
    found.append(_expert(f"{path}.experts.down_proj", latent, experts.width, Split.EXPERT_ROW, experts.count))
    if kind == "gpt_oss":
        found.append(Matrix(f"{path}.experts.gate_up_proj_bias", up, 1, Split.EXPERT_COLUMN, count=experts.count))
        found.append(Matrix(f"{path}.experts.down_proj_bias", hidden, 1, Split.EXPERT_WHOLE, count=experts.count))
    if latent != hidden:
        found += linear(f"{path}.fc1_latent_proj", latent, hidden, Split.WHOLE)
        found += linear(f"{path}.fc2_latent_proj", hidden, latent, Split.WHOLE)
    if experts.shared:
        found += _dense(text, experts.shared, hidden, traits, f"{path}.shared_experts")
    if experts.shared and experts.shared_gate:
        found.append(Matrix(f"{path}.shared_expert_gate", 1, hidden))
    return found


def _expert(name: str, rows: int, cols: int, split: Split, count: int) -> Matrix:
    return Matrix(name, rows, cols, split, count=count, linear=True)


def _gemma4(
    text: Config, index: int, experts: _Experts | None, traits: Traits, path: str, hidden: int, name: str
) -> list[Matrix]:
    """A dense layer in every layer, experts beside it, and norms of their own."""
    width = positive(text, _DENSE, name)
    shared = int(text.get("num_kv_shared_layers") or 0)
    if text.get("use_double_wide_mlp") and shared and index >= positive(text, ("num_hidden_layers",), name) - shared:
        width *= 2
    found = _dense(text, width, hidden, traits, f"{path}.mlp")
    found.append(Matrix(f"{path}.layer_scalar", 1, 1))
    if inputs := per_layer_inputs(text):
        found.append(Matrix(f"{path}.per_layer_input_gate", inputs, hidden, linear=True))
        found.append(Matrix(f"{path}.per_layer_projection", hidden, inputs, linear=True))
        found += norm(f"{path}.post_per_layer_input_norm", hidden)
    if experts is None:
        return found
    found += [
        Matrix(f"{path}.router.proj", experts.count, hidden),
        Matrix(f"{path}.router.scale", hidden, 1),
        Matrix(f"{path}.router.per_expert_scale", experts.count, 1),
        _expert(f"{path}.experts.gate_up_proj", 2 * experts.width, hidden, Split.EXPERT_COLUMN, experts.count),
        _expert(f"{path}.experts.down_proj", hidden, experts.width, Split.EXPERT_ROW, experts.count),
    ]
    for extra in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
        found += norm(f"{path}.{extra}", hidden)
    return found


def per_layer_inputs(text: Config) -> int:
    """Channels of the embeddings that Gemma 4's small models give every layer anew; 0 when there are none."""
    if text.get("model_type") != "gemma4_text":
        return 0
    return int(text.get("hidden_size_per_layer_input", 256) or 0)


def _searched(text: Config, index: int, hidden: int, path: str, name: str) -> list[Matrix]:
    """Nemotron's searched models: a multiple of the hidden size per layer (transformers' DeciLM, find_multiple)."""
    blocks = text["block_configs"]
    ffn = blocks[index].get("ffn") if index < len(blocks) else None
    if not isinstance(ffn, Mapping):
        raise ConfigError(f"{name}: block_configs has no ffn for layer {index}")
    if ffn.get("no_op"):
        return []
    if ffn.get("replace_with_linear"):
        return linear(f"{path}.mlp.linear_mlp", hidden, hidden, Split.COLUMN)
    width = ffn.get("intermediate_size")
    if not width:
        width = int(2 * float(ffn["ffn_mult"]) * hidden / 3)
        width += -width % 256
    return _dense(text, int(width), hidden, Traits(), f"{path}.mlp")
