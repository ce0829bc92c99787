"""make_plan and find_spec: the object of design 6.2, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.plan.planner import PlanOptions, make_plan
from pdkv.plan.source import PlannedModel, find_spec
from pdkv.units import GIB, MIB

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def llama_70b(tmp_path: Path) -> PlannedModel:
    folder = tmp_path / "llama-70b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return find_spec(str(folder))


def test_the_whole_answer(llama_70b: PlannedModel) -> None:
    report = make_plan(llama_70b, PlanOptions(kv_cache_memory_bytes=100 * GIB))
    answer = msgspec.json.decode(msgspec.json.encode(report))
    advice = answer.pop("advice")
    assert [entry["id"] for entry in advice] == ["kv-cache-dtype"]
    assert "655360 tokens instead of 327680" in advice[0]["effect"]
    assert answer == {
        "model": {"name": "llama-70b", "layers": 80, "params": None, "weights_bytes": None},
        "kv": {
            "bytes_per_token": 327680,
            "bytes_per_token_all_ranks": 327680,
            "fixed_bytes_per_request": 0,
            "bytes_per_block": 5242880,
            "block_size": 16,
            "groups": [{"kind": "full_attention", "layers": 80, "block_size": 16, "page_bytes": 65536, "window": None}],
            "dtype": "bfloat16",
        },
        "memory": {
            "available_kv_bytes": 100 * GIB,
            "basis": "given",
            "total_bytes": None,
            "requested_bytes": None,
            "weights_bytes": None,
            "activation_bytes": None,
            "non_torch_bytes": None,
            "cudagraph_bytes": None,
        },
        "capacity": {
            "num_blocks": 20480,
            "usable_blocks": 20479,
            "blocks_per_max_len_request": 8192,
            "kv_cache_size_tokens": 327680,
            "max_concurrency": 2.5,
            "max_model_len": 131072,
            "estimated_max_model_len": 131072,
            "fits": True,
        },
        "ranks": [
            {
                "rank": 0,
                "pipeline_stage": 0,
                "layers": 80,
                "bytes_per_block": 5242880,
                "available_kv_bytes": 100 * GIB,
                "num_blocks": 20480,
            }
        ],
        "rules": "0.32",
        "warnings": [],
    }


def test_tensor_and_pipeline_parallel(llama_70b: PlannedModel) -> None:
    options = PlanOptions(kv_cache_memory_bytes=20 * GIB, tensor_parallel_size=2, pipeline_parallel_size=3)
    report = make_plan(llama_70b, options)
    assert [(rank.rank, rank.pipeline_stage, rank.layers) for rank in report.ranks] == [
        (0, 0, 27), (1, 0, 27), (2, 1, 27), (3, 1, 27), (4, 2, 26), (5, 2, 26),
    ]  # fmt: skip
    assert report.capacity.num_blocks == min(rank.num_blocks for rank in report.ranks)
    assert report.kv.bytes_per_token == 27 * 4 * 256 * 2
    assert report.kv.bytes_per_token_all_ranks == 327680
    assert any("cut to the smallest" in warning for warning in report.warnings)


def test_replicated_kv_heads_are_pointed_out(llama_70b: PlannedModel) -> None:
    report = make_plan(llama_70b, PlanOptions(kv_cache_memory_bytes=20 * GIB, tensor_parallel_size=16))
    assert report.kv.bytes_per_token == 327680 // 8
    assert report.kv.bytes_per_token_all_ranks == 2 * 327680
    assert any("2 copies" in warning for warning in report.warnings)


def test_what_does_not_fit_is_an_answer_with_advice(llama_70b: PlannedModel) -> None:
    report = make_plan(llama_70b, PlanOptions(kv_cache_memory_bytes=10 * GIB))
    assert not report.capacity.fits
    assert report.capacity.estimated_max_model_len == 32752
    advice = {entry.id: entry for entry in report.advice}
    assert "32752" in advice["max-model-len"].text
    needed = 8193 * 5242880
    assert str(needed) in advice["kv-cache-memory-bytes"].text
    assert make_plan(llama_70b, PlanOptions(kv_cache_memory_bytes=needed)).capacity.fits
    assert not make_plan(llama_70b, PlanOptions(kv_cache_memory_bytes=needed - 1)).capacity.fits


def test_auto_and_override(llama_70b: PlannedModel) -> None:
    auto = make_plan(llama_70b, PlanOptions(kv_cache_memory_bytes=20 * GIB, max_model_len="auto"))
    assert (auto.capacity.max_model_len, auto.capacity.fits) == (65520, True)
    fixed = make_plan(llama_70b, PlanOptions(num_gpu_blocks_override=100, max_model_len=1024))
    assert (fixed.capacity.num_blocks, fixed.capacity.max_concurrency) == (100, 1.5625)
    assert fixed.memory.available_kv_bytes == 100 * 5242880


def test_smollm2_from_the_catalogue() -> None:
    report = make_plan(find_spec("smollm2"), PlanOptions(kv_cache_memory_bytes=512 * MIB, dtype="float32"))
    assert report.model.params == 134_515_008
    assert report.model.weights_bytes == 4 * 134_515_008
    assert (report.kv.bytes_per_token, report.kv.bytes_per_block, report.kv.dtype) == (46080, 737280, "float32")
    assert report.capacity.num_blocks == 512 * MIB // 737280


def test_auto_dtype_halves_a_32_bit_checkpoint() -> None:
    for dtype, said in (("float32", "is in float32"), (None, "does not say")):
        model = PlannedModel(replace(find_spec("smollm2").spec, dtype=dtype), params=None)
        report = make_plan(model, PlanOptions(kv_cache_memory_bytes=GIB))
        assert report.kv.dtype == "bfloat16"
        assert any(said in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "--kv-cache-memory-bytes"),
        ({"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes 0"),
        ({"kv_cache_memory_bytes": GIB, "block_size": 0}, "--block-size 0"),
        ({"kv_cache_memory_bytes": GIB, "max_model_len": -3}, "--max-model-len -3"),
        ({"kv_cache_memory_bytes": GIB, "max_model_len": 8193}, "8193 is more than smollm2 was made for"),
        ({"kv_cache_memory_bytes": GIB, "dtype": "int4"}, "--dtype int4"),
        ({"kv_cache_memory_bytes": GIB, "kv_cache_dtype": "nvfp4"}, "nvfp4 is not sized yet"),
        ({"kv_cache_memory_bytes": GIB, "tensor_parallel_size": 2}, "9 attention heads"),
        ({"kv_cache_memory_bytes": GIB, "pipeline_parallel_size": 31}, "30 layers"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_plan(find_spec("smollm2"), PlanOptions(**options))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ source


def test_a_config_file_by_any_name(tmp_path: Path) -> None:
    path = tmp_path / "acme-7b.json"
    path.write_text(json.dumps(CONFIG))
    assert find_spec(str(path)).spec.name == "acme-7b"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "no JSON object"),
        ("\xff", "not valid JSON"),
        ("{}", "num_hidden_layers|num_attention_heads"),
    ],
)
def test_unreadable_configs(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=says):
        find_spec(str(path))


def test_unknown_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3-8B: not a name in the catalogue \(smollm2\)"):
        find_spec("Qwen/Qwen3-8B")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find_spec(str(tmp_path))


def test_unsupported_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mla.json"
    path.write_text(json.dumps(CONFIG | {"kv_lora_rank": 512}))
    with pytest.raises(UnsupportedModel, match="kv_lora_rank 512"):
        find_spec(str(path))
