"""Bytes -> blocks, tokens, concurrency and the longest request (spec kv-layout, section 6; order of work as in vLLM).

num_blocks  = available // bytes_per_block      (null block included; every rank is cut to the smallest)
check_bytes = available - one block             (the null block can hold nothing)
fits        = bytes_per_block * blocks of one max-length request <= check_bytes
concurrency = num_blocks / blocks of one max-length request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdkv.errors import DoesNotFit
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
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if layout.bytes_per_block * layout.blocks_for(middle) <= check_bytes:
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
    rank has exactly that many blocks, whatever its bytes. Raises DoesNotFit when a rank has no memory at all.
    """
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
    longest = min(
        longest_request(layout, count - rules.null_blocks * layout.bytes_per_block, model_limit)
        for layout, count in zip(layouts, available, strict=True)
    )
    length = max_model_len if max_model_len is not None else (longest or model_limit)
    blocks = [count // layout.bytes_per_block for layout, count in zip(layouts, available, strict=True)]
    bottleneck = min(range(len(blocks)), key=lambda rank: blocks[rank])
    layout = layouts[bottleneck]
    per_request = max(rank.blocks_for(length) for rank in layouts)
    num_blocks = blocks[bottleneck]
    concurrency = num_blocks / per_request
    return Capacity(
        num_blocks=num_blocks,
        usable_blocks=max(0, num_blocks - rules.null_blocks),
        blocks_per_max_len_request=per_request,
        kv_cache_size_tokens=int(concurrency * length),
        max_concurrency=concurrency,
        max_model_len=length,
        estimated_max_model_len=longest,
        fits=_fits(layouts, available, length, rules),
        bottleneck=bottleneck,
        blocks_per_rank=tuple(blocks),
        available_per_rank=tuple(available),
        bytes_per_block=layout.bytes_per_block,
        available_bytes=available[bottleneck],
        needed_bytes=(layout.blocks_for(length) + rules.null_blocks) * layout.bytes_per_block,
    )


def _fits(layouts: Sequence[RankLayout], available: Sequence[int], length: int, rules: VllmRules) -> bool:
    return all(
        layout.bytes_per_block * (layout.blocks_for(length) + rules.null_blocks) <= count
        for layout, count in zip(layouts, available, strict=True)
    )
