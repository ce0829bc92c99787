"""Bytes per token of well-known models: the founding report's table, corrected (spec founding-report-checked)."""

from __future__ import annotations

from typing import Any

import pytest

from pdkv.layout.backends import BACKENDS
from pdkv.layout.build import KvSettings, boundary_layers, stage_caches
from pdkv.layout.groups import layouts_of_stages
from pdkv.layout.specs import AttentionCache
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
    for config, backend, blocks in ((LLAMA_70B, "FLASH_ATTN", 62_500), (DEEPSEEK_V3, "FLASHMLA", 15_625)):
        spec = spec_from_config(config, name="m")
        settings = KvSettings(model_dtype="bfloat16", max_model_len=32768, backend=BACKENDS[backend])
        built = stage_caches(spec, settings)
        assert layouts_of_stages(built.stages)[0].blocks_for(10**6) == blocks


def test_a_block_of_70b_over_eight_ranks() -> None:
    """Section 7.3 of the report: 50 GiB hold 81,920 blocks of 655,360 bytes."""
    spec = spec_from_config(LLAMA_70B, name="m")
    settings = KvSettings(model_dtype="bfloat16", max_model_len=32768, tensor_parallel=8)
    per_block = layouts_of_stages(stage_caches(spec, settings).stages)[0].bytes_per_block
    assert (per_block, 50 * GIB // per_block) == (655_360, 81_920)


def test_the_two_seventies_hold_the_same() -> None:
    """The report had them a factor of 4 apart: 4,096 bytes are one layer of either."""
    pages = []
    for config in (LLAMA_70B, QWEN_72B):
        built = stage_caches(
            spec_from_config(config, name="m"), KvSettings(model_dtype="bfloat16", max_model_len=32768)
        )
        pages.append([cache.page_bytes // built.block_size for cache in built.stages[0].values()])
    assert pages[0] == pages[1] == [4_096] * 80


def test_records_of_sparse_latents() -> None:
    """40,016 bytes a token are the latents of 61 layers in records of 656; the indexer's 132 come on top."""
    spec = spec_from_config(DEEPSEEK_V32, name="m")
    built = stage_caches(spec, KvSettings(model_dtype="bfloat16", max_model_len=32768, kv_cache_dtype="fp8_ds_mla"))
    caches = [cache for cache in built.stages[0].values() if isinstance(cache, AttentionCache)]
    latents = sum(cache.page_bytes for cache in caches if cache.role != "INDEXER") // built.block_size
    assert latents == 40_016
    assert round(latents * 10**6 / GIB, 1) == 37.3
    assert sum(cache.page_bytes for cache in caches) // built.block_size == 40_016 + 61 * 132


@pytest.mark.parametrize(
    ("value", "ratio"),
    [
        ("fp8", 2.00),
        ("nvfp4", 3.56),
        ("int8_per_token_head", 1.94),
        ("fp8_per_token_head", 1.94),
        ("int4_per_token_head", 3.76),
        ("turboquant_3bit_nc", 5.02),
    ],
)
def test_how_much_smaller_each_type_is(value: str, ratio: float) -> None:
    """The report promised 2 to 4 times, up to 5, for heads of 128; scales and norms are part of the cache."""
    spec = spec_from_config(LLAMA_8B, name="m")
    per_token = {}
    for dtype in ("auto", value):
        built = stage_caches(spec, KvSettings(model_dtype="bfloat16", max_model_len=32768, kv_cache_dtype=dtype))
        per_token[dtype] = layouts_of_stages(built.stages)[0].bytes_per_block / built.block_size
    assert round(per_token["auto"] / per_token[value], 2) == ratio


def test_the_largest_group_is_what_divides() -> None:
    """The report divided by the sum of the groups (and a common multiple): they lie over each other in one pool."""
    config = LLAMA_8B | {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "sliding_window": 1024,
        "layer_types": ["full_attention" if layer % 3 == 0 else "sliding_attention" for layer in range(30)],
        "num_hidden_layers": 30,
    }
    spec = spec_from_config(config, name="m")
    built = stage_caches(spec, KvSettings(model_dtype="bfloat16", max_model_len=32768))
    layout = layouts_of_stages(built.stages)[0]
    assert [len(group.layers) for group in layout.groups] == [10, 10, 10]
    assert layout.bytes_per_block == 10 * 4_096 * built.block_size == 655_360


def test_the_ends_of_a_dense_model_stay_wide() -> None:
    """So the 5 times of turboquant are never reached: `vllm serve` keeps the first and last two layers out of it."""
    spec = spec_from_config(LLAMA_8B, name="m")
    kept = boundary_layers(spec, "turboquant_3bit_nc")
    assert kept == ("0", "1", "30", "31")
    settings = KvSettings(
        model_dtype="bfloat16", max_model_len=32768, kv_cache_dtype="turboquant_3bit_nc", skip_layers=kept
    )
    stage = stage_caches(spec, settings).stages[0].values()
    caches = [cache for cache in stage if isinstance(cache, AttentionCache)]
    per_token = sum(cache.dense_page_bytes / cache.block_size for cache in caches)
    assert per_token == 4 * 4_096 + 28 * 816
    assert 131_072 / per_token < 3.4
