"""Findings about the capacity that was printed: is it true, what does it mean, what do block 0 and rounding cost?"""

from __future__ import annotations

from dataclasses import replace

from pdkv.errors import PdkvError
from pdkv.explain.budget import available_of, graphs_subtracted, ranks_unknown
from pdkv.explain.recompute import Verdict, recompute
from pdkv.explain.report import Finding, Severity
from pdkv.explain.start import Start
from pdkv.layout.capacity import Capacity
from pdkv.layout.draft import WITHOUT_DRAFT_MODEL, is_part_of_model
from pdkv.layout.specs import FULL_LIKE, WINDOWED, AttentionCache
from pdkv.logs.startup import EngineLog
from pdkv.models.spec import LayerKind
from pdkv.units import cdiv, format_bytes


def capacity_findings(start: Start) -> list[Finding]:
    """What to know about the numbers of a start that was sized."""
    if start.verdict is None:
        return [*_identity(start), *_engines(start), *_announcements(start)]
    verdict = start.verdict
    capacity = verdict.sizing.capacity(verdict.num_blocks)
    found = _agreement(start, verdict)
    # Numbers of a pool that is not the printed one would only mislead.
    if capacity.bytes_per_block and start.engine is not None and verdict.agrees:
        found += [*_meaning(start, verdict, capacity), *_null_block(verdict, capacity)]
        found += [*_rounding(start, verdict, capacity), *_hybrid_off(start, capacity)]
        found += [*_padding(verdict, capacity), *_window_reserve(verdict, capacity)]
    if verdict.agrees is False:
        found += _identity(start)
    return [*found, *_engines(start), *_announcements(start)]


def _agreement(start: Start, verdict: Verdict) -> list[Finding]:
    engine = start.engine
    if engine is None or verdict.printed is None:
        return []
    sizing = verdict.sizing
    if verdict.agrees:
        span = verdict.blocks
        text = f"{span[-1]:,}" if len(span) == 1 else f"{span[0]:,} to {span[-1]:,}"
        return [
            Finding(
                id="printed-capacity-agrees",
                text=f"the printed capacity is what vLLM {sizing.rules.version} gives for this model: {text} blocks of "
                f"{sizing.capacity(1).bytes_per_block:,} bytes",
            )
        ]
    if start.agrees is None and verdict.allowed:
        block = sizing.capacity(1).bytes_per_block
        held, seen = verdict.printed[-1] * block, verdict.allowed[0] * block
        return [
            Finding(
                id="another-rank-had-less",
                severity=Severity.WARNING,
                text=f"{verdict.printed[-1]:,} blocks were made where the printed memory allows "
                f"{verdict.allowed[0]:,}: {ranks_unknown(start.log)} rank(s) printed no memory, and the pool is "
                f"cut to the smallest, which had "
                f"about {format_bytes(held)}",
                bytes=seen - held,
                effect="start with VLLM_LOGGING_LEVEL=DEBUG to see every rank's terms",
            )
        ]
    expected = sizing.capacity(verdict.num_blocks)
    return [
        Finding(
            id="printed-capacity-differs",
            severity=Severity.WARNING,
            text=f"the log prints {_printed(engine)} at {engine.concurrency_text or '?'}x, and vLLM "
            f"{sizing.rules.version} gives {expected.kv_cache_size_tokens:,} tokens, {expected.num_blocks:,} blocks "
            f"and {expected.max_concurrency:.2f}x for {sizing.spec.name}: another model, a setting "
            f"that the log does not show, or a changed build{_draft_note(start)}",
        )
    ]


def _printed(engine: EngineLog) -> str:
    if engine.kv_cache_size_tokens is not None:
        return f"{engine.kv_cache_size_tokens:,} tokens"
    return f"{engine.num_blocks:,} blocks"


def _draft_note(start: Start) -> str:
    method = start.log.settings.speculative_method
    if method is None or is_part_of_model(method) or method in WITHOUT_DRAFT_MODEL:
        return ""
    return f"; the KV of the draft model ({method}) is not counted here"


def _meaning(start: Start, verdict: Verdict, capacity: Capacity) -> list[Finding]:
    """What "KV cache size" says in this release, and what fits in truth."""
    engine, rules = start.engine, verdict.sizing.rules
    if engine is None or engine.kv_cache_size_tokens is None or not capacity.blocks_per_max_len_request:
        return []
    printed, length = engine.kv_cache_size_tokens, verdict.sizing.length
    true = capacity.usable_blocks * length // capacity.blocks_per_max_len_request
    if rules.tokens_follow_concurrency:
        text = (
            f'in vLLM {rules.version} "KV cache size" is concurrency x length: {printed:,} tokens hold for requests of '
            f"{length:,} tokens and change with --max-model-len"
        )
    else:
        groups = len(verdict.sizing.layouts[capacity.bottleneck].groups)
        text = f'in vLLM {rules.version} "KV cache size" is blocks x block size'
        text += f", divided evenly among {groups} groups of layers" if groups > 1 else ""
    off = abs(printed - true) / max(true, 1)
    text += f"; requests of {length:,} tokens can hold {true:,} tokens at once"
    if off < 0.02:
        return [Finding(id="kv-cache-size-meaning", text=text)]
    return [
        Finding(
            id="kv-cache-size-misleads",
            severity=Severity.WARNING,
            text=f"{text}, {printed / max(true, 1):.2f} times less than the {printed:,} printed"
            if printed > true
            else f"{text}, {true / max(printed, 1):.2f} times the {printed:,} printed",
            effect=f"plan with {true:,} tokens",
        )
    ]


def _null_block(verdict: Verdict, capacity: Capacity) -> list[Finding]:
    count = verdict.sizing.rules.null_blocks
    if not count:
        return []
    true = capacity.usable_blocks / capacity.blocks_per_max_len_request
    return [
        Finding(
            id="null-block",
            text=f"block 0 never holds KV: {capacity.usable_blocks:,} of {capacity.num_blocks:,} blocks are usable, "
            f"and the printed {capacity.max_concurrency:.2f}x is {true:.2f}x",
            bytes=count * capacity.bytes_per_block,
        )
    ]


def _rounding(start: Start, verdict: Verdict, capacity: Capacity) -> list[Finding]:
    """What is left over: less than a block of the bottleneck's memory, and the tail of every request's last block."""
    found = []
    size = start.available[capacity.bottleneck]
    if size is not None and verdict.agrees:
        left_over = max(0, size.high_bytes - capacity.num_blocks * capacity.bytes_per_block)
        found.append(
            Finding(
                id="block-rounding",
                text=f"memory is handed out in blocks of {format_bytes(capacity.bytes_per_block)}: less than one block "
                f"of {size.text} stays unused",
                bytes=min(left_over, capacity.bytes_per_block - 1),
            )
        )
    rank = verdict.sizing.layouts[capacity.bottleneck]
    length = verdict.sizing.length
    tails = [
        cdiv(length, group.block_size) * group.block_size - length
        for group in rank.groups
        if group.cache.kind in FULL_LIKE and rank.limits.decode_context_parallel == 1
    ]
    if any(tails):
        found.append(
            Finding(
                id="last-block-rounding",
                text=f"{length:,} tokens do not fill their last block: up to {max(tails):,} tokens of room a request",
                effect=f"a --max-model-len of {length + max(tails):,} costs the same",
            )
        )
    return found


def _hybrid_off(start: Start, capacity: Capacity) -> list[Finding]:
    """The price of a hybrid manager that was switched off, by sizing the same start with it."""
    spec = start.spec
    if start.verdict is None:
        return []
    settings = start.verdict.sizing.settings
    if settings.hybrid_manager_off is None or spec is None or not spec.has(*WINDOWED, LayerKind.CHUNKED_LOCAL):
        return []
    if capacity.max_concurrency <= 0:
        return []
    try:
        with_hybrid = replace(settings, hybrid_manager_off=None, kv_connector=None)
        other = recompute(spec, with_hybrid, start.available, None)
    except PdkvError:
        return []
    if other is None:
        return []
    with_it = other.sizing.capacity(other.num_blocks)
    return [
        Finding(
            id="hybrid-manager-off",
            severity=Severity.WARNING,
            text=f"the hybrid KV cache manager is off, so windows are kept in full: {capacity.max_concurrency:.2f} "
            f"requests of {capacity.max_model_len:,} tokens where {with_it.max_concurrency:.2f} would fit "
            f"({settings.hybrid_manager_off[:200]})",
            effect=f"{with_it.max_concurrency / capacity.max_concurrency:.2f} times the requests with it on",
        )
    ]


def _padding(verdict: Verdict, capacity: Capacity) -> list[Finding]:
    rank = verdict.sizing.layouts[capacity.bottleneck]
    used = sum(group.bytes_per_block for group in rank.groups)
    whole = rank.bytes_per_block * len(rank.groups)
    if len(rank.groups) < 2 or (share := 1 - used / whole) < 0.005:
        return []
    return [
        Finding(
            id="group-padding",
            text=f"groups of {', '.join(str(len(group.layers)) for group in rank.groups)} layers share blocks of one "
            f"size: {share:.1%} of a full pool is padding",
            bytes=int(capacity.num_blocks * rank.bytes_per_block * share),
        )
    ]


def _window_reserve(verdict: Verdict, capacity: Capacity) -> list[Finding]:
    """A window is sized for the tokens of a whole step; a request that decodes only holds the window itself."""
    sizing = verdict.sizing
    rank = sizing.layouts[capacity.bottleneck]
    windowed = [
        group for group in rank.groups if isinstance(group.cache, AttentionCache) and group.cache.kind not in FULL_LIKE
    ]
    if not windowed:
        return []
    decoding = replace(rank, limits=replace(rank.limits, max_in_flight_tokens=1)).blocks_for(sizing.length)
    if decoding >= capacity.blocks_per_max_len_request:
        return []
    return [
        Finding(
            id="window-reserve",
            text=f"windows are sized for max_num_batched_tokens: a request that only decodes holds {decoding:,} "
            f"blocks, not {capacity.blocks_per_max_len_request:,}, so {capacity.usable_blocks / decoding:.2f} of "
            f"{sizing.length:,} tokens fit where {capacity.max_concurrency:.2f} were announced",
            bytes=(capacity.blocks_per_max_len_request - decoding) * capacity.bytes_per_block,
            effect="a decode instance may lower --max-num-batched-tokens",
        )
    ]


def _engines(start: Start) -> list[Finding]:
    """Data parallel engines have a pool each; what one printed is not what the deployment holds."""
    sizes = [engine.kv_cache_size_tokens for engine in start.log.engines if engine.kv_cache_size_tokens]
    if len(sizes) < 2:
        return []
    text = f"{len(sizes)} engines have a pool each: {sum(sizes):,} tokens together"
    if len(set(sizes)) == 1:
        return [Finding(id="several-engines", text=text)]
    return [
        Finding(
            id="engines-differ",
            severity=Severity.WARNING,
            text=f"{text}, and they differ: {min(sizes):,} to {max(sizes):,}; the first is explained here",
        )
    ]


def _announcements(start: Start) -> list[Finding]:
    """What the engine itself announced about its pool."""
    engine = start.engine
    if engine is None:
        return []
    found = []
    if engine.fitted_from is not None and engine.fitted_to is not None and engine.fitted_to < engine.fitted_from:
        found.append(
            Finding(
                id="length-fitted",
                severity=Severity.WARNING,
                text=f"--max-model-len auto lowered the length from {engine.fitted_from:,} to {engine.fitted_to:,} "
                "tokens",
            )
        )
    if engine.override_blocks is not None:
        before, after = engine.override_blocks
        found.append(
            Finding(
                id="blocks-overridden",
                severity=Severity.WARNING if after < before else Severity.INFO,
                text=f"--num-gpu-blocks-override made {after:,} blocks where memory allowed {before:,}",
            )
        )
    if engine.mm_reserve is not None:
        found.append(
            Finding(
                id="multimodal-reserve",
                text=f"{engine.mm_reserve.text} were held back for multimodal inputs after the available memory was "
                "printed",
                bytes=engine.mm_reserve.bytes,
            )
        )
    return found


def _identity(start: Start) -> list[Finding]:
    """Without the model, the printed numbers can still be put to each other."""
    engine = start.engine
    if engine is None or not engine.kv_cache_size_tokens or not engine.max_concurrency or not engine.max_model_len:
        return []
    tokens, implied = engine.kv_cache_size_tokens, engine.max_concurrency * engine.max_model_len
    if abs(implied - tokens) <= 0.0051 * engine.max_model_len + 1:
        text = f"{tokens:,} tokens are {engine.concurrency_text}x of {engine.max_model_len:,}: the lines agree"
        return [Finding(id="lines-agree", text=text)]
    return [
        Finding(
            id="kv-cache-size-misleads",
            severity=Severity.WARNING,
            text=f"{engine.concurrency_text}x of {engine.max_model_len:,} tokens are {implied:,.0f} tokens, and the "
            f"log prints {tokens:,}: before vLLM 0.21 the printed size divides the blocks evenly "
            "among groups of layers",
            effect=f"plan with {implied:,.0f} tokens",
        )
    ]


def spare_bytes(start: Start) -> dict[str, int]:
    """Memory that richer ranks leave unused because the pool is cut to the smallest, by rank."""
    if start.verdict is None or start.log.settings.kv_cache_memory_bytes is not None:
        return {}
    capacity = start.verdict.sizing.capacity(start.verdict.num_blocks)
    with_graphs = graphs_subtracted(start.log)
    spare = {}
    for rank in start.log.ranks:
        size = available_of(rank, with_graphs=with_graphs)
        stage = rank.pipeline_rank or 0
        if size is not None and stage < len(start.verdict.sizing.layouts):
            used = capacity.num_blocks * start.verdict.sizing.layouts[stage].bytes_per_block
            spare[rank.name] = max(0, size.low_bytes - used)
    return spare
