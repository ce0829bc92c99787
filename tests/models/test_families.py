"""config.json -> ModelSpec: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.models.catalog import catalog, find_model
from pdkv.models.families import spec_from_config
from pdkv.models.spec import LayerKind, LayerSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def test_reads_a_dense_decoder() -> None:
    spec = spec_from_config(LLAMA, name="llama")
    assert spec.layers == (LayerSpec(LayerKind.FULL_ATTENTION, 8, 128, 128),) * 32
    assert (spec.architecture, spec.attention_heads, spec.max_model_len, spec.dtype) == (
        "LlamaForCausalLM",
        32,
        8192,
        "bfloat16",
    )


def test_head_dim_field_wins_over_hidden_size() -> None:
    assert spec_from_config(LLAMA | {"head_dim": 64}, name="m").layers[0].head_dim == 64


def test_without_kv_heads_every_head_has_its_own_kv() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert spec_from_config(config, name="m").layers[0].kv_heads == 32


def test_multi_query_has_one_kv_head() -> None:
    assert spec_from_config(LLAMA | {"multi_query": True}, name="m").layers[0].kv_heads == 1


def test_gpt2_field_names() -> None:
    spec = spec_from_config({"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}, name="gpt2")
    assert (len(spec.layers), spec.layers[0].head_dim, spec.max_model_len, spec.dtype) == (12, 64, 1024, None)


def test_nested_text_config_and_newer_dtype_key() -> None:
    config = {"architectures": ["SomeVLM"], "dtype": "float16", "text_config": {**LLAMA, "torch_dtype": None}}
    spec = spec_from_config(config, name="vlm")
    assert (spec.architecture, len(spec.layers), spec.dtype) == ("SomeVLM", 32, "float16")


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, 8192),
        ({"rope_type": "linear", "factor": 2.0}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "default", "rope_theta": 1e6}, 8192),
    ],
)
def test_rope_scaling_lengthens_the_context_as_in_vllm(rope: dict[str, Any], expected: int) -> None:
    assert spec_from_config(LLAMA | {"rope_scaling": rope}, name="m").max_model_len == expected
    assert spec_from_config(LLAMA | {"rope_parameters": rope}, name="m").max_model_len == expected


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128}, "sliding_attention"),
        ({"kv_lora_rank": 512}, "kv_lora_rank 512"),
        ({"linear_num_value_heads": 32}, "linear-attention"),
        ({"hybrid_override_pattern": "M*M*"}, "recurrent"),
        ({"attn_type_list": [1, 0, 1]}, "attn_type_list"),
        ({"attention_chunk_size": 8192}, "chunk"),
        ({"compress_ratios": [4, 128]}, "compress_ratios"),
        ({"block_configs": [{}]}, "block_configs"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_refuses_other_layer_kinds_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named) as raised:
        spec_from_config(LLAMA | extra, name="other")
    assert str(raised.value).startswith("other: ")


@pytest.mark.parametrize(
    "extra",
    [
        {"sliding_window": 131072, "use_sliding_window": False},
        {"sliding_window": None},
        {"sliding_window": 4096, "layer_types": ["full_attention"] * 32},
        {"attn_type_list": [1] * 32},
        {"kv_lora_rank": None},
    ],
)
def test_a_feature_that_is_switched_off_is_no_reason(extra: dict[str, Any]) -> None:
    assert len(spec_from_config(LLAMA | extra, name="m").layers) == 32


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": "many"}, "num_attention_heads is 'many'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 5}, "do not divide"),
        ({"hidden_size": 4097}, "4097"),
        ({"max_position_embeddings": None}, "context length"),
    ],
)
def test_a_broken_config_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        spec_from_config(LLAMA | extra, name="m")


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"quant_method": "fp8"}, None),
    ],
)
def test_what_a_quantized_checkpoint_wants_for_kv(quantization: dict[str, Any], expected: str | None) -> None:
    assert spec_from_config(LLAMA | {"quantization_config": quantization}, name="m").kv_dtype == expected


def test_the_catalogue_knows_smollm2() -> None:
    model = find_model("HuggingFaceTB/SMOLLM2-135M-Instruct")
    assert model is not None
    assert model is catalog()["smollm2"]
    spec = spec_from_config(model.config, name=model.name)
    assert (len(spec.layers), spec.attention_heads, spec.layers[0], spec.max_model_len, spec.dtype) == (
        30,
        9,
        LayerSpec(LayerKind.FULL_ATTENTION, 3, 64, 64),
        8192,
        "bfloat16",
    )
    assert find_model("smollm") is None


def test_every_catalogue_entry_is_sizable() -> None:
    for model in catalog().values():
        assert spec_from_config(model.config, name=model.name).layers


def test_real_configs_are_sized_or_refused_never_misread(shared: Path) -> None:
    """Over all stored configs: either a spec with the layer count of the file, or a refusal that names the model."""
    sized = 0
    for path in sorted((shared / "models").glob("*.json")):
        config = json.loads(path.read_text())
        try:
            spec = spec_from_config(config, name=path.stem)
        except UnsupportedModel as error:
            assert str(error).startswith(path.stem)
            continue
        sized += 1
        assert len(spec.layers) == config.get("text_config", config)["num_hidden_layers"]
    assert sized >= 15
