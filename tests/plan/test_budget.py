"""The memory budget: against start-up logs, by its physics, and what it refuses."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.models.configs import LLAMA

from pdkv.errors import ConfigError, PdkvError, UnsupportedModel
from pdkv.models.families import spec_from_config
from pdkv.plan.budget import estimate
from pdkv.plan.calibrate import calibration
from pdkv.plan.capture_sizes import capture_sizes, graph_count
from pdkv.plan.options import PlanOptions
from pdkv.plan.planner import make_plan
from pdkv.source import PlannedModel, find_spec
from pdkv.units import GIB


def model(config: dict[str, Any] = LLAMA, name: str = "llama-3.1-8b") -> PlannedModel:
    return PlannedModel(spec_from_config(config, name=name), config)


# What the H100 logs of Llama-3.1-8B print (field rows L032 to L037: vLLM 0.19, 8,192 batched tokens, 1,024 requests).
LOGGED = {
    "vllm_version": "0.19.0",
    "gpu": "h100",
    "gpu_memory_utilization": 0.95,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 1024,
    "max_model_len": 8192,
}


@pytest.mark.parametrize(
    ("tensor_parallel", "dtype", "weights", "activation", "non_torch", "available"),
    [
        (1, "bfloat16", 14.99, 1.89, 0.25, 58.11),
        (1, "float32", 29.98, 2.21, 0.25, 42.80),
        (2, "bfloat16", 7.51, 1.89, 2.07, 63.76),
        (4, "bfloat16", 3.77, 1.89, 2.13, 67.44),
    ],
)
def test_terms_are_those_that_vllm_logs(
    tensor_parallel: int, dtype: str, weights: float, activation: float, non_torch: float, available: float
) -> None:
    (found,) = estimate(model(), PlanOptions(**LOGGED, tensor_parallel_size=tensor_parallel, dtype=dtype))
    assert found.weights_bytes is not None
    assert found.activation_bytes is not None
    assert found.non_torch_bytes is not None
    assert found.weights_bytes / GIB == pytest.approx(weights, abs=0.01)
    assert found.activation_bytes / GIB == pytest.approx(activation, abs=0.02)
    assert found.non_torch_bytes / GIB == pytest.approx(non_torch, abs=0.05)
    assert found.available_kv_bytes / GIB == pytest.approx(available, abs=0.08)
    assert found.low_bytes is not None
    assert found.high_bytes is not None
    assert found.low_bytes < available * GIB < found.high_bytes
    assert found.dominated_by == "weights"
    assert found.notes == ()


def test_the_terms_add_up() -> None:
    (found,) = estimate(model(), PlanOptions(gpu="h200", tensor_parallel_size=2))
    spent = sum(
        value or 0
        for value in (found.weights_bytes, found.activation_bytes, found.non_torch_bytes, found.cudagraph_bytes)
    )
    assert found.requested_bytes == -(-(found.total_bytes or 0) * 92 // 100)
    assert found.available_kv_bytes == (found.requested_bytes or 0) - spent


def test_stages_of_a_pipeline_have_budgets_of_their_own() -> None:
    first, last = estimate(model(), PlanOptions(**LOGGED, pipeline_parallel_size=2))
    assert first.weights_bytes == pytest.approx(7.51 * GIB, rel=0.001)
    assert last.activation_bytes == pytest.approx(2.01 * GIB, rel=0.01), "only the last stage samples"
    assert first.activation_bytes is not None
    assert last.activation_bytes is not None
    assert first.activation_bytes < last.activation_bytes
    report = make_plan(model(), PlanOptions(**LOGGED, pipeline_parallel_size=2))
    assert report.memory == last, "the stage with the least memory decides"
    assert {rank.available_kv_bytes for rank in report.ranks} == {first.available_kv_bytes, last.available_kv_bytes}


def test_releases_differ_as_measured() -> None:
    def activation(version: str) -> int:
        return estimate(model(), replace(PlanOptions(**LOGGED), vllm_version=version))[0].activation_bytes or 0

    assert activation("0.16") / GIB == pytest.approx(4.76, abs=0.02)
    assert activation("0.17") / activation("0.16") == pytest.approx(0.4, abs=0.01)
    graphs = [
        estimate(model(), replace(PlanOptions(**LOGGED), vllm_version=version))[0].cudagraph_bytes
        for version in ("0.20", "0.21")
    ]
    assert graphs[0] == 0
    assert graphs[1] > 0, "inside the budget from 0.21 on"


def test_a_release_without_measurements_says_so_and_gives_wider_bounds() -> None:
    old = estimate(model(), PlanOptions(**LOGGED))[0]
    new = estimate(model(), replace(PlanOptions(**LOGGED), vllm_version="0.32"))[0]
    assert any("unvalidated" in note for note in new.notes)
    assert (new.high_bytes or 0) - (new.low_bytes or 0) > (old.high_bytes or 0) - (old.low_bytes or 0)


def test_the_sampler_grows_with_requests_and_vocabulary() -> None:
    few = estimate(model(), replace(PlanOptions(**LOGGED), max_num_seqs=64))[0]
    many = estimate(model(), PlanOptions(**LOGGED))[0]
    assert (many.activation_bytes or 0) - (few.activation_bytes or 0) > 0.5 * GIB
    wide = estimate(model({**LLAMA, "vocab_size": 256000}), PlanOptions(**LOGGED))[0]
    assert (wide.activation_bytes or 0) > 1.8 * (many.activation_bytes or 0)


def test_a_vision_tower_keeps_what_it_made_of_the_images() -> None:
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
    }
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 10000,
    }
    architecture = ["Gemma3ForConditionalGeneration"]
    gemma = {"architectures": architecture, "model_type": "gemma3", "text_config": text, "vision_config": vision}
    (found,) = estimate(model({**gemma, "torch_dtype": "bfloat16"}, "gemma-3-12b"), PlanOptions(**LOGGED))
    # Field row L014: 23.31 GiB of weights, an activation peak of 3.94 GiB, 47.72 GiB for KV.
    assert (found.weights_bytes or 0) / GIB == pytest.approx(23.31, abs=0.01)
    assert (found.activation_bytes or 0) / GIB == pytest.approx(3.94, abs=0.02)
    assert found.available_kv_bytes / GIB == pytest.approx(47.72, abs=0.05)
    (blind,) = estimate(
        model({**gemma, "torch_dtype": "bfloat16"}, "gemma-3-12b"), PlanOptions(**LOGGED, language_model_only=True)
    )
    assert (found.weights_bytes or 0) - (blind.weights_bytes or 0) > 0.75 * GIB
    assert (found.activation_bytes or 0) - (blind.activation_bytes or 0) > 0.15 * GIB


def test_experts_are_shared_by_data_parallel_engines_and_cost_communication() -> None:
    experts = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
    alone = estimate(model(experts), PlanOptions(gpu="b300"))[0]
    shared = estimate(model(experts), PlanOptions(gpu="b300", data_parallel_size=8))[0]
    whole = estimate(model(experts), PlanOptions(gpu="b300", data_parallel_size=8, enable_expert_parallel=True))[0]
    held = 32 * 8 * 3 * 4096 * 14336 * 2
    assert (alone.weights_bytes or 0) - (shared.weights_bytes or 0) == pytest.approx(held * 7 / 8, rel=0.01)
    assert whole.weights_bytes == pytest.approx(shared.weights_bytes, rel=0.001)
    assert (shared.non_torch_bytes or 0) > (alone.non_torch_bytes or 0)
    assert any("--all2all-backend" in note for note in shared.notes)
    dense = [estimate(model(), PlanOptions(gpu="b300", data_parallel_size=engines))[0] for engines in (1, 8)]
    assert dense[0] == dense[1], "engines of a dense model have nothing to do with each other"


def test_capture_sizes() -> None:
    options = PlanOptions(**LOGGED)
    spec = model().spec
    assert len(capture_sizes(options, spec)) == 51, "as the logs say: PIECEWISE=51 (largest=512)"
    assert graph_count(options, spec) == 102
    assert graph_count(replace(options, cudagraph_mode="PIECEWISE"), spec) == 51
    assert graph_count(replace(options, enforce_eager=True), spec) == 0
    assert capture_sizes(replace(options, cudagraph_capture_sizes=(4, 2)), spec) == (2, 4)
    assert capture_sizes(replace(options, max_num_seqs=8), spec) == (1, 2, 4, 8, 16)
    assert graph_count(replace(options, max_num_seqs=8), spec) == 5 + 4
    assert graph_count(replace(options, max_num_seqs=256), spec) == 51 + 35, "FULL=35 (largest=256), as logs say"


def test_more_than_is_free_at_the_start_is_pointed_out() -> None:
    (found,) = estimate(model(), replace(PlanOptions(**LOGGED), gpu_memory_utilization=0.995))
    assert any("does not start: at most 0.993" in note for note in found.notes), "78.68 of 79.19 GiB are free"
    parallel = replace(PlanOptions(**LOGGED), gpu_memory_utilization=0.98, tensor_parallel_size=2)
    assert any("does not start" in note for note in estimate(model(), parallel)[0].notes)


def test_the_one_public_log_of_a_release_since_0_21() -> None:
    """vLLM 0.31.0, an A100 80GB, Llama-3.1-8B-Instruct and no flags: 56.21 GiB for KV of 72.91 GiB.

    From a public notebook of start-up lines: 15.26 GiB consumed, a peak of 1.44 GiB with the estimated graphs in it.
    """
    (found,) = estimate(model(), PlanOptions(gpu="a100-80gb", vllm_version="0.31"))
    assert (found.requested_bytes or 0) / GIB == pytest.approx(72.91, abs=0.01)
    consumed = (found.weights_bytes or 0) + (found.non_torch_bytes or 0)
    assert consumed / GIB == pytest.approx(15.26, abs=0.05)
    assert abs(found.available_kv_bytes / GIB - 56.21) < 0.01 * 72.91
    assert (found.low_bytes or 0) < 56.21 * GIB < (found.high_bytes or 0)


# --------------------------------------------------------------------------------------------------------- the planner


def test_a_plan_by_the_name_of_a_gpu() -> None:
    report = make_plan(model(), PlanOptions(**LOGGED))
    assert report.memory.basis == "estimated"
    assert report.model.params == 8_030_261_248
    assert report.model.weights_bytes == 2 * 8_030_261_248
    assert report.capacity.num_blocks == report.memory.available_kv_bytes // (131072 * 16)


def test_given_bytes_stay_exact_and_are_checked_against_the_gpu() -> None:
    options = PlanOptions(**LOGGED, kv_cache_memory_bytes=40 * GIB)
    found = make_plan(model(), options).memory
    assert (found.basis, found.available_kv_bytes, found.low_bytes) == ("given", 40 * GIB, None)
    assert found.weights_bytes == pytest.approx(14.99 * GIB, rel=0.001)
    assert found.requested_bytes is None, "vLLM's share of the GPU decides nothing then"
    assert found.notes == ()
    found = make_plan(model(), replace(options, kv_cache_memory_bytes=70 * GIB)).memory
    assert "more than the GPU has" in found.notes[0]


def test_weights_that_do_not_fit_are_an_answer() -> None:
    report = make_plan(model(), PlanOptions(gpu="t4", gpu_memory_utilization=0.9))
    assert not report.capacity.fits
    assert report.memory.available_kv_bytes < 0
    assert report.capacity.num_blocks == 0


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="Give --gpu"):
        make_plan(model(), PlanOptions())
    with pytest.raises(ConfigError, match="no such device"):
        make_plan(model(), PlanOptions(gpu="h1000000"))
    other = {**LLAMA, "model_type": "brandnew"}
    with pytest.raises(UnsupportedModel, match="safetensors"):
        make_plan(model(other), PlanOptions(gpu="h100"))
    report = make_plan(model(other), PlanOptions(gpu="h100", kv_cache_memory_bytes=GIB * 20))
    assert report.model.weights_bytes is None, "not known is null, and the capacity is exact all the same"
    assert report.capacity.num_blocks == 10240


ODD = (None, 0, -1, 1.5, "x", "", [], {}, [None], {"a": 1}, True, 1 << 40, "1,2")
QUANTIZED = {
    **LLAMA,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "vision_config": {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "patch_size": 14},
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}
        },
    },
}


@pytest.mark.parametrize("seed", range(4))
def test_odd_fields_are_refused_and_never_a_traceback(seed: int) -> None:
    draw = random.Random(seed)
    answered = 0
    for _ in range(100):
        config = copy.deepcopy(QUANTIZED)
        section = draw.choice((config, config["quantization_config"], config["rope_scaling"], config["vision_config"]))
        key = draw.choice([key for key in section if "layers" not in key and key != "depth"])
        section[key] = draw.choice(ODD)
        try:
            estimate(model(config), PlanOptions(gpu="h100", tensor_parallel_size=2))
            answered += 1
        except PdkvError as refusal:
            assert str(refusal)
    assert 10 < answered < 100, "both happen"


def test_numbers_that_would_keep_a_planner_busy_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers; no model has more than"):
        model({**LLAMA, "num_hidden_layers": 1 << 40})
    deep = {"depth": 1 << 40, "hidden_size": 64, "intermediate_size": 128}
    with pytest.raises(ConfigError, match="vision tower of"):
        estimate(model({**LLAMA, "vision_config": deep}), PlanOptions(gpu="h100"))


# ------------------------------------------------------------------------------------------------------------ the files


def write_checkpoint(directory: Path, config: dict[str, Any], tensors: dict[str, tuple[str, list[int], int]]) -> Path:
    """A directory with a config and one safetensors file whose data is a hole."""
    (directory / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + start)
    return directory


def test_weights_from_headers_are_exact(tmp_path: Path) -> None:
    config = {**LLAMA, "num_hidden_layers": 1, "vocab_size": 1024}
    tensors = {
        "model.embed_tokens.weight": ("BF16", [1024, 4096], 1024 * 4096 * 2),
        "model.layers.0.mlp.everything": ("BF16", [1], 300_000_000),
        "model.layers.1.eh_proj.weight": ("BF16", [1], 50_000_000),  # a draft layer: not loaded
        "model.rotary_emb.inv_freq": ("F32", [64], 256),
    }
    found = find_spec(str(write_checkpoint(tmp_path, config, tensors)))
    report = make_plan(found, PlanOptions(gpu="h100"))
    assert report.model.weights_bytes == 1024 * 4096 * 2 + 300_000_000
    assert any("the files are believed" in note for note in report.memory.notes)


def test_files_of_a_family_that_is_not_counted_are_still_summed(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "brandnew"}
    tensors = {
        "model.layers.0.q_proj.weight": ("BF16", [1], 4_000_000),
        "model.layers.0.input_layernorm.weight": ("BF16", [1], 8192),
    }
    found = find_spec(str(write_checkpoint(tmp_path, config, tensors)))
    (memory,) = estimate(found, PlanOptions(gpu="h100", tensor_parallel_size=2))
    assert memory.weights_bytes == 2_000_000 + 8192
    assert any("guessed by the tensors' names" in note for note in memory.notes)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, LLAMA, {})
    (directory / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        make_plan(find_spec(str(directory)), PlanOptions(gpu="h100"))
    (directory / "model.safetensors").unlink()
    (directory / "a.safetensors").write_bytes(b"")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks 1 of the 2 weight files.*b\.safetensors"):
        make_plan(find_spec(str(directory)), PlanOptions(gpu="h100"))


def test_modelopt_writes_the_format_into_a_file_of_its_own(tmp_path: Path) -> None:
    directory = tmp_path / "Some-NVFP4"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(UnsupportedModel, match="its name says nvfp4"):
        make_plan(find_spec(str(directory)), PlanOptions(gpu="h100"))
    section = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    (directory / "hf_quant_config.json").write_text(json.dumps(section))
    report = make_plan(find_spec(str(directory)), PlanOptions(gpu="h100"))
    assert report.model.weights_bytes is not None
    assert report.model.weights_bytes < 0.45 * 2 * 8_030_261_248


# ---------------------------------------------------------------------------------------------------------- calibration


def field_log(shared: Path, name: str) -> Path:
    return shared / "field" / "logs" / name


def test_a_log_calibrates_its_own_settings_to_what_it_printed(shared: Path) -> None:
    found = calibration(field_log(shared, "ibm-granite-granite-3-3---h100-80gb--tp1pp1dp1--8192.log"))
    granite = {
        **LLAMA,
        "model_type": "granite",
        "intermediate_size": 12800,
        "num_hidden_layers": 40,
        "vocab_size": 49159,
        "tie_word_embeddings": True,
    }
    options = PlanOptions(**found.options)
    assert options.max_num_batched_tokens == 8192
    assert options.vllm_version == "0.19"
    (memory,) = estimate(model(granite), options, found)
    assert memory.available_kv_bytes / GIB == pytest.approx(58.66, abs=0.02)
    assert memory.total_bytes is not None
    assert memory.total_bytes / GIB == pytest.approx(79.19, abs=0.006)
    assert (memory.high_bytes or 0) - (memory.low_bytes or 0) < 0.5 * GIB


def test_a_log_carries_over_to_other_settings(shared: Path) -> None:
    """From the log with tensor parallelism over two GPUs to the settings of the log with four."""
    found = calibration(field_log(shared, "meta-llama-llama-3-1-8b---h100-80gb--tp2pp1dp1--8192.log"))
    options = replace(PlanOptions(**found.options), tensor_parallel_size=4)
    (memory,) = estimate(model(), options, found)
    assert memory.available_kv_bytes / GIB == pytest.approx(67.44, abs=0.15)


def test_a_log_without_debug_lines_gives_what_it_can(shared: Path, tmp_path: Path) -> None:
    whole = field_log(shared, "meta-llama-llama-3-1-8b---h100-80gb--tp1pp1dp1--8192.log").read_text()
    plain = tmp_path / "info.log"
    plain.write_text("\n".join(line for line in whole.splitlines() if " DEBUG " not in line))
    found = calibration(plain)
    assert found.activation is None
    options = replace(PlanOptions(gpu="h100", max_num_batched_tokens=8192, max_num_seqs=1024), **found.options)
    (memory,) = estimate(model(), options, found)
    assert memory.available_kv_bytes / GIB == pytest.approx(58.11, abs=0.02)
    assert any("VLLM_LOGGING_LEVEL=DEBUG" in note for note in memory.notes)


def test_a_start_that_failed_calibrates_nothing(shared: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to calibrate with|Available KV"):
        calibration(field_log(shared, "codellama-codellama-34b---h100-80gb--tp2pp1dp1--8192.FAILED.log"))
