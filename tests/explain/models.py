"""Models of public logs: only the fields that size KV, as the models' own config.json state them."""

from __future__ import annotations

from pdkv.models.families import spec_from_config
from pdkv.models.spec import ModelSpec


def llama_8b() -> ModelSpec:
    """32 layers of 8 KV heads of 128: Llama 3.1 8B."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    return spec_from_config(config, name="llama-8b")


def llama_3b() -> ModelSpec:
    """28 layers of 8 KV heads of 128: Llama 3.2 3B."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 3072,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    return spec_from_config(config, name="llama-3b")


def gemma_12b() -> ModelSpec:
    """40 layers with a window of 1,024 and 8 with full attention, 8 KV heads of 256: Gemma 3 12B."""
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "hidden_size": 3840,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    return spec_from_config(config, name="gemma-12b")
