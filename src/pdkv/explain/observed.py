"""What a start-up log says, as JSON."""

from __future__ import annotations

from typing import Any

from pdkv.logs.printed import Printed
from pdkv.logs.startup import StartupLog


def observed(log: StartupLog) -> dict[str, Any]:
    """Settings, ranks, engines and the failure of the last start; sizes are bytes, with the rounding of the print."""
    engine = log.engine
    fields = {
        "version": log.settings.version,
        "model": log.settings.model,
        "ready": log.ready,
        "starts": log.starts,
        "num_blocks": engine.num_blocks if engine else None,
        "kv_cache_size_tokens": engine.kv_cache_size_tokens if engine else None,
        "max_model_len": (engine.max_model_len if engine else None) or log.settings.max_model_len,
        "max_concurrency": engine.max_concurrency if engine else None,
        "settings": _plain(log.settings),
        "ranks": [{"name": rank.name, **_plain(rank)} for rank in log.ranks],
        "engines": [_plain(engine) for engine in log.engines],
        "failure": None
        if log.failure is None
        else {"kind": log.failure.kind.value, "text": log.failure.text, "process": log.failure.process}
        | {name: _value(value) for name, value in log.failure.numbers.items()},
    }
    if log.runtime is not None:
        fields["runtime"] = _plain(log.runtime)
    return fields


def _plain(facts: Any) -> dict[str, Any]:
    """Fields that have a value, as JSON."""
    values = {name: getattr(facts, name) for name in facts.__dataclass_fields__}
    return {name: _value(value) for name, value in values.items() if value not in (None, (), {})}


def _value(value: Any) -> Any:
    if isinstance(value, Printed):
        return {"text": value.text, "bytes": value.bytes, "low_bytes": value.low_bytes, "high_bytes": value.high_bytes}
    return list(value) if isinstance(value, tuple) else value
