"""Matrices of layers that keep a recurrent state: gated delta nets, KDA, Mamba 1 and 2, short convolutions."""

from __future__ import annotations

from collections.abc import Mapping

from pdkv.errors import UnsupportedModel
from pdkv.models.fields import HIDDEN, Config, first, optional, positive
from pdkv.models.spec import RecurrentState
from pdkv.models.weights.matrices import Matrix, Split, linear, norm
from pdkv.units import cdiv


def state_matrices(text: Config, state: RecurrentState, path: str, name: str) -> list[Matrix]:
    """The matrices of one recurrent layer. ``path`` is the layer's. Raises UnsupportedModel for a kind not counted."""
    hidden = positive(text, HIDDEN, name)
    if text.get("linear_num_value_heads"):
        return _gated_delta(text, hidden, f"{path}.linear_attn", name)
    if isinstance(text.get("linear_attn_config"), Mapping):
        return _kda(text, text["linear_attn_config"], hidden, f"{path}.self_attn", name)
    if text.get("conv_L_cache"):
        return _short_conv(text, hidden, f"{path}.conv", name)
    if text.get("model_type") == "jamba":
        return _mamba1(text, state, hidden, f"{path}.mamba", name)
    if state.groups and state.heads:
        mixer = "mixer" if text.get("model_type") == "nemotron_h" else "mamba"
        return _mamba2(text, state, hidden, f"{path}.{mixer}")
    raise UnsupportedModel(f"{name}: weights of its recurrent layers are not counted from a config")


def _gated_delta(text: Config, hidden: int, path: str, name: str) -> list[Matrix]:
    heads, key_heads = (
        positive(text, ("linear_num_value_heads",), name),
        positive(text, ("linear_num_key_heads",), name),
    )
    key, value = positive(text, ("linear_key_head_dim",), name), positive(text, ("linear_value_head_dim",), name)
    kernel = positive(text, ("linear_conv_kernel_dim",), name)
    keys, values = key * key_heads, value * heads
    qkvz, ba = f"{path}.in_proj_qkvz", f"{path}.in_proj_ba"
    return [
        *linear(f"{path}.in_proj_qkv", 2 * keys + values, hidden, Split.COLUMN, fused=qkvz),
        *linear(f"{path}.in_proj_z", values, hidden, Split.COLUMN, fused=qkvz),
        *linear(f"{path}.in_proj_b", heads, hidden, Split.COLUMN, fused=ba),
        *linear(f"{path}.in_proj_a", heads, hidden, Split.COLUMN, fused=ba),
        Matrix(f"{path}.conv1d", 2 * keys + values, kernel, Split.COLUMN),
        Matrix(f"{path}.dt_bias", heads, 1, Split.COLUMN),
        Matrix(f"{path}.A_log", heads, 1, Split.COLUMN, dtype="float32"),
        *norm(f"{path}.norm", value),
        *linear(f"{path}.out_proj", hidden, values, Split.ROW),
    ]


def _kda(text: Config, sizes: Config, hidden: int, path: str, name: str) -> list[Matrix]:
    """Kimi Delta Attention: gates through a bottleneck of one head's width, or (K3) of full rank."""
    heads, dim = positive(sizes, ("num_heads",), name), positive(sizes, ("head_dim",), name)
    kernel, width = optional(sizes, ("short_conv_kernel_size",), name, 4), heads * dim
    found = []
    for which in "qkv":
        found += linear(f"{path}.{which}_proj", width, hidden, Split.COLUMN, fused=f"{path}.qkv_proj")
        found.append(Matrix(f"{path}.{which}_conv1d", width, kernel, Split.COLUMN))
    found += linear(f"{path}.f_a_proj", dim, hidden, Split.WHOLE)
    found += linear(f"{path}.f_b_proj", width, dim, Split.COLUMN)
    if sizes.get("use_full_rank_gate"):
        found += linear(f"{path}.g_proj", width, hidden, Split.COLUMN)
    else:
        found += linear(f"{path}.g_a_proj", dim, hidden, Split.WHOLE)
        found += linear(f"{path}.g_b_proj", width, dim, Split.COLUMN)
    return [
        *found,
        *linear(f"{path}.b_proj", heads, hidden, Split.COLUMN),
        Matrix(f"{path}.dt_bias", width, 1, Split.COLUMN, dtype="float32"),
        Matrix(f"{path}.A_log", heads, 1, Split.COLUMN, dtype="float32"),
        *norm(f"{path}.o_norm", dim),
        *linear(f"{path}.o_proj", hidden, width, Split.ROW),
    ]


def _short_conv(text: Config, hidden: int, path: str, name: str) -> list[Matrix]:
    bias = bool(text.get("conv_bias"))
    return [
        *linear(f"{path}.in_proj", 3 * hidden, hidden, Split.COLUMN, bias=bias),
        *linear(f"{path}.out_proj", hidden, hidden, Split.ROW, bias=bias),
        Matrix(f"{path}.conv", hidden, positive(text, ("conv_L_cache",), name), Split.COLUMN),
    ]


def _mamba2(text: Config, state: RecurrentState, hidden: int, path: str) -> list[Matrix]:
    inner, groups = state.conv_channels, state.groups * state.group_channels
    bias = bool(first(text, ("mamba_proj_bias", "use_bias")) or False)
    channels = inner + groups
    found = linear(f"{path}.in_proj", inner + channels + state.heads, hidden, Split.COLUMN, bias=bias)
    found.append(Matrix(f"{path}.conv1d", channels, state.conv_rows + 1, Split.COLUMN))
    if first(text, ("use_conv_bias", "mamba_conv_bias")) is not False:
        found.append(Matrix(f"{path}.conv1d.bias", channels, 1, Split.COLUMN))
    found += [
        Matrix(f"{path}.{part}", state.heads, 1, Split.COLUMN, dtype="float32") for part in ("dt_bias", "A_log", "D")
    ]
    if text.get("mamba_rms_norm", True):
        found.append(Matrix(f"{path}.norm", inner, 1, Split.COLUMN))
    return found + linear(f"{path}.out_proj", hidden, inner, Split.ROW, bias=bias)


def _mamba1(text: Config, state: RecurrentState, hidden: int, path: str, name: str) -> list[Matrix]:
    inner, cells = state.conv_channels, positive(text, ("mamba_d_state",), name)
    asked = text.get("mamba_dt_rank")
    rank = asked if isinstance(asked, int) else cdiv(hidden, 16)
    bias = bool(text.get("mamba_proj_bias"))
    found = [
        *linear(f"{path}.in_proj", 2 * inner, hidden, Split.COLUMN, bias=bias),
        Matrix(f"{path}.conv1d", inner, state.conv_rows + 1, Split.COLUMN),
        *linear(f"{path}.x_proj", rank + 2 * cells, inner, Split.ROW),
        *linear(f"{path}.dt_proj", inner, rank, Split.COLUMN, bias=True),
        Matrix(f"{path}.A_log", inner, cells, Split.COLUMN, dtype="float32"),
        Matrix(f"{path}.D", inner, 1, Split.COLUMN, dtype="float32"),
        *norm(f"{path}.dt_layernorm", rank),
        *norm(f"{path}.b_layernorm", cells),
        *norm(f"{path}.c_layernorm", cells),
        *linear(f"{path}.out_proj", hidden, inner, Split.ROW, bias=bias),
    ]
    if text.get("mamba_conv_bias", True):
        found.append(Matrix(f"{path}.conv1d.bias", inner, 1, Split.COLUMN))
    return found
