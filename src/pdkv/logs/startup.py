"""What one start of vLLM said, as facts: settings, memory of every rank, capacity of every engine, failures."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdkv.logs.printed import Printed


@dataclass(slots=True, kw_only=True)
class Settings:
    """What the engine ran with, under vLLM's names. ``None``: the log does not say.

    ``asked`` are the arguments that the user gave, as text. ``hybrid_manager_off`` is the sentence with which vLLM
    turned off its hybrid KV cache manager. ``block_size`` is only what was asked for or announced.
    """

    version: str | None = None
    engine: str | None = None
    model: str | None = None
    architecture: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None
    async_scheduling: bool | None = None
    attention_backend: str | None = None
    kv_connector: str | None = None
    kv_role: str | None = None
    speculative_method: str | None = None
    num_speculative_tokens: int | None = None
    hybrid_manager_off: str | None = None
    device: str | None = None
    asked: dict[str, str] = field(default_factory=dict)

    @property
    def release(self) -> str | None:
        """``major.minor`` of the version, ``None`` when there is none to read."""
        if self.version is None:
            return None
        parts = self.version.removeprefix("v").split(".")
        return ".".join(parts[:2]) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else None


@dataclass(slots=True, kw_only=True)
class RankLog:
    """Memory of one worker as it printed it. ``None``: it printed no such line (many are DEBUG or printed by one rank).

    ``process`` is its name in the log ("Worker_TP0 pid=442"). ``requested`` is total x gpu_memory_utilization;
    ``non_kv`` what the profile run charged to this instance; ``consumed`` its part that stays (weights and non-torch);
    ``within_requested`` what was left of ``requested`` after the profile run. ``reserved`` is KV memory given by hand.
    """

    process: str = ""
    rank: int | None = None
    data_rank: int | None = None
    pipeline_rank: int | None = None
    tensor_rank: int | None = None
    total: Printed | None = None
    free_at_start: Printed | None = None
    requested: Printed | None = None
    weights: Printed | None = None
    activation_peak: Printed | None = None
    non_torch: Printed | None = None
    consumed: Printed | None = None
    non_kv: Printed | None = None
    within_requested: Printed | None = None
    graph_estimate: Printed | None = None
    graph_actual: Printed | None = None
    available_kv: Printed | None = None
    reserved: Printed | None = None
    suggested_bytes: int | None = None
    suggested_full_bytes: int | None = None

    @property
    def name(self) -> str:
        """What a person calls it."""
        parts = [
            f"{word}{value}"
            for word, value in (("DP", self.data_rank), ("PP", self.pipeline_rank), ("TP", self.tensor_rank))
            if value is not None
        ]
        return " ".join(parts) or (f"rank {self.rank}" if self.rank is not None else self.process or "the worker")


@dataclass(slots=True, kw_only=True)
class EngineLog:
    """Capacity of one engine as it printed it. ``concurrency_text`` keeps the decimals of ``max_concurrency``.

    ``fitted_from`` is the length before --max-model-len auto lowered it. ``override_blocks`` are (before, after).
    ``padding_layers`` and ``padding_percent`` are vLLM's warning about groups of unequal size; ``mm_reserve`` is what
    it held back for multimodal inputs after it printed the available memory.
    """

    process: str = ""
    num_blocks: int | None = None
    kv_cache_size_tokens: int | None = None
    max_model_len: int | None = None
    max_concurrency: float | None = None
    concurrency_text: str | None = None
    device: str | None = None
    attention_block_size: int | None = None
    group_block_sizes: tuple[int, ...] = ()
    fitted_from: int | None = None
    fitted_to: int | None = None
    override_blocks: tuple[int, int] | None = None
    padding_layers: int | None = None
    padding_percent: float | None = None
    mm_reserve: Printed | None = None
    layout: str | None = None

    @property
    def sized(self) -> bool:
        """Whether it came as far as to print what its pool holds."""
        return self.kv_cache_size_tokens is not None or self.num_blocks is not None


class FailureKind(enum.Enum):
    """Why a start failed; earlier members say more about the cause than later ones."""

    DEVICE_SHARED = "device-memory-in-use"
    REQUEST_TOO_LONG = "one-request-does-not-fit"
    NO_KV_MEMORY = "no-memory-for-kv"
    STATE_BLOCKS = "more-sequences-than-state-blocks"
    SAMPLER_OOM = "out-of-memory-warming-up-sampler"
    OUT_OF_MEMORY = "out-of-memory"
    PROFILING_DISTURBED = "memory-changed-while-profiling"
    CPU_MEMORY = "cpu-memory"
    LENGTH_ABOVE_MODEL = "max-model-len-above-model"
    HEADS_NOT_DIVISIBLE = "heads-not-divisible"
    MISSING_DEVICE = "no-such-device"
    MODEL_NOT_FOUND = "model-files-not-available"
    ERROR = "error"
    ENGINE_DIED = "engine-did-not-start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One error, with the numbers that it named: counts and lengths as ints, memory as Printed."""

    kind: FailureKind
    text: str
    process: str = ""
    numbers: Mapping[str, Printed | int] = field(default_factory=dict)

    def memory(self, name: str) -> Printed | None:
        """The size it named, if it did."""
        value = self.numbers.get(name)
        return value if isinstance(value, Printed) else None

    def count(self, name: str) -> int | None:
        """The count it named, if it did."""
        value = self.numbers.get(name)
        return value if isinstance(value, int) else None


@dataclass(slots=True, kw_only=True)
class RuntimeStats:
    """What the periodic lines after start-up said: the last figures and the highest usage."""

    lines: int = 0
    running: int = 0
    waiting: int = 0
    usage_percent: float = 0.0
    highest_usage_percent: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupLog:
    """The last start in a log. ``starts`` counts all; ``ready`` is whether it came to serve."""

    settings: Settings
    ranks: tuple[RankLog, ...]
    engines: tuple[EngineLog, ...]
    failures: tuple[Failure, ...]
    runtime: RuntimeStats | None
    ready: bool
    starts: int

    @property
    def failure(self) -> Failure | None:
        """The error that ended the start, the one that says most about the cause; ``None`` when it came to serve."""
        if self.ready:
            return None
        order = list(FailureKind)
        return min(self.failures, key=lambda failure: order.index(failure.kind), default=None)

    @property
    def engine(self) -> EngineLog | None:
        """The first engine that printed its capacity."""
        return next((engine for engine in self.engines if engine.sized), None)

    @property
    def has_outcome(self) -> bool:
        """Whether it got as far as memory for KV, or says why not."""
        return bool(self.failures or self.engine or any(rank.available_kv or rank.reserved for rank in self.ranks))
