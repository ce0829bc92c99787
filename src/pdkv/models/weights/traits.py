"""What a family's code does that its config does not say: biases, norms, gates of its feed-forward layers.

Sources: the model classes of transformers 5 and of vLLM 0.32; `tests/models/test_weights.py` counts the parameters of
transformers' own modules and compares. A family that is not here is refused: a wrong number would be worse than none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdkv.errors import UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Defaults are Llama's. ``norms`` are those of a layer; ``qk_norm``: none, of one head, or of all heads together.

    ``qkv_bias`` holds whatever the config says, else a field of the config switches it; ``out_bias`` says whether the
    output's bias goes with it. ``gated`` feed-forward layers have three matrices, others two. ``tied`` is what holds
    when the config does not say whether the output layer is the embeddings once more.
    """

    qkv_bias: bool = False
    out_bias: bool = True
    qk_norm: Literal["", "head", "width"] = ""
    norms: int = 2
    norm_bias: bool = False
    gated: bool = True
    mlp_bias: bool = False
    lm_head_bias: bool = False
    tied: bool = False


_OF_LLAMA = """
    aria_text baichuan bamba deepseek_mtp deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 ernie4_5_moe exaone falcon_h1
    glm4_moe_lite glm_moe_dsa granite granitemoe granitemoehybrid granitemoeshared hyperclovax internlm2 internlm3
    jamba kimi_k2 kimi_linear llama llama4_text mimo_v2 mimo_v2_flash ministral ministral3 mistral mistral3 mixtral
    nemotron-nas nemotron_h pangu_ultra_moe phi3 smollm3 solar
"""
_OF_QWEN3 = """
    dots1 exaone4 exaone_moe hunyuan_v1_dense hunyuan_v1_moe lfm2 lfm2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next qwen3_vl_moe_text qwen3_vl_text step3p5 step3p7
"""
_OF_QWEN2 = "mimo qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text"

_TRAITS: dict[str, Traits] = {
    **dict.fromkeys(_OF_LLAMA.split(), Traits()),
    **dict.fromkeys(_OF_QWEN2.split(), Traits(qkv_bias=True, out_bias=False)),
    **dict.fromkeys(_OF_QWEN3.split(), Traits(qk_norm="head")),
    **dict.fromkeys(("chatglm", "glm", "glm4_moe", "glm4v_moe_text", "seed_oss"), Traits(out_bias=False)),
    **dict.fromkeys(("minimax_m2", "olmo2", "olmo3", "olmoe"), Traits(qk_norm="width")),
    **dict.fromkeys(("ernie4_5", "gemma", "minicpm"), Traits(tied=True)),
    **dict.fromkeys(("gemma3_text", "gemma4_text"), Traits(norms=4, qk_norm="head", tied=True)),
    **dict.fromkeys(("cohere", "cohere2"), Traits(norms=1, tied=True)),
    "apertus": Traits(gated=False, qk_norm="head"),
    "arcee": Traits(gated=False),
    "gemma2": Traits(norms=4, tied=True),
    "glm4": Traits(norms=4, out_bias=False),
    "glm4v_text": Traits(norms=4, qkv_bias=True, out_bias=False),
    "gpt_neox": Traits(qkv_bias=True, norm_bias=True, gated=False, mlp_bias=True),
    "gpt_oss": Traits(qkv_bias=True),
    "nemotron": Traits(norm_bias=True, gated=False),
    "olmo": Traits(norms=0),
    "orion": Traits(norm_bias=True),
    "phi": Traits(qkv_bias=True, norms=1, norm_bias=True, gated=False, mlp_bias=True, lm_head_bias=True),
    "phimoe": Traits(norm_bias=True),
    "stablelm": Traits(norm_bias=True, out_bias=False),
    "starcoder2": Traits(norm_bias=True, gated=False, tied=True),
}


def traits_of(kind: str, name: str) -> Traits:
    """The traits of a model type. Raises UnsupportedModel for one whose weights are not counted."""
    found = _TRAITS.get(kind)
    if found is None:
        said = (
            f"weights of the model type {kind!r} are" if kind else "the config does not say its model type, weights are"
        )
        raise UnsupportedModel(
            f"{name}: {said} not counted from a config; give the directory with the safetensors files (their headers "
            "are read), or --kv-cache-memory-bytes"
        )
    return found
