"""What a sized model looks like from outside: the parts of a report that only restate the layout."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from pdkv.layout.groups import Group, RankLayout
from pdkv.layout.specs import FULL_LIKE, AttentionCache
from pdkv.plan.report import DeploymentFacts, GroupFacts, KvFacts, RankFacts
from pdkv.plan.sizing import Sized, bytes_per_token, fixed_bytes, whole


def decoder_layers(names: Iterable[str]) -> int:
    """Decoder layers among the names of caches (``layers.N.part``)."""
    return len({name.split(".")[1] for name in names})


def kv_facts(sized: Sized) -> KvFacts:
    """Bytes of a token, a request and a block, and the groups, on the bottleneck rank."""
    bottleneck, ranks = sized.bottleneck, sized.options.tensor_parallel_size
    return KvFacts(
        bytes_per_token=whole(bytes_per_token(bottleneck)),
        bytes_per_token_all_ranks=whole(sum((bytes_per_token(rank) for rank in sized.layouts), Fraction()) * ranks),
        fixed_bytes_per_request=fixed_bytes(bottleneck),
        bytes_per_block=bottleneck.bytes_per_block,
        block_size=min((group.block_size for group in bottleneck.groups), default=sized.built.block_size),
        groups=tuple(_group_facts(group, bottleneck, sized.capacity.max_model_len) for group in bottleneck.groups),
        dtype=sized.built.dtype.name,
    )


def _group_facts(group: Group, rank: RankLayout, length: int) -> GroupFacts:
    cache = group.cache
    windowed = isinstance(cache, AttentionCache) and cache.kind not in FULL_LIKE
    kind = group.kind
    return GroupFacts(
        kind="unknown" if kind is None else kind.value,
        layers=len(group.layers),
        block_size=group.block_size,
        page_bytes=max(group.page_bytes, default=0),
        window=cache.reach_tokens if windowed and isinstance(cache, AttentionCache) else None,
        bytes_per_block=group.bytes_per_block,
        blocks_per_max_len_request=group.blocks_for(length, rank.limits),
    )


def rank_facts(sized: Sized) -> tuple[RankFacts, ...]:
    """Every GPU of one engine."""
    size = sized.options.tensor_parallel_size
    return tuple(
        RankFacts(
            rank=stage * size + rank,
            pipeline_stage=stage,
            layers=decoder_layers(name for group in layout.groups for name in group.layers),
            bytes_per_block=layout.bytes_per_block,
            available_kv_bytes=sized.capacity.available_per_rank[stage],
            num_blocks=sized.capacity.blocks_per_rank[stage],
        )
        for stage, layout in enumerate(sized.layouts)
        for rank in range(size)
    )


def deployment_facts(sized: Sized) -> DeploymentFacts:
    """All engines together."""
    options, capacity = sized.options, sized.capacity
    return DeploymentFacts(
        gpus=options.gpus,
        engines=options.data_parallel_size,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        data_parallel_size=options.data_parallel_size,
        decode_context_parallel_size=options.decode_context_parallel_size,
        max_concurrency=capacity.max_concurrency * options.data_parallel_size,
        kv_cache_size_tokens=capacity.kv_cache_size_tokens * options.data_parallel_size,
        hybrid_manager=options.hybrid_manager(sized.spec),
        attention_backend=sized.built.backend.name,
        max_num_batched_tokens=options.batched_tokens,
        max_num_seqs=options.seqs,
    )
