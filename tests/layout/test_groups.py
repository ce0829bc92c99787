"""Layers -> groups and hybrid pools: the vectors of spec kv-layout, section 7, and the rules of section 5."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.layout.capacity import Capacity, size_pool
from pdkv.layout.groups import Group, RankLayout, layouts_of_stages, make_groups
from pdkv.layout.placement import KvLayout, find_layout
from pdkv.layout.rules import VllmRules
from pdkv.layout.specs import AttentionCache, Cache, KernelBlocks, Limits, StateCache
from pdkv.layout.unify import group_size, padding_layers
from pdkv.models.spec import LayerKind
from pdkv.units import GIB

FULL = AttentionCache(
    kind=LayerKind.FULL_ATTENTION, block_size=16, kv_heads=8, head_dim=128, head_dim_v=128, element="bfloat16"
)
MLA = AttentionCache(
    kind=LayerKind.MLA, block_size=64, kv_heads=1, head_dim=576, head_dim_v=0, element="bfloat16", storage="auto"
)
STATE = StateCache(block_size=4096, tensors=(((3, 100), "bfloat16"), ((8, 64), "float32")))


def window(tokens: int, cache: AttentionCache = FULL) -> AttentionCache:
    return replace(cache, kind=LayerKind.SLIDING_WINDOW, reach=tokens)


def chunked(tokens: int) -> AttentionCache:
    return replace(FULL, kind=LayerKind.CHUNKED_LOCAL, chunk=tokens)


def named(*runs: tuple[int, Cache]) -> dict[str, Cache]:
    """``(count, cache)`` runs as layers called by their number."""
    caches = [cache for count, cache in runs for _ in range(count)]
    return {str(index): cache for index, cache in enumerate(caches)}


def sizes(groups: tuple[Group, ...]) -> list[int]:
    return [len(group.layers) for group in groups]


def size(caches: dict[str, Cache], available: int, length: int, limits: Limits) -> tuple[Capacity, RankLayout]:
    layouts = layouts_of_stages([caches], limits=limits)
    return size_pool(layouts, [available], max_model_len=length, model_limit=length), layouts[0]


# ------------------------------------------------------------------------------------------------ section 7, hybrids


@pytest.mark.parametrize(
    ("full", "windows", "in_flight", "layers", "per_block", "blocks", "tokens", "concurrency"),
    [
        (10, (20, 1024), 16384, [10, 10, 10], 655_360, 32_768, 254_079, 7.7539),
        (10, (20, 1024), 32768, [10, 10, 10], 655_360, 32_768, 174_705, 5.3316),
        (13, (12, 128), 16384, [13, 12], 851_968, 25_206, 268_078, 8.1811),
    ],
)
def test_vectors_of_hybrid_models(
    full: int,
    windows: tuple[int, int],
    in_flight: int,
    layers: list[int],
    per_block: int,
    blocks: int,
    tokens: int,
    concurrency: float,
) -> None:
    caches = named((full, FULL), (windows[0], window(windows[1])))
    capacity, layout = size(caches, 20 * GIB, 32768, Limits(max_in_flight_tokens=in_flight))
    assert sorted(sizes(layout.groups), reverse=True) == layers
    assert (layout.bytes_per_block, capacity.num_blocks) == (per_block, blocks)
    assert capacity.kv_cache_size_tokens == tokens
    assert capacity.max_concurrency == pytest.approx(concurrency, abs=1e-4)


def test_vector_of_latents_under_context_parallelism() -> None:
    limits = Limits(decode_context_parallel=4)
    capacity, layout = size(named((61, MLA)), 20 * GIB, 131072, limits)
    assert (layout.bytes_per_block, capacity.num_blocks) == (4_497_408, 4_774)
    assert capacity.kv_cache_size_tokens == 1_222_144
    assert capacity.max_concurrency == pytest.approx(9.32422, abs=1e-5)


def test_vector_of_sparse_latents_with_indexers() -> None:
    record = replace(MLA, element="uint8", quant="FP8_PER_TENSOR", storage="fp8_ds_mla", state_bytes=656)
    indexer = replace(MLA, element="uint8", head_dim=132, role="INDEXER")
    capacity, layout = size(named((61, record), (61, indexer)), 20 * GIB, 131072, Limits())
    assert sizes(layout.groups) == [122]
    assert layout.groups[0].kind is LayerKind.MLA
    assert (layout.bytes_per_block, capacity.num_blocks) == (3_076_352, 6_980)
    assert capacity.kv_cache_size_tokens == 446_720
    assert capacity.max_concurrency == pytest.approx(3.40820, abs=1e-5)


def test_in_flight_tokens_must_be_given_for_windows() -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        size(named((2, FULL), (2, window(64))), GIB, 100, Limits())


# ------------------------------------------------------------------------------------------------- how they are made


def test_full_attention_and_one_window_without_the_hybrid_manager_is_one_group() -> None:
    caches = named((2, FULL), (2, window(64)))
    (group,) = make_groups(caches, hybrid_manager=False)
    assert (len(group.layers), group.kind) == (4, LayerKind.FULL_ATTENTION)
    assert isinstance(group.cache, AttentionCache)
    assert group.cache.reach == 64
    assert len(make_groups(caches)) == 2


def test_two_windows_cannot_be_allocated_alike() -> None:
    with pytest.raises(ConfigError, match=r"different windows \(\[64, 128\] tokens\)"):
        make_groups(named((2, FULL), (1, window(64)), (1, window(128))), hybrid_manager=False)


def test_windows_of_different_sizes_are_different_groups() -> None:
    assert sizes(make_groups(named((2, window(64)), (2, window(128))))) == [2, 2]


def test_layers_go_round_over_the_groups_of_their_kind() -> None:
    groups = make_groups(named((2, FULL), (5, window(64))))
    assert [group.layers for group in groups] == [("0", "1"), ("2", "5"), ("3", "6"), ("4",)]


def test_smaller_pages_grow_by_their_block_size_or_are_padded() -> None:
    half = window(64, replace(FULL, kv_heads=4))
    odd = window(64, replace(FULL, kv_heads=3))
    for cache, block_size, page in ((half, 32, 65536), (odd, 16, 65536)):
        groups = make_groups(named((2, FULL), (2, cache)))
        assert [group.block_size for group in groups] == [16, block_size]
        assert {bytes_ for group in groups for bytes_ in group.page_bytes} == {page}


def test_a_state_is_padded_to_the_attention_page() -> None:
    groups = make_groups(named((4, STATE), (2, FULL)))
    assert sizes(groups) == [2, 2, 2]
    assert {group.page_bytes for group in groups} == {(65536, 65536)}
    assert groups[0].block_size == 4096


def test_a_latent_cannot_be_padded_so_that_its_neighbours_are_allocated_in_full() -> None:
    draft = window(64, replace(FULL, kv_heads=4, block_size=64))  # 131,072 bytes beside a latent's 73,728
    (group,) = make_groups(named((4, MLA), (1, draft)))
    assert (len(group.layers), group.members is not None) == (5, True)
    assert group.blocks_for(6400, Limits()) == 100
    with pytest.raises(ConfigError, match=r"73728, 131072 bytes cannot be made equal"):
        make_groups(named((4, MLA), (1, replace(chunked(64), kv_heads=4, block_size=64))))


def test_encoder_only_layers_keep_nothing() -> None:
    assert make_groups(named((2, replace(FULL, kind=LayerKind.ENCODER_ONLY)))) == ()
    assert sizes(make_groups(named((2, replace(FULL, kind=LayerKind.ENCODER_ONLY)), (3, FULL)))) == [3]


@pytest.mark.parametrize(
    ("counts", "size_", "padding"),
    [
        ([10, 20], 10, [0, 0]),
        ([13, 12], 13, [0, 1]),
        ([10, 15], 10, [0, 5]),
        ([10, 14], 14, [4, 0]),
        ([5, 29], 5, [0, 1]),
    ],
)
def test_group_sizes_and_padding(counts: list[int], size_: int, padding: list[int]) -> None:
    rules = VllmRules()
    assert group_size(counts, rules) == size_
    assert [layers for layers, _ in padding_layers(counts, rules)] == padding


def test_groups_are_made_over_all_stages_and_projected() -> None:
    first = {"0": FULL, "1": window(64)}
    second = {"2": FULL, "3": window(64), "4": window(64)}
    layouts = layouts_of_stages([first, second], limits=Limits(max_in_flight_tokens=64))
    assert [[group.layers for group in layout.groups] for layout in layouts] == [
        [("0",), ("1",), ()],
        [("2",), ("4",), ("3",)],
    ]
    # A group without a layer on a stage still draws blocks there: ids are the same on all ranks.
    assert layouts[0].blocks_for(160) == layouts[1].blocks_for(160)
    with pytest.raises(ConfigError, match="layer 0 is not the same"):
        layouts_of_stages([{"0": FULL}, {"0": window(64)}])


def test_mixed_pages_in_several_groups_need_blocks_outermost() -> None:
    caches = named((2, MLA), (1, replace(MLA, kind=LayerKind.SLIDING_WINDOW_MLA, reach=64, head_dim=100)))
    layouts = layouts_of_stages([caches], layout=KvLayout.BLHNC, limits=Limits(max_in_flight_tokens=64))
    assert sizes(layouts[0].groups) == [2, 1]
    assert layouts[0].bytes_per_block == 2 * 73728
    with pytest.raises(ConfigError, match="LBNHC cannot hold pages of different sizes"):
        RankLayout(layouts[0].groups, KvLayout.LBNHC).check_layout()
    assert find_layout("nhd") is KvLayout.LBNHC
    with pytest.raises(ConfigError, match="ABCDE"):
        find_layout("abcde")


def test_strides_of_packed_blocks_are_kept_whole() -> None:
    """A page that is split into kernel blocks lies at a multiple of them, so that a block may grow."""
    cache = replace(MLA, block_size=96, stride=KernelBlocks(64))
    assert cache.stride_bytes == 32 * 576 * 2
    layout = layouts_of_stages([named((1, cache), (1, replace(cache, head_dim=7)))])[0]
    assert layout.bytes_per_block == 96 * 576 * 2 + 96 * 7 * 2


# ----------------------------------------------------------------------------------------------------- what must hold

caches_strategy = st.builds(
    lambda kind, heads, dim, block, reach: replace(
        FULL,
        kind=kind,
        kv_heads=heads,
        head_dim=dim,
        head_dim_v=dim,
        block_size=block,
        reach=reach if kind is LayerKind.SLIDING_WINDOW else None,
        chunk=reach if kind is LayerKind.CHUNKED_LOCAL else None,
    ),
    st.sampled_from([LayerKind.FULL_ATTENTION, LayerKind.SLIDING_WINDOW, LayerKind.CHUNKED_LOCAL]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([64, 96, 128]),
    st.sampled_from([16, 32]),
    st.sampled_from([32, 64]),
)


@given(
    patterns=st.lists(caches_strategy, min_size=1, max_size=3),
    count=st.integers(1, 20),
    cut=st.integers(1, 19),
    layout=st.sampled_from([KvLayout.LBNHC, KvLayout.BLHNC]),
    available=st.integers(10**6, 10**9),
)
def test_groups_cover_every_layer_once_and_placements_stay_inside(
    patterns: list[AttentionCache], count: int, cut: int, layout: KvLayout, available: int
) -> None:
    caches: dict[str, Cache] = {str(index): patterns[index % len(patterns)] for index in range(count)}
    stages = (
        [caches]
        if cut >= count
        else [
            {name: cache for name, cache in caches.items() if int(name) < cut},
            {name: cache for name, cache in caches.items() if int(name) >= cut},
        ]
    )
    limits = Limits(max_in_flight_tokens=64)
    try:
        layouts = layouts_of_stages(stages, layout=layout, limits=limits)
    except ConfigError:
        return  # pages that do not pack are refused, as at vLLM's start-up
    for stage, rank in zip(stages, layouts, strict=True):
        assert sorted(name for group in rank.groups for name in group.layers) == sorted(stage)
        if len({len(group.page_bytes) and max(group.page_bytes) for group in rank.groups}) == 1:
            assert all(group.bytes_per_block <= rank.bytes_per_block for group in rank.groups)
    if any(rank.bytes_per_block > available for rank in layouts):
        return
    capacity = size_pool(layouts, [available] * len(layouts), max_model_len=None, model_limit=4096)
    for stage, rank in zip(stages, layouts, strict=True):
        # What a longer request needs is never less, and the estimate is the last that fits.
        assert rank.blocks_for(100) <= rank.blocks_for(1000)
        assert rank.bytes_per_block * capacity.num_blocks <= available
        for place in rank.placements(capacity.num_blocks):
            if not set(place.layers) <= set(stage):
                continue  # a group without a layer here
            last = place.offset + (len(place.layers) - 1) * place.layer_stride
            assert last + (capacity.num_blocks - 1) * place.block_stride < rank.bytes_per_block * capacity.num_blocks
    if 0 < capacity.estimated_max_model_len < 4096:
        longer = capacity.estimated_max_model_len + 1
        assert any(rank.bytes_for(longer) > available - rank.bytes_per_block for rank in layouts)
