"""Older releases, against start-up logs of real deployments (shared/field, vLLM 0.19 and about 0.11)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdkv.errors import ConfigError
from pdkv.layout.build import in_flight_tokens
from pdkv.layout.capacity import Capacity, size_pool
from pdkv.layout.groups import layouts_of_stages
from pdkv.layout.rules import VllmRules
from pdkv.layout.specs import AttentionCache, Cache, Limits
from pdkv.layout.unify import group_size
from pdkv.models.spec import LayerKind

FULL = AttentionCache(
    kind=LayerKind.FULL_ATTENTION, block_size=16, kv_heads=8, head_dim=256, head_dim_v=256, element="bfloat16"
)


def window(cache: AttentionCache, tokens: int) -> AttentionCache:
    return replace(cache, kind=LayerKind.SLIDING_WINDOW, reach=tokens)


def size(caches: list[Cache], blocks: int, length: int, batched: int, version: str) -> tuple[Capacity, int]:
    rules = VllmRules(version)
    in_flight = in_flight_tokens(batched, 1, async_scheduling=True, rules=rules)
    layouts = layouts_of_stages(
        [{str(index): cache for index, cache in enumerate(caches)}],
        limits=Limits(max_in_flight_tokens=in_flight),
        rules=rules,
    )
    capacity = size_pool(
        layouts, [1], max_model_len=length, model_limit=length, num_blocks_override=blocks, rules=rules
    )
    return capacity, len(layouts[0].groups)


@pytest.mark.parametrize(
    ("name", "caches", "blocks", "tokens", "concurrency", "groups"),
    [
        ("gemma-2-27b", [window(FULL, 4096), FULL] * 23, 7335, 58672, 7.16, 2),
        ("gemma-3-12b", ([window(FULL, 1024)] * 5 + [FULL]) * 8, 48867, 130304, 15.88, 6),
        (
            "Llama-4-Scout, 4 GPUs",
            ([replace(FULL, kind=LayerKind.CHUNKED_LOCAL, chunk=8192)] * 3 + [FULL]) * 12,
            91495,
            365968,
            44.68,
            4,
        ),
        ("Llama-3.1-8B", [FULL] * 32, 29751, 476016, 58.11, 1),
    ],
)
def test_what_0_19_printed(
    name: str, caches: list[Cache], blocks: int, tokens: int, concurrency: float, groups: int
) -> None:
    capacity, count = size(caches, blocks, 8192, 8192, "0.19.0")
    assert (capacity.kv_cache_size_tokens, count) == (tokens, groups), name
    assert round(capacity.max_concurrency, 2) == concurrency


def test_what_0_11_printed() -> None:
    """gemma-3-4b-it, 3,072 tokens: seven groups of five layers, 1,350 blocks a request."""
    caches = [window(FULL, 1024) if (index + 1) % 6 else FULL for index in range(34)]
    capacity, groups = size(caches, 138_750, 3072, 8192, "0.11")
    assert (groups, capacity.blocks_per_max_len_request) == (7, 1350)
    assert capacity.kv_cache_size_tokens == 317_136
    assert round(capacity.max_concurrency, 2) == 102.78


@pytest.mark.parametrize(("version", "size_"), [("0.11", 12), ("0.12", 12), ("0.17.1", 12), ("0.18", 17), ("0.32", 17)])
def test_group_size_of_12_and_17_layers(version: str, size_: int) -> None:
    assert group_size([12, 17], VllmRules(version)) == size_


def test_the_quarter_rule_held_from_0_12() -> None:
    assert [group_size([18, 19], VllmRules(version)) for version in ("0.11", "0.12")] == [18, 19]


def test_an_exact_fit_was_taken_before_the_null_block_was_counted() -> None:
    caches: list[Cache] = [FULL] * 2
    assert not size(caches, 64, 1024, 8192, "0.32")[0].fits
    assert size(caches, 65, 1024, 8192, "0.32")[0].fits
    assert size(caches, 64, 1024, 8192, "0.19")[0].fits


@pytest.mark.parametrize("version", ["0.5", "0.33", "1.0", "main", "0"])
def test_unknown_releases(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"vLLM {version} are not known; known are 0\.6 to 0\.32"):
        VllmRules(version)
    assert VllmRules("v0.25.1").tokens_follow_concurrency
