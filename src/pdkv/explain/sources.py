"""What a person points at -> an answer: a log, a directory of logs, two logs, standard input, or URLs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdkv.errors import ConfigError, PdkvError
from pdkv.explain.compare import Comparison, compare
from pdkv.explain.live import Live, watch
from pdkv.explain.naming import find_named
from pdkv.explain.report import Explanation
from pdkv.explain.start import Start, read_start
from pdkv.explain.startup import explain_start
from pdkv.logs.parser import read_startup_log
from pdkv.logs.scrape import is_url
from pdkv.logs.startup import StartupLog
from pdkv.models.spec import ModelSpec
from pdkv.source import find_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A file of a directory that is no start-up log, and why."""

    source: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """Every log of a directory, by name."""

    starts: tuple[Explanation, ...]
    refused: tuple[Refused, ...]


Answer = Explanation | Directory | Comparison | Live


def explain_sources(sources: Sequence[str], *, model: str | None = None, interval_s: float = 0.0) -> Answer:
    """Explain one log or a directory of logs, compare two logs, or look at running servers by their URLs.

    Raises ConfigError when a source cannot be read or is not what it should be.
    """
    urls = [source for source in sources if is_url(source)]
    if urls:
        if len(urls) != len(sources):
            raise ConfigError("logs and URLs cannot be mixed; give the one or the other")
        return watch(urls, interval_s)
    spec = None if model is None else find_spec(model).spec
    if len(sources) == 1 and Path(sources[0]).is_dir():
        return _directory(Path(sources[0]), spec)
    if len(sources) == 1:
        return explain_log(sources[0], spec)
    if len(sources) == 2:
        return compare(start_of(sources[0], spec), start_of(sources[1], spec))
    raise ConfigError(f"{len(sources)} sources: give one log or directory, or two logs to compare")


def explain_log(source: str, spec: ModelSpec | None = None) -> Explanation:
    """Explain the log ``source``, of the model ``spec`` or the one that the log names."""
    start = start_of(source, spec)
    return explain_start(start.source, start.log, start.spec)


def start_of(source: str, spec: ModelSpec | None = None) -> Start:
    """Read the log ``source``, of the model ``spec`` or the one that the log names."""
    log = read_startup_log(source)
    return read_start("standard input" if source == "-" else source, log, spec or model_of(log))


def model_of(log: StartupLog) -> ModelSpec | None:
    """The model that a log names, when the catalogue knows it or its directory is on this machine."""
    return None if log.settings.model is None else find_named(log.settings.model)


def _directory(path: Path, spec: ModelSpec | None) -> Directory:
    starts, refused = [], []
    files = sorted(entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith("."))
    for entry in files:
        try:
            starts.append(explain_log(str(entry), spec))
        except PdkvError as error:
            refused.append(Refused(source=str(entry), error=str(error)))
    if not starts:
        reason = f"none of its {len(refused)} files is a start-up log of vLLM" if refused else "it holds no file"
        raise ConfigError(f"{path}: {reason}; give a directory with the output of `vllm serve`, a file for every start")
    return Directory(starts=tuple(starts), refused=tuple(refused))
