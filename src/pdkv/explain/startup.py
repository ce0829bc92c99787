"""One start-up log -> Explanation: what it printed, what it must have had, and what to know about the difference."""

from __future__ import annotations

import re

from pdkv.explain.capacity import capacity_findings
from pdkv.explain.failed import failure_findings
from pdkv.explain.observed import observed
from pdkv.explain.report import Explanation, Finding, Severity
from pdkv.explain.spending import budget_findings
from pdkv.explain.start import Start, read_start
from pdkv.logs.startup import StartupLog
from pdkv.models.spec import ModelSpec


def explain_start(source: str, log: StartupLog, spec: ModelSpec | None) -> Explanation:
    """All that can be said about one start; ``spec`` is its model, ``None`` when it is not known."""
    start = read_start(source, log, spec)
    return Explanation(
        source=source,
        observed=observed(log),
        recomputed=None if start.verdict is None else start.verdict.facts(),
        agrees=start.agrees,
        findings=(
            *failure_findings(start),
            *capacity_findings(start),
            *budget_findings(start),
            *_model_findings(start),
        ),
    )


def _model_findings(start: Start) -> list[Finding]:
    """Why nothing could be recomputed, and what was assumed where it could."""
    if start.spec is None and start.engine is None and not any(start.available):
        # Nothing was sized, so there is nothing that the model would tell.
        return []
    if start.spec is None:
        name = start.log.settings.model
        return [
            Finding(
                id="model-unknown",
                severity=Severity.WARNING,
                text=f"{name or 'the model'} is not in the catalogue, so its capacity cannot be recomputed"
                + _implied_rate(start),
                effect="give --model with a catalogue name, a model directory or its config.json",
            )
        ]
    if start.trouble is not None:
        return [
            Finding(
                id="not-recomputed",
                severity=Severity.WARNING,
                text=f"the capacity could not be recomputed for {start.spec.name}: {start.trouble}",
            )
        ]
    if start.verdict is not None and start.verdict.sizing.assumed:
        stated = start.verdict.agrees
        return [
            Finding(
                id="assumed",
                text=f"the log does not state {_listed(start.verdict.sizing.assumed)}: "
                + ("it is what reproduces the printed numbers" if stated else "it is the default, and a guess"),
            )
        ]
    return []


def _listed(parts: tuple[str, ...]) -> str:
    return re.sub(r", (?=[^,]*$)", " and ", ", ".join(parts))


def _implied_rate(start: Start) -> str:
    """Bytes a token, from the printed memory and tokens, where the two were printed."""
    size, engine = start.available[0], start.engine
    if size is None or engine is None or not engine.kv_cache_size_tokens:
        return ""
    rate = size.bytes / engine.kv_cache_size_tokens
    return f"; {size.text} for {engine.kv_cache_size_tokens:,} tokens are about {rate:,.0f} bytes a token on that rank"
