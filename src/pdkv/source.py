"""From what a person typed to a ModelSpec: a catalogue name, a directory, or a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError
from pdkv.models.catalog import catalog, find_model
from pdkv.models.families import spec_from_config
from pdkv.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model to size; ``params`` is its parameter count where the catalogue knows it."""

    spec: ModelSpec
    params: int | None


def find_spec(ref: str, overrides: Mapping[str, Any] | None = None) -> PlannedModel:
    """The model behind ``ref``. Reads at most one small file; nothing is downloaded.

    ``overrides`` replace fields of its config, inside nested ones too (vLLM's --hf-overrides).

    Raises ConfigError when there is no such model or its config cannot be read, UnsupportedModel when it is not sized.
    """
    known = find_model(ref)
    if known is not None:
        return PlannedModel(spec_from_config(_overridden(known.config, overrides), name=known.name), known.params)
    path = Path(ref).expanduser()
    config_path = path / "config.json" if path.is_dir() else path
    if not config_path.is_file():
        there = f"the directory {path} has no config.json" if path.is_dir() else "no such file or directory either"
        raise ConfigError(
            f"{ref}: not a name in the catalogue ({', '.join(catalog())}), and {there}; give one of those names, a "
            "model directory, or the path of a config.json (the model's page on the hub has it)"
        )
    try:
        # Python's reader, as transformers': published configs have an Infinity here and there.
        config = json.loads(config_path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {config_path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{config_path} is not valid JSON ({error}); give a model's config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{config_path} holds no JSON object; give a model's config.json")
    name = config_path.resolve().parent.name if config_path.name == "config.json" else config_path.stem
    return PlannedModel(spec_from_config(_overridden(config, overrides), name=name), None)


def _overridden(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    found = dict(config)
    for key, value in (overrides or {}).items():
        before = found.get(key)
        both = isinstance(value, Mapping) and isinstance(before, Mapping)
        found[key] = _overridden(before or {}, value) if both else value
    return found
