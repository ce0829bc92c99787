"""Model + settings -> PlanReport. Exact where the KV bytes are given; where they are estimated the report says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pdkv.layout.backend_choice import default_backend, has_known_choice
from pdkv.layout.groups import RankLayout
from pdkv.models.fields import reading
from pdkv.models.spec import LayerKind, ModelSpec
from pdkv.plan.advice import Resize, advise
from pdkv.plan.budget import estimate, memory_facts, weights_facts
from pdkv.plan.calibrate import Calibration
from pdkv.plan.decode import Workload, decode_facts
from pdkv.plan.emit import serve_command
from pdkv.plan.facts import decoder_layers, deployment_facts, kv_facts, rank_facts, usage_facts
from pdkv.plan.long_context import host_tier, long_context
from pdkv.plan.model_length import beyond_model_length, needs_allow_long
from pdkv.plan.options import PlanOptions
from pdkv.plan.report import ModelFacts, PlanReport
from pdkv.plan.sizing import Sized, size
from pdkv.plan.speculative import draft_warnings
from pdkv.source import PlannedModel

__all__ = ["PlanOptions", "make_plan"]


def make_plan(
    model: PlannedModel,
    options: PlanOptions,
    calibration: Calibration | None = None,
    *,
    workload: Workload | None = None,
    served_as: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> PlanReport:
    """Size ``model`` under ``options``; ``workload`` is the load that a P/D deployment is to carry.

    ``served_as`` and ``overrides`` (--hf-overrides, which ``model`` was read with) go into the command to serve it.

    A model that does not fit is an answer (``capacity.fits`` false, with advice). Raises ConfigError for settings that
    cannot be, and when nothing says how much memory there is.
    """

    def resize(changed: PlanOptions) -> Sized:
        return size_planned(model, changed, calibration)

    sized = resize(options)
    spec = model.spec
    long = long_context(sized, resize)
    return PlanReport(
        model=ModelFacts(
            name=spec.name,
            layers=decoder_layers(layer.name for layer in spec.layers),
            **weights_facts(model, options),
        ),
        kv=kv_facts(sized),
        memory=memory_facts(model, sized, calibration),
        capacity=sized.capacity,
        ranks=rank_facts(sized),
        deployment=deployment_facts(sized),
        usage=usage_facts(sized),
        decode=decode_facts(sized, workload),
        long_context=long,
        rules=options.rules.version,
        command=serve_command(served_as or spec.name, options, overrides, allow_long=needs_allow_long(spec, options)),
        advice=advise(sized, resize),
        warnings=(
            *_connector_price(sized, resize),
            *warnings_of(spec, sized),
            *(_host_tier(sized) if long is None else ()),
        ),
    )


def _host_tier(sized: Sized) -> Iterator[str]:
    """What --kv-offloading-size is good for, where no table of long requests says it."""
    if sized.options.kv_offloading_bytes is not None and sized.bottleneck.groups:
        yield f"--kv-offloading-size: {host_tier(sized, sized.capacity.max_model_len)}"


def _connector_price(sized: Sized, resize: Resize) -> Iterator[str]:
    """What it costs when a connector, rather than the user, switches the hybrid manager off."""
    options = sized.options
    if options.kv_transfer is None or options.disable_hybrid_kv_cache_manager or options.hybrid_manager(sized.spec):
        return
    other = resize(replace(options, kv_transfer=None, disable_hybrid_kv_cache_manager=None)).capacity
    lost, whole = other.kv_cache_size_tokens - sized.capacity.kv_cache_size_tokens, other.kv_cache_size_tokens
    if lost > 0:
        yield (
            f"{options.kv_transfer.connector} switches the hybrid manager off (vLLM {options.rules.version}): windows "
            f"are kept in full, {whole - lost:,} tokens instead of {whole:,} ({lost / whole:.0%} less)"
        )


def size_planned(model: PlannedModel, options: PlanOptions, calibration: Calibration | None = None) -> Sized:
    """``model`` in the memory that ``options`` give or imply. Raises ConfigError when they do neither."""
    with reading(model.spec.name):
        if options.kv_cache_memory_bytes is not None or options.num_gpu_blocks_override is not None:
            return size(model.spec, options)
        stages = estimate(model, options, calibration)
        # A budget that is spent before KV is an answer too: a pool without a block.
        return size(model.spec, options, [max(1, stage.available_kv_bytes) for stage in stages])


def warnings_of(spec: ModelSpec, sized: Sized) -> tuple[str, ...]:
    """What a person should know about how the settings were understood."""
    options, built = sized.options, sized.built
    found = [*beyond_model_length(spec, options.length(spec)), *spec.warnings]
    if options.num_gpu_blocks_override is not None and options.kv_cache_memory_bytes is not None:
        found.append("--num-gpu-blocks-override decides the number of blocks; --kv-cache-memory-bytes was not used")
    given = options.kv_cache_memory_bytes is not None or options.num_gpu_blocks_override is not None
    if given and options.gpu_memory_utilization is not None:
        found.append("what KV gets was given in bytes or blocks; --gpu-memory-utilization was not used")
    if options.dtype == "auto" and spec.dtype in (None, "float32"):
        said = "does not say its type" if spec.dtype is None else "is in float32"
        found.append(f"the checkpoint {said}; vLLM's --dtype auto serves it in bfloat16")
    if options.kv_cache_dtype == "auto" and spec.kv_dtype is not None:
        found.append(f"the checkpoint asks for {built.dtype.name} KV, and --kv-cache-dtype auto follows it")
    if options.attention_backend is None and not has_known_choice(options.compute):
        found.append(f"{options.gpu} is served by a plugin of vLLM: blocks and types are those of an NVIDIA Hopper")
    elif options.attention_backend is None and built.backend is not default_backend(
        spec, "auto", options.compute, options.rules
    ):
        found.append(f"{built.dtype.name} KV needs the {built.backend.name} backend; the numbers are for it")
    if built.block_size != (options.block_size or options.rules.default_block_size):
        found.append(f"{built.backend.name} and the layers of this model make blocks of {built.block_size} tokens")
    if skipped := set(options.skip_layers(spec)) - set(options.kv_cache_dtype_skip_layers):
        found.append(f"layers {', '.join(sorted(skipped, key=int))} keep the model's own type, as under vllm serve")
    if options.kv_transfer is not None:
        found += [
            f"connector {name} is not one of vLLM 0.32: taken as one without hybrid support"
            for name in options.kv_transfer.unknown
        ]
    found += draft_warnings(sized.spec, options)
    found += _replication(spec, options)
    found += _padding(sized.bottleneck)
    if max(sized.capacity.blocks_per_rank) > sized.capacity.num_blocks:
        found.append("pipeline stages differ in size: all are cut to the smallest number of blocks")
    return tuple(found)


def _replication(spec: ModelSpec, options: PlanOptions) -> list[str]:
    ranks = options.tensor_parallel_size
    if options.decode_context_parallel_size > 1:
        return []
    divided = [layer.kv_heads for layer in spec.layers if layer.kv_heads and not layer.replicated]
    if divided and ranks > min(divided):
        smallest = min(divided)
        return [
            f"{spec.name} has {smallest} KV heads: --tensor-parallel-size {ranks} keeps {ranks // smallest} copies of "
            "each, and more ranks add no room for KV"
        ]
    if ranks > 1 and not divided and spec.has(LayerKind.MLA):
        return [f"latents are whole on every rank: --tensor-parallel-size {ranks} adds no room for KV"]
    return []


def _padding(rank: RankLayout) -> list[str]:
    """Layers that groups are padded with, on the bottleneck rank."""
    if len(rank.groups) < 2 or not rank.bytes_per_block:
        return []
    used = sum(group.bytes_per_block for group in rank.groups)
    share = 1 - used / (rank.bytes_per_block * len(rank.groups))
    if share < 0.005:
        return []
    counts = ", ".join(str(len(group.layers)) for group in rank.groups)
    return [f"groups of {counts} layers share blocks of one size: {share:.1%} of a full pool is padding"]
