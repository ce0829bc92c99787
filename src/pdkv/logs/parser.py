"""Lines of a start-up log -> StartupLog. One pass, bounded memory, every rank and every engine."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from pdkv.errors import ConfigError
from pdkv.logs.failures import ERROR_ANCHORS, find_failure
from pdkv.logs.shapes import PROCESS, SHAPES
from pdkv.logs.start import NOBODY, Speaker, Start
from pdkv.logs.startup import StartupLog
from pdkv.logs.text import matching_lines

ANCHORS = tuple(dict.fromkeys((*(anchor for shape in SHAPES for anchor in shape.anchors), *ERROR_ANCHORS)))


def read_startup_log(source: str | Path | IO[bytes]) -> StartupLog:
    """The last start in a log: a path, ``-`` for standard input, or an open binary stream (gzip and UTF-16 as well).

    Raises ConfigError when it cannot be read, is no start-up log of vLLM, or ends before there is anything to say.
    """
    if not isinstance(source, str | Path):
        return _checked(parse_startup(matching_lines(source, ANCHORS)), "the log")
    if str(source) == "-":
        return _checked(parse_startup(matching_lines(sys.stdin.buffer, ANCHORS)), "standard input")
    try:
        with Path(source).expanduser().open("rb") as stream:
            return _checked(parse_startup(matching_lines(stream, ANCHORS)), str(source))
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror or error}") from error


def parse_startup(lines: Iterable[str]) -> StartupLog:
    """The last start in ``lines`` that has an outcome, or the last one when none has. Never fails."""
    parser = StartupParser()
    for line in lines:
        parser.feed(line)
    return parser.result()


def _checked(log: StartupLog, what: str) -> StartupLog:
    if not log.starts:
        raise ConfigError(
            f"{what} holds no line of a vLLM start-up (0.6 to 0.32); give the output of `vllm serve` from its "
            "beginning, for example by `docker logs NAME` or `kubectl logs POD`"
        )
    if log.has_outcome:
        return log
    reached = "loaded its weights" if any(rank.weights for rank in log.ranks) else "printed its configuration"
    raise ConfigError(
        f"{what} is cut off: vLLM {log.settings.version or ''} {reached}, and then the log ends without memory for KV, "
        "capacity or an error; give the whole log, or wait until the start has ended"
    )


class StartupParser:
    """Takes lines one at a time; `result` may be asked at any time."""

    def __init__(self) -> None:
        self._starts = 0
        self._previous: Start | None = None
        self._now = Start()

    def feed(self, line: str) -> None:
        """Read one line. A line that is several, written over each other, is read as all of them."""
        processes = list(PROCESS.finditer(line))
        ips = {match["pid"]: match["ip"] for match in processes if match["ip"]}
        speakers = [(match.end(), Speaker.of(match, ips)) for match in processes]
        found: list[tuple[int, str, Any]] = []
        for shape in SHAPES:
            if any(anchor in line for anchor in shape.anchors):
                found += [(match.start(), shape.name, match) for match in shape.pattern.finditer(line)]
        failure = find_failure(line)
        if failure is not None:
            found.append((failure[0], "failure", failure[1]))
        for start, name, match in sorted(found, key=lambda item: item[0]):
            # The last name before the words; a line without one was written by the only process.
            speaker = next((who for end, who in reversed(speakers) if end <= start), NOBODY)
            if name in ("banner", "engine_config"):
                self._begin(name, speaker)
            self._now.take(name, speaker, match)

    def result(self) -> StartupLog:
        """The last start with an outcome, or the last one."""
        start = self._now
        if self._previous is not None and not start.log(0).has_outcome:
            start = self._previous
        return start.log(self._starts or int(start.seen))

    def _begin(self, name: str, speaker: Speaker) -> None:
        """A second configuration of the same process, or a banner after one, is another start."""
        now = self._now
        if name == "engine_config":
            # Engines of one data-parallel start are configured one after the other, some when others have failed.
            again = speaker.name in now.configured or (now.ended and "DP" not in speaker.places)
        else:
            again = bool(now.configured or now.ended)
        if again:
            if now.log(0).has_outcome:
                self._previous = now
            self._now = Start()
            self._starts += 1
        elif not self._starts:
            self._starts = 1
