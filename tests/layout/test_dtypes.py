"""The KV dtype catalogue of spec kv-layout, section 1: every value, its bytes, and who takes it."""

from __future__ import annotations

import pytest

from pdkv.errors import ConfigError
from pdkv.layout.backend_choice import check_runs_on, default_backend
from pdkv.layout.backends import BACKENDS, canonical_kv_dtype, check_kv_dtype, common_block_size, find_backend
from pdkv.layout.build import KvSettings, stage_caches
from pdkv.layout.dtypes import KV_DTYPES, kv_dtype, packed_cell, resolve_kv_dtype
from pdkv.layout.rules import VllmRules
from pdkv.models.families import spec_from_config
from pdkv.models.spec import ModelSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
LATENT = LLAMA | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
SPARSE = LATENT | {"model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128}

# value -> bytes of K and V of one token of one head of 128 elements (the table of section 1).
CELLS = {
    "float16": 512,
    "bfloat16": 512,
    "float32": 1024,
    "fp8": 256,
    "fp8_e4m3": 256,
    "fp8_e5m2": 256,
    "fp8_inc": 256,
    "int8_per_token_head": 264,
    "fp8_per_token_head": 264,
    "int4_per_token_head": 136,
    "nvfp4": 144,
    "nvfp4_4over6": 144,
    "turboquant_k8v4": 196,
    "turboquant_4bit_nc": 134,
    "turboquant_k3v4_nc": 118,
    "turboquant_3bit_nc": 102,
    "ultraquant_4bit": 136,
    "fp8_ds_mla": 656,
    "nvfp4_ds_mla": 352,
}


def model(config: dict[str, object]) -> ModelSpec:
    return spec_from_config(config, name="m")


def test_every_value_is_in_the_table() -> None:
    assert set(KV_DTYPES) == {"auto", *CELLS}


@pytest.mark.parametrize(("value", "cell"), CELLS.items())
def test_bytes_of_a_cell(value: str, cell: int) -> None:
    assert kv_dtype(value).cell_bytes(128, 128) == cell


@pytest.mark.parametrize(
    ("value", "backend"),
    [
        (value, name)
        for name, found in BACKENDS.items()
        if not found.latent
        for value in found.dtypes
        if value != "auto"
    ],
)
def test_a_page_of_every_pair_of_type_and_backend(value: str, backend: str) -> None:
    """On a backend that takes the type, one layer's page is 16 (or 64) tokens of 8 heads of the table's cells."""
    settings = KvSettings(model_dtype="bfloat16", max_model_len=8192, kv_cache_dtype=value, backend=BACKENDS[backend])
    built = stage_caches(model(LLAMA), settings)
    cache = next(iter(built.stages[0].values()))
    assert cache.page_bytes == built.block_size * 8 * CELLS[value]
    assert BACKENDS[backend].accepts_block(built.block_size)


def test_a_packed_type_without_its_backend_is_stored_plain() -> None:
    """Rule 2: capacity depends on type and backend together."""
    settings = KvSettings(
        model_dtype="bfloat16",
        max_model_len=8192,
        kv_cache_dtype="int8_per_token_head",
        backend=BACKENDS["FLASH_ATTN"],
        check_backend=False,
    )
    assert next(iter(stage_caches(model(LLAMA), settings).stages[0].values())).page_bytes == 16 * 8 * 256


def test_heads_that_a_type_cannot_pack() -> None:
    with pytest.raises(ConfigError, match="nvfp4.*192 and 128"):
        packed_cell("NVFP4", 192, 128)
    assert packed_cell("NONE", 192, 128) is None
    assert packed_cell("INT4_PER_TOKEN_HEAD", 576, 0) == (1, 288 + 8)


def test_auto_follows_the_checkpoint_and_an_explicit_value_wins() -> None:
    assert resolve_kv_dtype("auto", "bfloat16").name == "bfloat16"
    assert resolve_kv_dtype("auto", "bfloat16", "fp8").element_bytes == 1
    assert resolve_kv_dtype("bfloat16", "bfloat16", "fp8").element_bytes == 2
    assert resolve_kv_dtype("auto", "bfloat16", "nvfp4").name == "nvfp4"
    with pytest.raises(ConfigError, match=r"fp7: there is no such type.*fp8_ds_mla"):
        resolve_kv_dtype("fp7", "bfloat16")
    with pytest.raises(ConfigError, match=r"int8.*--dtype"):
        resolve_kv_dtype("auto", "int8")


# ------------------------------------------------------------------------------------------------------- who takes it


@pytest.mark.parametrize(
    ("config", "value", "backend", "resolved"),
    [
        (LLAMA, "auto", "FLASH_ATTN", "auto"),
        (LLAMA | {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
         "auto", "FLASH_ATTN", "fp8_e4m3"),
        (LLAMA | {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
         "bfloat16", "FLASH_ATTN", "bfloat16"),
        (LATENT, "auto", "FLASHMLA", "auto"),
        (LATENT, "fp8", "FLASHMLA", "fp8"),
        (SPARSE, "bfloat16", "FLASHMLA_SPARSE", "auto"),
        (SPARSE, "fp8", "FLASHMLA_SPARSE", "fp8_ds_mla"),
        (SPARSE, "nvfp4_ds_mla", "FLASHMLA_SPARSE", "nvfp4_ds_mla"),
        (SPARSE, "auto", "FLASHINFER_MLA_SPARSE_SM120", "fp8_ds_mla"),
        (SPARSE, "fp8", "FLASHINFER_MLA_SPARSE", "fp8"),
    ],
)  # fmt: skip
def test_what_a_value_becomes(config: dict[str, object], value: str, backend: str, resolved: str) -> None:
    assert canonical_kv_dtype(value, model(config), BACKENDS[backend]) == resolved


def test_deepseek_v3_keeps_16_bit_by_default() -> None:
    """The founding report says fp8; vLLM 0.32 keeps the model's own type (section 1.2)."""
    built = stage_caches(model(LATENT), KvSettings(model_dtype="bfloat16", max_model_len=8192))
    assert (built.value, built.dtype.name, built.backend.name, built.block_size) == (
        "auto",
        "bfloat16",
        "FLASH_ATTN_MLA",
        16,
    )


def test_refusals_name_who_takes_the_type() -> None:
    with pytest.raises(ConfigError, match="latent model keeps nvfp4_ds_mla"):
        canonical_kv_dtype("nvfp4", model(LATENT), BACKENDS["FLASHMLA"])
    with pytest.raises(ConfigError, match=r"nvfp4 is not taken by the FLASH_ATTN backend; these do: FLASHINFER"):
        check_kv_dtype("nvfp4", BACKENDS["FLASH_ATTN"])
    with pytest.raises(ConfigError, match=r"nope: there is no such backend.*FLASHMLA"):
        find_backend("nope")
    assert find_backend("flash_attn").name == "FLASH_ATTN"


@pytest.mark.parametrize(
    ("config", "value", "compute", "backend"),
    [
        (LLAMA, "auto", None, "FLASH_ATTN"),
        (LLAMA, "auto", "7.0", "TRITON_ATTN"),
        (LLAMA, "auto", "10.0", "FLASHINFER"),
        (LLAMA, "auto", "gfx942", "ROCM_ATTN"),
        (LLAMA, "fp8", "9.0", "FLASH_ATTN"),
        (LLAMA, "fp8", "8.9", "FLASHINFER"),
        (LLAMA, "fp8_e5m2", "9.0", "FLASHINFER"),
        (LLAMA, "int4_per_token_head", None, "TRITON_ATTN"),
        (LLAMA, "nvfp4", "8.0", "FLASHINFER"),
        (LLAMA, "nvfp4_4over6", "10.3", "FLASHINFER"),
        (LLAMA, "turboquant_3bit_nc", None, "TURBOQUANT"),
        (LLAMA, "ultraquant_4bit", "gfx950", "ULTRAQUANT"),
        (LATENT, "auto", None, "FLASH_ATTN_MLA"),
        (LATENT, "fp8", None, "FLASHMLA"),
        (LATENT, "auto", "10.0", "FLASHINFER_MLA"),
        (LATENT, "auto", "8.0", "TRITON_MLA"),
        (LATENT, "auto", "12.0", "TRITON_MLA"),
        (LATENT, "int8_per_token_head", None, "TRITON_MLA"),
        (SPARSE, "auto", None, "FLASHMLA_SPARSE"),
        (SPARSE, "fp8", "9.0", "FLASHMLA_SPARSE"),
        (SPARSE, "fp8", "10.0", "FLASHINFER_MLA_SPARSE"),
        (SPARSE, "auto", "12.0", "FLASHINFER_MLA_SPARSE_SM120"),
        # A plugin's own choice is not known: as on a Hopper.
        (LLAMA, "fp8", "gaudi3", "FLASH_ATTN"),
    ],
)
def test_the_backend_that_is_taken(config: dict[str, object], value: str, compute: str | None, backend: str) -> None:
    assert default_backend(model(config), value, compute).name == backend


@pytest.mark.parametrize(
    ("config", "value", "compute", "named"),
    [
        (LLAMA, "nvfp4_4over6", "9.0", "compute capability 9.0"),
        (LLAMA | {"head_dim": 64}, "nvfp4", "9.0", "nvfp4"),
        (LLAMA, "ultraquant_4bit", "9.0", "ultraquant_4bit"),
        (LLAMA, "nvfp4", "7.5", "compute capability 7.5"),
        (SPARSE, "auto", "8.0", "no backend for sparse attention"),
        (SPARSE, "auto", "gfx942", "gfx942"),
    ],
)
def test_what_no_backend_of_a_device_takes_is_refused(
    config: dict[str, object], value: str, compute: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        default_backend(model(config), value, compute)


def test_a_backend_is_refused_where_it_does_not_run() -> None:
    with pytest.raises(ConfigError, match=r"FLASHMLA runs on .* 9.x, 10.x, not on one of compute capability 8.0"):
        check_runs_on(BACKENDS["FLASHMLA"], "8.0")
    with pytest.raises(ConfigError, match="ROCM_ATTN is for AMD"):
        check_runs_on(BACKENDS["ROCM_ATTN"], "9.0")
    with pytest.raises(ConfigError, match="gfx942"):
        check_runs_on(BACKENDS["FLASH_ATTN"], "gfx942")
    check_runs_on(BACKENDS["FLASHMLA"], "9.0")
    check_runs_on(BACKENDS["FLASHMLA"], None)
    check_runs_on(BACKENDS["ROCM_ATTN"], "gfx942")


def test_latent_blocks_were_forced_before_0_19() -> None:
    """Kimi-VL on an H100 with 0.19: FLASH_ATTN_MLA, 89,148 blocks for 1,426,368 tokens (field log)."""
    assert default_backend(model(LATENT), "auto", "9.0", VllmRules("0.19")).preferred_block(16) == 16
    assert default_backend(model(LATENT), "auto", "9.0", VllmRules("0.11")).preferred_block(16) == 64
    assert default_backend(model(LATENT), "auto", "10.0", VllmRules("0.11")).preferred_block(16) == 128


@pytest.mark.parametrize(
    ("names", "size"),
    [
        (["FLASH_ATTN"], 16),
        (["CPU_ATTN"], 128),
        (["FLASHMLA"], 64),
        (["CUTLASS_MLA"], 128),
        (["FLASHINFER_MLA"], 32),
        (["ULTRAQUANT"], 64),
        (["FLASHMLA_SPARSE", "INDEXER"], 64),
        (["FLASHMLA_SPARSE_DSV4"], 256),
        (["CPU_ATTN", "CUTLASS_MLA"], 128),
    ],
)
def test_preferred_block_sizes(names: list[str], size: int) -> None:
    assert common_block_size([BACKENDS[name] for name in names], 16) == size
