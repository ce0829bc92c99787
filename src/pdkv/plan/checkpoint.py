"""Weights as a plan needs them: from the headers of the safetensors files where they are there, else from the config.

Only headers are read. Bytes in the files are exact; how ranks share them follows the config (`pdkv.models.weights`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.models.fields import Config, text_config
from pdkv.models.weights import Division, Weights, count_weights
from pdkv.models.weights.matrices import Split
from pdkv.plan.activations import layer_widths
from pdkv.plan.options import PlanOptions
from pdkv.source import PlannedModel
from pdkv.units import MIB, format_bytes

_INDEX = "model.safetensors.index.json"
# The same weights in Mistral's format, and those of an adapter.
_OTHER_FILES = ("consolidated", "adapter_")
_LARGEST_HEADER = 100 * MIB  # what the safetensors library accepts
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# In a checkpoint, and never loaded.
_UNUSED = re.compile(r"rotary_emb\.inv_freq$|^mtp\.|\.mtp\.")
# By name, where the config's family is not known: what ranks have copies of.
_WHOLE = re.compile(r"norm|bias$|router|gate\.weight$|scale$")
_DISAGREE = Fraction(2, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWeights:
    """The weights of a model. ``scale`` makes what the config implies equal to what the files hold.

    ``stored_bytes`` are the files' (``None``: not there). ``counted`` is ``None`` for a family that is not counted
    from its config, whose files are then shared out by the names of their tensors (``whole_bytes``: copies on all).
    """

    config: Config
    text: Config
    counted: Weights | None
    stored_bytes: int | None = None
    whole_bytes: int = 0
    scale: Fraction = Fraction(1)
    layers: int = 0
    notes: tuple[str, ...] = ()
    _widths: dict[Division, dict[int, int]] = field(default_factory=dict, compare=False, repr=False)

    def layer_widths(self, division: Division) -> dict[int, int]:
        """Elements a token at the widest point of every layer, counted once; empty where matrices are not known."""
        if division not in self._widths:
            parts = () if self.counted is None else self.counted.parts
            self._widths[division] = layer_widths(self.text, parts, division)
        return self._widths[division]

    @property
    def has_experts(self) -> bool:
        """Whether ranks of all data-parallel engines share layers, and so talk to each other."""
        parts = () if self.counted is None else self.counted.parts
        return any(matrix.split is Split.EXPERT_COLUMN for part in parts for matrix in part.matrices)

    @property
    def params(self) -> int | None:
        """Parameters of the whole model, where they are counted."""
        return None if self.counted is None else self.counted.params

    def total_bytes(self, dtype: str) -> int | None:
        """Bytes of the whole model: the files', else what the config implies."""
        if self.stored_bytes is not None:
            return self.stored_bytes
        return None if self.counted is None else self.counted.file_bytes(dtype)

    def on_rank(self, division: Division, dtype: str, *, layers: range, first: bool, last: bool) -> int:
        """Bytes on one rank of the stage that has ``layers``."""
        if self.counted is not None:
            found = self.counted.on_rank(division, dtype, layers=layers, first=first, last=last)
            return found.rope_bytes + int((found.bytes - found.rope_bytes) * self.scale)
        stored = self.stored_bytes or 0
        shared = (stored - self.whole_bytes) // division.tensor_parallel
        return (shared + self.whole_bytes) * len(layers) // max(self.layers, 1)

    def off(self, rank_bytes: int) -> int:
        """What ``rank_bytes`` may be off by: kernels repack and pad some formats, more so those of 4 bits."""
        if self.counted is None:
            return rank_bytes // 10
        quantized = self.counted.quantization.method != "none"
        share = Fraction(3, 100) if self.notes else Fraction(15, 1000) if quantized else Fraction(3, 1000)
        return int(rank_bytes * share) + 32 * MIB


def plan_weights(model: PlannedModel, options: PlanOptions, *, with_draft: bool = False) -> PlannedWeights:
    """The weights of ``model`` under ``options``, counted once for a model and what they depend on.

    Raises UnsupportedModel when neither files nor config tell them.
    """
    key = ("weights", options.quantization, options.language_model_only, with_draft)
    if key not in model.memo:
        model.memo[key] = _plan_weights(model, options, with_draft=with_draft)
    found = model.memo[key]
    assert isinstance(found, PlannedWeights)
    return found


def _plan_weights(model: PlannedModel, options: PlanOptions, *, with_draft: bool) -> PlannedWeights:
    config = dict(model.config)
    if options.language_model_only:
        config.pop("vision_config", None)
    text = text_config(config)
    stored = None if model.directory is None else stored_tensors(model.directory, model.spec.decoder_layers, text)
    try:
        counted = count_weights(config, model.spec, with_draft=with_draft, quantization=options.quantization)
    except UnsupportedModel:
        if stored is None:
            raise
        note = f"{model.spec.name}: weights are from the files; how ranks share them is guessed by the tensors' names"
        return PlannedWeights(
            config=config,
            text=text,
            counted=None,
            stored_bytes=sum(stored.values()),
            whole_bytes=sum(size for name, size in stored.items() if _WHOLE.search(name)),
            layers=model.spec.decoder_layers,
            notes=(note,),
        )
    notes = () if options.language_model_only else counted.notes
    if stored is None:
        return PlannedWeights(config=config, text=counted.text, counted=counted, notes=notes)
    held = sum(stored.values())
    plain = counted if options.quantization is None else count_weights(config, model.spec)
    implied = plain.file_bytes(model.spec.dtype or "bfloat16")
    scale = Fraction(held, implied)
    if abs(scale - 1) > _DISAGREE:
        notes = (
            *notes,
            f"the files hold {format_bytes(held)} of weights, the config implies {format_bytes(implied)}: the "
            "files are believed",
        )
    return PlannedWeights(
        config=config, text=counted.text, counted=counted, stored_bytes=held, scale=scale, notes=notes
    )


# ----------------------------------------------------------------------------------------------------------- the files


def stored_tensors(directory: Path, decoder_layers: int, text: Config) -> dict[str, int] | None:
    """Bytes of every tensor that is loaded, by name; ``None`` when the directory has no safetensors files.

    Raises ConfigError for a file that is damaged, or one that the index names and that is not there.
    """
    files = _files(directory)
    if not files:
        return None
    tied = bool(text.get("tie_word_embeddings"))
    found: dict[str, int] = {}
    for path in files:
        for name, size in _header_sizes(path):
            layer = _LAYER.search(name)
            is_draft = layer is not None and int(layer[1]) >= decoder_layers and "vision" not in name
            if not (_UNUSED.search(name) or is_draft or (tied and name.endswith("lm_head.weight"))):
                found[name] = size
    return found


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.is_file():
        return sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith(_OTHER_FILES))
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
        files = sorted({directory / str(name) for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is not a readable index of safetensors files ({error!r})") from error
    missing = [path.name for path in files if not path.is_file()]
    if len(missing) == len(files):
        return []  # only the index was downloaded
    if missing:
        raise ConfigError(
            f"{directory} lacks {len(missing)} of the {len(files)} weight files that its index names (first: "
            f"{missing[0]}); finish the download, or remove the others to count weights from config.json"
        )
    return files


def _header_sizes(path: Path) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every tensor of a safetensors file: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, path.stat().st_size - 8):
                raise ConfigError(f"{path} is not a safetensors file: its header would have {length} bytes")
            header: Any = json.loads(file.read(length))
        if not isinstance(header, Mapping):
            raise TypeError("no object")
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield str(name), int(end) - int(start)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file ({error!r})") from error
