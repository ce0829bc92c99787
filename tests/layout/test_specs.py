"""Most blocks that one request holds, for every kind (spec kv-layout, section 3)."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from pdkv.errors import ConfigError
from pdkv.layout.groups import Group
from pdkv.layout.hashing_sizes import TokenSteps, tensor_parallel_replicas, token_steps
from pdkv.layout.specs import AttentionCache, Limits, StateCache
from pdkv.models.spec import LayerKind

FULL = AttentionCache(
    kind=LayerKind.FULL_ATTENTION, block_size=16, kv_heads=8, head_dim=128, head_dim_v=128, element="bfloat16"
)
LIMITS = Limits(max_in_flight_tokens=1000, encoder_tokens=1500)
STATE = StateCache(block_size=16, tensors=(((3, 64), "bfloat16"), ((4, 256), "float32")), checkpoint_blocks=1)


@pytest.mark.parametrize(
    ("cache", "tokens", "blocks"),
    [
        (FULL, 1600, 100),
        (FULL, 1601, 101),
        (replace(FULL, kind=LayerKind.MLA), 1601, 101),
        (replace(FULL, kind=LayerKind.SINK_FULL), 1601, 101),
        (replace(FULL, kind=LayerKind.RSWA, reach=64), 1601, 101),
        (replace(FULL, kind=LayerKind.SLIDING_WINDOW, reach=128), 100_000, 71 + 1),
        (replace(FULL, kind=LayerKind.SLIDING_WINDOW, reach=128, extra_retained=3), 100_000, 71 + 1),
        (replace(FULL, kind=LayerKind.SLIDING_WINDOW, reach=128, extra_retained=16), 100_000, 72 + 1),
        (replace(FULL, kind=LayerKind.SLIDING_WINDOW, reach=128), 160, 10 + 1),
        (replace(FULL, kind=LayerKind.SLIDING_WINDOW_MLA, reach=8, block_size=4), 100_000, 252 + 1),
        (replace(FULL, kind=LayerKind.CHUNKED_LOCAL, chunk=8192), 100_000, 575),
        (replace(FULL, kind=LayerKind.CHUNKED_LOCAL, chunk=8192), 160, 10),
        (replace(FULL, kind=LayerKind.CROSS), 100_000, 94),
        (replace(FULL, kind=LayerKind.ENCODER_ONLY), 100_000, 0),
        (replace(FULL, kind=LayerKind.CIRCULAR_BUFFER), 100_000, 1),
        (STATE, 100_000, 1),
        (replace(STATE, mode="align"), 100_000, 3),
        (replace(STATE, mode="align", speculative_blocks=2), 7, 5),
        (replace(STATE, speculative_blocks=2), 7, 3),
    ],
)
def test_blocks_of_a_request(cache: AttentionCache | StateCache, tokens: int, blocks: int) -> None:
    assert cache.blocks_for(tokens, LIMITS) == blocks


def test_context_parallel_ranks_share_the_tokens() -> None:
    limits = replace(LIMITS, decode_context_parallel=4)
    assert FULL.blocks_for(6400, limits) == 100
    assert replace(FULL, dcp_sharded=False).blocks_for(6400, limits) == 400


def test_what_a_kind_needs_must_be_given() -> None:
    with pytest.raises(ConfigError, match="window of at least one token"):
        replace(FULL, kind=LayerKind.SLIDING_WINDOW).blocks_for(10, LIMITS)
    with pytest.raises(ConfigError, match="encoder's input"):
        replace(FULL, kind=LayerKind.CROSS).blocks_for(10, Limits())


def test_pages() -> None:
    assert FULL.page_bytes == 16 * 8 * 256 * 2
    assert replace(FULL, tokens_per_state=4).page_bytes == 4 * 8 * 256 * 2
    assert replace(FULL, tokens_per_state=Fraction(1, 2)).page_bytes == 32 * 8 * 256 * 2
    assert replace(FULL, head_slots=16, state_bytes=72).page_bytes == 16 * 16 * 72
    assert STATE.page_bytes == 3 * 64 * 2 + 4 * 256 * 4
    v4 = replace(FULL, kind=LayerKind.MLA, block_size=256, kv_heads=1, state_bytes=584, page_alignment=576)
    assert (replace(v4, tokens_per_state=4).page_bytes, replace(v4, tokens_per_state=128).page_bytes) == (37_440, 1_728)
    assert replace(v4, block_size=64).page_bytes == 37_440


# ------------------------------------------------------------------------------------------------------- token steps


def steps(*caches: AttentionCache | StateCache, **settings: object) -> TokenSteps:
    groups = [Group((str(index),), cache) for index, cache in enumerate(caches)]
    return token_steps(groups, block_size=16, **settings)  # type: ignore[arg-type]


def test_one_group_counts_in_its_blocks() -> None:
    assert steps(FULL) == TokenSteps(16, 16, 16)
    assert steps(FULL, decode_context_parallel=4) == TokenSteps(64, 64, 64)
    assert steps() == TokenSteps(16, 16, 16)
    with pytest.raises(ConfigError, match="--prefix-match-unit 8"):
        steps(FULL, prefix_match_unit=8)


def test_several_groups_schedule_in_the_common_multiple_and_hash_in_the_common_divisor() -> None:
    window = replace(FULL, kind=LayerKind.SLIDING_WINDOW, reach=64, block_size=48)
    assert steps(FULL, window) == TokenSteps(48, 16, 48)
    assert steps(FULL, window, prefix_caching=False) == TokenSteps(48, 48, 48)
    assert steps(FULL, window, prefix_caching=False, connector=True) == TokenSteps(48, 16, 48)
    assert steps(FULL, window, prefix_match_unit=8) == TokenSteps(48, 8, 48)
    with pytest.raises(ConfigError, match="does not divide"):
        steps(FULL, window, prefix_match_unit=32)


def test_states_saved_at_block_ends_hit_within_blocks() -> None:
    aligned = replace(STATE, mode="align", block_size=64)
    assert steps(FULL, aligned) == TokenSteps(64, 16, 16)
    assert steps(FULL, replace(aligned, mode="none")) == TokenSteps(64, 64, 64)
    window = replace(FULL, kind=LayerKind.SLIDING_WINDOW, reach=64, block_size=32)
    assert steps(FULL, aligned, window) == TokenSteps(64, 16, 64)


def test_states_of_several_tokens_must_divide_the_hits() -> None:
    compressed = replace(FULL, kind=LayerKind.MLA, block_size=256, tokens_per_state=128)
    with pytest.raises(ConfigError, match="inside a state of 128 tokens"):
        steps(replace(STATE, mode="align", block_size=256), replace(FULL, block_size=16), compressed)


def test_replicas_over_tensor_parallel_ranks() -> None:
    latent = replace(FULL, kind=LayerKind.MLA, max_tp_shards=1)
    groups = [Group(("a",), latent)]
    assert tensor_parallel_replicas(groups, 8) == 8
    assert tensor_parallel_replicas(groups, 8, decode_context_parallel=8) == 1
    assert tensor_parallel_replicas([*groups, Group(("b",), FULL)], 8) == 1
    assert tensor_parallel_replicas([], 8) == 1
