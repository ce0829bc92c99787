"""The terms of a memory budget for every pipeline stage of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.layout.pages import stage_layers
from pdkv.models.fields import HIDDEN, first, reading
from pdkv.models.gpus import Gpu
from pdkv.models.weights import Division
from pdkv.plan.activations import (
    SORTING,
    TRITON,
    V2_RUNNER,
    SamplerRules,
    Step,
    forward_peak,
    sampler_peak,
    vision_peak,
)
from pdkv.plan.capture_sizes import graph_count
from pdkv.plan.checkpoint import PlannedWeights
from pdkv.plan.measured import Measured, measured
from pdkv.plan.options import PlanOptions
from pdkv.plan.terms import Terms
from pdkv.source import PlannedModel
from pdkv.units import GIB, MIB

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_HOPPER_PROCESSORS = 132


def stage_terms(
    model: PlannedModel,
    options: PlanOptions,
    weights: PlannedWeights,
    gpu: Gpu | None,
    constants: Measured | None = None,
) -> tuple[Terms, ...]:
    """The terms of one rank of every pipeline stage. ``constants`` replace the measured ones.

    Raises ConfigError for a type of weights that is not sized and for a config that cannot be read.
    """
    if options.model_dtype(model.spec) not in _ELEMENT_BYTES:
        dtype = options.model_dtype(model.spec)
        raise ConfigError(f"{model.spec.name}: weights of type {dtype!r} are not sized; --dtype says another")
    kept = constants or measured(options.rules, fast_link=gpu is None or "NVLink" in gpu.link)
    engine = _Engine(model, options, weights, _HOPPER_PROCESSORS if gpu is None else gpu.processors, kept)
    layers = stage_layers(model.spec.decoder_layers, options.pipeline_parallel_size)
    with reading(model.spec.name):
        return tuple(
            engine.terms(_Stage(part, index == 0, index == len(layers) - 1)) for index, part in enumerate(layers)
        )


@dataclass(frozen=True, slots=True)
class _Stage:
    """The layers of a stage, and whether it has what comes before them and after them."""

    layers: range
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class _Engine:
    """A model under its settings, on GPUs of so many ``processors``."""

    model: PlannedModel
    options: PlanOptions
    weights: PlannedWeights
    processors: int
    kept: Measured

    @property
    def division(self) -> Division:
        options = self.options
        shared = options.tensor_parallel_size * options.data_parallel_size * options.prefill_context_parallel_size
        return Division(
            tensor_parallel=options.tensor_parallel_size,
            expert_ranks=shared,
            expert_parallel=options.enable_expert_parallel,
        )

    @property
    def ranks_together(self) -> int:
        """Ranks that all-reduce, or hand tokens to each other's experts."""
        engines = self.options.data_parallel_size if self.weights.has_experts else 1
        return self.options.tensor_parallel_size * engines

    @property
    def step(self) -> Step:
        """The step of the profile run."""
        return Step(
            tokens=self.options.batched_tokens(self.model.spec),
            rows=self.options.seqs(self.model.spec),
            max_model_len=self.options.length(self.model.spec),
            element_bytes=_ELEMENT_BYTES[self.options.model_dtype(self.model.spec)],
        )

    def terms(self, stage: _Stage) -> Terms:
        """What one rank of ``stage`` spends before KV."""
        rules = self.options.rules
        weights = self.weights.on_rank(
            self.division,
            self.options.model_dtype(self.model.spec),
            layers=stage.layers,
            first=stage.first,
            last=stage.last,
        )
        activation, activation_off = self._activation(stage)
        graphs = 0
        if rules.subtracts_graph_estimate and self.options.estimate_cudagraphs:
            graphs = graph_count(self.options, self.model.spec) * self.kept.per_graph
        return Terms(
            weights=weights,
            activation=activation,
            non_torch=self.kept.non_torch(self.ranks_together, self.options.pipeline_parallel_size),
            graphs=graphs,
            weights_off=self.weights.off(weights),
            activation_off=activation_off,
            non_torch_off=(GIB // 4 if rules.budget_is_measured else GIB // 2) * (2 if self.ranks_together > 1 else 1),
            graphs_off=graphs * 3 // 4,
        )

    def _activation(self, stage: _Stage) -> tuple[int, int]:
        """(bytes, what they may be off by) of the activations' peak."""
        step, text = self.step, self.weights.text
        widths = self.weights.layer_widths(self.division)
        widest = max((widths.get(layer, 0) for layer in stage.layers), default=0)
        forward = forward_peak(text, widest, self.division, step)
        vision = vision_peak({} if self.options.language_model_only else self.weights.config, text, step)
        # Hidden states and residual come from the stage before, or wait for the next.
        passed = 2 * step.tokens * int(first(text, HIDDEN) or 0) * step.element_bytes
        if self.options.pipeline_parallel_size == 1:
            passed = 0

        def peak(rules: SamplerRules) -> int:
            sampler = sampler_peak(text, step, rules, self.processors) if stage.last else 0
            return passed + max(vision.kept_bytes + max(forward, sampler), vision.peak_bytes)

        chosen = self._sampler()
        found = peak(chosen)
        off = found // 12 + 64 * MIB
        if vision.peak_bytes:
            off += vision.peak_bytes // 4 + GIB // 4
        if chosen is V2_RUNNER:
            off += peak(TRITON) - found
        return found, off

    def _sampler(self) -> SamplerRules:
        rules = self.options.rules
        if not rules.samples_by_triton:
            return SORTING
        return V2_RUNNER if rules.runs_on_v2_runner and not self.options.v1_runner else TRITON
