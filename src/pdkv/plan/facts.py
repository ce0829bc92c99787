"""What a sized model looks like from outside: the parts of a report that only restate the layout."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from pdkv.layout.groups import Group, RankLayout
from pdkv.layout.specs import FULL_LIKE, AttentionCache, Limits
from pdkv.plan.report import DeploymentFacts, GroupFacts, KvFacts, RankFacts, UsageFacts
from pdkv.plan.sizing import Sized, bytes_per_token, fixed_bytes, whole

_PROBE_BLOCKS, _PROBE_OUTPUT = 8, 64


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
        max_num_batched_tokens=options.batched_tokens(sized.spec),
        max_num_seqs=options.seqs(sized.spec),
    )


def _least(group: Group, num_tokens: int, limits: Limits) -> int:
    """The fewest blocks of a group between two steps: a window may begin at a block's border, a state be alone."""
    if group.cache.kind in FULL_LIKE:
        return group.blocks_for(num_tokens, limits)
    reach = group.cache.reach_tokens if isinstance(group.cache, AttentionCache) else 1
    return max(1, min(reach, num_tokens) // group.block_size)


def usage_facts(sized: Sized) -> UsageFacts | None:
    """A request that ends in the block in which its prompt does; ``None`` where none is short enough."""
    rank = sized.bottleneck
    if not rank.groups:
        return None
    largest = max(group.block_size * rank.limits.decode_context_parallel for group in rank.groups)
    longest = min(sized.capacity.max_model_len, sized.capacity.estimated_max_model_len)
    # Two tokens of the block are kept free, for the one that is computed ahead.
    blocks = min(_PROBE_BLOCKS, longest // largest - 1)
    output = min(largest - 3, _PROBE_OUTPUT)
    if blocks < 1 or output < 1:
        return None
    prompt = blocks * largest + 1
    return UsageFacts(
        prompt_tokens=prompt,
        output_tokens=output,
        blocks_low=sum(_least(group, prompt, rank.limits) for group in rank.groups),
        blocks_high=rank.blocks_for(prompt + output),
    )
