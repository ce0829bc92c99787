"""Terms of a budget from one of the user's own start-up logs, carried over to other settings.

What a log says about its own settings is compared with what would have been estimated for them; the differences (a
ratio where a term grows with the settings, a difference where it does not) correct the estimate for other settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdkv.errors import ConfigError
from pdkv.layout.dtypes import MODEL_DTYPES
from pdkv.plan.options import PlanOptions
from pdkv.plan.terms import Terms
from pdkv.units import MIB

if TYPE_CHECKING:
    from pdkv.logs.startup import RankLog, Settings, StartupLog

# Settings of a log -> options of a plan; those that change a term.
_SETTINGS = (
    "max_model_len",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "gpu_memory_utilization",
    "enforce_eager",
)


@dataclass(frozen=True, slots=True)
class Corrections:
    """What to do to estimated terms; nothing by default. ``offs`` replace what the terms may be off by."""

    weights: float = 1.0
    activation: float = 1.0
    non_torch: int = 0
    graphs: float = 1.0
    from_log: bool = False

    def apply(self, terms: Terms) -> Terms:
        """``terms``, corrected."""
        if not self.from_log:
            return terms
        weights, activation = int(terms.weights * self.weights), int(terms.activation * self.activation)
        graphs = int(terms.graphs * self.graphs)
        return Terms(
            weights=weights,
            activation=activation,
            non_torch=max(0, terms.non_torch + self.non_torch),
            graphs=graphs,
            weights_off=weights // 500 + 16 * MIB,
            activation_off=activation // 20 + 32 * MIB,
            non_torch_off=96 * MIB,
            graphs_off=graphs // 4,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One log. ``total_bytes`` is its GPU's memory; ``options`` are its settings, under the names of PlanOptions.

    Terms are those of the rank that had least for KV; ``None`` where the log does not print one. ``notes`` say what a
    person should know about using it.
    """

    model: str | None
    total_bytes: int | None
    requested: int | None
    available: int
    weights: int | None
    activation: int | None
    non_torch: int | None
    graphs: int | None
    options: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def own_options(self, options: PlanOptions) -> PlanOptions:
        """``options`` with the log's own settings, as far as it says them."""
        return replace(options, **self.options)

    def corrections(self, stages: Sequence[Terms], own: PlanOptions, total_bytes: int) -> Corrections:
        """What the log's terms say about ``stages``, the estimates for the same settings.

        ``total_bytes`` is the GPU's memory, for a log that does not print what was requested of it.
        """
        guess = max(stages, key=lambda terms: terms.total)
        weights = 1.0 if self.weights is None else self.weights / guess.weights
        activation = 1.0 if self.activation is None else self.activation / max(guess.activation, 1)
        graphs = 1.0 if self.graphs is None or not guess.graphs else self.graphs / guess.graphs
        if self.non_torch is not None and self.activation is not None:
            difference = self.non_torch - guess.non_torch
        else:
            requested = self.requested or math.ceil(total_bytes * own.utilization)
            difference = requested - self.available - int(guess.weights * weights)
            difference -= guess.activation + guess.non_torch
            difference -= int(guess.graphs * graphs)
        return Corrections(weights, activation, difference, graphs, from_log=True)


def calibration(path: str | Path) -> Calibration:
    """Read a start-up log of vLLM.

    Raises ConfigError when it cannot be read, or when the start failed before it knew its memory for KV.
    """
    from pdkv.logs.parser import read_startup_log  # few plans read a log, and all of them start faster without it

    log = read_startup_log(path)
    ranks = [rank for rank in log.ranks if rank.available_kv is not None]
    if not ranks:
        raise ConfigError(
            f"{path}: no line says how much memory was left for KV ('Available KV cache memory'), so there is nothing "
            "to calibrate with; give the log of a start that came to serve"
        )
    rank = min(ranks, key=lambda rank: 0 if rank.available_kv is None else rank.available_kv.bytes)
    return _of_rank(log, rank)


def _of_rank(log: StartupLog, rank: RankLog) -> Calibration:
    terms = {
        name: None if (printed := getattr(rank, attribute)) is None else printed.bytes
        for name, attribute in (
            ("total_bytes", "total"),
            ("requested", "requested"),
            ("weights", "weights"),
            ("activation", "activation_peak"),
            ("non_torch", "non_torch"),
            ("graphs", "graph_estimate"),
        )
    }
    assert rank.available_kv is not None
    notes = [f"calibrated with a start of {log.settings.model or 'a model'} (vLLM {log.settings.version or 'unknown'})"]
    lacking = [word for word, key in (("weights", "weights"), ("activations", "activation")) if terms[key] is None]
    if lacking:
        notes.append(
            f"the log does not print its {' and '.join(lacking)}; set VLLM_LOGGING_LEVEL=DEBUG for all terms. What is "
            "known is taken from what was left"
        )
    return Calibration(
        model=log.settings.model,
        available=rank.available_kv.bytes,
        options=_options(log.settings),
        notes=tuple(notes),
        **terms,
    )


def _options(settings: Settings) -> dict[str, Any]:
    found = {name: value for name in _SETTINGS if (value := getattr(settings, name)) is not None}
    dtype = (settings.dtype or "").removeprefix("torch.")
    if dtype in MODEL_DTYPES:
        found["dtype"] = dtype
    if settings.release is not None:
        found["vllm_version"] = settings.release
    return found
