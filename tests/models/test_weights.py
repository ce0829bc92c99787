"""Weights from a config: parameters against transformers' own modules, bytes against formats and divisions."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from tests.models.configs import LLAMA

from pdkv.errors import UnsupportedModel
from pdkv.models.catalog import catalog
from pdkv.models.families import spec_from_config
from pdkv.models.weights import Division, Weights, count_weights
from pdkv.models.weights.formats import MXFP4, NVFP4, fp8_block, packed
from pdkv.models.weights.matrices import Matrix, Split
from pdkv.models.weights.per_rank import allocated
from pdkv.models.weights.quantization import read_quantization
from pdkv.models.weights.rope import rope_bytes
from pdkv.units import MIB

# Families as transformers builds them when only sizes are given; each has something that Llama has not.
FAMILIES = [
    "arcee", "aria_text", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5", "exaone4",
    "exaone_moe", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe_lite",
    "glm_moe_dsa", "gpt_neox", "gpt_oss", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared",
    "hyperclovax", "internlm3", "jamba", "lfm2", "llama", "llama4_text", "minimax_m2", "ministral3", "mistral",
    "mixtral", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2",
]  # fmt: skip


def weights(config: dict[str, Any], name: str = "model", **asked: Any) -> Weights:
    return count_weights(config, spec_from_config(config, name=name), **asked)


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_are_those_of_transformers(kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in mapping:
        pytest.skip(f"this transformers has no {kind}")
    fields = mapping[kind]().to_dict()
    small: dict[str, Any] = {"pad_token_id": 0, "vocab_size": 1024, "num_hidden_layers": 4}
    for key in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"):
        if isinstance(fields.get(key), int) and fields[key] > 8:
            small[key] = 8
    if isinstance(fields.get("intermediate_size"), int) and fields["intermediate_size"] > 3000:
        small["intermediate_size"] = 1536
    settings = mapping[kind](**small)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(settings))
    config = {**settings.to_dict(), "architectures": [type(module).__name__]}
    # Kept as buffers there: the correction of the router's scores, and Gemma 4's scalar of a layer.
    ours = sum(
        matrix.params
        for part in weights(config, kind).parts
        for matrix in part.matrices
        if not matrix.name.endswith(("correction_bias", "layer_scalar"))
    )
    assert ours == sum(parameter.numel() for parameter in module.parameters())


def test_published_counts() -> None:
    assert weights(LLAMA).params == 8_030_261_248
    assert weights(LLAMA).file_bytes("bfloat16") == 2 * 8_030_261_248
    assert weights(LLAMA).file_bytes("float32") == 4 * 8_030_261_248


# Families of the catalogue whose layers are sized and whose weights nobody looked at: plans of these take given bytes.
NOT_COUNTED = {"falcon_mamba", "gemma3n_text", "minicpm3", "minimax_m1"}


def test_every_model_of_the_catalogue_that_is_laid_out_is_counted() -> None:
    """Within what the name says (8B: 6.4 to 12 billion), where it says it."""
    counted = 0
    for known in catalog().values():
        try:
            spec = spec_from_config(known.config, name=known.name)
        except UnsupportedModel:
            continue
        try:
            params = count_weights(known.config, spec).params
        except UnsupportedModel as refusal:
            assert any(repr(kind) in str(refusal) for kind in NOT_COUNTED), known.name
            continue
        counted += 1
        stated = re.search(r"-(\d+(?:\.\d+)?)B(?!-\d+E|-A\d|\d)", known.name, re.IGNORECASE)
        if stated is not None and not re.search(r"\dx\d|-\d+E-", known.name, re.IGNORECASE):
            assert 0.8 < params / (float(stated[1]) * 1e9) < 1.5, known.name
    assert counted > 0.95 * len(catalog())


def test_models_of_the_shared_folder_are_counted_or_refused(shared: Any) -> None:
    import json

    known = {
        "deepseek-ai--DeepSeek-V3": 671_026_419_200,  # of 685B with the MTP layer
        "Qwen--Qwen3-32B": 32_762_123_264,
        "Qwen--Qwen3-235B-A22B-FP8": 235_093_634_560,
        "openai--gpt-oss-120b": 116_829_156_672,
        "meta-llama--Meta-Llama-3.1-405B": 405_853_388_800,
        "google--gemma-4-26B-A4B": 25_805_933_872 + 30,
        "moonshotai--Kimi-K2.5": None,
    }
    counted = 0
    for path in sorted((shared / "models").glob("*.json")):
        config = json.loads(path.read_bytes())
        try:
            found = weights(config, path.stem)
        except UnsupportedModel as refusal:
            assert "quantization_config" in str(refusal) or "is not sized" in str(refusal), path.stem
            continue
        counted += 1
        if known.get(path.stem):
            assert found.params == known[path.stem], path.stem
    assert counted >= 45


# ------------------------------------------------------------------------------------------------------------ division


def test_tensor_parallelism_divides_and_copies() -> None:
    division = Division(tensor_parallel=16)
    query = Matrix("q_proj", 4096, 4096, Split.COLUMN)
    key = Matrix("k_proj", 1024, 4096, Split.HEADS, heads=8)
    assert query.on_rank(division) == (256, 4096, 1)
    assert key.on_rank(division) == (128, 4096, 1), "a rank keeps at least one of the 8 heads"
    assert Matrix("o_proj", 4096, 4096, Split.ROW).on_rank(division) == (4096, 256, 1)
    assert Matrix("norm", 4096, 1).on_rank(division) == (4096, 1, 1)
    assert Matrix("embed_tokens", 49155, 2048, Split.VOCAB).on_rank(Division(tensor_parallel=2)) == (24608, 2048, 1)


def test_experts_are_divided_inside_or_handed_out_whole() -> None:
    experts = Matrix("experts.gate_up_proj", 2816, 2048, Split.EXPERT_COLUMN, count=64)
    assert experts.on_rank(Division(tensor_parallel=4)) == (704, 2048, 64)
    assert experts.on_rank(Division(tensor_parallel=4, expert_parallel=True)) == (2816, 2048, 16)
    assert experts.on_rank(Division(tensor_parallel=1, expert_ranks=8)) == (352, 2048, 64), "data parallel ranks share"
    assert experts.on_rank(Division(tensor_parallel=1, expert_ranks=8, expert_parallel=True)) == (2816, 2048, 8)


def test_ranks_of_a_stage_hold_its_layers() -> None:
    model = weights(LLAMA)
    whole = model.on_rank(Division(), "bfloat16")
    first = model.on_rank(Division(), "bfloat16", layers=range(16), last=False)
    last = model.on_rank(Division(), "bfloat16", layers=range(16, 32), first=False)
    # The table of positions is on both.
    assert first.bytes + last.bytes - whole.rope_bytes == whole.bytes
    tied = weights({**LLAMA, "tie_word_embeddings": True})
    last_tied = tied.on_rank(Division(), "bfloat16", layers=range(16, 32), first=False)
    assert last_tied.bytes == last.bytes, "the last stage of a tied model keeps the embeddings too"


def test_a_tensor_of_its_own_segment_counts_what_the_allocator_cannot_give_away() -> None:
    assert allocated(1) == 512
    assert allocated(9 * MIB + 1) == 9 * MIB + 512
    assert allocated(11 * MIB) == 12 * MIB, "1 MiB is left of the segment of 12: it counts"
    assert allocated(24 * MIB + MIB // 2) == 24 * MIB + MIB // 2, "1.5 MiB is left of the segment of 26: given away"


def test_draft_layers_are_counted_when_they_are_served() -> None:
    config = {**LLAMA, "num_nextn_predict_layers": 1}
    plain, drafting = weights(config), weights(config, with_draft=True)
    assert plain.params == drafting.params == weights(LLAMA).params
    extra = drafting.on_rank(Division(), "bfloat16").bytes - plain.on_rank(Division(), "bfloat16").bytes
    layer = 2 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 4096 * 8192)
    assert layer <= extra < layer * 1.02


def test_latent_attention_keeps_its_projections_twice(shared: Any) -> None:
    import json

    config = json.loads((shared / "models" / "deepseek-ai--DeepSeek-V3.json").read_bytes())
    derived = [m for part in weights(config).parts for m in part.matrices if m.derived]
    assert sum(m.rows * m.cols for m in derived) == 61 * 512 * 128 * (128 + 128)


# ------------------------------------------------------------------------------------------------------------- formats


def test_bytes_of_formats() -> None:
    assert fp8_block(128).bytes_of(256, 300) == 256 * 300 + 2 * 3 * 4
    assert NVFP4.bytes_of(64, 1024) == 64 * 512 + 64 * 64
    assert MXFP4.bytes_of(64, 1024) == 64 * 512 + 64 * 32
    assert packed("awq", 4, 128, zero_points=True).bytes_of(64, 1024) == 64 * 512 + 64 * 8 * 2 + 64 * 4
    assert packed("gptq", 4, 128, zero_points=False).bytes_of(64, 1024) == 64 * 512 + 64 * 8 * 2


def formats(section: dict[str, Any]) -> Any:
    return read_quantization({"quantization_config": section}, {}, "model")


def test_ignore_lists_in_the_ways_that_checkpoints_write_them() -> None:
    group = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}
    found = formats(
        {
            "quant_method": "modelopt",
            "config_groups": group,
            "ignore": ["lm_head", "model.layers.0*", "re:.*self_attn.*", "model.layers.3.block_sparse_moe.gate"],
        }
    )
    assert found.format_of("layers.1.mlp.up_proj") is NVFP4
    assert found.format_of("layers.0.mlp.up_proj") is None
    assert found.format_of("layers.7.self_attn.q_proj") is None
    assert found.format_of("layers.3.mlp.gate") is None
    assert found.format_of("layers.3.mlp.gate_proj") is NVFP4, "a pattern is no prefix of a longer name"


def test_formats_by_method() -> None:
    assert formats({"quant_method": "fp8", "weight_block_size": [128, 128]}).default == fp8_block(128)
    assert formats({"quant_method": "awq", "bits": 4, "group_size": 128}).default.zero_bits == 4
    gpt_oss = formats({"quant_method": "mxfp4"})
    assert gpt_oss.format_of("layers.0.mlp.experts.down_proj") is MXFP4
    assert gpt_oss.format_of("layers.0.self_attn.q_proj") is None
    mixed = formats(
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4"}}}
    )
    assert mixed.format_of("layers.0.mlp.up_proj") is NVFP4
    assert mixed.format_of("layers.0.mlp.down_proj") is None


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="quantized by 'quip'"):
        formats({"quant_method": "quip"})
    with pytest.raises(UnsupportedModel, match="safetensors files"):
        weights({**LLAMA, "model_type": "brandnew"})
    with pytest.raises(UnsupportedModel, match="its name says nvfp4"):
        weights(LLAMA, "nvidia--Llama-NVFP4")
    assert weights(LLAMA, "nvidia--Llama-FP8", quantization="fp8").params == 8_030_261_248


def test_experts_in_mxfp4_are_padded_for_their_kernels() -> None:
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    experts = {m.name: m for part in weights(config).parts for m in part.matrices if ".experts." in m.name}
    assert experts["layers.0.mlp.experts.gate_up_proj"].rows == 5760
    in_16_bits = weights({k: v for k, v in config.items() if k != "quantization_config"})
    saved = in_16_bits.on_rank(Division(), "bfloat16").bytes - weights(config).on_rank(Division(), "bfloat16").bytes
    plain = 32 * 3 * 2880 * 2880 * 2
    stored = 32 * 3 * 2944 * 3072 * 17 // 32  # 128 of an expert's own channels, 256 of the model's
    assert abs(saved - (plain - stored)) <= 4 * MIB


# ---------------------------------------------------------------------------------------------------- position tables


def test_tables_of_positions() -> None:
    text = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072}
    assert rope_bytes(text, 2) == 131072 * 128 * 2
    linear = {**text, "head_dim": 256, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert rope_bytes(linear, 2) == 8 * 131072 * 256 * 2, "Gemma 3: the scaled length, 512 MiB"
    local = {**linear, "rope_local_base_freq": 10000}
    assert rope_bytes(local, 2) == 9 * 131072 * 256 * 2
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    assert rope_bytes({**text, "rope_scaling": yarn}, 2) == 131072 * 128 * 2
