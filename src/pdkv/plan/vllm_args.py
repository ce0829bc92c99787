"""The words of a ``vllm serve`` -> the options of a plan. Every flag is used, known not to matter, or in a warning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError
from pdkv.layout.rules import NEWEST, OLDEST
from pdkv.plan.command_text import ServeCall, read_command
from pdkv.plan.options import PlanOptions
from pdkv.plan.vllm_flags import Flag, find_flag
from pdkv.plan.vllm_values import ENVIRONMENT, IRRELEVANT_ENVIRONMENT, Given, convert

_NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """What a command asks for. ``given`` are the fields of PlanOptions that it sets, ``options`` those and defaults;
    ``overrides`` are --hf-overrides: fields of the model's config to replace.

    ``used`` and ``irrelevant`` name the flags (and variables) that were understood, ``warnings`` those that may matter
    and are not counted, each with why. ``unknown`` are words of no flag that is known; ``warnings`` has them too.
    """

    model: str | None
    options: PlanOptions
    given: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    used: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    irrelevant: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Word:
    """A flag as it was written: its full spelling, a path into its JSON (``--flag.a.b``), and its values."""

    flag: Flag
    spelling: str
    path: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def negated(self) -> bool:
        return self.spelling.startswith("--no-") and not self.flag.name.startswith("--no-")


def parse_command(text: str) -> ServeCommand:
    """What the deployment in ``text`` asks for. Raises ConfigError, beginning with ``--command``, when there is none or
    a value cannot be."""
    call = read_command(text)
    try:
        return parse_call(call)
    except ConfigError as error:
        raise ConfigError(f"--command: {error}") from error


def parse_call(call: ServeCall) -> ServeCommand:
    """What the words of ``call`` ask for, as vLLM's own parser would read them."""
    reading = _Reading()
    reading.image(call.image)
    reading.environment(call.environment)
    reading.arguments(call.arguments)
    return reading.done()


class _Reading:
    """Collects what a command says, word by word."""

    def __init__(self) -> None:
        self.given = Given()
        self.model: str | None = None
        self.used: list[str] = []
        self.irrelevant: list[str] = []
        self.unknown: list[str] = []
        self.warnings: list[str] = []
        self._json: dict[str, Any] = {}

    def image(self, image: str | None) -> None:
        """The release that a container's tag names."""
        if image is None:
            return
        match = re.search(r":v?(0)\.(\d+)(?:\.\d+)?", image)
        if match and OLDEST <= (0, int(match[2])) <= NEWEST:
            self.given.options["vllm_version"] = f"0.{match[2]}"
            self.used.append(f"image {image}")
        else:
            self.warnings.append(f"image {image} names no release whose rules are known; planned by the newest")

    def environment(self, variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            if name in ENVIRONMENT:
                ENVIRONMENT[name](self.given, value)
                self.used.append(name)
            elif name.startswith("VLLM_") and not name.startswith(IRRELEVANT_ENVIRONMENT):
                self.warnings.append(f"{name}={value} is not looked at here; it may change memory")
            else:
                self.irrelevant.append(name)

    def arguments(self, words: Sequence[str]) -> None:
        for word in _words(words):
            if isinstance(word, str):
                self._positional(word)
            elif word.flag.name == "--config":
                self._config_file(word.values[0])
            else:
                self._flag(word)
        for name, value in self._json.items():
            convert(self.given, name, value)

    def _positional(self, word: str) -> None:
        if word.startswith("-"):
            self.unknown.append(word)
            self.warnings.append(f"{word}: vLLM 0.32 has no such flag; left out")
        elif self.model is None:
            self.model = word
        else:
            self.unknown.append(word)
            self.warnings.append(f"{word!r} stands alone: it belongs to no flag, and was left out")

    def _flag(self, word: _Word) -> None:
        name = word.flag.name
        if word.flag.role == "skip":
            self.irrelevant.append(name)
            return
        if word.flag.role == "warn":
            if not word.negated:
                self.warnings.append(f"{name}: {word.flag.why}")
            return
        self.used.append(name)
        if name == "--model":
            self.model = word.values[0]
        elif word.flag.values == "0":
            convert(self.given, name, not word.negated)
        elif name in _JSON_FLAGS:
            value = _nested(word.path, _scalar(word.values[0])) if word.path else _json_object(name, word.values[0])
            self._json[name] = _merged(self._json.get(name, {}), value)
        else:
            convert(self.given, name, word.values if word.flag.values == "+" else word.values[0])

    def _config_file(self, path: str) -> None:
        """A YAML file of flags; what the command itself says wins."""
        import yaml

        try:
            content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
        except OSError:
            self.warnings.append(f"--config {path} is not here: what it sets is not in this plan")
            return
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"--config {path} is not valid YAML; vLLM would not read it either") from error
        if not isinstance(content, Mapping):
            raise ConfigError(f"--config {path} must map flags to values")
        before, self.given = self.given, Given()
        model, self.model = self.model, None
        self.arguments([word for key, value in content.items() for word in _as_words(str(key), value)])
        self.model = model or self.model
        self.given.options.update(before.options)
        self.given.overrides.update(before.overrides)
        self.used.append("--config")

    def done(self) -> ServeCommand:
        options = dict(self.given.options)
        for needed in [self.model or "", *(value for value in options.values() if isinstance(value, str))]:
            if "$" in needed:
                raise ConfigError(f"{needed} is a variable that the text does not set; write its value")
        return ServeCommand(
            model=self.model,
            options=PlanOptions(**options),
            given=options,
            overrides=self.given.overrides,
            used=tuple(dict.fromkeys(self.used)),
            unknown=tuple(self.unknown),
            irrelevant=tuple(dict.fromkeys(self.irrelevant)),
            warnings=tuple(dict.fromkeys((*self.warnings, *self.given.warnings))),
        )


_JSON_FLAGS = (
    "--hf-overrides",
    "--attention-config",
    "--compilation-config",
    "--kv-transfer-config",
    "--speculative-config",
)


def _words(words: Sequence[str]) -> Iterator[_Word | str]:
    """Flags with their values, and words that stand alone. Raises ConfigError for a flag without its value."""
    # One item of a YAML list may hold a flag and its value.
    split = [part for word in words for part in (word.split(None, 1) if re.match(r"--?[\w-]+\s", word) else [word])]
    index = 0
    while index < len(split):
        word = split[index]
        index += 1
        if not word.startswith("-") or _NEGATIVE_NUMBER.fullmatch(word):
            yield word
            continue
        name, equals, value = word.partition("=")
        name, *path = name.split(".")
        if name.startswith("-O") and not name.startswith("--"):
            value, equals, name = value or name[2:], "=", "--optimization-level"
        found = find_flag(name)
        if found is None:
            # Whatever follows is its value, as far as anyone can tell.
            takes = not equals and index < len(split) and not _is_flag(split[index])
            index += 1 if takes else 0
            yield name
            continue
        flag, spelling = found
        values = [value] if equals else []
        most = {"0": 0, "1": 1, "?": 1}.get(flag.values, len(split))
        while not equals and len(values) < most and index < len(split) and not _is_flag(split[index]):
            values.append(split[index])
            index += 1
        if flag.values in ("1", "+") and not values:
            raise ConfigError(f"{flag.name} needs a value")
        yield _Word(flag, spelling, tuple(part.removesuffix("+") for part in path), tuple(values))


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NEGATIVE_NUMBER.fullmatch(word)


def _as_words(key: str, value: Any) -> list[str]:
    """One entry of a --config file as the words that it stands for."""
    flag = f"--{key}"
    if value is True:
        return [flag]
    if value is False or value is None:
        return [f"--no-{key}"] if value is False and find_flag(f"--no-{key}") else []
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    return [flag, *map(str, value)] if isinstance(value, list) else [f"{flag}={value}"]


def _json_object(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if name == "--compilation-config" and text.strip().isdigit():
            return {"level": int(text)}
        raise ConfigError(f"{name} is not valid JSON ({error}); quote it as one word: '{{...}}'") from error
    if name == "--compilation-config" and isinstance(value, int):
        return {"level": value}
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, not {value!r}")
    return value


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return dict(value)


def _merged(into: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(into)
    for key, value in other.items():
        before = found.get(key)
        found[key] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return found
