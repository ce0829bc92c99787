"""Bytes per token of well-known models: the founding report's table, corrected (spec founding-report-checked)."""

from __future__ import annotations

from typing import Any

import pytest

from pdkv.layout.build import KvSettings, stage_caches
from pdkv.layout.groups import layouts_of_stages
from pdkv.models.families import spec_from_config
from pdkv.units import GIB

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "max_position_embeddings": 131072,
}
LLAMA_8B = LLAMA | {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
LLAMA_70B = LLAMA | {"num_hidden_layers": 80}
QWEN_72B = LLAMA_70B | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
DEEPSEEK_V32 = DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128}


@pytest.mark.parametrize(
    ("config", "value", "per_token", "million_gib"),
    [
        (LLAMA_8B, "auto", 131_072, 122.07),
        (LLAMA_8B, "fp8", 65_536, 61.04),
        (LLAMA_70B, "auto", 327_680, 305.18),
        (LLAMA_70B, "fp8", 163_840, 152.59),
        (QWEN_72B, "auto", 327_680, 305.18),
        (QWEN_72B, "fp8", 163_840, 152.59),
        (DEEPSEEK_V3, "auto", 70_272, 65.45),
        (DEEPSEEK_V3, "fp8", 35_136, 32.72),
        (DEEPSEEK_V32, "fp8_ds_mla", 48_068, 44.77),
        (DEEPSEEK_V32, "nvfp4_ds_mla", 29_524, 27.50),
    ],
)
def test_bytes_per_token(config: dict[str, Any], value: str, per_token: int, million_gib: float) -> None:
    """The report left out the layers: it had 16,384, 4,096, 1,408 and 704 bytes for the four models in 16 and 8 bit."""
    spec = spec_from_config(config, name="m")
    built = stage_caches(spec, KvSettings(model_dtype="bfloat16", max_model_len=32768, kv_cache_dtype=value))
    layout = layouts_of_stages(built.stages)[0]
    assert layout.bytes_per_block == per_token * built.block_size
    assert round(per_token * 10**6 / GIB, 2) == million_gib


def test_a_million_tokens_are_62500_blocks_of_16_and_15625_of_64() -> None:
    for config, blocks in ((LLAMA_70B, 62_500), (DEEPSEEK_V3, 15_625)):
        spec = spec_from_config(config, name="m")
        built = stage_caches(spec, KvSettings(model_dtype="bfloat16", max_model_len=32768))
        assert layouts_of_stages(built.stages)[0].blocks_for(10**6) == blocks


def test_a_block_of_70b_over_eight_ranks() -> None:
    """Section 7.3 of the report: 50 GiB hold 81,920 blocks of 655,360 bytes."""
    spec = spec_from_config(LLAMA_70B, name="m")
    settings = KvSettings(model_dtype="bfloat16", max_model_len=32768, tensor_parallel=8)
    per_block = layouts_of_stages(stage_caches(spec, settings).stages)[0].bytes_per_block
    assert (per_block, 50 * GIB // per_block) == (655_360, 81_920)
