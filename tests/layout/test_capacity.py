"""Pages, groups and pool sizes: the vectors of spec kv-layout, section 7, and the rules behind them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ConfigError, DoesNotFit
from pdkv.layout.capacity import Capacity, longest_request, size_pool
from pdkv.layout.dtypes import KvDtype, resolve_kv_dtype
from pdkv.layout.groups import RankLayout, group_layers, layouts_of_stages
from pdkv.layout.pages import check_tensor_parallel, kv_heads_per_rank, page_bytes, stage_layers
from pdkv.layout.specs import AttentionCache
from pdkv.models.spec import LayerKind, LayerSpec, ModelSpec
from pdkv.units import GIB

BF16 = resolve_kv_dtype("auto", "bfloat16")
FULL = LayerSpec(LayerKind.FULL_ATTENTION, 8, 128, 128)


def layout(layers: int, first: int = 0, dtype: KvDtype = BF16, tensor_parallel: int = 1) -> RankLayout:
    return group_layers((FULL,) * layers, first=first, block_size=16, dtype=dtype, tensor_parallel=tensor_parallel)


def size(
    available: int, max_model_len: int | None, *, layers: int = 80, override: int | None = None, limit: int = 131072
) -> Capacity:
    return size_pool(
        [layout(layers)],
        [available],
        max_model_len=max_model_len,
        model_limit=max(limit, max_model_len or 0),
        num_blocks_override=override,
    )


@pytest.mark.parametrize(
    ("available", "length", "override", "blocks", "tokens", "concurrency"),
    [
        (100 * GIB, 131072, None, 20480, 327680, 2.5),
        (100 * GIB, 131073, None, 20480, 327642, 2.49969),
        (8193 * 5242880, 131072, None, 8193, 131088, 1.00012),
        (100 * GIB, 1024, 100, 100, 1600, 1.5625),
    ],
)
def test_vectors_of_80_full_attention_layers(
    available: int, length: int, override: int | None, blocks: int, tokens: int, concurrency: float
) -> None:
    capacity = size(available, length, override=override)
    assert capacity.fits
    capacity.require_fit()
    assert capacity.bytes_per_block == 5_242_880
    assert (capacity.num_blocks, capacity.kv_cache_size_tokens) == (blocks, tokens)
    assert capacity.usable_blocks == blocks - 1
    assert capacity.max_concurrency == pytest.approx(concurrency, abs=1e-5)


def test_a_pool_that_holds_exactly_one_request_is_one_block_short() -> None:
    capacity = size(8192 * 5242880, 131072)
    assert not capacity.fits
    assert (capacity.num_blocks, capacity.estimated_max_model_len) == (8192, 131072 - 16)
    with pytest.raises(
        DoesNotFit, match=r"131072 tokens needs 42954915840 bytes .*8192 blocks.*--max-model-len"
    ) as raised:
        capacity.require_fit()
    assert "131056" in str(raised.value)


def test_auto_takes_the_longest_that_fits() -> None:
    capacity = size(20 * GIB, None)
    assert (capacity.num_blocks, capacity.kv_cache_size_tokens, capacity.max_model_len) == (4096, 65536, 65520)
    assert capacity.max_concurrency == pytest.approx(1.00024, abs=1e-5)
    assert capacity.fits


def test_auto_keeps_the_models_length_when_it_fits() -> None:
    assert size(100 * GIB, None).max_model_len == 131072


@pytest.mark.parametrize(
    ("stages", "gib", "blocks", "tokens", "concurrency"),
    [((40, 40), (60, 50), 20480, 327680, 2.5), ((42, 38), (50, 50), 19504, 312064, 2.38086)],
)
def test_the_poorest_pipeline_stage_rules_all(
    stages: tuple[int, int], gib: tuple[int, int], blocks: int, tokens: int, concurrency: float
) -> None:
    capacity = size_pool(
        [layout(stages[0]), layout(stages[1], first=stages[0])],
        [gib[0] * GIB, gib[1] * GIB],
        max_model_len=131072,
        model_limit=131072,
    )
    assert (capacity.num_blocks, capacity.kv_cache_size_tokens) == (blocks, tokens)
    assert capacity.max_concurrency == pytest.approx(concurrency, abs=1e-5)
    assert min(capacity.blocks_per_rank) == capacity.num_blocks == capacity.blocks_per_rank[capacity.bottleneck]


def test_less_than_a_block_fits_nothing() -> None:
    capacity = size(1000, None)
    assert not capacity.fits
    assert (capacity.num_blocks, capacity.usable_blocks, capacity.estimated_max_model_len) == (0, 0, 0)
    with pytest.raises(DoesNotFit, match="not even one token fits"):
        capacity.require_fit()


@pytest.mark.parametrize("available", [0, -5])
def test_no_memory_at_all_is_an_error(available: int) -> None:
    with pytest.raises(DoesNotFit, match=f"{available} bytes left for KV cache"):
        size(available, 16)


@given(
    blocks=st.integers(1, 500),
    spare=st.integers(0, 99),
    length=st.integers(1, 9000),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_fit_estimate_and_blocks_agree(blocks: int, spare: int, length: int, sizes: list[int]) -> None:
    """A length fits exactly when it is not above the estimate, and then its blocks are usable ones."""
    layouts = [layout(count) for count in sizes]
    available = [blocks * rank.bytes_per_block + spare for rank in layouts]
    capacity = size_pool(layouts, available, max_model_len=length, model_limit=9000)
    assert capacity.num_blocks == blocks
    assert capacity.fits == (length <= capacity.estimated_max_model_len)
    assert capacity.fits == (capacity.blocks_per_max_len_request <= capacity.usable_blocks)
    assert capacity.estimated_max_model_len == min(9000, 16 * (blocks - 1))
    assert capacity.fits == (capacity.needed_bytes <= capacity.available_bytes)


def test_longest_request_is_zero_without_room() -> None:
    assert longest_request(layout(2), 0, 100) == 0
    assert longest_request(layout(2), -1, 100) == 0


# ------------------------------------------------------------------------------------------------- pages and dtypes


@pytest.mark.parametrize(("tensor_parallel", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_tensor_parallel_divides_kv_heads_down_to_one(tensor_parallel: int, heads: int) -> None:
    assert kv_heads_per_rank(8, tensor_parallel) == heads
    page = page_bytes(FULL, block_size=16, dtype=BF16, tensor_parallel=tensor_parallel)
    assert page == 16 * heads * 256 * 2


def test_bytes_per_token_of_llama_70b() -> None:
    """Design section 5: 327,680 bytes a token in 16 bit, and 305.2 GiB for a million tokens."""
    per_token = layout(80).bytes_per_block // 16
    assert per_token == 327_680
    assert round(per_token * 10**6 / GIB, 2) == 305.18


def spec(heads: int, kv_heads: int) -> ModelSpec:
    layer = LayerSpec(LayerKind.FULL_ATTENTION, kv_heads, 64, 64)
    return ModelSpec(
        name="m", architecture="A", layers=(layer,), attention_heads=heads, max_model_len=64, dtype="bfloat16"
    )


def test_tensor_parallel_must_divide_the_heads() -> None:
    check_tensor_parallel(spec(32, 8), 16)
    with pytest.raises(ConfigError, match=r"9 attention heads.*possible: 1, 3, 9"):
        check_tensor_parallel(spec(9, 3), 2)
    with pytest.raises(ConfigError, match="8 KV heads"):
        check_tensor_parallel(spec(36, 8), 12)


def test_pipeline_stages_as_in_vllm() -> None:
    assert [len(stage) for stage in stage_layers(80, 3)] == [27, 27, 26]
    assert [len(stage) for stage in stage_layers(126, 4)] == [31, 32, 32, 31]
    assert stage_layers(80, 2) == (range(40), range(40, 80))
    with pytest.raises(ConfigError, match="more than the model's 2 layers"):
        stage_layers(2, 3)


def test_layers_of_different_sizes_share_one_group() -> None:
    small = LayerSpec(LayerKind.FULL_ATTENTION, 2, 64, 64)
    mixed = group_layers((FULL, small), block_size=16, dtype=BF16)
    assert len(mixed.groups) == 1
    assert mixed.groups[0].page_bytes == (65536, 8192)
    assert mixed.groups[0].kind is LayerKind.FULL_ATTENTION
    assert mixed.bytes_per_block == 65536 + 8192


@pytest.mark.parametrize(
    ("available", "length", "limit", "override", "says"),
    [
        ([1 << 30], 0, 64, None, "--max-model-len 0"),
        ([1 << 30], -4, 64, None, "--max-model-len -4"),
        ([1 << 30], 64, 0, None, "context length 0"),
        ([1 << 30], 64, 64, 0, "--num-gpu-blocks-override 0"),
        ([1 << 30, 1 << 30], 64, 64, None, "1 ranks and 2 amounts"),
        ([], 64, 64, None, "1 ranks and 0 amounts"),
    ],
)
def test_sizes_that_cannot_be(available: list[int], length: int, limit: int, override: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        size_pool([layout(2)], available, max_model_len=length, model_limit=limit, num_blocks_override=override)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"block_size": 0}, "block_size"), ({"kv_heads": -1}, "kv_heads"), ({"head_dim": 0}, "head_dim")],
)
def test_caches_that_cannot_be(changes: dict[str, int], says: str) -> None:
    sizes = {"block_size": 16, "kv_heads": 8, "head_dim": 128} | changes
    with pytest.raises(ConfigError, match=f"{says}.*must be at least 1"):
        AttentionCache(kind=LayerKind.FULL_ATTENTION, head_dim_v=128, element="bfloat16", **sizes)


def test_a_page_cannot_be_padded_to_less() -> None:
    with pytest.raises(ConfigError, match="65536 bytes cannot be padded to 100"):
        AttentionCache(
            kind=LayerKind.FULL_ATTENTION,
            block_size=16,
            kv_heads=8,
            head_dim=128,
            head_dim_v=128,
            element="bfloat16",
            padded_page_bytes=100,
        )


def test_a_model_without_kv_has_the_null_block_alone() -> None:
    capacity = size_pool(layouts_of_stages([{}]), [GIB], max_model_len=None, model_limit=512)
    assert (capacity.num_blocks, capacity.usable_blocks, capacity.fits) == (1, 0, True)
    assert (capacity.max_model_len, capacity.kv_cache_size_tokens) == (512, 0)


def test_a_stage_without_kv_is_refused() -> None:
    cache = AttentionCache(
        kind=LayerKind.FULL_ATTENTION, block_size=16, kv_heads=8, head_dim=128, head_dim_v=128, element="bfloat16"
    )
    with pytest.raises(ConfigError, match="stage 1 holds no layer"):
        size_pool(layouts_of_stages([{"a": cache}, {}]), [GIB, GIB], max_model_len=64, model_limit=64)
