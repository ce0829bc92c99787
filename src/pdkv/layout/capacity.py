"""Bytes -> blocks, tokens, concurrency and the longest request (spec kv-layout, section 6; order of work as in vLLM).

num_blocks  = available // bytes_per_block      (null block included; every rank is cut to the smallest)
check_bytes = available - one block             (the null block can hold nothing)
fits        = bytes_per_block * blocks of one max-length request <= check_bytes
concurrency = num_blocks / blocks of one max-length request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdkv.errors import ConfigError, DoesNotFit
from pdkv.layout.groups import RankLayout
from pdkv.layout.rules import DEFAULT_RULES, VllmRules
from pdkv.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a pool holds. ``bytes_per_block``, ``available_bytes`` and ``needed_bytes`` are the bottleneck rank's.

    ``max_model_len`` is the asked length, or the fitted one under auto; ``estimated_max_model_len`` is the longest
    request in tokens that would fit, at most the model's own limit, 0 when not even one token does.
    ``needed_bytes`` are what one request of ``max_model_len`` takes, the null block included.
    ``fits`` is false when one request of ``max_model_len`` does not fit: the other numbers stand all the same.
    ``longest_per_rank`` is ``estimated_max_model_len`` for each rank alone.
    """

    num_blocks: int
    usable_blocks: int
    blocks_per_max_len_request: int
    kv_cache_size_tokens: int
    max_concurrency: float
    max_model_len: int
    estimated_max_model_len: int
    fits: bool
    bottleneck: int
    blocks_per_rank: tuple[int, ...]
    available_per_rank: tuple[int, ...]
    longest_per_rank: tuple[int, ...]
    bytes_per_block: int
    available_bytes: int
    needed_bytes: int

    def require_fit(self) -> None:
        """Raise DoesNotFit, with the numbers and the remedies, unless one request of the full length fits."""
        if self.fits:
            return
        longest = (
            f"the longest request that fits has {self.estimated_max_model_len} tokens: lower --max-model-len to that "
            "(or say auto), or give"
            if self.estimated_max_model_len > 0
            else "not even one token fits: give"
        )
        raise DoesNotFit(
            f"one request of {self.max_model_len} tokens needs {self.needed_bytes} bytes of KV cache "
            f"({format_bytes(self.needed_bytes)}, {self.blocks_per_max_len_request} blocks and the null block); "
            f"there are {self.available_bytes} ({format_bytes(self.available_bytes)}, {self.num_blocks} blocks); "
            f"{longest} at least {self.needed_bytes} bytes (--kv-cache-memory-bytes, --gpu-memory-utilization)"
        )


def longest_request(layout: RankLayout, check_bytes: int, limit: int) -> int:
    """Most tokens, at most ``limit``, whose blocks take no more than ``check_bytes``; 0 if not even one does.

    A binary search, because with several groups a length's blocks have no closed inverse.
    """
    most_blocks = check_bytes // layout.bytes_per_block if check_bytes >= 0 else -1
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if layout.blocks_for(middle) <= most_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def size_pool(
    layouts: Sequence[RankLayout],
    available_bytes: Sequence[int],
    *,
    max_model_len: int | None,
    model_limit: int,
    num_blocks_override: int | None = None,
    rules: VllmRules = DEFAULT_RULES,
) -> Capacity:
    """Size one engine's pool over its ranks: ``available_bytes[i]`` is what rank ``i`` has for KV.

    ``max_model_len`` of ``None`` is auto: the longest length up to ``model_limit`` that fits. With an override every
    rank has exactly that many blocks, whatever its bytes. Raises DoesNotFit when a rank has no memory at all, and
    ConfigError for sizes that cannot be.
    """
    _check_sizes(layouts, available_bytes, max_model_len, model_limit, num_blocks_override)
    if not any(layout.groups for layout in layouts):
        return _without_kv(available_bytes, max_model_len or model_limit)
    if num_blocks_override is not None:
        available = [num_blocks_override * layout.bytes_per_block for layout in layouts]
    else:
        available = list(available_bytes)
    for rank, count in enumerate(available):
        if count <= 0:
            raise DoesNotFit(
                f"rank {rank} has {count} bytes left for KV cache after weights and activations; raise "
                "--gpu-memory-utilization, use a smaller model, or give --kv-cache-memory-bytes"
            )
    longest = tuple(
        longest_request(layout, count - _kept_back(layout, rules), model_limit)
        for layout, count in zip(layouts, available, strict=True)
    )
    length = max_model_len if max_model_len is not None else (min(longest) or model_limit)
    blocks = [count // layout.bytes_per_block for layout, count in zip(layouts, available, strict=True)]
    bottleneck = min(range(len(blocks)), key=lambda rank: blocks[rank])
    layout = layouts[bottleneck]
    per_request = max(rank.blocks_for(length) for rank in layouts)
    num_blocks = blocks[bottleneck]
    return Capacity(
        num_blocks=num_blocks,
        usable_blocks=max(0, num_blocks - rules.null_blocks),
        blocks_per_max_len_request=per_request,
        kv_cache_size_tokens=reported_tokens(layout, num_blocks, per_request, length, rules),
        max_concurrency=num_blocks / per_request,
        max_model_len=length,
        estimated_max_model_len=min(longest),
        fits=all(
            rank.bytes_for(length) <= count - _kept_back(rank, rules)
            for rank, count in zip(layouts, available, strict=True)
        ),
        bottleneck=bottleneck,
        blocks_per_rank=tuple(blocks),
        available_per_rank=tuple(available),
        longest_per_rank=longest,
        bytes_per_block=layout.bytes_per_block,
        available_bytes=available[bottleneck],
        needed_bytes=layout.bytes_for(length) + _kept_back(layout, rules),
    )


def reported_tokens(layout: RankLayout, num_blocks: int, blocks_per_request: int, length: int, rules: VllmRules) -> int:
    """The "KV cache size" that a release prints for a pool of ``num_blocks`` blocks."""
    if rules.tokens_follow_concurrency:
        return int(num_blocks / blocks_per_request * length)
    return _evenly_divided(layout, num_blocks)


def _evenly_divided(layout: RankLayout, num_blocks: int) -> int:
    """Tokens as older releases reported them: every group gets the same share of the blocks."""
    smallest = min(group.block_size for group in layout.groups)
    return num_blocks // len(layout.groups) * smallest * layout.limits.decode_context_parallel


def _kept_back(layout: RankLayout, rules: VllmRules) -> int:
    """Bytes that the fit check does not count on: the null block's."""
    return rules.null_blocks * layout.bytes_per_block if rules.check_keeps_null_block else 0


def _check_sizes(
    layouts: Sequence[RankLayout],
    available_bytes: Sequence[int],
    max_model_len: int | None,
    model_limit: int,
    num_blocks_override: int | None,
) -> None:
    """Raise ConfigError for sizes that cannot be, and for a rank that would hold no KV while others do."""
    if len(layouts) != len(available_bytes) or not layouts:
        raise ConfigError(f"{len(layouts)} ranks and {len(available_bytes)} amounts of memory")
    for what, value in (
        ("--max-model-len", max_model_len),
        ("the model's context length", model_limit),
        ("--num-gpu-blocks-override", num_blocks_override),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{what} {value}: must be at least 1")
    for rank, layout in enumerate(layouts):
        if layout.groups and not layout.bytes_per_block:
            raise ConfigError(
                f"pipeline stage {rank} holds no layer that keeps KV, and vLLM cannot size such a stage; use fewer "
                "stages (--pipeline-parallel-size)"
            )


def _without_kv(available_bytes: Sequence[int], length: int) -> Capacity:
    """A model without KV: the pool is the null block alone, and every length fits."""
    count = len(available_bytes)
    return Capacity(
        num_blocks=1,
        usable_blocks=0,
        blocks_per_max_len_request=0,
        kv_cache_size_tokens=0,
        max_concurrency=0.0,
        max_model_len=length,
        estimated_max_model_len=length,
        fits=True,
        bottleneck=0,
        blocks_per_rank=(1,) * count,
        available_per_rank=tuple(available_bytes),
        longest_per_rank=(length,) * count,
        bytes_per_block=0,
        available_bytes=available_bytes[0],
        needed_bytes=0,
    )
