"""Do config.json and the weights belong together? Answered from the headers, before anything is allocated.

transformers fills every field that a config lacks with the family's default, a model of billions of parameters, and
would allocate and initialise that before it found out that no tensor fits.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from pdkv.errors import ConfigError, UnsupportedModel, in_words
from pdkv.runtime.models.files import ModelFiles, read_header

Shape = tuple[int, ...]

_SHAPE_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_MAX_LAYERS = 1000


def check_shapes(files: ModelFiles, config: PretrainedConfig, num_layers: int) -> None:
    """Compare the model that ``config`` describes (built without memory) with the tensors that are stored.

    Raises `ConfigError` naming a tensor that is missing or has another shape, `UnsupportedModel` for a config from
    which transformers cannot build a model.
    """
    stored = stored_shapes(files)
    if num_layers > max(len(stored), _MAX_LAYERS):  # building that many takes long, even without memory
        raise ConfigError(
            f"{files.directory / 'config.json'} describes {num_layers} layers, but the weights beside it are "
            f"{len(stored)} tensors in all; {_remedy(files, config)}"
        )
    model = _without_memory(files, config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    wrong = _differing(model, expected, stored)
    if wrong:
        name, shape = wrong[0]
        raise ConfigError(
            f"{files.directory / 'config.json'} does not describe the weights beside it: {name} has the shape "
            f"{shape} in the weights and {expected[name]} by the config ({len(wrong)} of {len(expected)} tensors "
            f"differ); {_remedy(files, config)}"
        )
    missing = _missing(model, expected, stored)
    if missing:
        raise ConfigError(lacking(files, config, type(model).__name__, missing))


def stored_shapes(files: ModelFiles) -> dict[str, Shape]:
    """Every tensor's shape by its name, from the headers of all weight files. Raises `ConfigError`."""
    shapes: dict[str, Shape] = {}
    for path in files.weight_files:
        header, _ = read_header(path)
        try:
            shapes |= {name: tuple(int(n) for n in entry["shape"]) for name, entry in header.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is not a readable safetensors file: {error!r}") from error
    return shapes


def lacking(files: ModelFiles, config: PretrainedConfig, model: str, missing: list[str]) -> str:
    """The text for weights that are not there."""
    return (
        f"{files.directory} lacks {len(missing)} weight tensors of {model} (first: {missing[0]}); they would be "
        f"random: {_remedy(files, config)}"
    )


def _without_memory(files: ModelFiles, config: PretrainedConfig) -> Any:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except Exception as error:  # the model classes raise whatever odd sizes lead them to
        raise UnsupportedModel(
            f"transformers cannot build {files.name} from its config.json: {in_words(error)}"
        ) from error


def _differing(model: Any, expected: dict[str, Shape], stored: dict[str, Shape]) -> list[tuple[str, Shape]]:
    """Tensors whose stored shape is another, by the model's names; those that are converted on loading may differ."""
    converted = [
        pattern
        for transform in get_model_conversion_mapping(model)
        if isinstance(transform, WeightConverter)
        for pattern in transform.source_patterns
    ]
    wrong = []
    for name, shape in stored.items():
        own = _own_name(model, name, expected)
        if own is not None and expected[own] != shape and not any(re.search(p, name) for p in converted):
            wrong.append((own, shape))
    return wrong


def _own_name(model: Any, stored: str, expected: dict[str, Shape]) -> str | None:
    """What the model calls a stored tensor; checkpoints of the bare decoder lack its prefix. None: not its own."""
    for name in (stored, f"{model.base_model_prefix}.{stored}"):
        if name in expected:
            return name
    return None


def _missing(model: Any, expected: dict[str, Shape], stored: dict[str, Shape]) -> list[str]:
    """Parameters that are not stored. None when a stored tensor is unknown: the loader may know it by another name."""
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    names = {_own_name(model, name, expected) for name in stored if name not in tied}
    if None in names:
        return []
    shared = {*tied, *tied.values()}  # stored under either name: the loader sees whether it is
    return sorted(name for name in expected if name not in names and name not in shared)


def _remedy(files: ModelFiles, config: PretrainedConfig) -> str:
    """What to do; names the fields that the config leaves to transformers' defaults, if it does."""
    lacks = _absent_fields(files.directory / "config.json", config.get_text_config(decoder=True))
    if lacks:
        return f"config.json lacks {', '.join(lacks)}: take the complete file that belongs to these weights"
    return "download or convert the model again, config.json and weights together"


def _absent_fields(path: Path, config: PretrainedConfig) -> list[str]:
    """Sizes that this family has, by whatever name, and that the file does not give."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        text = stored.get("text_config") or stored
        return [
            field
            for field in _SHAPE_FIELDS
            if hasattr(config, field) and field not in text and config.attribute_map.get(field) not in text
        ]
    except (OSError, ValueError, AttributeError, TypeError):
        return []
