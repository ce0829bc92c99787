"""Bytes of weights, from a config: a list of matrices, a format for each, and the share of one rank.

`count_weights` reads a model once; the result answers for any division over ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pdkv.errors import UnsupportedModel
from pdkv.models.defaults import family, with_defaults
from pdkv.models.drafts import draft_layer_count
from pdkv.models.fields import Config, reading, text_config
from pdkv.models.spec import ModelSpec
from pdkv.models.weights.matrices import Division, Part
from pdkv.models.weights.model import model_parts
from pdkv.models.weights.per_rank import RankWeights, allocated, checkpoint_bytes, part_bytes
from pdkv.models.weights.quantization import Quantization, read_quantization
from pdkv.models.weights.rope import rope_bytes
from pdkv.models.weights.towers import tower_note

__all__ = ["Division", "RankWeights", "Weights", "count_weights"]

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Weights:
    """All matrices of a model and their formats. ``draft_layers`` are in the last of ``parts`` when there are any.

    ``notes`` say what the config leaves out, so that it is not counted.
    """

    name: str
    parts: tuple[Part, ...]
    quantization: Quantization
    text: Config
    notes: tuple[str, ...] = ()
    _sizes: dict[tuple[Division, str], tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def params(self) -> int:
        """Parameters, tied embeddings counted once, without draft layers."""
        return sum(matrix.params for part in self.parts if part.kind != "draft" for matrix in part.matrices)

    def file_bytes(self, dtype: str) -> int:
        """What the whole model takes as stored, what is not quantized in ``dtype``; without draft layers."""
        key = (Division(), f"files in {dtype}")
        if key not in self._sizes:
            kept = (part for part in self.parts if part.kind != "draft")
            self._sizes[key] = (checkpoint_bytes(kept, self.quantization, dtype),)
        return self._sizes[key][0]

    def on_rank(
        self, division: Division, dtype: str, *, layers: range | None = None, first: bool = True, last: bool = True
    ) -> RankWeights:
        """The weights of a rank of the pipeline stage that has ``layers`` (``None``: all).

        ``first`` and ``last`` say whether embeddings and output layer are on it. A stage that is last and not first
        keeps embeddings of its own for a tied output layer, and for draft layers.
        """
        tied = not any(matrix.name == "lm_head" for part in self.parts for matrix in part.matrices)
        drafts = any(part.kind == "draft" for part in self.parts)
        total = 0
        for part, size in zip(self.parts, self._part_sizes(division, dtype), strict=True):
            if part.kind == "layer":
                total += size if layers is None or part.layer in layers else 0
            elif part.kind == "before" and first:
                total += size
            elif part.kind == "before" and last and (tied or drafts):
                embeddings = tuple(matrix for matrix in part.matrices if matrix.name == "embed_tokens")
                total += part_bytes(Part("before", embeddings), self.quantization, division, dtype)
            elif part.kind in ("after", "draft") and last:
                total += size
        rope = allocated(rope_bytes(self.text, _BYTES[dtype]))
        return RankWeights(total + rope, rope)

    def _part_sizes(self, division: Division, dtype: str) -> tuple[int, ...]:
        """Bytes of every part on a rank, counted once: a comparison asks for the same divisions again and again."""
        key = (division, dtype)
        if key not in self._sizes:
            self._sizes[key] = tuple(part_bytes(part, self.quantization, division, dtype) for part in self.parts)
        return self._sizes[key]


def count_weights(
    config: Config, spec: ModelSpec, *, with_draft: bool = False, quantization: str | None = None
) -> Weights:
    """Count the weights of the model that ``config`` describes. ``quantization`` is what ``--quantization`` asks for.

    Raises UnsupportedModel when the family or the format is not counted, ConfigError when a field is missing.
    """
    with reading(spec.name):
        text = text_config(config)
        text, _ = with_defaults(text, family(config, text))
        parts = model_parts(config, spec, draft_layers=draft_layer_count(text) if with_draft else 0)
        formats = read_quantization(config, text, spec.name, asked=quantization)
    _refuse_unsaid(spec.name, formats)
    return Weights(spec.name, parts, formats, text, _notes(config, spec.architecture))


def _notes(config: Config, architecture: str) -> tuple[str, ...]:
    note = tower_note(config)
    multimodal = architecture.endswith(("ForConditionalGeneration", "VLForCausalLM"))
    if multimodal and not any(config.get(part) for part in ("vision_config", "audio_config")):
        note = f"{architecture} has a vision tower, which the config does not describe: it is not counted"
    return () if note is None else (note,)


def _refuse_unsaid(name: str, formats: Quantization) -> None:
    """A name that promises a format which the config does not have: weights in 16 bits would be far too much."""
    found = re.search(
        r"(?<![a-z0-9])(nvfp4|mxfp4|fp8|awq|gptq|int4|int8|w4a16|w8a8|4bit|bnb)(?![a-z0-9])", name.lower()
    )
    if found is not None and formats.method == "none":
        raise UnsupportedModel(
            f"{name}: its name says {found[1]}, but the config has no quantization_config, so its weights are not "
            "counted; give the directory (with hf_quant_config.json, or the safetensors files), or --quantization"
        )
