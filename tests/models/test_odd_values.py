"""Every field of configs of every kind, replaced by odd values: sized, or refused by name; never a crash."""

from __future__ import annotations

from typing import Any

import pytest

from pdkv.errors import PdkvError
from pdkv.layout.build import KvSettings, stage_caches
from pdkv.layout.groups import layouts_of_stages
from pdkv.layout.specs import Limits
from pdkv.models.families import spec_from_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_size": 1024,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "windows": BASE | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64,
                       "num_kv_shared_layers": 1, "global_head_dim": 128, "num_global_key_value_heads": 2},
    "pattern": BASE | {"model_type": "cohere2", "sliding_window": 64, "sliding_window_pattern": 2},
    "chunks": BASE | {"model_type": "llama4_text", "attention_chunk_size": 64, "no_rope_layers": [1, 0, 1, 0]},
    "hybrid_layers": BASE | {"hybrid_layer_pattern": [0, 1, 0, 1], "sliding_window_size": 64,
                             "swa_num_key_value_heads": 8, "swa_head_dim": 64, "swa_v_head_dim": 32, "v_head_dim": 32},
    "searched": BASE | {"block_configs": [{"attention": {"n_heads_in_group": 4, "no_op": False}}] * 4},
    "latent": BASE | {"model_type": "deepseek_v3", "kv_lora_rank": 128, "qk_rope_head_dim": 32},
    "sparse": BASE | {"model_type": "glm_moe_dsa", "kv_lora_rank": 128, "qk_rope_head_dim": 32, "index_topk": 64,
                      "index_head_dim": 128, "index_topk_freq": 2, "index_skip_topk_offset": 1},
    "compressed": BASE | {"model_type": "deepseek_v4", "compress_ratios": [0, 4, 128, 0], "index_head_dim": 128,
                          "sliding_window": 128},
    "delta": BASE | {"model_type": "qwen3_5_text", "full_attention_interval": 4, "linear_num_value_heads": 8,
                     "linear_num_key_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
                     "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32"},
    "kda": BASE | {"model_type": "kimi_linear", "kv_lora_rank": 128, "qk_rope_head_dim": 32,
                   "linear_attn_config": {"full_attn_layers": [4], "num_heads": 8, "head_dim": 32}},
    "mamba2": BASE | {"hybrid_override_pattern": "M-M*", "mamba_num_heads": 8, "mamba_head_dim": 32,
                      "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "mamba_ssm_cache_dtype": "float32"},
    "mamba1": BASE | {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
                      "mamba_expand": 2},
}  # fmt: skip
ODD: list[Any] = [None, 0, -1, 1, 3, 10**9, 1.5, True, "", "x", [], [1], ["x"], [None] * 4, {}, {"x": 1}]


@pytest.mark.parametrize("name", CONFIGS)
def test_odd_values(name: str) -> None:
    config = CONFIGS[name]
    settings = KvSettings(model_dtype="bfloat16", max_model_len=2048, kv_cache_dtype="auto")
    sized = 0
    for key in config:
        for value in ODD:
            if key == "num_hidden_layers" and value == 10**9:
                continue  # as many layers as asked for are made
            try:
                model = spec_from_config(config | {key: value}, name="odd")
            except PdkvError as error:
                assert str(error).startswith("odd: "), (key, value)
                continue
            try:
                built = stage_caches(model, settings)
                layouts = layouts_of_stages(built.stages, layout=built.layout, limits=Limits(max_in_flight_tokens=4096))
            except PdkvError:
                continue
            sized += 1
            assert all(rank.bytes_per_block > 0 for rank in layouts), (key, value)
            assert all(rank.blocks_for(2048) > 0 for rank in layouts), (key, value)
    assert sized > len(config)
