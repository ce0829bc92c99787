"""Random layer mixes sized by pdkv and by vLLM's own functions: every number must be equal, every refusal shared.

Not part of the test suite, because it needs vLLM 0.32 (its CPU build will do) in its own environment:

    PYTHONPATH=src PATH/TO/vllm/bin/python tests/layout/against_vllm.py [CASES] [FIRST_SEED]

Prints one line per difference and ``N equal, M refused by both, D different``; exits 1 when there is one.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core import kv_cache_utils as peer
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdkv.errors import PdkvError
from pdkv.layout.capacity import size_pool
from pdkv.layout.groups import layouts_of_stages
from pdkv.layout.hashing_sizes import token_steps
from pdkv.layout.placement import KvLayout
from pdkv.layout.specs import AttentionCache, Cache, KernelBlocks, Limits, StateCache
from pdkv.models.spec import LayerKind

ELEMENTS = {"bfloat16": torch.bfloat16, "uint8": torch.uint8, "float32": torch.float32}
ENCODER_TOKENS = 1500
KINDS = [
    LayerKind.FULL_ATTENTION,
    LayerKind.SLIDING_WINDOW,
    LayerKind.CHUNKED_LOCAL,
    LayerKind.MLA,
    LayerKind.SLIDING_WINDOW_MLA,
    LayerKind.MAMBA,
    LayerKind.CIRCULAR_BUFFER,
    LayerKind.RSWA,
    LayerKind.CROSS,
]


def random_state(choose: random.Random, mode: str) -> tuple[Any, Cache]:
    shapes = ((3, choose.choice([64, 96])), (choose.choice([2, 4]), choose.choice([16, 32, 40]), 16))
    elements = ("bfloat16", choose.choice(["bfloat16", "float32"]))
    checkpoints = choose.choice([0, 1])
    block_size, alignment = 16 if mode == "align" else 4096, 1 if checkpoints else None
    spec = MambaSpec(
        block_size=block_size,
        shapes=shapes,
        dtypes=tuple(ELEMENTS[element] for element in elements),
        mamba_cache_mode=mode,
        num_prefill_checkpoint_blocks=checkpoints,
        prefill_checkpoint_alignment=alignment,
    )
    cache = StateCache(
        block_size=block_size,
        tensors=tuple(zip(shapes, elements, strict=True)),
        mode=mode,
        checkpoint_blocks=checkpoints,
        checkpoint_alignment=alignment,
    )
    return spec, cache


def random_layer(choose: random.Random, kinds: list[LayerKind], mode: str) -> tuple[Any, Cache]:
    """A layer as vLLM's spec and as our cache."""
    kind = choose.choice(kinds)
    if kind is LayerKind.MAMBA:
        return random_state(choose, mode)
    heads, dim = choose.choice([1, 2, 4]), choose.choice([32, 64, 96])
    element, block_size = choose.choice(["bfloat16", "bfloat16", "uint8"]), 16 * choose.choice([1, 1, 1, 2])
    split = choose.random() < 0.25
    theirs: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": heads,
        "head_size": dim,
        "dtype": ELEMENTS[element],
        "block_stride_alignment": MultipleOf(16) if split else None,
    }
    ours: dict[str, Any] = {
        "kind": kind,
        "block_size": block_size,
        "kv_heads": heads,
        "head_dim": dim,
        "head_dim_v": dim,
        "element": element,
        "stride": KernelBlocks(16) if split else None,
    }
    reach = choose.choice([64, 128])
    if kind is LayerKind.FULL_ATTENTION:
        return FullAttentionSpec(**theirs), AttentionCache(**ours)
    if kind is LayerKind.RSWA:
        return RSWASpec(**theirs, rswa_window=64), AttentionCache(**ours, reach=64)
    if kind is LayerKind.SLIDING_WINDOW:
        return SlidingWindowSpec(**theirs, sliding_window=reach), AttentionCache(**ours, reach=reach)
    if kind is LayerKind.CHUNKED_LOCAL:
        return ChunkedLocalAttentionSpec(**theirs, attention_chunk_size=reach), AttentionCache(**ours, chunk=reach)
    if kind is LayerKind.CROSS:
        return CrossAttentionSpec(**theirs), AttentionCache(**ours)
    if kind is LayerKind.CIRCULAR_BUFFER:
        return CircularBufferSpec(**theirs), AttentionCache(**ours)
    alignment, storage = choose.choice([None, None, 512, 576]), choose.choice(["auto", "fp8"])
    theirs |= {"num_kv_heads": 1, "cache_dtype_str": storage, "alignment": alignment}
    ours |= {"kv_heads": 1, "head_dim_v": 0, "storage": storage, "page_alignment": alignment}
    if kind is LayerKind.MLA:
        per_state = choose.choice([1, 1, 4])
        cache = AttentionCache(**ours, tokens_per_state=per_state, role="SPARSE")
        return MLAAttentionSpec(**theirs, tokens_per_state=per_state), cache
    return SlidingWindowMLASpec(**theirs, sliding_window=reach), AttentionCache(**ours, reach=reach)


def random_case(seed: int) -> dict[str, Any]:
    """Layers on one or two stages, and everything else that matters."""
    choose = random.Random(seed)
    mode = choose.choice(["align", "none"])
    kinds = choose.sample(KINDS, choose.choice([1, 1, 2, 2, 3]))
    patterns = [random_layer(choose, kinds, mode) for _ in range(choose.choice([1, 2, 2, 3, 4]))]
    count = choose.randint(1, 14)
    layers = [
        choose.choice(patterns) if choose.random() < 0.4 else patterns[index % len(patterns)] for index in range(count)
    ]
    cut = choose.randint(1, count - 1) if count > 2 and choose.random() < 0.3 else count
    stages = [range(cut), range(cut, count)] if cut < count else [range(count)]
    return {
        "mode": mode,
        "theirs": [{f"l.{index}": layers[index][0] for index in stage} for stage in stages],
        "ours": [{f"l.{index}": layers[index][1] for index in stage} for stage in stages],
        "layout": choose.choice(["LBNHC", "LBHNC", "BLHNC", "BLHNC"]),
        "length": choose.choice([100, 1000, 4096]),
        "in_flight": choose.choice([64, 500, 2000]),
        "hybrid_manager": choose.random() >= 0.25,
        "override": choose.choice([None, None, None, 7000]),
        "lookahead": choose.choice([0, 0, 3]),
        "auto": choose.random() < 0.4,
        "available": [choose.choice([3 * 10**5, 10**6, 10**7, 10**9]) + choose.randint(0, 999) for _ in stages],
    }


def peer_config(case: dict[str, Any]) -> Any:
    """As much of a VllmConfig as those functions look at."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=not case["hybrid_manager"], max_num_encoder_input_tokens=ENCODER_TOKENS
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[case["layout"]],
            num_gpu_blocks_override=case["override"],
            prefix_cache_retention_interval=None,
            mamba_cache_mode=case["mode"],
            block_size=16,
            enable_prefix_caching=True,
            prefix_match_unit=None,
        ),
        model_config=SimpleNamespace(
            max_model_len=case["length"],
            original_max_model_len=-1 if case["auto"] else case["length"],
            hf_config=SimpleNamespace(model_type="none"),
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        speculative_config=None,
        kv_transfer_config=None,
        device_config=SimpleNamespace(device_type="cuda"),
        max_in_flight_tokens=case["in_flight"],
        num_prefill_lookahead_tokens=case["lookahead"],
    )


def of_peer(case: dict[str, Any]) -> dict[str, Any] | None:
    """What vLLM makes of it; ``None`` when it does not start."""
    config = peer_config(case)
    try:
        ranks = peer.get_kv_cache_configs(config, [dict(stage) for stage in case["theirs"]], list(case["available"]))
        tokens, concurrency = peer.get_kv_cache_capacity(config, ranks[0])
        several = len(ranks[0].kv_cache_groups) > 1
        steps = peer.resolve_kv_cache_block_sizes(ranks[0], config) if several else None
    except (ValueError, AssertionError, NotImplementedError, ZeroDivisionError, TypeError, StopIteration):
        return None
    return {
        "blocks": ranks[0].num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
        "length": config.model_config.max_model_len,
        "steps": steps,
        "groups": [[(tuple(g.layer_names), g.kv_cache_spec.block_size) for g in r.kv_cache_groups] for r in ranks],
        "tensors": [
            [(tuple(t.layers), t.layer_stride, t.block_stride, t.offset) for t in rank.kv_cache_tensors]
            for rank in ranks
        ],
    }


def of_ours(case: dict[str, Any]) -> dict[str, Any] | None:
    """What we make of it; ``None`` when we refuse it."""
    try:
        ranks = layouts_of_stages(
            case["ours"],
            layout=KvLayout[case["layout"]],
            limits=Limits(max_in_flight_tokens=case["in_flight"], encoder_tokens=ENCODER_TOKENS),
            hybrid_manager=case["hybrid_manager"],
            extra_retained=max(0, case["lookahead"] - 1),
        )
        capacity = size_pool(
            ranks,
            case["available"],
            max_model_len=None if case["auto"] else case["length"],
            model_limit=case["length"],
            num_blocks_override=case["override"],
        )
        capacity.require_fit()
        steps = token_steps(ranks[0].groups, block_size=16)
    except PdkvError:
        return None
    return {
        "blocks": capacity.num_blocks,
        "tokens": capacity.kv_cache_size_tokens,
        "concurrency": capacity.max_concurrency,
        "length": capacity.max_model_len,
        "steps": (steps.scheduler, steps.hashes) if len(ranks[0].groups) > 1 else None,
        "groups": [[(group.layers, group.block_size) for group in rank.groups] for rank in ranks],
        "tensors": [
            [(p.layers, p.layer_stride, p.block_stride, p.offset) for p in rank.placements(capacity.num_blocks)]
            for rank in ranks
        ],
    }


def main(cases: int, first: int) -> int:
    logging.disable(logging.CRITICAL)
    counts: Counter[str] = Counter()
    for seed in range(first, first + cases):
        case = random_case(seed)
        theirs, ours = of_peer(case), of_ours(case)
        if theirs == ours:
            counts["equal" if ours else "refused by both"] += 1
            continue
        counts["different"] += 1
        if theirs is None or ours is None:
            print(f"seed {seed}: refused by {'vLLM' if theirs is None else 'pdkv'} only")
        else:
            key = next(key for key in ours if ours[key] != theirs[key])
            print(f"seed {seed}: {key}: ours {ours[key]}, reference {theirs[key]}")
    print(", ".join(f"{counts[what]} {what}" for what in ("equal", "refused by both", "different")))
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(arguments + [2000, 0][len(arguments) :])))
