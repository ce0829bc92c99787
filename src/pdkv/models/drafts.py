"""The caches of the multi-token-prediction layers that come with a checkpoint (vLLM 0.32, models/*_mtp.py).

They stand behind the decoder layers and are numbered on from them. Per-layer lists that are long enough say what they
keep (Step-3.5: ``layer_types``; DeepSeek-V4: ``compress_ratios``, whose last entry makes it a window); MiMo-V2's is a
window; every other model's is like its last layer with attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdkv.errors import ConfigError
from pdkv.models.fields import Config, first
from pdkv.models.latent import is_v4, v4_layer
from pdkv.models.spec import LayerKind, LayerSpec

# vLLM serves the first of MiMo-V2's layers only (config/speculative.py).
_ONE_WINDOW = "mimo_v2"
_MOST_DRAFTS = 16


def draft_layer_count(text: Config) -> int:
    """Multi-token-prediction layers that come with the checkpoint, 0 when there are none.

    Raises ConfigError for more than any model has.
    """
    value = first(text, ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"))
    if not isinstance(value, int) or value < 1:
        return 0
    if value > _MOST_DRAFTS:
        raise ConfigError(f"{value} multi-token-prediction layers; no model has more than {_MOST_DRAFTS}")
    return value


def draft_layers(text: Config, layers: Sequence[LayerSpec], count: int, *, name: str) -> tuple[LayerSpec, ...]:
    """What they keep, behind ``count`` decoder layers that keep ``layers``; empty when there are none.

    A config that does not count them may still be served with them: one is taken then.
    """
    attending = [layer for layer in layers if layer.state is None]
    if not attending:
        return ()
    if str(text.get("model_type", "")).startswith(_ONE_WINDOW):
        return _like(_last(attending, LayerKind.SLIDING_WINDOW), count)
    found: list[LayerSpec] = []
    for index in range(count, count + max(1, draft_layer_count(text))):
        if is_v4(text):
            # Beyond the list: nothing but a window (models/deepseek_v4/attention.py).
            ratios = [*text["compress_ratios"], *[0] * (index + 1 - len(text["compress_ratios"]))]
            found += v4_layer({**text, "compress_ratios": ratios}, index, name=name)
        else:
            found += _like(_last(attending, _stated_kind(text, index)), index)
    return tuple(found)


def _stated_kind(text: Config, index: int) -> LayerKind | None:
    kinds = text.get("layer_types")
    if not isinstance(kinds, list | tuple) or index >= len(kinds):
        return None
    named = {"sliding_attention": LayerKind.SLIDING_WINDOW, "full_attention": LayerKind.FULL_ATTENTION}
    return named.get(str(kinds[index]))


def _last(layers: Sequence[LayerSpec], kind: LayerKind | None) -> list[LayerSpec]:
    """The caches of the last layer of ``kind``; of the last one of any kind when there is none."""
    chosen = [layer for layer in layers if layer.kind is kind] or layers
    last = max(layer.layer for layer in chosen)
    return [layer for layer in layers if layer.layer == last]


def _like(caches: Sequence[LayerSpec], index: int) -> tuple[LayerSpec, ...]:
    return tuple(replace(cache, layer=index) for cache in caches)
