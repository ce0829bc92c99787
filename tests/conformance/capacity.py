"""Replay of recorded capacities (../shared/oracle, part A): what a deployment of vLLM 0.32 could hold, to the block.

Two ways lead to the numbers. (a) The row's own layer specs go through grouping and sizing: `replay_specs`. (b) The
row's config.json is read, and every step is ours: `replay_config`. A row passes when (a) agrees, and
(b) agrees or the config was refused with a reason (which is returned).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pdkv.errors import ConfigError, PdkvError
from pdkv.layout.backends import find_backend
from pdkv.layout.build import KvSettings, stage_caches
from pdkv.layout.capacity import Capacity, size_pool
from pdkv.layout.groups import Group, RankLayout, layouts_of_stages
from pdkv.layout.hashing_sizes import tensor_parallel_replicas, token_steps
from pdkv.layout.placement import find_layout
from pdkv.layout.specs import AttentionCache, Cache, KernelBlocks, Limits, StateCache
from pdkv.models.families import spec_from_config
from pdkv.models.spec import LayerKind
from pdkv.units import GIB

Row = dict[str, Any]

_KIND_OF_CLASS = {
    "FullAttentionSpec": LayerKind.FULL_ATTENTION,
    "MLAAttentionSpec": LayerKind.MLA,
    "SlidingWindowSpec": LayerKind.SLIDING_WINDOW,
    "SlidingWindowMLASpec": LayerKind.SLIDING_WINDOW_MLA,
    "ChunkedLocalAttentionSpec": LayerKind.CHUNKED_LOCAL,
    "SinkFullAttentionSpec": LayerKind.SINK_FULL,
    "EncoderOnlyAttentionSpec": LayerKind.ENCODER_ONLY,
    "CrossAttentionSpec": LayerKind.CROSS,
    "CircularBufferSpec": LayerKind.CIRCULAR_BUFFER,
    "RSWASpec": LayerKind.RSWA,
}
# What vLLM calls the kind of groups that it has no word for.
_KIND_NAMES = {LayerKind.RSWA: "full_attention", LayerKind.CIRCULAR_BUFFER: "unknown", None: "unknown"}


class CapacityMismatch(AssertionError):
    """The first number in which ours and the reference differ."""


class ConfigRefused(Exception):
    """The row's config was refused with a reason: there is nothing to compare."""


def is_capacity_row(row: Row) -> bool:
    """Whether a row is one of part A."""
    return "layer_specs_per_worker" in row


def replay_capacity(row: Row) -> str | None:
    """Both ways. Returns why the config was refused, ``None`` when it was not. Raises CapacityMismatch."""
    try:
        replay_specs(row)
    except PdkvError as error:
        raise CapacityMismatch(f"from the row's layer specs: {error}") from error
    try:
        replay_config(row)
    except ConfigRefused as refusal:
        return str(refusal)
    except PdkvError as error:
        raise CapacityMismatch(f"from the row's config: {error}") from error
    except CapacityMismatch as error:
        raise CapacityMismatch(f"from the row's config: {error}") from error
    return None


# -------------------------------------------------------------------------------------------------------- the two ways


def replay_specs(row: Row) -> None:
    """Way (a). Raises CapacityMismatch."""
    stages = [_stage_from_row(stage) for stage in row["layer_specs_per_worker"]]
    _compare(row, lambda: stages, names=True)


def replay_config(row: Row) -> None:
    """Way (b). Raises CapacityMismatch, or ConfigRefused when the config is not sized."""
    try:
        model = spec_from_config(row["config"], name=row["model"])
    except ConfigError as error:
        raise ConfigRefused(str(error)) from error
    settings = settings_of(row)

    def stages() -> Sequence[Mapping[str, Cache]]:
        return stage_caches(model, settings).stages

    built = [] if "error" in row["expected"] else list(stages())
    for index, (ours, theirs) in enumerate(zip(built, row["layer_specs_per_worker"], strict=bool(built))):
        reference = [theirs["specs"][number] for number in theirs["layers"].values()]
        _same(f"caches of stage {index}", len(ours), len(reference))
        for position, (cache, spec) in enumerate(zip(ours.values(), reference, strict=True)):
            what = f"stage {index}, cache {position}"
            _same(f"{what}: kind", cache.kind.value, _row_kind(spec).value)
            _same(f"{what}: block size", cache.block_size, spec["block_size"])
            _same(f"{what}: page bytes", cache.page_bytes, spec["page_size_bytes"])
    _compare(row, stages, names=False)


def settings_of(row: Row) -> KvSettings:
    """The engine arguments of a row as ours. A recorder may pair a backend with a type that it would not choose."""
    given = row["engine_args"]
    return KvSettings(
        model_dtype=given["model_dtype"],
        kv_cache_dtype=given["kv_cache_dtype"],
        block_size=given["requested_block_size"],
        max_model_len=given["max_model_len"],
        tensor_parallel=given["tp"],
        pipeline_parallel=given["pp"],
        decode_context_parallel=given.get("dcp") or 1,
        backend=find_backend(given["attention_backend"]),
        check_backend=False,
        skip_layers=tuple(given["kv_cache_dtype_skip_layers"] or ()),
        prefix_caching=given["enable_prefix_caching"] is not False,
        mamba_cache_mode=given["mamba_cache_mode"],
        mamba_ssm_cache_dtype=given["mamba_ssm_cache_dtype"] or "auto",
    )


def _row_kind(spec: Row) -> LayerKind:
    return LayerKind.MAMBA if "shapes" in spec else _KIND_OF_CLASS.get(spec["class"]) or LayerKind(spec["kind"])


def _stage_from_row(stage: Row) -> dict[str, Cache]:
    caches = [_cache_from_row(spec) for spec in stage["specs"]]
    return {name: caches[number] for name, number in stage["layers"].items()}


def _cache_from_row(spec: Row) -> Cache:
    kind = _row_kind(spec)
    if kind is LayerKind.MAMBA:
        cache: Cache = StateCache(
            block_size=spec["block_size"],
            tensors=tuple(
                (tuple(shape), element) for shape, element in zip(spec["shapes"], spec["dtypes"], strict=True)
            ),
            padded_page_bytes=spec.get("page_size_padded"),
            mode=spec["mamba_cache_mode"],
            speculative_blocks=spec.get("num_speculative_blocks", 0),
            checkpoint_blocks=spec.get("num_prefill_checkpoint_blocks", 0),
            checkpoint_alignment=spec.get("prefill_checkpoint_alignment"),
            tp_replicated=spec.get("tp_replicated", False),
            family=spec.get("mamba_type"),
        )
    else:
        windowed = kind not in (LayerKind.CHUNKED_LOCAL, LayerKind.RSWA)
        cache = AttentionCache(
            kind=kind,
            block_size=spec["block_size"],
            kv_heads=spec["num_kv_heads"],
            head_dim=spec["head_size"],
            head_dim_v=spec["head_size_v"],
            element=spec["dtype"],
            quant=spec["kv_quant_mode"],
            head_slots=spec.get("num_head_slots"),
            state_bytes=spec.get("state_content_bytes"),
            tokens_per_state=spec.get("tokens_per_state", 1),
            padded_page_bytes=spec.get("page_size_padded"),
            stride=_stride(spec.get("block_stride_alignment")),
            dcp_sharded=spec.get("dcp_sharded", True),
            max_tp_shards=spec.get("max_tp_shards"),
            reach=spec.get("sliding_window") if windowed else spec.get("rswa_window"),
            chunk=spec.get("attention_chunk_size"),
            extra_retained=spec.get("extra_retained_tokens", 0),
            bounded_replay=spec.get("bounded_replay", False),
            storage=spec.get("cache_dtype_str"),
            role=spec.get("cache_role"),
            leads_index=spec.get("is_index_group_leader", False),
            model_version=spec.get("model_version"),
            page_alignment=spec.get("alignment"),
        )
    _same(f"page bytes of a {kind.value} layer", cache.page_bytes, spec["page_size_bytes"])
    return cache


def _stride(value: Any) -> int | KernelBlocks | None:
    if isinstance(value, str):
        number = re.fullmatch(r"MultipleOf\((?:base=)?(\d+)\)", value)
        assert number is not None, value
        return KernelBlocks(int(number[1]))
    return value


# ---------------------------------------------------------------------------------------------------------- comparing


def _compare(row: Row, stages: Any, *, names: bool) -> None:
    given, expected = row["engine_args"], row["expected"]
    if "error" in expected:
        try:
            size_pool(
                _layouts(row, stages()),
                [row["available_bytes"]] * given["pp"],
                max_model_len=given["max_model_len"],
                model_limit=given["max_model_len"],
                num_blocks_override=given["num_gpu_blocks_override"],
            ).require_fit()
        except PdkvError:
            return
        raise CapacityMismatch(f"ours sizes it, the reference refuses: {expected['error']}")
    try:
        layouts = _layouts(row, stages())
        capacity = _size(row, layouts, row["available_bytes"], given["max_model_len"])
    except ConfigError as error:
        raise CapacityMismatch(f"ours refuses, the reference sizes it: {error}") from error
    _compare_groups(layouts, expected["groups"], given["max_model_len"], names)
    _compare_capacity(layouts, capacity, expected)
    _compare_workers(layouts, capacity, expected, names)
    steps = token_steps(
        layouts[0].groups,
        block_size=given["resolved_block_size"],
        prefix_caching=given["enable_prefix_caching"] is not False,
        decode_context_parallel=given.get("dcp") or 1,
    )
    _same("scheduler_block_size", steps.scheduler, expected["scheduler_block_size"])
    _same("hash_block_size", steps.hashes, expected["hash_block_size"])
    _same("cache_hit_alignment_tokens", steps.hits, expected["cache_hit_alignment_tokens"])
    replicas = tensor_parallel_replicas(layouts[0].groups, given["tp"])
    _same("kv_tp_replicas", replicas, expected["kv_tp_replicas"])
    for budget in row.get("small_budgets") or ():
        _compare_budget(row, layouts, budget)


def _layouts(row: Row, stages: Sequence[Mapping[str, Cache]]) -> tuple[RankLayout, ...]:
    given = row["engine_args"]
    return layouts_of_stages(
        stages,
        layout=find_layout(given["kv_cache_layout"]),
        limits=Limits(
            max_in_flight_tokens=given["max_in_flight_tokens"], decode_context_parallel=given.get("dcp") or 1
        ),
        hybrid_manager=not given["disable_hybrid_kv_cache_manager"],
    )


def _size(row: Row, layouts: Sequence[RankLayout], available: int, length: int | None) -> Capacity:
    given = row["engine_args"]
    return size_pool(
        layouts,
        [available] * len(layouts),
        max_model_len=length,
        model_limit=given["max_model_len"],
        num_blocks_override=given["num_gpu_blocks_override"],
    )


def _compare_groups(layouts: Sequence[RankLayout], expected: list[Row], length: int, names: bool) -> None:
    ours = layouts[0].groups
    _same("number of groups", len(ours), len(expected))
    for index, (group, reference) in enumerate(zip(ours, expected, strict=True)):
        what = f"group {index}"
        _same(f"{what}: kind", _kind_name(group), reference["kind"])
        _same(f"{what}: block size", group.block_size, reference["block_size"])
        here = [layout.groups[index].layers for layout in layouts]
        _same(f"{what}: layers per worker", [len(layers) for layers in here], reference["layers_per_worker"])
        if names:
            _same(f"{what}: layers", [list(layers) for layers in here], reference["layer_names_per_worker"])
        one_type = group.members is not None
        page = sum(cache.page_bytes for cache in group.members.values()) if group.members else group.cache.page_bytes
        _same(f"{what}: of one type", one_type, reference["class"] == "UniformTypeKVCacheSpecs")
        _same(f"{what}: page bytes", page, reference["group_page_size_bytes"])
        blocks = group.blocks_for(length, layouts[0].limits)
        _same(f"{what}: blocks per request", blocks, reference["blocks_per_max_len_request"])


def _kind_name(group: Group) -> str:
    kind = group.kind
    if kind is None or kind in _KIND_NAMES:
        return _KIND_NAMES[kind]
    return kind.value


def _compare_capacity(layouts: Sequence[RankLayout], capacity: Capacity, expected: Row) -> None:
    _same("num_blocks", capacity.num_blocks, expected["num_blocks"])
    _same("kv_tokens", capacity.kv_cache_size_tokens, expected["kv_tokens"])
    _same("max_concurrency", capacity.max_concurrency, expected["max_concurrency"])
    pages = {group.of(name).page_bytes for group in layouts[0].groups for name in group.layers}
    if expected.get("unified_page_size_bytes") is not None:
        _same("unified page bytes", sorted(pages), [expected["unified_page_size_bytes"]])


def _compare_workers(layouts: Sequence[RankLayout], capacity: Capacity, expected: Row, names: bool) -> None:
    for index, (layout, reference) in enumerate(zip(layouts, expected["workers"], strict=True)):
        what = f"worker {index}"
        _same(f"{what}: bytes per block", layout.bytes_per_block, reference["bytes_per_block"])
        needed = layout.bytes_for(capacity.max_model_len)
        _same(f"{what}: bytes per request", needed, reference["max_memory_usage_bytes_per_request"])
        backing = layout.bytes_per_block * capacity.num_blocks
        _same(f"{what}: backing bytes", backing, reference["backing_bytes"])
        placed = layout.placements(capacity.num_blocks)
        _same(f"{what}: tensors", len(placed), reference["num_tensors"])
        for number, (place, tensor) in enumerate(zip(placed, reference["tensors"], strict=True)):
            ours = (len(place.layers), place.layer_stride, place.block_stride, place.offset)
            theirs = tuple(tensor[key] for key in ("num_layers", "layer_stride", "block_stride", "offset"))
            _same(f"{what}, tensor {number}: layers, strides and offset", ours, theirs)
            if names:
                _same(f"{what}, tensor {number}: first layer", place.layers[0], tensor["first_layer"])


def _compare_budget(row: Row, layouts: Sequence[RankLayout], budget: Row) -> None:
    """A budget in which no longest request fits, or only just: refusal, its numbers, and what auto would give."""
    what = f"budget {budget['available_bytes']}"
    length = row["engine_args"]["max_model_len"]
    asked = _size(row, layouts, budget["available_bytes"], length)
    _same(f"{what}: fits", asked.fits, budget["error"] is None)
    _same(f"{what}: longest", list(asked.longest_per_rank), budget["estimated_max_model_len_per_worker"])
    needed = [layout.bytes_for(length) for layout in layouts]
    checked = [budget["available_bytes"] - layout.bytes_per_block for layout in layouts]
    _same(f"{what}: needed bytes", needed, budget["needed_bytes_per_worker"])
    _same(f"{what}: bytes checked against", checked, budget["check_bytes_per_worker"])
    if budget["error"] is not None and budget.get("error_numbers"):
        short = next(rank for rank, (need, have) in enumerate(zip(needed, checked, strict=True)) if need > have)
        numbers: list[float] = [length, _gib(needed[short]), _gib(checked[short])]
        if asked.longest_per_rank[short]:
            numbers.append(asked.longest_per_rank[short])
        _same(f"{what}: numbers of the refusal", numbers, budget["error_numbers"])
    expected = budget.get("auto_fit")
    if not expected:
        return
    auto = _size(row, layouts, budget["available_bytes"], None)
    if "error" in expected:
        _same(f"{what}: auto fits", auto.fits, False)
        return
    _same(f"{what}: auto length", auto.max_model_len, expected["max_model_len"])
    _same(f"{what}: auto blocks", auto.num_blocks, expected["num_blocks"])
    _same(f"{what}: auto tokens", auto.kv_cache_size_tokens, expected["kv_tokens"])
    _same(f"{what}: auto concurrency", auto.max_concurrency, expected["max_concurrency"])


def _gib(count: int) -> float:
    """As vLLM prints it: two decimals."""
    return round(count / GIB, 2)


def _same(what: str, ours: Any, reference: Any) -> None:
    if ours != reference:
        raise CapacityMismatch(f"{what}: ours {_short(ours)}, reference {_short(reference)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."
