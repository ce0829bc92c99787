"""From a config to caches: block sizes of hybrids and skip layers, types per layer, stages, DeepSeek-V4 (section 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.layout.backends import BACKENDS
from pdkv.layout.build import BuiltCaches, KvSettings, boundary_layers, in_flight_tokens, stage_caches
from pdkv.layout.capacity import size_pool
from pdkv.layout.groups import layouts_of_stages
from pdkv.layout.placement import KvLayout
from pdkv.layout.specs import AttentionCache, Limits, StateCache
from pdkv.models.families import spec_from_config
from pdkv.models.spec import LayerKind, ModelSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
HYBRID = LLAMA | {
    "model_type": "qwen3_next",
    "head_dim": 128,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
WINDOWED = LLAMA | {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 1024}
LATENT = LLAMA | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
V4 = LLAMA | {
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0],
    "head_dim": 512,
    "index_head_dim": 128,
    "sliding_window": 128,
}


def build(config: dict[str, Any], **settings: Any) -> BuiltCaches:
    model = spec_from_config(config, name="m")
    return stage_caches(model, KvSettings(**({"model_dtype": "bfloat16", "max_model_len": 8192} | settings)))


def only(built: BuiltCaches, kind: LayerKind) -> AttentionCache | StateCache:
    found = {cache for stage in built.stages for cache in stage.values() if cache.kind is kind}
    assert len(found) == 1
    return found.pop()


# -------------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize(
    ("settings", "block_size", "state_block"),
    [
        ({}, 272, 272),
        ({"prefix_caching": False}, 272, 8192),
        ({"kv_cache_dtype": "fp8"}, 544, 544),
        ({"block_size": 512}, 512, 512),
        ({"mamba_ssm_cache_dtype": "float32"}, 528, 528),
        ({"tensor_parallel": 4}, 272, 272),
        ({"tensor_parallel": 16}, 144, 144),
    ],
)
def test_attention_blocks_are_raised_until_a_page_holds_a_state(
    settings: dict[str, Any], block_size: int, state_block: int
) -> None:
    built = build(HYBRID, **settings)
    attention, state = only(built, LayerKind.FULL_ATTENTION), only(built, LayerKind.MAMBA)
    assert isinstance(state, StateCache)
    assert (attention.block_size, state.block_size) == (block_size, state_block)
    assert attention.page_bytes == state.page_bytes >= state.state_bytes
    assert state.mode == ("none" if settings.get("prefix_caching") is False else "align")


def test_latent_hybrids_align_to_128_tokens() -> None:
    linear = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8]}
    config = LATENT | {"model_type": "kimi_linear", "linear_attn_config": linear}
    built = build(config, backend=BACKENDS["FLASHMLA"])
    latent, state = only(built, LayerKind.MLA), only(built, LayerKind.MAMBA)
    assert isinstance(state, StateCache)
    # 32 heads of 128 x 128 in float32 and three rows of 12,288 channels: 2,170,880 bytes; 1,152 bytes a token.
    assert state.state_bytes == 32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2
    assert latent.block_size == 128 * -(-state.state_bytes // (128 * 1152)) == 1920


def test_a_state_that_the_ranks_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="32 heads of a recurrent layer do not divide|6 .*do not divide"):
        build(HYBRID | {"linear_num_value_heads": 6}, tensor_parallel=4)


def test_speculative_tokens_lengthen_the_convolution_and_add_states() -> None:
    plain = only(build(HYBRID), LayerKind.MAMBA)
    drafting = only(build(HYBRID, speculative_tokens=3), LayerKind.MAMBA)
    assert isinstance(plain, StateCache)
    assert isinstance(drafting, StateCache)
    assert drafting.state_bytes - plain.state_bytes == 3 * 8192 * 2
    assert drafting.blocks_for(100, Limits()) == plain.blocks_for(100, Limits()) + 3


# -------------------------------------------------------------------------------------------------------- skip layers


def test_skip_layers_raise_the_block_size() -> None:
    """Section 4: 102 bytes a token against 512, so that 96 tokens cover 16 of the larger ones."""
    built = build(LLAMA, kv_cache_dtype="turboquant_3bit_nc", skip_layers=("0", "7"))
    pages = [cache.page_bytes for cache in built.stages[0].values()]
    assert built.block_size == 96
    assert pages == [96 * 8 * 512] + [96 * 8 * 102] * 6 + [96 * 8 * 512]


def test_windows_are_padded_to_the_shared_page() -> None:
    built = build(WINDOWED, kv_cache_dtype="nvfp4", skip_layers=("sliding_window",), backend=BACKENDS["FLASHINFER"])
    windows, full = only(built, LayerKind.SLIDING_WINDOW), only(built, LayerKind.FULL_ATTENTION)
    assert isinstance(windows, AttentionCache)
    assert (windows.quant, full.block_size, windows.block_size) == ("NONE", 64, 16)
    assert windows.page_bytes == full.page_bytes == 64 * 8 * 144


def test_block_sizes_are_reckoned_with_the_heads_of_the_whole_model() -> None:
    """The largest ones, also where the layers that are raised have others (Gemma 4's global layers)."""
    gemma = {"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    settings = {"kv_cache_dtype": "turboquant_3bit_nc", "skip_layers": ("0",)}
    model = spec_from_config(WINDOWED | gemma, name="m")
    assert model.heads == (8, 512)
    assert build(WINDOWED | gemma, **settings).block_size == build(LLAMA | {"head_dim": 512}, **settings).block_size


def test_skip_layers_without_a_difference_change_nothing() -> None:
    assert build(LLAMA, kv_cache_dtype="bfloat16", skip_layers=("0",)).block_size == 16
    with pytest.raises(ConfigError, match="less than"):
        build(LLAMA, kv_cache_dtype="float32", skip_layers=("0",))


@pytest.mark.parametrize(
    ("config", "value", "layers"),
    [
        (LLAMA, "turboquant_k8v4", ("0", "1", "6", "7")),
        (LLAMA, "ultraquant_4bit", ("0", "1", "6", "7")),
        (LLAMA | {"num_hidden_layers": 3}, "turboquant_k8v4", ("0", "2")),
        (LLAMA, "fp8", ()),
        (HYBRID, "turboquant_k8v4", ()),
    ],
)
def test_layers_that_vllm_serve_keeps_out(config: dict[str, Any], value: str, layers: tuple[str, ...]) -> None:
    assert boundary_layers(spec_from_config(config, name="m"), value) == layers


# ------------------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("backend", "asked", "window_block"), [("FLASH_ATTN", 128, 128), ("FLASHINFER", 128, 64), ("FLASHINFER", None, 16)]
)
def test_a_window_chooses_its_own_block(backend: str, asked: int | None, window_block: int) -> None:
    built = build(WINDOWED, backend=BACKENDS[backend], block_size=asked)
    assert only(built, LayerKind.SLIDING_WINDOW).block_size == window_block
    layout = layouts_of_stages(built.stages, limits=Limits(max_in_flight_tokens=8192))[0]
    # Pages are made equal afterwards, so that a smaller kernel block costs nothing.
    assert {page for group in layout.groups for page in group.page_bytes} == {(asked or 16) * 8 * 512}


def test_deepseek_v4() -> None:
    """Pages of section 3.4, and the groups that vLLM's own packing makes of them."""
    built = build(V4)
    assert (built.value, built.block_size, built.layout) == ("fp8_ds_mla", 256, KvLayout.BLHNC)
    pages = {name.removeprefix("layers."): cache.page_bytes for name, cache in built.stages[0].items()}
    assert pages["0.window"] == pages["2.attn"] == 37_440
    assert pages["3.attn"] == 1_728
    assert pages["2.indexer"] == pages["2.indexer.state"] == 8_640
    assert pages["2.state"] == pages["3.state"] == 32_832
    assert list(pages)[2:7] == ["2.indexer", "2.indexer.state", "2.window", "2.attn", "2.state"]
    layouts = layouts_of_stages(built.stages, layout=built.layout, limits=Limits(max_in_flight_tokens=16384))
    assert [group.block_size for group in layouts[0].groups] == [64, 64, 64, 256, 4, 8]
    assert size_pool(layouts, [1 << 30], max_model_len=8192, model_limit=8192).fits


# -------------------------------------------------------------------------------------------------------- parallelism


def test_stages_divide_decoder_layers_not_caches() -> None:
    config = LLAMA | {"num_hidden_layers": 7}
    built = build(config, pipeline_parallel=3)
    assert [len(stage) for stage in built.stages] == [2, 3, 2]
    mamba = {"mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_d_ssm": 3072}
    hybrid = build(LLAMA | {"model_type": "falcon_h1"} | mamba, pipeline_parallel=2)
    assert [list(stage)[:2] for stage in hybrid.stages] == [
        ["layers.0.attn", "layers.0.state"],
        ["layers.4.attn", "layers.4.state"],
    ]


def test_latents_are_whole_on_every_rank() -> None:
    pages = {build(LATENT, tensor_parallel=size).stages[0]["layers.0.attn"].page_bytes for size in (1, 8, 32)}
    assert pages == {16 * 576 * 2}


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        (LATENT, {"tensor_parallel": 4, "decode_context_parallel": 3}, "must divide --tensor-parallel-size 4"),
        (WINDOWED, {"tensor_parallel": 16, "decode_context_parallel": 2}, "sliding-window"),
        (LLAMA, {"tensor_parallel": 8, "decode_context_parallel": 2}, "must be at least 16"),
        (
            LLAMA | {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128},
            {"tensor_parallel": 24, "decode_context_parallel": 2},
            "must divide the 3 query heads",
        ),
        (LLAMA, {"tensor_parallel": 5}, "32 attention heads do not divide"),
        (LLAMA, {"pipeline_parallel": 9}, "more than the model's 8 layers"),
        (LATENT, {"block_size": 16, "backend": BACKENDS["FLASHMLA"]}, "FLASHMLA backend takes multiples of 64"),
        (LLAMA, {"kv_cache_dtype": "nvfp4", "backend": BACKENDS["FLASH_ATTN"]}, "not taken by the FLASH_ATTN"),
        (LLAMA, {"kv_cache_dtype": "fp9"}, "no such type"),
    ],
)
def test_combinations_that_cannot_be(config: dict[str, Any], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(config, **settings)


def test_context_parallel_ranks_are_those_that_held_copies() -> None:
    built = build(LLAMA, tensor_parallel=16, decode_context_parallel=2)
    assert built.stages[0]["layers.0.attn"].page_bytes == 16 * 1 * 512


def test_tokens_in_flight() -> None:
    assert in_flight_tokens(8192, 1, async_scheduling=True) == 16384
    assert in_flight_tokens(8192, 4, async_scheduling=True) == 40960
    assert in_flight_tokens(2048, 1, async_scheduling=False) == 2048


def test_models_of_one_shape_are_sized_alike() -> None:
    first: ModelSpec = spec_from_config(LLAMA, name="a")
    settings = KvSettings(model_dtype="bfloat16", max_model_len=64)
    assert stage_caches(first, settings) == stage_caches(replace(first, name="b"), settings)
