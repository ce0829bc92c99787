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
    """Defaults are Llama's. ``qk_norm``: none, of one head, or of all heads together.

    ``norms`` of a layer; ``attention_bias`` names the field that switches biases of q, k and v (``out_bias``: of the
    output too) unless they are ``always``. ``gated`` feed-forward layers have three matrices, others two.
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


_LLAMA = Traits()
_QKV = Traits(qkv_bias=True, out_bias=False)
_NORMED = Traits(qk_norm="head")
_FOUR = Traits(norms=4)
_PLAIN_MLP = Traits(gated=False)

_TRAITS: dict[str, Traits] = {
    **dict.fromkeys(
        """llama mistral mistral3 ministral ministral3 mixtral granite granitemoe granitemoeshared phi3 internlm3
        smollm3 olmoe minimax_text minimax llama4_text deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 kimi_linear
        pangu_ultra_moe glm_moe_dsa deepseek_v4 nemotron-nas ernie4_5_moe mimo_v2 hyperclovax aria_text
        jamba bamba granitemoehybrid lfm2 lfm2_moe falcon_h1 nemotron_h deepseek_mtp""".split(),
        _LLAMA,
    ),
    "ernie4_5": Traits(tied=True),
    "mimo_v2_flash": _LLAMA,
    "minicpm": Traits(tied=True),
    **dict.fromkeys("qwen2 qwen2_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text mimo".split(), _QKV),
    **dict.fromkeys(
        """qwen3 qwen3_moe qwen3_vl_text qwen3_vl_moe_text qwen3_next qwen3_5_text qwen3_5_moe_text dots1
        hunyuan_v1_dense hunyuan_v1_moe step3p5 step3p7 exaone4 exaone_moe""".split(),
        _NORMED,
    ),
    "seed_oss": Traits(out_bias=False),
    "olmo": Traits(norms=0),
    "olmo2": Traits(qk_norm="width"),
    "olmo3": Traits(qk_norm="width"),
    "olmoe": Traits(qk_norm="width"),
    "minimax_m2": Traits(qk_norm="width"),
    "gemma": Traits(tied=True),
    "gemma2": Traits(norms=4, tied=True),
    "gemma3_text": Traits(norms=4, qk_norm="head", tied=True),
    "gemma4_text": Traits(norms=4, qk_norm="head", tied=True),
    "cohere": Traits(norms=1, tied=True),
    "cohere2": Traits(norms=1, tied=True),
    "glm": Traits(out_bias=False),
    "glm4": Traits(norms=4, out_bias=False),
    "glm4_moe": Traits(out_bias=False),
    "glm4v_text": Traits(norms=4, qkv_bias=True, out_bias=False),
    "glm4v_moe_text": Traits(out_bias=False),
    "glm4_moe_lite": _LLAMA,
    "chatglm": Traits(out_bias=False),
    "gpt_oss": Traits(qkv_bias=True),
    "phi": Traits(qkv_bias=True, norms=1, norm_bias=True, gated=False, mlp_bias=True, lm_head_bias=True),
    "phimoe": Traits(qkv_bias=True, norm_bias=True, lm_head_bias=True),
    "starcoder2": Traits(norm_bias=True, gated=False, tied=True),
    "nemotron": Traits(norm_bias=True, gated=False),
    "arcee": Traits(gated=False),
    "apertus": Traits(gated=False, qk_norm="head"),
    "stablelm": Traits(norm_bias=True, out_bias=False),
    "internlm2": _LLAMA,
    "baichuan": _LLAMA,
    "exaone": _LLAMA,
    "solar": _LLAMA,
    "orion": Traits(norm_bias=True),
    "gpt_neox": Traits(qkv_bias=True, norm_bias=True, gated=False, mlp_bias=True),
}


def traits_of(kind: str, name: str) -> Traits:
    """The traits of a model type. Raises UnsupportedModel for one whose weights are not counted."""
    found = _TRAITS.get(kind)
    if found is None:
        said = f"weights of the model type {kind!r} are" if kind else "the config does not say its model type, weights are"
        raise UnsupportedModel(
            f"{name}: {said} not counted from a config; give the directory with the safetensors files (their headers "
            "are read), or --kv-cache-memory-bytes"
        )
    return found
