"""Latent attention: one vector a token instead of K and V. Dense (DeepSeek-V3), sparse with an indexer (V3.2, GLM-5),
and compressed (DeepSeek-V4)."""

from __future__ import annotations

from pdkv.errors import ConfigError
from pdkv.models.fields import Config, optional, positive
from pdkv.models.spec import LayerKind, LayerSpec, Record

# The types for which vLLM 0.32 takes the latent path (model_arch_config_convertor.py, is_deepseek_mla).
_KNOWN_FAMILIES = frozenset(
    {
        "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_mtp",
        "glm_moe_dsa", "glm4_moe_lite", "kimi_k2", "kimi_linear", "pangu_ultra_moe",
    }
)  # fmt: skip
# These project through a latent too, but keep K and V of every head.
_EXPANDING = ("minicpm3",)
# One scale of four bytes for so many indexer elements.
_INDEXER_SCALE_GROUP = 128


def is_latent(text: Config) -> bool:
    """Whether attention keeps a latent."""
    return (text.get("kv_lora_rank") is not None and text.get("model_type") not in _EXPANDING) or is_v4(text)


def is_v4(text: Config) -> bool:
    """Whether the config is of DeepSeek-V4's kind: its layers compress the latents of several tokens."""
    return bool(text.get("compress_ratios"))


def latent_warnings(text: Config) -> tuple[str, ...]:
    """What a person should know about reading this config as latent attention."""
    family = str(text.get("model_type") or "unknown")
    if family in _KNOWN_FAMILIES:
        return ()
    return (f"kv_lora_rank in a model of type {family}: read as latent attention, which vLLM does for types it lists",)


def latent_layer(text: Config, index: int, *, name: str) -> list[LayerSpec]:
    """The caches of one latent-attention layer, indexer first."""
    head = positive(text, ("kv_lora_rank",), name) + optional(text, ("qk_rope_head_dim",), name, 0)
    sparse = text.get("index_topk") is not None
    leads = sparse and not _shares_index(text, index)
    found = [_indexer(text, index, name)] if leads else []
    record = Record.DEEPSEEK_SPARSE if sparse else Record.PLAIN
    found.append(LayerSpec(LayerKind.MLA, 1, head, 0, layer=index, record=record, replicated=True, leads_index=leads))
    return found


def _shares_index(text: Config, index: int) -> bool:
    """Whether a sparse layer reuses the tokens that an earlier layer's indexer chose, so that it has no indexer."""
    pattern = text.get("index_topk_pattern")
    if pattern is not None:
        return index < len(pattern) and pattern[index] == "S"
    every = int(text.get("index_topk_freq") or 1)
    offset = int(2 if text.get("index_skip_topk_offset") is None else text["index_skip_topk_offset"])
    return max(index - offset + 1, 0) % every != 0


def _indexer_bytes(text: Config, name: str) -> int:
    head = positive(text, ("index_head_dim",), name)
    return head + head // _INDEXER_SCALE_GROUP * 4


def _indexer(text: Config, index: int, name: str) -> LayerSpec:
    size = _indexer_bytes(text, name)
    return LayerSpec(LayerKind.MLA, 1, size, 0, layer=index, part="indexer", record=Record.INDEXER, replicated=True)


# ---------------------------------------------------------------------------------------------------- DeepSeek-V4

# Tokens per block of the compressors' states, chosen by vLLM so that their pages match those of the keys.
_COMPRESSOR_BLOCK = {4: 4, 128: 8}
_V4_WINDOW_BLOCK = 64


def v4_layer(text: Config, index: int, *, name: str) -> list[LayerSpec]:
    """The caches of one DeepSeek-V4 layer, in vLLM's order: indexer and its state, window, compressed keys, state."""
    head = positive(text, ("head_dim",), name)
    ratios = text["compress_ratios"]
    if index >= len(ratios):
        raise ConfigError(f"{name}: compress_ratios has {len(ratios)} entries, and there is a layer {index}")
    ratio = max(1, int(ratios[index]))
    if ratio not in (1, *_COMPRESSOR_BLOCK):
        raise ConfigError(f"{name}: compress_ratios[{index}] is {ratio}; known are 0, 1, 4 and 128")
    found = []
    if ratio == 4:
        index_head = positive(text, ("index_head_dim",), name)
        found.append(
            LayerSpec(
                LayerKind.MLA, 1, _indexer_bytes(text, name), 0,
                layer=index, part="indexer", record=Record.V4_INDEXER, replicated=True, tokens_per_state=ratio,
            )
        )  # fmt: skip
        found.append(_compressor(index_head, ratio, index, "indexer.state"))
    found.append(
        LayerSpec(
            LayerKind.SLIDING_WINDOW_MLA, 1, head, 0, reach=positive(text, ("sliding_window",), name),
            layer=index, part="window", record=Record.V4_WINDOW, replicated=True, fixed_block=_V4_WINDOW_BLOCK,
        )
    )  # fmt: skip
    if ratio > 1:
        found.append(
            LayerSpec(
                LayerKind.MLA, 1, head, 0,
                layer=index, record=Record.V4_COMPRESSED, replicated=True, tokens_per_state=ratio,
            )
        )  # fmt: skip
        found.append(_compressor(head, ratio, index, "state"))
    return found


def _compressor(head: int, ratio: int, index: int, part: str) -> LayerSpec:
    """Keys and scores of the open group; at ratio 4 groups overlap, so that two are kept."""
    overlap = 2 if ratio == 4 else 1
    return LayerSpec(
        LayerKind.SLIDING_WINDOW_MLA, 1, 2 * overlap * head, 0, reach=overlap * ratio,
        layer=index, part=part, record=Record.V4_COMPRESSOR, replicated=True, fixed_block=_COMPRESSOR_BLOCK[ratio],
    )  # fmt: skip
