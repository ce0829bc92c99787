"""From what a person typed to a ModelSpec: a catalogue name, a directory, or a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError
from pdkv.models.catalog import find_model, similar_names
from pdkv.models.families import spec_from_config
from pdkv.models.spec import ModelSpec

_MODELOPT = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model to size.

    ``config`` is what the spec was read from; ``directory`` is where its weight files may be (``None``: only a config).
    ``memo`` keeps what a plan derives from them, for the next one.
    """

    spec: ModelSpec
    config: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


def find_spec(ref: str, overrides: Mapping[str, Any] | None = None) -> PlannedModel:
    """The model behind ``ref``. Reads at most one small file; nothing is downloaded.

    ``overrides`` replace fields of its config, inside nested ones too (vLLM's --hf-overrides).

    Raises ConfigError when there is no such model or its config cannot be read, UnsupportedModel when it is not sized.
    """
    known = find_model(ref)
    if known is not None:
        config = _overridden(known.config, overrides)
        return PlannedModel(spec_from_config(config, name=known.name), config)
    config_path, there = _config_path(ref)
    if config_path is None:
        near = similar_names(ref)
        meant = f"did you mean {', '.join(near)}? Else give" if near else "give"
        raise ConfigError(
            f"{ref}: not a name in the catalogue (`pdkv models` lists it), and {there}; {meant} a model directory, or "
            "the path of a config.json (the model's page on the hub has it)"
        )
    config = _overridden(_read(config_path), overrides)
    beside = config_path.parent / _MODELOPT
    if not any(key in config for key in ("quantization_config", "compression_config")) and beside.is_file():
        # Where ModelOpt writes it; vLLM reads it likewise (transformers_utils/config.py).
        config["quantization_config"] = {"quant_method": "modelopt", **_read(beside)}
    whole = config_path.name == "config.json"
    name = config_path.resolve().parent.name if whole else config_path.stem
    return PlannedModel(spec_from_config(config, name=name), config, config_path.parent if whole else None)


def _config_path(ref: str) -> tuple[Path | None, str]:
    """(the config file behind a path, or ``None``; then why not)."""
    try:
        path = Path(ref).expanduser()
        if path.is_dir():
            inside = path / "config.json"
            return (inside, "") if inside.is_file() else (None, f"the directory {path} has no config.json")
        return (path, "") if path.is_file() else (None, "no such file or directory either")
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL inside, no such user's home
        return None, f"no path either ({error})"


def _read(path: Path) -> dict[str, Any]:
    try:
        # Python's reader, as transformers': published configs have an Infinity here and there.
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); give a model's config.json") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; give a model's config.json")
    return found


def _overridden(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    found = dict(config)
    for key, value in (overrides or {}).items():
        before = found.get(key)
        both = isinstance(value, Mapping) and isinstance(before, Mapping)
        found[key] = _overridden(before or {}, value) if both else value
    return found
