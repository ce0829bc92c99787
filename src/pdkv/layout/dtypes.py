"""The KV dtype catalogue: what one element of K or V takes (spec kv-layout, section 1)."""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError

# Element bytes of the types that a model computes in.
MODEL_DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4}

# fp8 keeps its per-tensor scales in the layers' parameters: nothing of them is in the cache.
_DENSE = {"float16": 2, "bfloat16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}

# vLLM's values that pack scales or codes beside the elements; each needs its own cell formula.
_PACKED = (
    "int8_per_token_head",
    "fp8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
    "nvfp4_4over6",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "ultraquant_4bit",
    "fp8_ds_mla",
    "nvfp4_ds_mla",
)

KV_DTYPES = ("auto", *_DENSE)
"""Every value of ``--kv-cache-dtype`` that is sized."""


@dataclass(frozen=True, slots=True)
class KvDtype:
    """How KV elements are stored: ``name`` is never ``auto``; a dense type takes ``element_bytes`` per element."""

    name: str
    element_bytes: int

    def cell_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Bytes of K and V of one token of one KV head."""
        return (head_dim + head_dim_v) * self.element_bytes


def resolve_kv_dtype(value: str, model_dtype: str, checkpoint: str | None = None) -> KvDtype:
    """The storage type for ``--kv-cache-dtype VALUE`` of a model that computes in ``model_dtype``.

    ``auto`` is what the checkpoint asks for, else the model's own type. Raises ConfigError for an unknown value or one
    that is not sized.
    """
    name = (checkpoint or model_dtype) if value == "auto" else value
    if name in _DENSE:
        return KvDtype(name, _DENSE[name])
    asked = f"{value} ({name}, as the checkpoint says)" if value == "auto" else value
    if name in _PACKED:
        raise ConfigError(f"--kv-cache-dtype {asked} is not sized yet; sized are: {', '.join(KV_DTYPES)}")
    if value == "auto":
        raise ConfigError(
            f"the model computes in {name}; KV is sized for {', '.join(MODEL_DTYPES)}: choose with --dtype"
        )
    raise ConfigError(f"--kv-cache-dtype {value}: there is no such type; there are: {', '.join(KV_DTYPES)}")
