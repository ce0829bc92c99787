"""make_plan and find_spec: the object of design 6.2, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.plan.kv_transfer import parse_kv_transfer
from pdkv.plan.planner import PlanOptions, make_plan
from pdkv.source import PlannedModel, find_spec
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
    assert advice[0]["changes"] == {"kv_cache_dtype": "fp8"}
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
            "groups": [
                {
                    "kind": "full_attention",
                    "layers": 80,
                    "block_size": 16,
                    "page_bytes": 65536,
                    "window": None,
                    "bytes_per_block": 5242880,
                    "blocks_per_max_len_request": 8192,
                }
            ],
            "dtype": "bfloat16",
        },
        "memory": {
            "available_kv_bytes": 100 * GIB,
            "basis": "given",
            "low_bytes": None,
            "high_bytes": None,
            "total_bytes": None,
            "requested_bytes": None,
            "weights_bytes": None,
            "activation_bytes": None,
            "non_torch_bytes": None,
            "cudagraph_bytes": None,
            "reserve_bytes": None,
            "dominated_by": None,
            "notes": [],
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
            "bottleneck": 0,
            "blocks_per_rank": [20480],
            "available_per_rank": [100 * GIB],
            "longest_per_rank": [131072],
            "bytes_per_block": 5242880,
            "available_bytes": 100 * GIB,
            "needed_bytes": 8193 * 5242880,
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
        "deployment": {
            "gpus": 1,
            "engines": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "max_concurrency": 2.5,
            "kv_cache_size_tokens": 327680,
            "hybrid_manager": True,
            "attention_backend": "FLASH_ATTN",
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 1024,
        },
        "usage": {"prompt_tokens": 129, "output_tokens": 13, "blocks_low": 9, "blocks_high": 9},
        "decode": None,
        "long_context": None,
        "rules": "0.32",
        "command": "vllm serve llama-70b \\\n  --kv-cache-memory-bytes 107374182400",
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
        model = PlannedModel(replace(find_spec("smollm2").spec, dtype=dtype))
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
        ({"kv_cache_memory_bytes": GIB, "dtype": "int4"}, "--dtype int4"),
        ({"kv_cache_memory_bytes": GIB, "kv_cache_dtype": "nvfp5"}, "nvfp5: there is no such type|nvfp5 is not"),
        ({"kv_cache_memory_bytes": GIB, "mamba_ssm_cache_dtype": "fp8"}, "--mamba-ssm-cache-dtype fp8"),
        ({"kv_cache_memory_bytes": GIB, "max_num_batched_tokens": 0}, "--max-num-batched-tokens 0"),
        ({"kv_cache_memory_bytes": GIB, "attention_backend": "nope"}, "nope: there is no such backend"),
        ({"kv_cache_memory_bytes": GIB, "attention_backend": "CPU_ATTN", "block_size": 16}, "multiples of 32"),
        ({"kv_cache_memory_bytes": GIB, "vllm_version": "0.99"}, "0.99 are not known"),
        ({"kv_cache_memory_bytes": GIB, "decode_context_parallel_size": 2}, "must divide --tensor-parallel-size 1"),
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


def test_an_infinity_as_in_published_configs(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"time_step_limit": [0.0, float("inf")]}))
    assert "Infinity" in path.read_text()
    assert find_spec(str(path)).spec.num_layers == 80


def test_unknown_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nobody/none: not a name in the catalogue \(`pdkv models` lists it\)"):
        find_spec("nobody/none")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find_spec(str(tmp_path))


def test_unsupported_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t5.json"
    path.write_text(json.dumps(CONFIG | {"is_encoder_decoder": True}))
    with pytest.raises(UnsupportedModel, match="t5: an encoder-decoder model"):
        find_spec(str(path))


# -------------------------------------------------------------------------------------------------- other layer kinds


def planned(tmp_path: Path, **changes: object) -> PlannedModel:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(CONFIG | changes))
    return find_spec(str(path))


def test_windows_take_a_fixed_part_of_every_request(tmp_path: Path) -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 10
    model = planned(tmp_path, num_hidden_layers=30, layer_types=types, sliding_window=1024, head_dim=128)
    report = make_plan(model, PlanOptions(kv_cache_memory_bytes=20 * GIB, max_model_len=32768))
    assert report.capacity.kv_cache_size_tokens == 254_079  # the vector of spec kv-layout, section 7
    assert [(group.kind, group.layers, group.window) for group in report.kv.groups] == [
        ("sliding_window", 10, 1024),
        ("sliding_window", 10, 1024),
        ("full_attention", 10, None),
    ]
    assert report.kv.bytes_per_token == 10 * 8 * 256 * 2
    window_blocks = -(-(1023 + 16384) // 16) + 1
    assert report.kv.fixed_bytes_per_request == 2 * window_blocks * 655_360
    one_step = PlanOptions(kv_cache_memory_bytes=20 * GIB, max_model_len=32768, max_num_batched_tokens=16384)
    assert make_plan(model, one_step).capacity.kv_cache_size_tokens == 174_705
    in_full = make_plan(
        model,
        PlanOptions(kv_cache_memory_bytes=20 * GIB, max_model_len=32768, disable_hybrid_kv_cache_manager=True),
    )
    assert (len(in_full.kv.groups), in_full.kv.fixed_bytes_per_request) == (1, 0)
    assert in_full.capacity.num_blocks == 20 * GIB // (3 * 655_360)


def test_padding_is_pointed_out(tmp_path: Path) -> None:
    types = ["full_attention"] * 13 + ["sliding_attention"] * 12
    model = planned(tmp_path, num_hidden_layers=25, layer_types=types, sliding_window=128, head_dim=128)
    report = make_plan(model, PlanOptions(kv_cache_memory_bytes=20 * GIB, max_model_len=32768))
    assert report.capacity.kv_cache_size_tokens == 268_078
    assert any(
        "13, 12 layers" in warning and "3.8% of a full pool is padding" in warning for warning in report.warnings
    )


def test_latents_gain_nothing_from_tensor_but_from_context_parallel_ranks(tmp_path: Path) -> None:
    model = planned(tmp_path, model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
    one = make_plan(model, PlanOptions(kv_cache_memory_bytes=20 * GIB))
    eight = make_plan(model, PlanOptions(kv_cache_memory_bytes=20 * GIB, tensor_parallel_size=8))
    assert one.capacity == eight.capacity
    assert eight.kv.bytes_per_token_all_ranks == 8 * one.kv.bytes_per_token
    assert any("adds no room for KV" in warning for warning in eight.warnings)
    b200 = make_plan(model, PlanOptions(kv_cache_memory_bytes=20 * GIB, gpu="b200"))
    assert any("FLASHINFER_MLA and the layers of this model make blocks of 32" in text for text in b200.warnings)
    advice = {entry.id: entry for entry in eight.advice}["decode-context-parallel-size"]
    divided = make_plan(
        model, PlanOptions(kv_cache_memory_bytes=20 * GIB, tensor_parallel_size=8, decode_context_parallel_size=8)
    )
    assert advice.effect.startswith(f"{divided.capacity.kv_cache_size_tokens} tokens")
    assert divided.capacity.kv_cache_size_tokens == 8 * eight.capacity.kv_cache_size_tokens


def test_states_and_the_block_size_they_ask_for(tmp_path: Path) -> None:
    model = planned(
        tmp_path, num_hidden_layers=8, full_attention_interval=4, head_dim=128, linear_num_value_heads=32,
        linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    )  # fmt: skip
    report = make_plan(model, PlanOptions(kv_cache_memory_bytes=GIB, max_model_len=8192))
    assert {group.kind for group in report.kv.groups} == {"mamba", "full_attention"}
    assert report.kv.block_size == 272
    # Three groups of two states, two blocks each while they are saved at block ends.
    assert report.kv.fixed_bytes_per_request == 3 * 2 * report.kv.bytes_per_block
    without = make_plan(model, PlanOptions(kv_cache_memory_bytes=GIB, max_model_len=8192, enable_prefix_caching=False))
    assert without.kv.fixed_bytes_per_request == 3 * report.kv.bytes_per_block


def test_layers_that_keep_their_type_are_named(llama_70b: PlannedModel) -> None:
    options = PlanOptions(kv_cache_memory_bytes=20 * GIB, kv_cache_dtype="turboquant_3bit_nc", max_model_len=8192)
    report = make_plan(llama_70b, options)
    assert any("layers 0, 1, 78, 79 keep the model's own type" in warning for warning in report.warnings)
    assert any("TURBOQUANT backend" in warning for warning in report.warnings)
    assert report.kv.groups[0].bytes_per_block == 96 * 8 * (4 * 512 + 76 * 102)


def test_a_checkpoint_in_8_bit_kv(tmp_path: Path) -> None:
    model = planned(tmp_path, quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"})
    report = make_plan(model, PlanOptions(kv_cache_memory_bytes=GIB, max_model_len=1024))
    assert (report.kv.dtype, report.kv.bytes_per_token) == ("fp8_e4m3", 163_840)
    assert any("asks for fp8_e4m3" in warning for warning in report.warnings)


def test_rules_of_an_older_release(llama_70b: PlannedModel) -> None:
    needed = 64 * 5242880
    exact = PlanOptions(kv_cache_memory_bytes=needed, max_model_len=1024)
    assert not make_plan(llama_70b, exact).capacity.fits
    older = make_plan(llama_70b, replace(exact, vllm_version="0.19"))
    assert (older.capacity.fits, older.rules) == (True, "0.19")


def test_longrope_is_planned_at_the_length_it_is_served_at(tmp_path: Path) -> None:
    model = planned(tmp_path, original_max_position_embeddings=4096, rope_scaling={"rope_type": "longrope"})
    assert make_plan(model, PlanOptions(kv_cache_memory_bytes=GIB)).capacity.max_model_len == 4096
    longer = PlanOptions(kv_cache_memory_bytes=100 * GIB, max_model_len=131072)
    assert make_plan(model, longer).capacity.max_model_len == 131072


def test_the_device_decides_what_it_can_keep(tmp_path: Path) -> None:
    model = planned(tmp_path)
    with pytest.raises(ConfigError, match=r"nvfp4_4over6: no backend .* compute capability 9.0"):
        make_plan(model, PlanOptions(kv_cache_memory_bytes=20 * GIB, gpu="h100", kv_cache_dtype="nvfp4_4over6"))
    with pytest.raises(ConfigError, match=r"FLASH_ATTN runs on .* not on one of compute capability 7.5"):
        make_plan(model, PlanOptions(kv_cache_memory_bytes=20 * GIB, gpu="t4", attention_backend="FLASH_ATTN"))
    assert (
        make_plan(
            model, PlanOptions(kv_cache_memory_bytes=20 * GIB, gpu="b200", kv_cache_dtype="nvfp4_4over6")
        ).kv.dtype
        == "nvfp4_4over6"
    )
    gaudi = make_plan(model, PlanOptions(kv_cache_memory_bytes=20 * GIB, gpu="gaudi 3"))
    assert any("plugin" in warning for warning in gaudi.warnings)


def test_a_batch_is_what_vllm_makes_of_it(tmp_path: Path) -> None:
    """engine/arg_utils.py: all requests together bound it; config/scheduler.py: what it refuses."""
    model = planned(tmp_path)

    def batch(**options: Any) -> tuple[int, int]:
        found = make_plan(model, PlanOptions(kv_cache_memory_bytes=20 * GIB, gpu="h100", **options)).deployment
        return found.max_num_batched_tokens, found.max_num_seqs

    assert batch() == (8192, 1024)
    assert batch(max_num_seqs=2, max_model_len=512) == (1024, 2)
    assert batch(max_num_batched_tokens=128) == (128, 128)
    assert batch(enable_chunked_prefill=False, max_model_len=8192) == (8192, 1024)
    with pytest.raises(ConfigError, match="less than --max-num-seqs 256"):
        batch(max_num_batched_tokens=128, max_num_seqs=256)
    with pytest.raises(ConfigError, match="--no-enable-chunked-prefill: a prompt of 4096 tokens"):
        batch(enable_chunked_prefill=False, max_num_batched_tokens=2048, max_model_len=4096)


def test_a_connector_that_vllm_does_not_bring_is_named(tmp_path: Path) -> None:
    transfer = parse_kv_transfer({"kv_connector": "Mine", "kv_role": "kv_both"})
    plan = make_plan(planned(tmp_path), PlanOptions(kv_cache_memory_bytes=GIB, kv_transfer=transfer))
    assert any("connector Mine is not one of vLLM 0.32" in warning for warning in plan.warnings)
