"""A Prometheus text (0.0.4, or OpenMetrics) -> samples. What an endpoint sends is not trusted: sizes are bounded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pdkv.errors import ConfigError

MAX_BYTES = 32 << 20
"""Of one text. A vLLM engine sends about 100 KiB."""
MAX_SAMPLES = 200_000
_MAX_LABELS = 64
_SHOWN = 80

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,255}")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]{0,127})\s*=\s*"((?:[^"\\\n]|\\.){0,4096})"\s*(,|(?=\}))', re.ASCII)
_VALUE = re.compile(
    r"\s*([+-]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:[eE][+-]?\d{1,4})?|[+-]?Inf|NaN)(?:\s|$)", re.ASCII
)
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric and the labels that tell it from others."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """Samples by name, in the order of the text."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.samples

    def series(self, name: str, **labels: str) -> list[Sample]:
        """The samples of ``name`` that have ``labels``; none when there are none."""
        wanted = labels.items()
        return [sample for sample in self.samples.get(name, []) if wanted <= sample.labels.items()]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over samples (engines, models) of ``name`` with ``labels``; ``None`` when there is none."""
        found = self.series(name, **labels)
        return sum(sample.value for sample in found) if found else None

    def counter(self, name: str, **labels: str) -> float | None:
        """The sum of a counter, which exporters call ``name_total``, some of them ``name``."""
        found = self.total(f"{name}_total", **labels)
        return self.total(name, **labels) if found is None else found

    def values(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The sums of ``name`` by the value of ``label``."""
        found: dict[str, float] = {}
        for sample in self.series(name, **labels):
            key = sample.labels.get(label)
            if key is not None:
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def of(self, **labels: str) -> Metrics:
        """Only the samples with ``labels``: one engine of several."""
        return self._where(lambda sample: labels.items() <= sample.labels.items())

    def about(self, labels: Mapping[str, str]) -> Metrics:
        """The samples that do not contradict ``labels``; those that lack some of them are about all engines."""
        return self._where(lambda sample: all(sample.labels.get(key, value) == value for key, value in labels.items()))

    def _where(self, holds: Callable[[Sample], bool]) -> Metrics:
        kept = {name: [sample for sample in samples if holds(sample)] for name, samples in self.samples.items()}
        return Metrics({name: samples for name, samples in kept.items() if samples})


def parse_metrics(data: bytes | str, what: str = "the metrics text") -> Metrics:
    """Every sample of a text. Raises ConfigError when it is too long, or a line is no sample, naming the line."""
    text = data if isinstance(data, str) else data.decode("utf-8", "replace")
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{what} is longer than {MAX_BYTES >> 20} MiB; give the /metrics URL of one engine or router")
    samples: dict[str, list[Sample]] = {}
    count = 0
    for number, line in enumerate(_lines(text), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        count += 1
        if count > MAX_SAMPLES:
            raise ConfigError(f"{what} holds more than {MAX_SAMPLES} samples; give the /metrics URL of one engine")
        name, sample = _sample(stripped, number, what)
        samples.setdefault(name, []).append(sample)
    if not samples:
        raise ConfigError(f"{what} holds no sample; a vLLM or pdkv server answers them at /metrics")
    return Metrics(samples)


def _lines(text: str) -> Iterator[str]:
    """Lines of ``text`` one at a time: a list of them would double what a long text takes."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 1


def _sample(line: str, number: int, what: str) -> tuple[str, Sample]:
    name = _NAME.match(line)
    if name is None:
        raise _malformed(line, number, what)
    labels: dict[str, str] = {}
    at = name.end()
    if line.startswith("{", at):
        at += 1
        while not line.startswith("}", at):
            label = _LABEL.match(line, at)
            if label is None or len(labels) >= _MAX_LABELS:
                raise _malformed(line, number, what)
            labels[label[1]] = _shown(re.sub(r'\\[\\"n]', lambda match: _ESCAPES[match[0]], label[2]))
            at = label.end()
        at += 1
    value = _VALUE.match(line, at)
    if value is None:
        raise _malformed(line, number, what)
    return name[0], Sample(labels, float(value[1].replace("Inf", "inf").replace("NaN", "nan")))


def _shown(label: str) -> str:
    """Labels are printed: what a terminal would obey is left out, but for ends of lines."""
    if label.isprintable():
        return label
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in label)


def _malformed(line: str, number: int, what: str) -> ConfigError:
    shown = repr(line if len(line) <= _SHOWN else line[:_SHOWN] + "...")
    return ConfigError(f"{what}, line {number}: no Prometheus sample: {shown}; is this the /metrics of vLLM or pdkv?")
