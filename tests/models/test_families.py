"""config.json -> ModelSpec: what is read, what is assumed with a warning, and what is refused by name."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import ConfigError, PdkvError, UnsupportedModel
from pdkv.layout.build import KvSettings, stage_caches
from pdkv.layout.capacity import size_pool
from pdkv.layout.groups import layouts_of_stages
from pdkv.layout.specs import Limits
from pdkv.models.catalog import catalog, find_model
from pdkv.models.families import spec_from_config
from pdkv.models.spec import LayerKind, LayerSpec, ModelSpec
from pdkv.units import GIB

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
FULL = LayerKind.FULL_ATTENTION


def read(**changes: Any) -> ModelSpec:
    return spec_from_config(LLAMA | changes, name="m")


def reaches(spec: ModelSpec) -> list[int | None]:
    return [layer.reach for layer in spec.layers]


# ------------------------------------------------------------------------------------------------------ plain decoders


def test_reads_a_dense_decoder() -> None:
    spec = read()
    assert spec.layers == tuple(LayerSpec(FULL, 8, 128, 128, layer=index) for index in range(32))
    assert (spec.architecture, spec.attention_heads, spec.max_model_len, spec.dtype) == (
        "LlamaForCausalLM",
        32,
        8192,
        "bfloat16",
    )
    assert (spec.num_layers, spec.warnings, spec.kv_dtype) == (32, (), None)


def test_head_dim_field_wins_over_hidden_size() -> None:
    assert read(head_dim=64).layers[0].head_dim == 64
    assert read(attention_head_dim=96).layers[0].head_dim == 96


def test_without_kv_heads_every_head_has_its_own_kv() -> None:
    assert read(num_key_value_heads=None).layers[0].kv_heads == 32


def test_multi_query_has_one_kv_head() -> None:
    assert read(multi_query=True).layers[0].kv_heads == 1


def test_gpt2_field_names() -> None:
    spec = spec_from_config({"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}, name="gpt2")
    assert (len(spec.layers), spec.layers[0].head_dim, spec.max_model_len, spec.dtype) == (12, 64, 1024, None)


def test_nested_text_config_and_newer_dtype_key() -> None:
    config = {"architectures": ["SomeVLM"], "dtype": "float16", "text_config": {**LLAMA, "torch_dtype": None}}
    spec = spec_from_config(config, name="vlm")
    assert (spec.architecture, len(spec.layers), spec.dtype) == ("SomeVLM", 32, "float16")
    omni = spec_from_config({"thinker_config": {"text_config": LLAMA}}, name="omni")
    assert len(omni.layers) == 32


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, 8192),
        ({"rope_type": "linear", "factor": 2.0}, 16384),
        ({"rope_type": "dynamic", "factor": 4.0}, 32768),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 8192),
        ({"rope_type": "default", "rope_theta": 1e6}, 8192),
        (
            {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}},
            16384,
        ),
    ],
)
def test_rope_scaling_lengthens_the_context_as_in_vllm(rope: dict[str, Any], expected: int) -> None:
    """0.32 takes max_position_embeddings of a YaRN model as scaled already."""
    assert read(rope_scaling=rope).max_model_len == expected
    assert read(rope_parameters=rope).max_model_len == expected


def test_a_context_length_of_its_own_holds_whatever_the_others_say() -> None:
    """Command R states 8,192 positions and a model_max_length of 131,072, which vLLM serves."""
    assert read(max_position_embeddings=8192, model_max_length=131072).max_model_len == 131072
    assert read(max_position_embeddings=8192, seq_length=4096, model_max_length=None).max_model_len == 4096


def test_longrope_is_served_at_its_original_length() -> None:
    spec = read(
        max_position_embeddings=131072, original_max_position_embeddings=4096, rope_scaling={"type": "longrope"}
    )
    assert (spec.max_model_len, spec.served_model_len) == (131072, 4096)


NEMOTRON = {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}

# ------------------------------------------------------------------------------------------------- unknown and absent


def test_an_unknown_model_is_read_with_a_warning() -> None:
    (warning,) = read(model_type="acme").warnings
    assert "'acme' is not known here: its fields are read" in warning
    (warning,) = spec_from_config(LLAMA | {"architectures": None}, name="m").warnings
    assert "does not say its model type" in warning
    assert not read(architectures=["Qwen3MoeForCausalLM"]).warnings


@pytest.mark.parametrize(
    ("changes", "field", "head_dim"),
    [
        ({"model_type": "gemma2"}, "head_dim", 256),
        ({"model_type": "qwen3"}, "head_dim", 128),
        ({"model_type": "mistral"}, "sliding_window", 128),
        ({"architectures": ["GptOssForCausalLM"]}, "head_dim", 64),
    ],
)
def test_what_a_family_takes_for_an_absent_field(changes: dict[str, Any], field: str, head_dim: int) -> None:
    spec = read(**changes)
    assert spec.layers[0].head_dim == head_dim
    assert any(warning.startswith(f"{field} is not in the config") for warning in spec.warnings)
    # A null is an answer.
    assert not any("sliding_window is not" in warning for warning in read(sliding_window=None, **changes).warnings)


def test_a_multimodal_config_that_only_states_what_differs() -> None:
    """As google/gemma-3-4b-it is published."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    spec = spec_from_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}, name="m")
    assert (spec.max_model_len, spec.attention_heads, len(spec.layers)) == (131072, 8, 34)
    assert {(layer.kv_heads, layer.head_dim) for layer in spec.layers} == {(4, 256)}
    assert Counter(reaches(spec)) == {1024: 29, None: 5}


def test_heads_expanded_from_a_latent_are_no_latent() -> None:
    spec = read(kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, model_type="minicpm3")
    assert {(layer.kind, layer.kv_heads, layer.head_dim) for layer in spec.layers} == {(FULL, 32, 96)}


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"lru_width": 2560}, "RG-LRU"),
        ({"index_kpool": 4}, "pools keys"),
        ({"model_type": "longcat_flash", "kv_lora_rank": 512}, "two attention blocks"),
        ({"model_type": "qwen4_exp_text"}, "sparse attention of its own kind"),
        ({"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}, "which ones is not in the config"),
        ({"layer_types": ["linear_attention"] * 32}, "described by no field"),
        ({"layers_block_type": ["mamba", "strange"] * 16}, "'strange'"),
        ({"layer_types": ["full_attention", "indexed_attention"] * 16}, "'indexed_attention'"),
        ({"hybrid_override_pattern": "MX" * 16}, "letter 'X'"),
        ({"attention_chunk_size": 8192, "model_type": "acme"}, "which layers use chunks"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4},
            "from 4 on",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named) as raised:
        spec_from_config(LLAMA | extra, name="other")
    assert str(raised.value).startswith("other: ")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": "many"}, "num_attention_heads is 'many'"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 5}, "do not divide"),
        ({"hidden_size": 4097}, "4097"),
        ({"max_position_embeddings": None}, "context length"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 32 layers"),
        ({"layer_types": ["chunked_attention"] * 32}, "attention_chunk_size is None"),
        ({"sliding_window": 8, "sliding_window_pattern": 0}, "must be at least 1"),
        ({"hybrid_override_pattern": "M*", **NEMOTRON}, "32 layers, and a list of layer kinds for 2"),
        ({"compress_ratios": [4] * 31, "head_dim": 512, "index_head_dim": 128, "sliding_window": 128}, "31 entries"),
        ({"compress_ratios": [3] * 32, "head_dim": 512, "sliding_window": 128}, "known are 0, 1, 4 and 128"),
        ({"block_configs": [{}]}, "n_heads_in_group|1 entries"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
    ],
)
def test_a_broken_config_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        spec_from_config(LLAMA | extra, name="m")


@pytest.mark.parametrize(
    ("quantization", "expected", "warned"),
    [
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
         "fp8_e4m3", False),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, None, True),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4", False),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4", False),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP3"}, None, True),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8", False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None, False),
        ({"quant_method": "fp8"}, None, False),
    ],
)  # fmt: skip
def test_what_a_quantized_checkpoint_wants_for_kv(
    quantization: dict[str, Any], expected: str | None, warned: bool
) -> None:
    spec = read(quantization_config=quantization)
    assert spec.kv_dtype == expected
    assert bool(spec.warnings) == warned


# ----------------------------------------------------------------------------------------------------------- known ones


def test_the_catalogue_knows_smollm2() -> None:
    model = find_model("HuggingFaceTB/SMOLLM2-135M-Instruct")
    assert model is not None
    assert model is catalog()["smollm2"]
    spec = spec_from_config(model.config, name=model.name)
    assert (len(spec.layers), spec.attention_heads, spec.layers[0], spec.max_model_len, spec.dtype) == (
        30,
        9,
        LayerSpec(FULL, 3, 64, 64),
        8192,
        "bfloat16",
    )
    assert find_model("smollm") is None


def test_every_stored_config_is_sized_or_refused_with_a_reason(shared: Path) -> None:
    """Prints the table (``pytest -s``): model, caches, KV type, block, bytes per block, tokens in 100 GiB on 8 GPUs."""
    paths = sorted((shared / "models").glob("*.json"))
    sized = 0
    for path in paths:
        try:
            spec = spec_from_config(json.loads(path.read_text()), name=path.stem)
            length = min(32768, spec.max_model_len)
            built = stage_caches(spec, KvSettings(model_dtype=spec.dtype or "bfloat16", max_model_len=length))
            layouts = layouts_of_stages(built.stages, layout=built.layout, limits=Limits(max_in_flight_tokens=16384))
            capacity = size_pool(layouts, [100 * GIB], max_model_len=length, model_limit=length)
        except PdkvError as error:
            assert str(error).startswith(path.stem), error
            print(f"{path.stem}: refused: {error}")
            continue
        sized += 1
        kinds = Counter(cache.kind.value for cache in built.stages[0].values())
        print(
            f"{path.stem}: {dict(kinds)}, {built.dtype.name}, {built.block_size} tokens a block, "
            f"{layouts[0].bytes_per_block} B, {len(layouts[0].groups)} groups, {capacity.kv_cache_size_tokens} tokens"
        )
        assert capacity.fits
    assert sized == len(paths) >= 62
