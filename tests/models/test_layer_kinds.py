"""What each layer of a config keeps: windows and chunks, other heads, shared KV, latents, recurrent states."""

from __future__ import annotations

from typing import Any

import pytest

from pdkv.models.families import spec_from_config
from pdkv.models.spec import LayerKind, ModelSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def read(**changes: Any) -> ModelSpec:
    return spec_from_config(LLAMA | changes, name="m")


def reaches(spec: ModelSpec) -> list[int | None]:
    return [layer.reach for layer in spec.layers]


# ------------------------------------------------------------------------------------------------- windows and chunks


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 4096, "model_type": "mistral"}, [4096] * 6),
        ({"sliding_window": None, "model_type": "mistral"}, [None] * 6),
        ({"sliding_window": 4096, "use_sliding_window": False}, [None] * 6),
        ({"sliding_window": 4096, "model_type": "qwen2"}, [None] * 6),
        ({"sliding_window": 64, "model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 4},
         [None] * 4 + [64] * 2),
        ({"sliding_window": 64, "model_type": "gemma2"}, [64, None] * 3),
        ({"sliding_window": 64, "model_type": "gemma3_text"}, [64] * 5 + [None]),
        ({"sliding_window": 64, "sliding_window_pattern": 3}, [64, 64, None] * 2),
        ({"sliding_window": 64, "sliding_window_pattern": "LLG"}, [64, 64, None] * 2),
        ({"sliding_window": 64, "model_type": "cohere2"}, [65, 65, 65, None, 65, 65]),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 3}, [64, None] * 3),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"] * 6, "model_type": "gemma4_text"},
         [64] * 5 + [None]),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 6}, [None] * 6),
        ({"attention_chunk_size": 128, "model_type": "llama4_text"}, [128, 128, 128, None, 128, 128]),
        ({"attention_chunk_size": 128, "model_type": "llama4_text", "no_rope_layers": [1, 0, 1, 0, 1, 0]},
         [128, None] * 3),
        ({"attention_chunk_size": 128, "layer_types": ["chunked_attention", "full_attention"] * 3}, [128, None] * 3),
        ({"sliding_window": 64, "model_type": "smollm3", "use_sliding_window": True},
         [None, None, None, 64, None, None]),
        ({"sliding_window_size": 64, "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1]}, [None, 64, 64, None, 64, 64]),
        ({"layer_types": ["sliding_attention"] * 6 + ["full_attention"], "sliding_window": 8}, [8] * 6),
    ],
)  # fmt: skip
def test_which_layers_reach_how_far(changes: dict[str, Any], expected: list[int | None]) -> None:
    assert reaches(read(num_hidden_layers=6, **changes)) == expected


def test_a_window_on_all_layers_of_an_unknown_model_is_pointed_out() -> None:
    unknown, window = read(sliding_window=64, model_type="acme").warnings
    assert "'acme' is not known here" in unknown
    assert "64 tokens" in window
    assert not read(sliding_window=64, model_type="mistral").warnings


def test_layers_with_other_heads() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    gemma4 = read(
        num_hidden_layers=4, layer_types=types, sliding_window=64, head_dim=256,
        global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True,
    )  # fmt: skip
    assert [(layer.kv_heads, layer.head_dim) for layer in gemma4.layers] == [(8, 256), (2, 512)] * 2
    step = read(
        num_hidden_layers=4, layer_types=types, sliding_window=64,
        attention_other_setting={
            "attention_type": "sliding_attention", "num_attention_heads": 64, "num_attention_groups": 4, "head_dim": 96,
        },
    )  # fmt: skip
    assert [(layer.kv_heads, layer.head_dim) for layer in step.layers] == [(4, 96), (8, 128)] * 2
    mimo = read(
        num_hidden_layers=2, hybrid_layer_pattern=[1, 0], sliding_window_size=64, head_dim=192, v_head_dim=128,
        swa_num_key_value_heads=4, swa_head_dim=96, swa_v_head_dim=64,
    )  # fmt: skip
    assert [(layer.kv_heads, layer.head_dim, layer.head_dim_v) for layer in mimo.layers] == [(4, 96, 64), (8, 192, 128)]
    assert [layer.kv_heads for layer in read(num_hidden_layers=3, num_key_value_heads=[2, 4, 8]).layers] == [2, 4, 8]


def test_searched_models_have_layers_without_attention() -> None:
    blocks = [
        {"attention": {"no_op": False, "n_heads_in_group": 8}},
        {"attention": {"no_op": True}},
        {"attention": {"no_op": False, "n_heads_in_group": 4}},
    ]
    spec = read(num_hidden_layers=3, num_key_value_heads=None, block_configs=blocks)
    assert [(layer.layer, layer.kv_heads) for layer in spec.layers] == [(0, 4), (2, 8)]
    assert spec.num_layers == 3


def test_layers_that_share_another_layers_kv_own_none() -> None:
    types = ["sliding_attention", "full_attention"] * 4
    spec = read(num_hidden_layers=8, layer_types=types, sliding_window=64, num_kv_shared_layers=3)
    assert [layer.layer for layer in spec.layers] == [0, 1, 2, 3, 4]
    assert spec.shared_layers == ((5, 3), (6, 4), (7, 3))


# ---------------------------------------------------------------------------------------------------- latents, states


def test_latents() -> None:
    spec = read(num_hidden_layers=2, kv_lora_rank=512, qk_rope_head_dim=64, model_type="deepseek_v3")
    assert [(layer.kind, layer.head_dim, layer.head_dim_v) for layer in spec.layers] == [(LayerKind.MLA, 576, 0)] * 2
    assert not spec.warnings
    assert "read as latent attention" in read(kv_lora_rank=512, model_type="acme").warnings[0]


@pytest.mark.parametrize(
    ("changes", "indexed"),
    [
        ({}, list(range(12))),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6, 10]),
        ({"index_topk_pattern": "FSFSFSFSFSFS"}, [0, 2, 4, 6, 8, 10]),
    ],
)
def test_which_sparse_layers_have_an_indexer(changes: dict[str, Any], indexed: list[int]) -> None:
    sparse = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048, "index_head_dim": 128}
    spec = read(num_hidden_layers=12, model_type="glm_moe_dsa", **sparse, **changes)
    assert [layer.layer for layer in spec.layers if layer.part == "indexer"] == indexed
    assert {layer.head_dim for layer in spec.layers if layer.part == "indexer"} == {132}
    assert sum(layer.part == "attn" for layer in spec.layers) == 12


GDN = {
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
MAMBA2 = {"mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_d_ssm": 3072}
NEMOTRON = {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}


@pytest.mark.parametrize(
    ("changes", "attention", "states"),
    [
        ({"full_attention_interval": 4, **GDN}, [3, 7], [0, 1, 2, 4, 5, 6]),
        ({"layer_types": ["linear_attention", "full_attention"] * 4, **GDN}, [1, 3, 5, 7], [0, 2, 4, 6]),
        (GDN, [3, 7], [0, 1, 2, 4, 5, 6]),
        ({"hybrid_override_pattern": "M-M*-EM*", **NEMOTRON}, [3, 7], [0, 2, 6]),
        ({"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2, **NEMOTRON}, [2, 6], [0, 4]),
        ({"layers_block_type": ["mamba", "hybrid"] * 4, "n_mamba_heads": 8, "mamba_headdim": 64, "mamba_d_state": 64,
          "mamba_d_conv": 4, "mamba_expand": 2}, [1, 3, 5, 7], list(range(8))),
        ({"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
         [2, 6], [0, 1, 3, 4, 5, 7]),
        ({"model_type": "falcon_h1", **MAMBA2}, list(range(8)), list(range(8))),
        ({"attn_layer_indices": [1, 5], **MAMBA2}, [1, 5], [0, 2, 3, 4, 6, 7]),
        ({"full_attn_idxs": [2], "conv_L_cache": 3}, [2], [0, 1, 3, 4, 5, 6, 7]),
        ({"kv_lora_rank": 512, "model_type": "kimi_linear",
          "linear_attn_config": {"full_attn_layers": [4, 8], "num_heads": 32, "head_dim": 128}},
         [3, 7], [0, 1, 2, 4, 5, 6]),
        ({"attn_type_list": [0, 0, 0, 1] * 2}, [3, 7], [0, 1, 2, 4, 5, 6]),
    ],
)  # fmt: skip
def test_which_layers_keep_a_state(changes: dict[str, Any], attention: list[int], states: list[int]) -> None:
    spec = read(num_hidden_layers=8, **changes)
    assert [layer.layer for layer in spec.layers if layer.state is None] == attention
    assert [layer.layer for layer in spec.layers if layer.state is not None] == states
    assert spec.num_layers == 8


def test_sizes_of_states() -> None:
    (state,) = {layer.state for layer in read(num_hidden_layers=8, **GDN).layers} - {None}
    assert state is not None
    assert (state.conv_rows, state.conv_channels, state.heads, state.cells) == (3, 8192, 32, 128 * 128)
    (state,) = {layer.state for layer in read(hybrid_override_pattern="M*" * 16, **NEMOTRON).layers} - {None}
    assert state is not None
    assert (state.conv_channels, state.groups, state.group_channels, state.cells) == (4096, 8, 256, 64 * 128)
    assert (state.cells_dtype, state.checkpoint_blocks) == ("float32", 1)
    mamba = spec_from_config(
        {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 768, "state_size": 16, "conv_kernel": 4,
         "expand": 2, "max_position_embeddings": 2048}, name="mamba",
    )  # fmt: skip
    assert mamba.attention_heads == 0
    assert [layer.kind for layer in mamba.layers] == [LayerKind.MAMBA] * 2
