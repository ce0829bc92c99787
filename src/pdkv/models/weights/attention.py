"""Matrices of one attention layer: separate K and V heads, a latent, a sparse latent, DeepSeek-V4's compressed one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdkv.models.fields import HEADS, HIDDEN, Config, optional, positive
from pdkv.models.latent import is_latent, is_v4
from pdkv.models.spec import LayerKind, LayerSpec, Record
from pdkv.models.weights.matrices import Matrix, Split, linear, norm
from pdkv.models.weights.traits import Traits


def attention_matrices(text: Config, cache: LayerSpec, traits: Traits, path: str, name: str) -> list[Matrix]:
    """The matrices of the attention that owns ``cache``. ``path`` is the module's (``layers.3.self_attn``)."""
    if is_v4(text):
        return _compressed(text, cache.layer, path, name)
    if is_latent(text):
        return _latent(text, cache, path, name)
    return _heads(text, cache, traits, path, name)


def _query_heads(text: Config, index: int, name: str) -> int:
    """Query heads of one layer; a few families have other counts on other kinds of layers."""
    types = text.get("layer_types") or ()
    other = text.get("attention_other_setting")
    if isinstance(other, Mapping) and index < len(types) and other.get("attention_type") == types[index]:
        return positive(other, ("num_attention_heads",), name)
    sliding = index < len(types) and types[index] == "sliding_attention"
    if sliding and text.get("swa_num_attention_heads"):
        return positive(text, ("swa_num_attention_heads",), name)
    return positive(text, HEADS, name)


def _biases(text: Config, traits: Traits) -> tuple[bool, bool]:
    """Whether q, k and v have biases, and whether the output has one."""
    asked = text.get("attention_bias", text.get("qkv_bias", text.get("add_qkv_bias", text.get("use_bias"))))
    both = bool(traits.qkv_bias or asked)
    out = text.get("attention_out_bias")
    return both, bool(out) if out is not None else both and traits.out_bias


def _heads(text: Config, cache: LayerSpec, traits: Traits, path: str, name: str) -> list[Matrix]:
    hidden = positive(text, HIDDEN, name)
    heads, kv_heads = _query_heads(text, cache.layer, name), cache.kv_heads
    dim, dim_v = cache.head_dim, cache.head_dim_v
    qkv_bias, out_bias = _biases(text, traits)
    fused = f"{path}.qkv_proj"
    # Qwen3-Next and 3.5 make a gate for every output along with the queries.
    gated = text.get("attn_output_gate", str(text["model_type"]).startswith(("qwen3_next", "qwen3_5")))
    gate = 2 if gated else 1
    found = linear(f"{path}.q_proj", heads * dim * gate, hidden, Split.COLUMN, bias=qkv_bias, fused=fused)
    found += linear(f"{path}.k_proj", kv_heads * dim, hidden, Split.HEADS, heads=kv_heads, bias=qkv_bias, fused=fused)
    value = linear(f"{path}.v_proj", kv_heads * dim_v, hidden, Split.HEADS, heads=kv_heads, bias=qkv_bias, fused=fused)
    if _keys_are_values(text, cache):
        value = [replace(matrix, derived=True) for matrix in value]
    found += value
    found += linear(f"{path}.o_proj", hidden, heads * dim_v, Split.ROW, bias=out_bias)
    found += _query_key_norms(text, traits, heads * dim, kv_heads * dim, dim, path)
    if text.get("use_head_wise_attn_gate"):
        found += linear(f"{path}.g_proj", heads, hidden, Split.COLUMN)
    if _has_sinks(text, cache):
        found.append(Matrix(f"{path}.sinks", heads, 1, Split.COLUMN))
    return found


def _keys_are_values(text: Config, cache: LayerSpec) -> bool:
    """Gemma 4's full attention has no values of its own; the engine keeps the projection all the same."""
    sliding = cache.kind is LayerKind.SLIDING_WINDOW
    return text.get("model_type") == "gemma4_text" and bool(text.get("attention_k_eq_v")) and not sliding


def _has_sinks(text: Config, cache: LayerSpec) -> bool:
    kind = text.get("model_type")
    if kind in ("mimo_v2_flash", "mimo_v2"):
        which = "swa" if cache.kind is LayerKind.SLIDING_WINDOW else "full"
        return bool(text.get(f"add_{which}_attention_sink_bias", which == "swa"))
    return kind == "gpt_oss"


def _query_key_norms(text: Config, traits: Traits, q_width: int, k_width: int, dim: int, path: str) -> list[Matrix]:
    kind = traits.qk_norm
    if text.get("use_qk_norm") is not None:
        kind = (traits.qk_norm or "head") if text["use_qk_norm"] else ""
    if text.get("model_type") == "llama4_text":
        kind = ""  # normalised without weights
    if kind == "width":
        return [Matrix(f"{path}.q_norm", q_width, 1, Split.COLUMN), Matrix(f"{path}.k_norm", k_width, 1)]
    if kind != "head":
        return []
    if text.get("model_type") == "cohere":
        return [Matrix(f"{path}.q_norm", q_width, 1, Split.COLUMN), Matrix(f"{path}.k_norm", k_width, 1)]
    return [*norm(f"{path}.q_norm", dim), *norm(f"{path}.k_norm", dim)]


# ------------------------------------------------------------------------------------------------------------- latents


def _latent(text: Config, cache: LayerSpec, path: str, name: str) -> list[Matrix]:
    hidden, heads = positive(text, HIDDEN, name), positive(text, HEADS, name)
    latent = positive(text, ("kv_lora_rank",), name)
    rope = optional(text, ("qk_rope_head_dim",), name, 0)
    nope, value = positive(text, ("qk_nope_head_dim",), name), positive(text, ("v_head_dim",), name)
    bias = bool(text.get("attention_bias"))
    found = _latent_queries(text, hidden, heads * (nope + rope), bias, path, name)
    found += linear(f"{path}.kv_a_proj_with_mqa", latent + rope, hidden, Split.WHOLE, bias=bias)
    found += norm(f"{path}.kv_a_layernorm", latent)
    found += linear(f"{path}.kv_b_proj", heads * (nope + value), latent, Split.COLUMN)
    found += linear(f"{path}.o_proj", hidden, heads * value, Split.ROW, bias=bias)
    if text.get("mla_use_output_gate"):
        found += linear(f"{path}.g_proj", heads * value, hidden, Split.COLUMN)
    # The two halves of kv_b_proj once more, in the model's type, for decoding on latents (mla_attention.py,
    # process_weights_after_loading).
    found.append(Matrix(f"{path}.W_UK_T", heads * nope, latent, Split.COLUMN, derived=True))
    found.append(Matrix(f"{path}.W_UV", heads * value, latent, Split.COLUMN, derived=True))
    if cache.record is Record.DEEPSEEK_SPARSE and cache.leads_index:
        found += _indexer(text, f"{path}.indexer", hidden, name)
    return found


def _latent_queries(text: Config, hidden: int, width: int, bias: bool, path: str, name: str) -> list[Matrix]:
    rank: Any = text.get("q_lora_rank")
    if not rank:
        return linear(f"{path}.q_proj", width, hidden, Split.COLUMN)
    rank = positive(text, ("q_lora_rank",), name)
    return [
        *linear(f"{path}.q_a_proj", rank, hidden, Split.WHOLE, bias=bias),
        *norm(f"{path}.q_a_layernorm", rank),
        *linear(f"{path}.q_b_proj", width, rank, Split.COLUMN),
    ]


def _indexer(text: Config, path: str, hidden: int, name: str) -> list[Matrix]:
    dim, heads = positive(text, ("index_head_dim",), name), positive(text, ("index_n_heads",), name)
    return [
        *linear(f"{path}.wq_b", heads * dim, positive(text, ("q_lora_rank",), name), Split.WHOLE),
        *linear(f"{path}.wk", dim, hidden, Split.WHOLE),
        *norm(f"{path}.k_norm", dim, bias=True),
        Matrix(f"{path}.weights_proj", heads, hidden),
    ]


# --------------------------------------------------------------------------------------------------------- DeepSeek-V4


def _compressed(text: Config, index: int, path: str, name: str) -> list[Matrix]:
    hidden, heads = positive(text, HIDDEN, name), positive(text, HEADS, name)
    dim, rank = positive(text, ("head_dim",), name), positive(text, ("q_lora_rank",), name)
    groups, out_rank = positive(text, ("o_groups",), name), positive(text, ("o_lora_rank",), name)
    found = [
        Matrix(f"{path}.sinks", heads, 1, Split.COLUMN, dtype="float32"),
        *linear(f"{path}.q_a_proj", rank, hidden, Split.WHOLE),
        *norm(f"{path}.q_a_norm", rank),
        *linear(f"{path}.q_b_proj", heads * dim, rank, Split.COLUMN),
        *linear(f"{path}.kv_proj", dim, hidden, Split.WHOLE),
        *norm(f"{path}.kv_norm", dim),
        *linear(f"{path}.o_a_proj", groups * out_rank, heads * dim // groups, Split.COLUMN),
        *linear(f"{path}.o_b_proj", hidden, groups * out_rank, Split.ROW),
    ]
    ratio = int(text["compress_ratios"][index])
    if ratio > 1:
        found += _compressor(f"{path}.compressor", dim, ratio, hidden)
    if ratio == 4:
        index_dim = positive(text, ("index_head_dim",), name)
        index_heads = positive(text, ("index_n_heads",), name)
        found += _compressor(f"{path}.indexer.compressor", index_dim, ratio, hidden)
        found += linear(f"{path}.indexer.q_b_proj", index_heads * index_dim, rank, Split.WHOLE)
        found.append(Matrix(f"{path}.indexer.weights_proj", index_heads, hidden))
    return found


def _compressor(path: str, dim: int, ratio: int, hidden: int) -> list[Matrix]:
    """Keys and scores of a group of tokens; at ratio 4 groups overlap, so that both are twice as wide."""
    width = dim * (2 if ratio == 4 else 1)
    return [
        Matrix(f"{path}.position_bias", ratio, width, dtype="float32"),
        Matrix(f"{path}.kv_proj", width, hidden),
        Matrix(f"{path}.gate_proj", width, hidden),
        *norm(f"{path}.kv_norm", dim),
    ]
