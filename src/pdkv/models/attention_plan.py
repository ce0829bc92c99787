"""Which attention each decoder layer of a config has: full, a sliding window, or chunks.

A config says it per layer (``layer_types``), by a pattern (``sliding_window_pattern``, ``no_rope_layers`` ...), or not
at all: then a family's own default holds, which is in its code rather than in its config. Those defaults are the tables
below. A window without any of this is on every layer, as in vLLM (engine/arg_utils.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.models.fields import Config, first, positive, strings
from pdkv.models.recurrent import NOTHING_TYPES, STATE_TYPES
from pdkv.models.spec import LayerKind

FULL_TYPES = frozenset({"full_attention", "attention", "global_attention", "global", "full", "hybrid"})
SLIDING_TYPES = frozenset({"sliding_attention", "local_attention", "sliding_window", "swa"})
NO_ATTENTION_TYPES = STATE_TYPES | NOTHING_TYPES
CHUNKED_TYPES = frozenset({"chunked_attention"})

# Of every so many layers the last has full attention, the others a window, unless the config says otherwise.
_WINDOW_PERIOD = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n": 5,
    "gemma3n_text": 5,
    "gemma4": 6,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "exaone_moe": 4,
    "cohere2_moe": 4,
    "vaultgemma": 2,
    "olmo3": 4,
}
# Configs of these carry a window that holds only when use_sliding_window says so.
_WINDOW_IS_OPTIONAL = ("qwen2", "qwen3", "mimo", "smollm3", "dots1")
_WINDOW_ON_ALL_OR_NONE = ("qwen2",)
# Command models see one token more than their window says (vLLM, commandr.py).
_WINDOW_PLUS_ONE = ("cohere2",)
_CHUNKED_FAMILIES = ("llama4",)
# The last layer of these has full attention whatever the list says.
_LAST_IS_FULL = ("gemma4",)


@dataclass(frozen=True, slots=True)
class Reach:
    """The attention of one layer; ``tokens`` is its window or chunk, ``None`` for full attention."""

    kind: LayerKind
    tokens: int | None = None


FULL = Reach(LayerKind.FULL_ATTENTION)


def attention_plan(text: Config, count: int, *, name: str) -> tuple[list[Reach], tuple[str, ...]]:
    """The attention of each of ``count`` layers, and warnings about what was assumed.

    Layers that are no attention (a state, a feed-forward block) count as full here: their reader does not ask. Raises
    UnsupportedModel for a kind of layer that is not known, ConfigError for a list of the wrong length.
    """
    family = str(text.get("model_type") or "")
    window, chunk = _window(text, family), text.get("attention_chunk_size")
    if text.get("hybrid_layer_pattern") is not None and text.get("sliding_window_size"):
        flags = _sized(text["hybrid_layer_pattern"], count, "hybrid_layer_pattern", name)
        sliding = Reach(LayerKind.SLIDING_WINDOW, positive(text, ("sliding_window_size",), name))
        return [sliding if flag == 1 else FULL for flag in flags], ()
    types = strings(text, "layer_types")
    if types and not _all_other(types):
        plan = [_reach_of_type(kind, window, chunk, name) for kind in _sized(list(types), count, "layer_types", name)]
    elif chunk and family.startswith(_CHUNKED_FAMILIES):
        plan = [
            Reach(LayerKind.CHUNKED_LOCAL, positive(text, ("attention_chunk_size",), name)) if rope else FULL
            for rope in _rope_layers(text, count, name)
        ]
    elif chunk:
        raise UnsupportedModel(
            f"{name}: attention_chunk_size {chunk} in a model of type {family or 'unknown'}: which layers use chunks "
            "is not in the config (layer_types would say)"
        )
    elif window is None:
        return [FULL] * count, ()
    else:
        return _by_pattern(text, family, count, window, name)
    if plan and family.startswith(_LAST_IS_FULL):
        plan[-1] = FULL
    return plan, ()


def _window(text: Config, family: str) -> int | None:
    window = text.get("sliding_window")
    if not isinstance(window, int) or window < 1:
        return None
    optional = family.startswith(_WINDOW_IS_OPTIONAL)
    if not text.get("use_sliding_window", not optional):
        return None
    return window + 1 if family.startswith(_WINDOW_PLUS_ONE) else window


def _all_other(types: tuple[str, ...]) -> bool:
    """Whether a list speaks of states and blocks only, so that it says nothing about attention."""
    return all(kind in NO_ATTENTION_TYPES for kind in types)


def _reach_of_type(kind: str, window: int | None, chunk: Any, name: str) -> Reach:
    if kind in SLIDING_TYPES:
        return FULL if window is None else Reach(LayerKind.SLIDING_WINDOW, window)
    if kind in CHUNKED_TYPES:
        if not isinstance(chunk, int) or chunk < 1:
            raise ConfigError(f"{name}: layer_types has chunked_attention, but attention_chunk_size is {chunk!r}")
        return Reach(LayerKind.CHUNKED_LOCAL, chunk)
    if kind not in FULL_TYPES and kind not in NO_ATTENTION_TYPES:
        raise UnsupportedModel(f"{name}: a layer of type {kind!r} (layer_types) is not sized")
    return FULL


def _by_pattern(text: Config, family: str, count: int, window: int, name: str) -> tuple[list[Reach], tuple[str, ...]]:
    """Layers with a window in a config that has no list of layer types."""
    sliding = Reach(LayerKind.SLIDING_WINDOW, window)
    pattern = first(text, ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"))
    if pattern is None and family.startswith("smollm3"):
        return [FULL if rope else sliding for rope in _rope_layers(text, count, name)], ()
    if pattern is None and text.get("max_window_layers") is not None and family.startswith(_WINDOW_IS_OPTIONAL):
        start = int(text["max_window_layers"])
        if start < count and family.startswith(_WINDOW_ON_ALL_OR_NONE):
            raise UnsupportedModel(
                f"{name}: a sliding window on layers from {start} on (max_window_layers): vLLM serves such models "
                "with a window on all layers or on none"
            )
        return [sliding if index >= start else FULL for index in range(count)], ()
    if pattern is None:
        pattern = _WINDOW_PERIOD.get(family)
    if isinstance(pattern, str):
        letters = pattern.upper()
        if not letters or set(letters) - {"L", "G"}:
            raise ConfigError(f"{name}: sliding_window_pattern is {pattern!r}; as a word it is made of L and G")
        return [sliding if letters[index % len(letters)] == "L" else FULL for index in range(count)], ()
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        if pattern < 1:
            raise ConfigError(f"{name}: sliding_window_pattern is {pattern}; it must be at least 1")
        return [sliding if (index + 1) % pattern else FULL for index in range(count)], ()
    known = family in ("mistral", "mixtral", "phi3", "phimoe", "starcoder2", "ministral", "step3p5", "step3p7")
    warning = (
        f"a sliding window of {window} tokens and no word about the layers (layer_types): taken to be on all of them, "
        "as vLLM does unless the model's own code says otherwise"
    )
    return [sliding] * count, () if known else (warning,)


def _rope_layers(text: Config, count: int, name: str) -> list[bool]:
    """Which layers use rotary positions: a list in the config, else all but every fourth."""
    listed = text.get("no_rope_layers")
    if listed:
        return [bool(flag) for flag in _sized(listed, count, "no_rope_layers", name)]
    interval = int(text.get("no_rope_layer_interval") or 4)
    return [(index + 1) % interval != 0 for index in range(count)]


def _sized(values: Any, count: int, key: str, name: str) -> list[Any]:
    """The first ``count`` of a per-layer list: some configs list their MTP layers too."""
    if not isinstance(values, list | tuple) or len(values) < count:
        length = len(values) if isinstance(values, list | tuple) else repr(values)
        raise ConfigError(f"{name}: {key} has {length} entries for {count} layers")
    return list(values[:count])
