"""The KV dtype catalogue: what one element of K or V takes, and which types pack scales beside it (spec section 1)."""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError

# Element bytes of the types that a model computes in.
MODEL_DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4}

ELEMENT_BYTES = {
    **MODEL_DTYPES,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "int32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes of the elements that tensors of a cache are made of."""

# Value of --kv-cache-dtype -> (element it is stored in, quantization mode). fp8 keeps its per-tensor scales in the
# layers' parameters: nothing of them is in the cache.
_VALUES = {
    "float16": ("float16", "NONE"),
    "bfloat16": ("bfloat16", "NONE"),
    "float32": ("float32", "NONE"),
    "fp8": ("uint8", "FP8_PER_TENSOR"),
    "fp8_e4m3": ("uint8", "FP8_PER_TENSOR"),
    "fp8_e5m2": ("uint8", "FP8_PER_TENSOR"),
    "fp8_inc": ("float8_e4m3fn", "FP8_PER_TENSOR"),
    "int8_per_token_head": ("int8", "INT8_PER_TOKEN_HEAD"),
    "fp8_per_token_head": ("uint8", "FP8_PER_TOKEN_HEAD"),
    "int4_per_token_head": ("uint8", "INT4_PER_TOKEN_HEAD"),
    "nvfp4": ("uint8", "NVFP4"),
    "nvfp4_4over6": ("uint8", "NVFP4"),
    "turboquant_k8v4": ("uint8", "TURBOQUANT_K8V4"),
    "turboquant_4bit_nc": ("uint8", "TURBOQUANT_4BIT_NC"),
    "turboquant_k3v4_nc": ("uint8", "TURBOQUANT_K3V4_NC"),
    "turboquant_3bit_nc": ("uint8", "TURBOQUANT_3BIT_NC"),
    "ultraquant_4bit": ("uint8", "ULTRAQUANT_4BIT"),
    "fp8_ds_mla": ("uint8", "FP8_PER_TENSOR"),
    "nvfp4_ds_mla": ("uint8", "NVFP4_DS_MLA"),
}

KV_DTYPES = ("auto", *_VALUES)
"""Every value of ``--kv-cache-dtype``."""

DS_MLA_RECORD_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of one token's latent in the packed records of sparse MLA (spec section 3.4)."""

# Bits of K and of V in the turboquant types, and the bytes beside them (a norm of K; scale and zero point of V).
_TURBOQUANT = {
    "TURBOQUANT_K8V4": (8, 0, 4, 4),
    "TURBOQUANT_4BIT_NC": (4, 2, 4, 4),
    "TURBOQUANT_K3V4_NC": (3, 2, 4, 4),
    "TURBOQUANT_3BIT_NC": (3, 2, 3, 4),
}


@dataclass(frozen=True, slots=True)
class KvDtype:
    """How KV is stored: ``name`` is a value of ``--kv-cache-dtype``, never ``auto``.

    ``element_bytes`` are those of the element that tensors are made of, called ``element``; ``quant`` is vLLM's name of
    the quantization mode.
    """

    name: str
    element_bytes: int
    element: str
    quant: str = "NONE"

    def cell_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Bytes of K and V of one token of one KV head, when the backend packs as the type wants (section 1).

        ``head_dim_v`` of 0 is a latent. Raises ConfigError for a head size that the type cannot pack.
        """
        if self.name in DS_MLA_RECORD_BYTES:
            return DS_MLA_RECORD_BYTES[self.name]
        packed = packed_cell(self.quant, head_dim, head_dim_v)
        if packed is None:
            return (head_dim + head_dim_v) * self.element_bytes
        slots, content = packed
        return slots * content


def packed_cell(quant: str, head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """(head slots per KV head, bytes per slot) of a packed type; ``None`` when K and V are stored as they are.

    Raises ConfigError for head sizes that the type does not support.
    """
    if quant.endswith("_PER_TOKEN_HEAD"):
        # One float32 scale for K and one for V, behind the codes of each head.
        if quant.startswith("INT4"):
            head_dim, head_dim_v = head_dim // 2, head_dim_v // 2
        return 1, head_dim + head_dim_v + 8
    if quant == "NVFP4":
        if head_dim != head_dim_v:
            raise ConfigError(f"nvfp4 KV needs equal head sizes for K and V, not {head_dim} and {head_dim_v}")
        return 2, head_dim // 2 + head_dim // 16
    if quant in _TURBOQUANT:
        k_bits, k_beside, v_bits, v_beside = _TURBOQUANT[quant]
        size = -(-k_bits * head_dim // 8) + k_beside + -(-v_bits * head_dim // 8) + v_beside
        return 1, size + size % 2
    if quant == "ULTRAQUANT_4BIT":
        return 1, 2 * (head_dim // 2 + head_dim // 32)
    return None


def kv_dtype(name: str) -> KvDtype:
    """The type called ``name``. Raises ConfigError when there is none."""
    if name not in _VALUES:
        raise ConfigError(f"--kv-cache-dtype {name}: there is no such type; there are: {', '.join(KV_DTYPES)}")
    element, quant = _VALUES[name]
    return KvDtype(name, ELEMENT_BYTES[element], element, quant)


def resolve_kv_dtype(value: str, model_dtype: str, checkpoint: str | None = None) -> KvDtype:
    """The storage type for ``--kv-cache-dtype VALUE`` of a model that computes in ``model_dtype``.

    ``auto`` is what the checkpoint asks for, else the model's own type; an explicit value always wins. What a model
    family or a backend makes of it on top is `backends.canonical_kv_dtype`. Raises ConfigError for an unknown value.
    """
    if value != "auto":
        return kv_dtype(value)
    name = checkpoint or model_dtype
    if name not in _VALUES:
        raise ConfigError(
            f"the model computes in {name}; KV is sized for {', '.join(MODEL_DTYPES)}: choose with --dtype"
        )
    return kv_dtype(name)
