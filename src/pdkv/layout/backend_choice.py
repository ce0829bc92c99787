"""Which attention backend vLLM takes when it is not told: by device (vLLM's platforms/cuda.py and rocm.py).

Backends differ in the sizes of their blocks and in the types that they keep, so the device moves blocks and bytes. Not
followed: head sizes that only some kernels take, and FlashAttention 4, whose pages depend on the build.
"""

from __future__ import annotations

from pdkv.errors import ConfigError
from pdkv.layout.backends import BACKENDS, Backend
from pdkv.layout.dtypes import KV_DTYPES
from pdkv.layout.rules import DEFAULT_RULES, VllmRules
from pdkv.models.spec import LayerKind, ModelSpec, Record

_AMD = "gfx"

_DENSE = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "TURBOQUANT")
# Major compute capability -> what is tried, best first. Without an entry: the last one.
_DENSE_ORDER = {10: ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "TURBOQUANT")}
_LATENT_ORDER = {
    9: ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"),
    10: ("FLASHINFER_MLA", "CUTLASS_MLA", "FLASHMLA", "TRITON_MLA"),
}
_LATENT = ("TRITON_MLA",)
# Before 0.19 a latent model's blocks were forced to one backend's (0.11 prints it, 0.19 no longer does).
_LATENT_ORDER_UP_TO_018 = {9: ("FLASHMLA", "TRITON_MLA"), 10: ("CUTLASS_MLA", "TRITON_MLA")}
# FLASH_ATTN_MLA_SPARSE stands before FLASHMLA_SPARSE on Hopper and keeps the same pages.
_SPARSE_ORDER = {
    9: ("FLASHMLA_SPARSE",),
    10: ("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE"),
    12: ("FLASHINFER_MLA_SPARSE_SM120",),
}
_AMD_DENSE = ("ROCM_ATTN", "TRITON_ATTN", "TURBOQUANT", "ULTRAQUANT")

# Backend -> major compute capabilities that it runs on; every one of NVIDIA's where none are named.
_RUNS_ON = {
    "FLASH_ATTN": (8, 9, 10, 11, 12),
    "FLASHINFER": (8, 9, 10, 11, 12),
    "FLASH_ATTN_MLA": (9,),
    "FLASHMLA": (9, 10),
    "FLASHINFER_MLA": (10,),
    "CUTLASS_MLA": (10,),
    "TOKENSPEED_MLA": (10,),
    "FLASH_ATTN_MLA_SPARSE": (9,),
    "FLASHMLA_SPARSE": (9, 10),
    "FLASHINFER_MLA_SPARSE": (10,),
    "FLASHINFER_MLA_SPARSE_SM120": (12,),
}
_FLASH_ATTENTION_FP8 = (9, 10)


def default_backend(
    model: ModelSpec, value: str, compute: str | None = None, rules: VllmRules = DEFAULT_RULES
) -> Backend:
    """The backend that vLLM takes on a device for ``--kv-cache-dtype VALUE``.

    ``compute`` is a compute capability (``"9.0"``) or AMD's ``gfx942``. ``None`` and devices of other makers, which
    have plugins of their own, are taken for an NVIDIA Hopper. Raises ConfigError when none takes the type.
    """
    records = {layer.record for layer in model.layers}
    if Record.V4_WINDOW in records:
        return BACKENDS["FLASHMLA_SPARSE_DSV4"]
    order = _order(model, compute, rules, sparse=Record.DEEPSEEK_SPARSE in records)
    if not order:
        raise ConfigError(f"{model.name}: vLLM has no backend for sparse attention on a device of {_shown(compute)}")
    if value not in KV_DTYPES or value == "float32":
        return BACKENDS[order[0]]
    for name in order:
        if _asked(value, name) in BACKENDS[name].dtypes and _keeps(name, value, model, compute):
            return BACKENDS[name]
    raise ConfigError(
        f"--kv-cache-dtype {value}: no backend that vLLM takes by itself on a device of {_shown(compute)} keeps it for "
        f"{model.name} ({', '.join(order)}); choose another type"
    )


def check_runs_on(backend: Backend, compute: str | None) -> None:
    """Raise ConfigError when ``backend`` was asked for on a device, of NVIDIA or AMD, that it does not run on."""
    if compute is None:
        return
    major = _major(compute)
    allowed = _RUNS_ON.get(backend.name)
    wrong = allowed is not None and major is not None and major not in allowed
    if wrong or (compute.startswith(_AMD) and backend.name in _RUNS_ON):
        needs = ", ".join(f"{number}.x" for number in allowed or ())
        raise ConfigError(
            f"--attention-backend {backend.name} runs on NVIDIA GPUs of compute capability {needs}, not on one of "
            f"{_shown(compute)}; leave it out, and vLLM takes one that does"
        )
    if major is not None and backend.name.startswith("ROCM_"):
        raise ConfigError(f"--attention-backend {backend.name} is for AMD GPUs, not for one of {_shown(compute)}")


def has_known_choice(compute: str | None) -> bool:
    """Whether what vLLM takes on a device is known here: NVIDIA's and AMD's; others bring plugins of their own."""
    return compute is None or compute.startswith(_AMD) or _major(compute) is not None


def _order(model: ModelSpec, compute: str | None, rules: VllmRules, *, sparse: bool) -> tuple[str, ...]:
    latent = model.has(LayerKind.MLA, LayerKind.SLIDING_WINDOW_MLA)
    if compute is not None and compute.startswith(_AMD):
        # The one for sparse attention is not known here.
        return () if sparse else _LATENT if latent else _AMD_DENSE
    major = _major_or_hopper(compute)
    if sparse:
        return _SPARSE_ORDER.get(major, ())
    if latent:
        order = _LATENT_ORDER if rules.blocks_follow_backend else _LATENT_ORDER_UP_TO_018
        return order.get(major, _LATENT)
    return _DENSE_ORDER.get(major, _DENSE) if major >= 8 else ("TRITON_ATTN", "TURBOQUANT")


def _asked(value: str, name: str) -> str:
    """``value`` as the backend's list has it: sparse kernels keep what quantized type is asked for as records."""
    return "fp8_ds_mla" if name == "FLASHMLA_SPARSE" and value == "fp8_e4m3" else value


def _keeps(name: str, value: str, model: ModelSpec, compute: str | None) -> bool:
    """What depends on the device or the heads besides a backend's list of types."""
    major = _major_or_hopper(compute)
    if name == "FLASH_ATTN" and value.startswith("fp8"):
        return major in _FLASH_ATTENTION_FP8
    if name == "FLASHINFER" and value.startswith("nvfp4") and major != 10:
        heads = {layer.head_dim for layer in model.layers if layer.state is None}
        return value == "nvfp4" and 64 not in heads
    return True


def _major(compute: str) -> int | None:
    number, dot, _ = compute.partition(".")
    return int(number) if dot and number.isdigit() else None


def _major_or_hopper(compute: str | None) -> int:
    return (None if compute is None else _major(compute)) or 9


def _shown(compute: str | None) -> str:
    compute = compute or "9.0"
    return f"compute capability {compute}" if _major(compute) else compute
