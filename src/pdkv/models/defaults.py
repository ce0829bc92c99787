"""What a family's own code takes when its config.json leaves a field out, and which families were looked at.

A config written by hand, or one that only states what differs, would be misread without these. Every use is warned of.
"""

from __future__ import annotations

from typing import Any

from pdkv.models.fields import Config

# model_type -> fields (defaults of the configuration classes in transformers 5).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "afmoe": {"head_dim": 128, "sliding_window": 1024, "global_attn_every_n_layers": 4},
    "cohere2": {"sliding_window": 4096},
    "cohere2_moe": {"head_dim": 128, "sliding_window": 4096},
    "ernie4_5": {"head_dim": 128},
    "exaone4": {"sliding_window": 4096},
    "exaone_moe": {"sliding_window": 4096},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "head_dim": 256,
        "sliding_window": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    },
    "gemma3n_text": {"head_dim": 256, "sliding_window": 512},
    "gemma4_text": {"head_dim": 256, "global_head_dim": 512, "sliding_window": 512},
    "glm": {"head_dim": 128},
    "glm4": {"head_dim": 128},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "llama4_text": {"head_dim": 128, "attention_chunk_size": 8192},
    "minimax_m2": {"head_dim": 128},
    "ministral": {"sliding_window": 4096},
    "ministral3": {"head_dim": 128},
    "mistral": {"sliding_window": 4096},
    "nemotron_h": {"head_dim": 128},
    "olmo3": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128},
    "qwen3_5_moe_text": {"head_dim": 256},
    "qwen3_5_text": {"head_dim": 256},
    "qwen3_next": {"head_dim": 256},
    "seed_oss": {"head_dim": 128},
    "solar_open": {"head_dim": 128},
}
# Another name of a field, under which it may be there all the same.
_SAME = {"head_dim": ("attention_head_dim", "kv_channels", "hidden_size_per_head")}

_PLAIN = """
    apertus arcee aria_text baichuan bamba bloom chatglm cohere dbrx dots1 ernie4_5_moe exaone falcon falcon_h1
    falcon_mamba glm4_moe glm4v_text glm4v_moe_text gpt2 gpt_bigcode gpt_neox gptj granite granitemoe granitemoehybrid
    granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hyperclovax internlm2 internlm3 jais jamba lfm2 lfm2_moe llama
    mamba mamba2 mimo mimo_v2 mimo_v2_flash minicpm mixtral mpt nemotron nemotron-nas olmo olmo2 olmoe opt orion
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3_moe qwen3_vl_text
    qwen3_vl_moe_text smollm3 solar stablelm starcoder2 step3p5 step3p7 vaultgemma zamba2 minicpm3
"""
_KNOWN = frozenset({*_PLAIN.split(), *_DEFAULTS})

UNREAD = {
    "axk2": "sparse attention of its own kind",
    "bailing_hybrid": "linear attention in groups of layers",
    "deepseek_v41": "the records of DeepSeek-V4.1",
    "dots3_note": "latents with sliding windows",
    "glm5_next": "an indexer that pools keys",
    "hy_v4": "sparse latents of its own kind",
    "inkling": "attention over convolved keys",
    "longcat_flash": "two attention blocks in every layer",
    "minimax_m3": "an indexer of its own kind",
    "qwen4_exp": "sparse attention of its own kind",
    "recurrent_gemma": "a recurrent layer of the RG-LRU kind",
    "rwkv": "a recurrent state of its own kind",
    "xlstm": "a recurrent state of its own kind",
}
"""Families (model types that begin so) whose code keeps KV in a way that their fields do not show."""


def family(config: Config, text: Config) -> str:
    """The model type of the language model; from the architecture's name when the config has none; else empty."""
    stated = text.get("model_type") or config.get("model_type")
    if stated:
        return str(stated)
    architectures = text.get("architectures") or config.get("architectures") or [""]
    name = str(architectures[0]).removesuffix("LMHeadModel").split("For")[0].lower()
    return next((known for known in sorted(_KNOWN) if known.replace("_", "") == name), "")


def with_defaults(text: Config, kind: str) -> tuple[Config, tuple[str, ...]]:
    """``text`` with what its family takes for fields that are absent (a null is an answer), and a warning for each."""
    added = {
        key: value
        for key, value in _DEFAULTS.get(kind, {}).items()
        if key not in text and not any(text.get(other) for other in _SAME.get(key, ()))
    }
    if "layer_types" in text or "sliding_window_pattern" in text:
        added.pop("global_attn_every_n_layers", None)
    warnings = tuple(f"{key} is not in the config; {value} is taken, as {kind} does" for key, value in added.items())
    return {**text, "model_type": kind, **added}, warnings


def plain_attention_warning(kind: str) -> tuple[str, ...]:
    """A warning for a family that nobody looked at: its fields are read, its code may do something else."""
    if kind in _KNOWN:
        return ()
    said = f"the model type {kind!r} is not known here" if kind else "the config does not say its model type"
    return (f"{said}: its fields are read, and its code may keep KV in another way",)
