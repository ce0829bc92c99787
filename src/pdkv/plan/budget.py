"""How many bytes a GPU has for KV: requested memory less weights, activations and the rest (spec memory-profile, 1).

Weights and activations are computed from shapes, the rest is measured (`measured`). An estimate says between which
bounds the truth should lie; ``--kv-cache-memory-bytes`` needs none, and ``--calibrate`` takes the terms from a log.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pdkv.errors import ConfigError
from pdkv.layout.draft import is_part_of_model
from pdkv.models.gpus import Gpu, find_gpu
from pdkv.plan.calibrate import Calibration, Corrections
from pdkv.plan.checkpoint import PlannedWeights, plan_weights
from pdkv.plan.measured import Measured, measured
from pdkv.plan.options import PlanOptions
from pdkv.plan.report import MemoryFacts
from pdkv.plan.sizing import Sized
from pdkv.plan.stages import stage_terms
from pdkv.plan.terms import Terms
from pdkv.source import PlannedModel
from pdkv.units import format_bytes


def estimate(
    model: PlannedModel,
    options: PlanOptions,
    calibration: Calibration | None = None,
    constants: Measured | None = None,
) -> tuple[MemoryFacts, ...]:
    """The memory of one rank of every pipeline stage. ``constants`` replace the measured ones (accuracy benchmark).

    ``available_kv_bytes`` may be negative: the weights alone do not fit then. Raises ConfigError when nothing says
    what the GPU is, UnsupportedModel when the weights are not known.
    """
    total, gpu = device_memory(options, calibration)
    requested = math.ceil(total * options.utilization)
    weights = plan_weights(model, options, with_draft=is_part_of_model(options.speculative_method))
    notes = (*_notes(options, gpu, weights, calibration), *_start_check(options, total, requested, constants))
    corrections = Corrections() if calibration is None else _corrections(model, options, calibration, constants, total)
    stages = stage_terms(model, options, weights, gpu, constants)
    return tuple(_facts(corrections.apply(terms), total, requested, options, notes) for terms in stages)


def memory_facts(model: PlannedModel, sized: Sized, calibration: Calibration | None = None) -> MemoryFacts:
    """The memory of the stage that decides the size of the pool; only what is known where the bytes are given."""
    options = sized.options
    if options.kv_cache_memory_bytes is None and options.num_gpu_blocks_override is None:
        return estimate(model, options, calibration)[sized.capacity.bottleneck]
    found = MemoryFacts(available_kv_bytes=sized.capacity.available_bytes, basis="given")
    if options.gpu is None and options.gpu_memory_bytes is None:
        return found
    total, _ = device_memory(options)
    try:
        around = estimate(model, options, calibration)[sized.capacity.bottleneck]
    except ConfigError:  # the weights are not known, and nobody asked for them
        return replace(found, total_bytes=total)
    over = found.available_kv_bytes - (around.available_kv_bytes + total - (around.requested_bytes or total))
    notes: tuple[str, ...] = ()
    if over > 0:
        notes = (
            f"the KV memory that was asked for is about {format_bytes(over)} more than the GPU has beside weights, "
            "activations and the rest: expect it to run out of memory",
        )
    # vLLM does not look at its share of the GPU then.
    return replace(
        around,
        available_kv_bytes=found.available_kv_bytes,
        basis="given",
        low_bytes=None,
        high_bytes=None,
        requested_bytes=None,
        notes=notes,
    )


def weights_facts(model: PlannedModel, options: PlanOptions) -> dict[str, int | None]:
    """``params`` and ``weights_bytes`` of the whole model, ``None`` where they are not known."""
    try:
        weights = plan_weights(model, options)
    except ConfigError:
        return {"params": None, "weights_bytes": None}
    return {"params": weights.params, "weights_bytes": weights.total_bytes(options.model_dtype(model.spec))}


def device_memory(options: PlanOptions, calibration: Calibration | None = None) -> tuple[int, Gpu | None]:
    """(bytes of the device as its driver reports them, the device where it is known). Raises ConfigError without."""
    gpu = None if options.gpu is None else find_gpu(options.gpu)
    if options.gpu_memory_bytes is not None:
        return options.gpu_memory_bytes, gpu
    if calibration is not None and calibration.total_bytes is not None and gpu is None:
        return calibration.total_bytes, None
    if gpu is None:
        raise ConfigError(
            "how much memory is there for KV? Give --gpu (for example h100, h200, a100-80gb, l40s; the budget is "
            "estimated then), --gpu-memory-bytes, or --kv-cache-memory-bytes (per GPU, for example 40GiB; vLLM prints "
            "its own as 'Available KV cache memory')"
        )
    return gpu.total_bytes, gpu


# ------------------------------------------------------------------------------------------------------------ the facts


def _corrections(
    model: PlannedModel, options: PlanOptions, calibration: Calibration, constants: Measured | None, total: int
) -> Corrections:
    """What the log says about the terms of its own settings, next to what would have been estimated for them."""
    own = calibration.own_options(options)
    gpu = None if options.gpu is None else find_gpu(options.gpu)
    weights = plan_weights(model, own, with_draft=is_part_of_model(own.speculative_method))
    return calibration.corrections(stage_terms(model, own, weights, gpu, constants), own, total)


def _facts(terms: Terms, total: int, requested: int, options: PlanOptions, notes: tuple[str, ...]) -> MemoryFacts:
    reserve = options.mm_ipc_gpu_memory_bytes or 0
    available = requested - terms.total - reserve
    return MemoryFacts(
        available_kv_bytes=available,
        basis="estimated",
        low_bytes=available - terms.off,
        high_bytes=min(available + terms.off, requested),
        total_bytes=total,
        requested_bytes=requested,
        weights_bytes=terms.weights,
        activation_bytes=terms.activation,
        non_torch_bytes=terms.non_torch,
        cudagraph_bytes=terms.graphs,
        reserve_bytes=reserve or None,
        dominated_by=terms.largest,
        notes=notes,
    )


def _start_check(options: PlanOptions, total: int, requested: int, constants: Measured | None) -> tuple[str, ...]:
    """A note when vLLM would find less memory free at its start than it was told to take (spec memory-profile, 3)."""
    held = (constants or measured(options.rules)).before_start(options.ranks)
    if requested <= total - held:
        return ()
    most = math.floor(1000 * (total - held) / total) / 1000
    return (
        f"--gpu-memory-utilization {options.utilization:g} asks for {format_bytes(requested)}, and about "
        f"{format_bytes(total - held)} are free when vLLM checks, so that it does not start: at most {most:g}",
    )


def _notes(
    options: PlanOptions, gpu: Gpu | None, weights: PlannedWeights, calibration: Calibration | None
) -> tuple[str, ...]:
    found = list(weights.notes)
    if not options.rules.budget_is_measured and calibration is None:
        newer = options.rules.subtracts_graph_estimate
        terms = (
            "Activations follow the source of 0.32; memory outside PyTorch and CUDA graphs are those of 0.19"
            if newer
            else "Activations and memory outside PyTorch are those of 0.14"
        )
        found.append(
            f"vLLM {options.rules.version} is unvalidated: logs of 0.14 to 0.19, and one of 0.31, were compared with. "
            f"{terms}"
        )
    if gpu is not None and not gpu.measured and options.gpu_memory_bytes is None:
        found.append(
            f"the memory of {gpu.name} was read off {gpu.memory_from} figures; --gpu-memory-bytes makes it exact"
        )
    if gpu is not None and gpu.vendor != "nvidia":
        found.append(f"all measurements are of NVIDIA GPUs; what {gpu.name} keeps outside PyTorch is not known")
    if options.data_parallel_size > 1 and weights.has_experts:
        found.append("buffers in which experts' ranks hand each other tokens (--all2all-backend) are not counted")
    if calibration is not None:
        found.extend(calibration.notes)
    return tuple(found)
