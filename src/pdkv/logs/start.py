"""What one start says, gathered line by line: one handler for every shape of line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pdkv.logs.fields import read_arguments, read_config
from pdkv.logs.printed import Printed
from pdkv.logs.startup import EngineLog, Failure, FailureKind, RankLog, RuntimeStats, Settings, StartupLog

_MOST_PROCESSES = 4096
_MOST_FAILURES = 64
_ANYONES = frozenset(
    {FailureKind.ERROR, FailureKind.OUT_OF_MEMORY, FailureKind.MODEL_NOT_FOUND, FailureKind.CPU_MEMORY}
)
_PLACE = re.compile(r"(DP|PP|TP)(\d{1,6})")
_BACKEND_NAMES = {
    "FLASH ATTENTION": "FLASH_ATTN",
    "FLASHINFER": "FLASHINFER",
    "TRITON": "TRITON_ATTN",
    "TRITON ATTENTION": "TRITON_ATTN",
    "TRITON MLA": "TRITON_MLA",
    "FLASHMLA": "FLASHMLA",
    "CUTLASS MLA": "CUTLASS_MLA",
    "FLASHINFER MLA": "FLASHINFER_MLA",
    "FLASHATTN MLA": "FLASH_ATTN_MLA",
    "FLEXATTENTION": "FLEX_ATTENTION",
    "XFORMERS": "XFORMERS",
    "TORCH SDPA": "TORCH_SDPA",
}
_V0_TERMS = {
    "model weights take": "weights",
    "non_torch_memory takes": "non_torch",
    "PyTorch activation peak memory takes": "activation_peak",
    "the rest of the memory reserved for KV Cache is": "available_kv",
}
_V0_ROWS = {
    "total_gpu_memory": "total",
    "the current vLLM instance can use": "requested",
    "model weights take": "weights",
    "non_torch_memory": "non_torch",
    "PyTorch activation peak memory": "activation_peak",
    "available_kv_cache_memory": "available_kv",
}


class Speaker:
    """The process that wrote a line. Its name changes while it starts (Worker, then Worker_TP0); its id does not."""

    __slots__ = ("key", "label", "name", "places", "rank")

    def __init__(self, name: str, label: str, key: str, rank: int | None) -> None:
        self.name, self.label, self.key, self.rank = name, label, key, rank
        self.places = {word: int(number) for word, number in _PLACE.findall(name)}

    @classmethod
    def of(cls, match: re.Match[str], ips: Mapping[str, str]) -> Speaker:
        """The process of a match; ``ips`` are the hosts that its line names for pids (Ray does, vLLM does not)."""
        rank, pid = match["rank"], match["pid"]
        label = f"{match['name']} pid={pid}"
        return cls(match["name"], label, f"{pid} {ips.get(pid, '')}", None if rank is None else int(rank))


NOBODY = Speaker("", "", "", None)


class Start:
    """What one start has said so far."""

    def __init__(self) -> None:
        self.configured: set[str] = set()
        self.seen = False
        self.ended = False
        self._settings = Settings()
        self._ranks: dict[str, RankLog] = {}
        self._engines: dict[str, EngineLog] = {}
        self._failures: dict[tuple[FailureKind, str], Failure] = {}
        self._runtime: RuntimeStats | None = None
        self._ready = False
        self._unnamed = 0

    def take(self, name: str, speaker: Speaker, match: Any) -> None:
        """One fact."""
        # Any program runs out of memory or raises errors: those alone do not make a log vLLM's.
        self.seen = self.seen or name != "failure" or match.kind not in _ANYONES
        handler: Callable[[Speaker, Any], None] = getattr(self, f"_on_{name}")
        handler(speaker, match)

    def log(self, starts: int) -> StartupLog:
        """All of it."""
        order = sorted(
            self._ranks.values(),
            key=lambda rank: tuple(
                value if value is not None else 0
                for value in (rank.data_rank, rank.pipeline_rank, rank.tensor_rank, rank.rank)
            ),
        )
        return StartupLog(
            settings=self._settings,
            ranks=tuple(rank for rank in order if _says_something(rank)),
            engines=tuple(self._engines.values()),
            failures=tuple(self._failures.values()),
            runtime=self._runtime,
            ready=self._ready,
            starts=starts,
        )

    def _rank(self, speaker: Speaker, fact: str | None = None) -> RankLog:
        """Where the memory of ``speaker`` is noted. The same fact again without a name is another rank's."""
        key = speaker.key
        if not key:
            known = self._ranks.get(f"unnamed {self._unnamed}")
            if known is not None and fact is not None and getattr(known, fact) is not None:
                self._unnamed += 1
            key = f"unnamed {self._unnamed}"
        rank = self._ranks.get(key)
        if rank is None:
            rank = RankLog(process=speaker.label, rank=speaker.rank)
            if len(self._ranks) < _MOST_PROCESSES:
                self._ranks[key] = rank
        if speaker.places:
            rank.process = speaker.label
            rank.data_rank = speaker.places.get("DP", rank.data_rank)
            rank.pipeline_rank = speaker.places.get("PP", rank.pipeline_rank)
            rank.tensor_rank = speaker.places.get("TP", rank.tensor_rank)
        return rank

    def _engine(self, speaker: Speaker) -> EngineLog:
        engine = self._engines.get(speaker.key)
        if engine is None:
            engine = EngineLog(process=speaker.label)
            if len(self._engines) < _MOST_PROCESSES:
                self._engines[speaker.key] = engine
        return engine

    # ------------------------------------------------------------------------------------------------------- settings

    def _on_banner(self, _speaker: Speaker, match: re.Match[str]) -> None:
        self._settings.version = self._settings.version or match[1]

    def _on_engine_config(self, speaker: Speaker, match: re.Match[str]) -> None:
        self.configured.add(speaker.name)
        self._settings.engine = match[1] or "V0"
        self._settings.version = match[2]
        read_config(self._settings, match[3])

    def _on_arguments(self, _speaker: Speaker, match: re.Match[str]) -> None:
        read_arguments(self._settings, match[1])

    def _on_architecture(self, _speaker: Speaker, match: re.Match[str]) -> None:
        self._settings.architecture = self._settings.architecture or match[1]

    def _on_max_num_batched_tokens(self, _speaker: Speaker, match: re.Match[str]) -> None:
        self._settings.max_num_batched_tokens = int(match[1])

    def _on_max_num_seqs(self, _speaker: Speaker, match: re.Match[str]) -> None:
        self._settings.max_num_seqs = self._settings.max_num_seqs or int(match[1])

    def _on_async_scheduling(self, _speaker: Speaker, match: re.Match[str]) -> None:
        self._settings.async_scheduling = match[1] == "enabled"

    def _on_backend(self, _speaker: Speaker, match: re.Match[str]) -> None:
        name = match[1].strip().upper()
        name = _BACKEND_NAMES.get(name, name)
        # The first is the language model's; encoders name theirs in other words.
        if " " not in name and self._settings.attention_backend in (None, "auto"):
            self._settings.attention_backend = name

    def _on_hybrid_off(self, _speaker: Speaker, match: re.Match[str]) -> None:
        self._settings.hybrid_manager_off = self._settings.hybrid_manager_off or match[1].strip()

    # ----------------------------------------------------------------------------------------------- memory of a rank

    def _on_place(self, speaker: Speaker, match: re.Match[str]) -> None:
        rank = self._rank(speaker, "rank")
        rank.rank, rank.data_rank, rank.pipeline_rank, rank.tensor_rank = (int(match[place]) for place in range(1, 5))
        # Only what there is more than one of is worth naming.
        sizes = self._settings
        rank.data_rank = rank.data_rank if (sizes.data_parallel_size or 1) > 1 else None
        rank.pipeline_rank = rank.pipeline_rank if (sizes.pipeline_parallel_size or 1) > 1 else None
        rank.tensor_rank = rank.tensor_rank if (sizes.tensor_parallel_size or 1) > 1 else None

    def _on_snapshot(self, speaker: Speaker, match: re.Match[str]) -> None:
        rank = self._rank(speaker, "free_at_start")
        rank.free_at_start, rank.total = Printed.of(match[1]), Printed.of(match[3])

    def _on_requested(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._rank(speaker, "requested").requested = Printed.of(match[1])

    def _on_weights(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._rank(speaker, "weights").weights = Printed.of(match[1])

    def _on_profile(self, speaker: Speaker, match: re.Match[str]) -> None:
        rank = self._rank(speaker, "non_kv")
        rank.non_kv, rank.activation_peak = Printed.of(match[1]), Printed.of(match[3])
        third = Printed.of(match[6])
        if match[5].startswith("non-torch"):
            rank.non_torch = third
        else:
            rank.consumed = third
        rank.weights = Printed.of(match[8])

    def _on_initial(self, speaker: Speaker, match: re.Match[str]) -> None:
        rank = self._rank(speaker)
        rank.free_at_start, rank.requested = Printed.of(match[1]), Printed.of(match[4])
        self._settings.gpu_memory_utilization = float(match[3])

    def _on_after_profiling(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._rank(speaker, "within_requested").within_requested = Printed.of(match[3])

    def _on_available(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._rank(speaker, "available_kv").available_kv = Printed.of(match[1])

    def _on_graph_estimate(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._rank(speaker, "graph_estimate").graph_estimate = Printed.of(match[1])

    def _on_graph_actual(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._rank(speaker, "graph_actual").graph_actual = Printed.of(match[1])

    def _on_graph_compare(self, speaker: Speaker, match: re.Match[str]) -> None:
        rank = self._rank(speaker)
        rank.graph_actual, rank.graph_estimate = Printed.of(match[1]), Printed.of(match[3])

    def _on_reserved(self, speaker: Speaker, match: re.Match[str]) -> None:
        rank = self._rank(speaker, "reserved")
        rank.free_at_start, rank.reserved = Printed.of(match[1]), Printed.of(match[3])

    def _on_summary(self, speaker: Speaker, match: re.Match[str]) -> None:
        rank = self._rank(speaker, "suggested_bytes")
        rank.free_at_start, rank.total = Printed.of(match[1]), Printed.of(match[2])
        rank.requested = Printed.of(match[4])
        if match[6] == "weight":
            rank.weights = Printed.of(match[5])
        else:
            rank.consumed = Printed.of(match[5])
        rank.activation_peak = rank.activation_peak or Printed.of(match[7])
        if match[8] is not None:
            rank.non_torch = Printed.of(match[8])
        rank.graph_actual = rank.graph_actual or Printed.of(match[9])
        rank.suggested_bytes, rank.suggested_full_bytes = int(match[10]), int(match[11])
        self._settings.gpu_memory_utilization = float(match[3])

    def _on_v0_limit(self, speaker: Speaker, match: re.Match[str]) -> None:
        rank = self._rank(speaker, "requested")
        rank.total, rank.requested = Printed.of(match[1]), Printed.of(match[4])
        self._settings.gpu_memory_utilization = float(match[3])

    def _on_v0_term(self, speaker: Speaker, match: re.Match[str]) -> None:
        # Weights are the first of four, and were printed before: the second tells whether this is another rank.
        first = match[1].startswith("model weights")
        setattr(self._rank(speaker, "non_torch" if first else None), _V0_TERMS[match[1]], Printed.of(match[2]))

    def _on_v0_results(self, speaker: Speaker, match: re.Match[str]) -> None:
        rank = self._rank(speaker, "available_kv")
        rank.total, rank.non_torch, rank.available_kv = (Printed.of(match[place]) for place in (1, 3, 5))
        self._settings.gpu_memory_utilization = float(match[7])

    def _on_v0_row(self, speaker: Speaker, match: re.Match[str]) -> None:
        target = _V0_ROWS[match[1]]
        setattr(self._rank(speaker, target), target, Printed.of(match[2]))

    def _on_cpu_reserved(self, speaker: Speaker, match: re.Match[str]) -> None:
        rank = self._rank(speaker, "total")
        rank.total = Printed.of(match[3])
        if match[1] == "Explicitly":
            rank.reserved = Printed.of(match[2])
        else:
            rank.available_kv = Printed.of(match[2])

    # -------------------------------------------------------------------------------------------- capacity of an engine

    def _on_tokens(self, speaker: Speaker, match: re.Match[str]) -> None:
        engine = self._engine(speaker)
        # Behind a prefix the words before "KV cache size" include the prefix: only the last is the device.
        engine.device = match[1].split()[-1]
        engine.kv_cache_size_tokens = _count(match[2])

    def _on_concurrency(self, speaker: Speaker, match: re.Match[str]) -> None:
        engine = self._engine(speaker)
        engine.max_model_len = _count(match[1])
        engine.concurrency_text, engine.max_concurrency = match[2], float(match[2])

    def _on_blocks(self, speaker: Speaker, match: re.Match[str]) -> None:
        engine = self._engine(speaker)
        # V0 printed "# GPU blocks: N, # CPU blocks: M" and the pool is the smallest rank's.
        blocks = int(match[2])
        engine.num_blocks = blocks if engine.num_blocks is None else min(engine.num_blocks, blocks)
        engine.device = match[1]

    def _on_final_blocks(self, _speaker: Speaker, match: re.Match[str]) -> None:
        # The API server says it, of engines by number: they are in the order in which they printed their capacity.
        sized = [engine for engine in self._engines.values() if engine.sized]
        if int(match[1]) < len(sized):
            sized[int(match[1])].num_blocks = int(match[2])

    def _on_override(self, speaker: Speaker, match: re.Match[str]) -> None:
        # From 0 blocks is the small cache of the CUDA graph estimate, not a user's override.
        if int(match[1]) > 0:
            self._engine(speaker).override_blocks = (int(match[1]), int(match[2]))

    def _on_fitted(self, speaker: Speaker, match: re.Match[str]) -> None:
        engine = self._engine(speaker)
        engine.fitted_from, engine.fitted_to = int(match[1]), int(match[2])

    def _on_fits_whole(self, speaker: Speaker, match: re.Match[str]) -> None:
        engine = self._engine(speaker)
        engine.fitted_from = engine.fitted_to = int(match[1])

    def _on_mm_reserve(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._engine(speaker).mm_reserve = Printed.of(match[1])

    def _on_padding(self, speaker: Speaker, match: re.Match[str]) -> None:
        engine = self._engine(speaker)
        engine.padding_layers = (engine.padding_layers or 0) + int(match[1])
        engine.padding_percent = float(match[2])

    def _on_group_sizes(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._engine(speaker).group_block_sizes = tuple(int(part) for part in match[1].split(","))

    def _on_block_size(self, _speaker: Speaker, match: re.Match[str]) -> None:
        self._settings.block_size = int(match[1])

    def _on_attention_block(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._engine(speaker).attention_block_size = int(match[1])

    def _on_kv_layout(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._engine(speaker).layout = match[1]

    def _on_ready(self, _speaker: Speaker, _match: re.Match[str]) -> None:
        self._ready = True

    def _on_stats(self, _speaker: Speaker, match: re.Match[str]) -> None:
        stats = self._runtime = self._runtime or RuntimeStats()
        stats.lines += 1
        stats.running, stats.waiting = int(match[1]), int(match[2])
        stats.preemptions += int(match[3] or 0)
        stats.usage_percent = float(match[4])
        stats.highest_usage_percent = max(stats.highest_usage_percent, stats.usage_percent)

    def _on_failure(self, speaker: Speaker, failure: Failure) -> None:
        self.ended = True
        key = (failure.kind, "" if failure.kind is not FailureKind.ERROR else failure.text)
        if key not in self._failures and len(self._failures) < _MOST_FAILURES:
            self._failures[key] = Failure(
                kind=failure.kind, text=failure.text, process=speaker.label, numbers=failure.numbers
            )


def _count(text: str) -> int:
    return int(text.replace(",", ""))


def _says_something(rank: RankLog) -> bool:
    return any(
        value is not None
        for value in (
            rank.total,
            rank.free_at_start,
            rank.requested,
            rank.weights,
            rank.non_kv,
            rank.available_kv,
            rank.reserved,
            rank.graph_actual,
        )
    )
