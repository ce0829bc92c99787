"""The capacity that a start must have had, by the rules of its release, from the memory that it printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pdkv.errors import ConfigError
from pdkv.explain.report import GroupShape, Recomputed
from pdkv.layout.backends import BACKENDS, Backend
from pdkv.layout.build import BuiltCaches, KvSettings, boundary_layers, in_flight_tokens, stage_caches
from pdkv.layout.capacity import Capacity, reported_tokens, size_pool
from pdkv.layout.draft import with_draft_layers
from pdkv.layout.groups import Group, RankLayout, layouts_of_stages
from pdkv.layout.rules import DEFAULT_RULES, NEWEST, OLDEST, VllmRules
from pdkv.layout.specs import FULL_LIKE, WINDOWED, AttentionCache, Limits
from pdkv.logs.printed import Printed
from pdkv.logs.startup import EngineLog, Settings
from pdkv.models.spec import LayerKind, ModelSpec

# Releases that differ in how they size a pool, newest first: for logs that do not say theirs.
_UNKNOWN_RELEASE = ("0.32", "0.25", "0.19", "0.17", "0.11", "0.8")
_UNKNOWN_BATCH = (8192, 2048, 4096, 16384, 32768, 1024, 512)


@dataclass(frozen=True, slots=True)
class Sizing:
    """A model under the settings of a start; ``assumed`` are those that the log does not state."""

    spec: ModelSpec
    settings: Settings
    rules: VllmRules
    built: BuiltCaches
    layouts: tuple[RankLayout, ...]
    length: int
    assumed: tuple[str, ...] = ()

    def capacity(self, num_blocks: int) -> Capacity:
        """Everything that a pool of so many blocks implies."""
        return size_pool(
            self.layouts,
            [1] * len(self.layouts),
            max_model_len=self.length,
            model_limit=max(self.length, 1),
            num_blocks_override=max(1, num_blocks),
            rules=self.rules,
        )

    @property
    def blocks_per_request(self) -> int:
        """Blocks of one request of the full length."""
        return max(layout.blocks_for(self.length) for layout in self.layouts)

    def blocks_between(self, available: Sequence[Printed | None]) -> tuple[int, int] | None:
        """The fewest and the most blocks that the memory of every stage allows; ``None`` when none is known."""
        known = [
            (size, layout.bytes_per_block)
            for size, layout in zip(available, self.layouts, strict=True)
            if size is not None and layout.bytes_per_block
        ]
        if not known:
            return None
        return (
            min(max(0, size.low_bytes) // block for size, block in known),
            min(max(0, size.high_bytes) // block for size, block in known),
        )

    def blocks_printed(self, engine: EngineLog) -> range | None:
        """Every number of blocks for which this release prints what ``engine`` printed; ``None`` if it printed none."""
        if not any(layout.groups for layout in self.layouts):
            return None
        if engine.kv_cache_size_tokens is None:
            return None if engine.num_blocks is None else range(engine.num_blocks, engine.num_blocks + 1)
        tokens, layout, per_request = engine.kv_cache_size_tokens, self.layouts[0], self.blocks_per_request

        def printed(count: int) -> int:
            return reported_tokens(layout, count, per_request, self.length, self.rules)

        low = _first(lambda count: printed(count) >= tokens)
        high = _first(lambda count: printed(count) > tokens)
        found = range(low, high)
        if engine.num_blocks is not None:
            return found if engine.num_blocks not in found else range(engine.num_blocks, engine.num_blocks + 1)
        return found


def sizings(spec: ModelSpec, settings: Settings) -> Iterator[Sizing]:
    """``spec`` as the start sized it: one way where the log says all, else one per value of what it leaves out.

    Raises ConfigError for a combination that cannot be.
    """
    spec = with_draft_layers(spec, settings.speculative_method)
    windows = spec.has(*WINDOWED, LayerKind.CHUNKED_LOCAL)
    batches = (settings.max_num_batched_tokens,) if settings.max_num_batched_tokens else _UNKNOWN_BATCH
    for (rules, release_note), dtype, batch in product(
        _rules(settings), _kv_dtypes(spec, settings), batches if windows else batches[:1]
    ):
        notes = [release_note] if release_note else []
        if windows and settings.hybrid_manager_off is None and _connector_ends_hybrid(settings, rules):
            off = f"{settings.kv_connector} is a KV connector, and before vLLM 0.22 any of them switches it off"
            given = replace(settings, kv_cache_dtype=dtype, hybrid_manager_off=off)
            yield _sizing(spec, given, rules, batch, (*notes, "the hybrid manager, which a connector switches off"))
        if dtype != (settings.kv_cache_dtype or "auto"):
            notes.append(f"{dtype} KV, although the checkpoint asks for {spec.kv_dtype}")
        if windows and settings.max_num_batched_tokens is None:
            notes.append(f"max_num_batched_tokens {batch}")
        yield _sizing(spec, replace(settings, kv_cache_dtype=dtype), rules, batch, tuple(notes))


def _connector_ends_hybrid(settings: Settings, rules: VllmRules) -> bool:
    """Whether a connector switches the hybrid manager off without a word in the log."""
    return settings.kv_connector is not None and not rules.connectors_keep_hybrid_manager


def _kv_dtypes(spec: ModelSpec, settings: Settings) -> tuple[str, ...]:
    """What ``auto`` may have become: the KV type of a quantized checkpoint, or a copy of the model without one."""
    dtype = settings.kv_cache_dtype or "auto"
    return (dtype, _model_dtype(spec, settings)) if dtype == "auto" and spec.kv_dtype is not None else (dtype,)


def _rules(settings: Settings) -> list[tuple[VllmRules, str]]:
    """The rules of the release that a log names, or every kind of rules there is."""
    release = settings.release
    if release is None or _number(release) < (0, 2):
        # Development builds call themselves 0.1: nothing is known about them but what they print.
        return [(VllmRules(version), f"the rules of vLLM {version}") for version in _UNKNOWN_RELEASE]
    if _number(release) > NEWEST:
        return [(DEFAULT_RULES, f"the rules of vLLM {DEFAULT_RULES.version}, the newest known")]
    if _number(release) < OLDEST:
        raise ConfigError(f"vLLM {release} is older than the rules that are known (0.{OLDEST[1]} to 0.{NEWEST[1]})")
    if settings.engine == "V0":
        return [(VllmRules(release if _number(release) < (0, 8) else "0.7"), "")]
    return [(VllmRules(release if settings.engine is None or _number(release) >= (0, 8) else "0.8"), "")]


def _number(release: str) -> tuple[int, int]:
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


def _sizing(spec: ModelSpec, settings: Settings, rules: VllmRules, batch: int, assumed: tuple[str, ...]) -> Sizing:
    length = settings.max_model_len or spec.served_model_len or spec.max_model_len
    if length < 1:
        raise ConfigError(f"the log states a longest request of {length} tokens")
    pipeline, context = settings.pipeline_parallel_size or 1, settings.decode_context_parallel_size or 1
    dtype = settings.kv_cache_dtype or "auto"
    kv = KvSettings(
        model_dtype=_model_dtype(spec, settings),
        max_model_len=length,
        kv_cache_dtype=dtype,
        block_size=settings.block_size,
        tensor_parallel=settings.tensor_parallel_size or 1,
        pipeline_parallel=pipeline,
        decode_context_parallel=context,
        backend=_backend(spec, settings),
        check_backend=False,
        skip_layers=boundary_layers(spec, dtype if dtype != "auto" else (spec.kv_dtype or "auto")),
        prefix_caching=settings.enable_prefix_caching is not False,
        speculative_tokens=settings.num_speculative_tokens or 0,
        rules=rules,
    )
    built = stage_caches(spec, kv)
    limits = Limits(
        max_in_flight_tokens=in_flight_tokens(
            batch, pipeline, async_scheduling=settings.async_scheduling is not False, rules=rules
        ),
        decode_context_parallel=context,
    )
    layouts = layouts_of_stages(
        built.stages,
        layout=built.layout,
        limits=limits,
        hybrid_manager=settings.hybrid_manager_off is None and rules.has_hybrid_manager,
        rules=rules,
    )
    return Sizing(spec, settings, rules, built, layouts, length, assumed)


def _backend(spec: ModelSpec, settings: Settings) -> Backend | None:
    """The backend that the log names, or the only one of a CPU; ``None``: what a GPU takes by itself.

    CPUs had another backend before 0.12, with blocks like a GPU's.
    """
    release = settings.release
    if settings.device == "cpu" and (release is None or _number(release) >= (0, 12)):
        return BACKENDS["CPU_MLA" if spec.has(LayerKind.MLA) else "CPU_ATTN"]
    return BACKENDS.get(settings.attention_backend or "")


def _model_dtype(spec: ModelSpec, settings: Settings) -> str:
    if settings.dtype not in (None, "auto"):
        return settings.dtype or ""
    return "bfloat16" if spec.dtype in (None, "float32") else spec.dtype or "bfloat16"


def _first(reached: Callable[[int], bool]) -> int:
    """The smallest count of blocks, at least 1, from which on ``reached`` holds."""
    high = 1
    while not reached(high):
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class Verdict:
    """A sizing put to what was printed. ``agrees`` is ``None`` where nothing was printed to compare with."""

    sizing: Sizing
    blocks: range
    allowed: tuple[int, int] | None
    printed: range | None
    agrees: bool | None

    @property
    def num_blocks(self) -> int:
        """The largest number of blocks that agrees with all."""
        return self.blocks[-1]

    def facts(self) -> Recomputed:
        """The numbers, for a report."""
        sizing = self.sizing
        capacity = sizing.capacity(self.num_blocks)
        rank = sizing.layouts[capacity.bottleneck]
        per_request = capacity.blocks_per_max_len_request
        return Recomputed(
            num_blocks=capacity.num_blocks,
            num_blocks_low=self.blocks[0],
            num_blocks_high=self.blocks[-1],
            usable_blocks=capacity.usable_blocks,
            kv_cache_size_tokens=capacity.kv_cache_size_tokens,
            max_concurrency=capacity.max_concurrency,
            max_model_len=capacity.max_model_len,
            bytes_per_block=capacity.bytes_per_block,
            block_size=min((group.block_size for group in rank.groups), default=sizing.built.block_size),
            blocks_per_max_len_request=per_request,
            needed_bytes=capacity.needed_bytes,
            estimated_max_model_len=capacity.estimated_max_model_len,
            capacity_tokens=capacity.usable_blocks * sizing.length // per_request if per_request else 0,
            fits=capacity.fits,
            groups=tuple(_shape(group, rank, sizing.length) for group in rank.groups),
            dtype=sizing.built.dtype.name,
            rules=sizing.rules.version,
            assumed=sizing.assumed,
        )


def judge(sizing: Sizing, available: Sequence[Printed | None], engine: EngineLog | None) -> Verdict | None:
    """Put ``sizing`` to the memory of every stage and what ``engine`` printed; ``None`` when neither is known."""
    allowed = sizing.blocks_between(available)
    if engine is not None and engine.override_blocks is not None:
        allowed = (engine.override_blocks[1], engine.override_blocks[1])
    printed = None if engine is None else sizing.blocks_printed(engine)
    if printed is None or engine is None:
        if allowed is None:
            return None
        return Verdict(sizing, range(allowed[0], allowed[1] + 1), allowed, None, None)
    both = range(max(printed.start, allowed[0]), min(printed.stop, allowed[1] + 1)) if allowed else printed
    per_request = sizing.blocks_per_request
    agreeing = [count for count in both if _concurrency_agrees(count, per_request, sizing.length, engine)]
    if agreeing:
        return Verdict(sizing, range(agreeing[0], agreeing[-1] + 1), allowed, printed, True)
    # Without agreement the numbers stand for what the memory allows: that is what was to be explained.
    least = max(1, printed.start)
    blocks = range(allowed[0], allowed[1] + 1) if allowed else range(least, max(least + 1, printed.stop))
    return Verdict(sizing, blocks, allowed, printed, False)


def _concurrency_agrees(count: int, per_request: int, length: int, engine: EngineLog) -> bool:
    """Whether so many blocks are printed with the same concurrency, decimals and all."""
    text = engine.concurrency_text
    if text is None or engine.max_model_len != length:
        return text is None
    return f"{count / per_request:.{len(text.partition('.')[2])}f}" == text


def recompute(
    spec: ModelSpec, settings: Settings, available: Sequence[Printed | None], engine: EngineLog | None
) -> Verdict | None:
    """The first way to size ``spec`` that agrees with what was printed, or the first way there is.

    ``available`` holds one entry a pipeline stage. ``None`` when the start printed no memory and no capacity. Raises
    ConfigError for a combination that cannot be.
    """
    if engine is not None and engine.max_model_len is not None:
        settings = replace(settings, max_model_len=engine.max_model_len)
    if engine is not None and (engine.device or "").lower() == "cpu":
        settings = replace(settings, device="cpu")
    first: Verdict | None = None
    for sizing in sizings(spec, settings):
        verdict = judge(sizing, available, engine)
        if verdict is None or verdict.agrees:
            return verdict
        first = first or verdict
    return first


def _shape(group: Group, rank: RankLayout, length: int) -> GroupShape:
    cache, kind = group.cache, group.kind
    windowed = isinstance(cache, AttentionCache) and cache.kind not in FULL_LIKE
    return GroupShape(
        kind="unknown" if kind is None else kind.value,
        layers=len(group.layers),
        block_size=group.block_size,
        page_bytes=max(group.page_bytes, default=0),
        window=cache.reach_tokens if windowed and isinstance(cache, AttentionCache) else None,
        blocks_per_max_len_request=group.blocks_for(length, rank.limits),
    )
