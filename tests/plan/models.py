"""Small made-up models of every family that plans differ by."""

from __future__ import annotations

from typing import Any

from pdkv.models.families import spec_from_config
from pdkv.source import PlannedModel

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
WINDOWED = DENSE | {
    "layer_types": ["sliding_attention", "full_attention"] * 8,
    "sliding_window": 1024,
    "head_dim": 128,
}
LATENT = DENSE | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
STATES = DENSE | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "mamba_ssm_dtype": "float32",
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 4,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
CONFIGS = {"dense": DENSE, "windowed": WINDOWED, "latent": LATENT, "states": STATES}


def planned(name: str, **changes: Any) -> PlannedModel:
    """The model called ``name`` here, with fields of its config replaced."""
    config = CONFIGS[name] | changes
    return PlannedModel(spec_from_config(config, name=name), config)
