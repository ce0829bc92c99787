"""A start with what is known about it: the log, the model, and the capacity recomputed."""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import PdkvError
from pdkv.explain.budget import available_of, available_per_stage, graphs_subtracted, ranks_unknown
from pdkv.explain.recompute import Verdict, recompute
from pdkv.logs.printed import Printed
from pdkv.logs.startup import EngineLog, RankLog, StartupLog
from pdkv.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Start:
    """A log with what is known about it: ``spec`` and ``verdict`` are ``None`` when its model is not known."""

    source: str
    log: StartupLog
    spec: ModelSpec | None
    verdict: Verdict | None
    available: tuple[Printed | None, ...]
    trouble: str | None = None

    @property
    def engine(self) -> EngineLog | None:
        """The engine whose capacity is explained: the first that printed it."""
        return self.log.engine

    @property
    def bottleneck(self) -> RankLog | None:
        """The rank with the least memory for KV among those that printed it."""
        with_graphs = graphs_subtracted(self.log)
        sizes = [(rank, available_of(rank, with_graphs=with_graphs)) for rank in self.log.ranks]
        known = [(size.bytes, index) for index, (_, size) in enumerate(sizes) if size is not None]
        if not known:
            return self.log.ranks[0] if self.log.ranks else None
        return self.log.ranks[min(known)[1]]

    @property
    def agrees(self) -> bool | None:
        """Whether what was printed is what the rules give; ``None`` when ranks that matter printed nothing."""
        verdict = self.verdict
        if verdict is None or verdict.agrees is not False:
            return None if verdict is None else verdict.agrees
        if verdict.printed and verdict.allowed and ranks_unknown(self.log) and verdict.printed[-1] < verdict.allowed[0]:
            return None
        return False


def read_start(source: str, log: StartupLog, spec: ModelSpec | None) -> Start:
    """Recompute what ``log`` printed for ``spec``. A combination that cannot be sized is noted, not raised."""
    available = available_per_stage(log)
    verdict, trouble = None, None
    if spec is not None:
        try:
            verdict = recompute(spec, log.settings, available, log.engine)
        except PdkvError as error:
            trouble = str(error)
    return Start(source, log, spec, verdict, available, trouble)
