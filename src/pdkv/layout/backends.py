"""What an attention backend decides about KV: types, kernel block sizes, packing, layouts (spec kv-layout, 1 and 4)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdkv.errors import ConfigError
from pdkv.layout.dtypes import KvDtype, kv_dtype, packed_cell
from pdkv.layout.placement import KvLayout
from pdkv.layout.specs import AttentionCache, KernelBlocks
from pdkv.models.spec import ModelSpec, Record

_SIXTEEN_BIT = ("auto", "float16", "bfloat16")
_FP8 = ("fp8", "fp8_e4m3")
_PER_TOKEN_HEAD = ("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")
_TURBOQUANT = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
_LAYER_OUTER = (KvLayout.LBNHC, KvLayout.LBHNC)


@dataclass(frozen=True, slots=True)
class Backend:
    """One attention backend.

    ``fixed`` are block sizes its kernels take exactly, ``multiples`` sizes of which they take any multiple.
    ``packs`` are the types that it packs itself; any other quantized type it accepts is stored as plain elements.
    ``row_stride`` aligns blocks to whole rows (sparse kernels), ``layouts`` are the physical layouts it can read, best
    first.
    """

    name: str
    dtypes: tuple[str, ...]
    fixed: tuple[int, ...] = ()
    multiples: tuple[int, ...] = ()
    preferred: int | None = None
    packs: tuple[str, ...] = ()
    latent: bool = False
    row_stride: bool = False
    layouts: tuple[KvLayout, ...] = _LAYER_OUTER

    @property
    def smallest_block(self) -> int:
        """The smallest block that a kernel takes."""
        return min((*self.fixed, *self.multiples), default=1)

    def accepts_block(self, block_size: int) -> bool:
        """Whether a block of so many tokens can be read: whole kernel blocks."""
        sizes = (*self.fixed, *self.multiples)
        return not sizes or any(block_size % size == 0 for size in sizes)

    def preferred_block(self, default: int) -> int:
        """The block size that this backend alone would choose."""
        if self.preferred is not None:
            return self.preferred
        return default if self.accepts_block(default) else self.smallest_block

    def largest_block_within(self, per_token: int, budget: int, fallback: int) -> int:
        """The largest kernel block whose page fits into ``budget`` bytes; the smallest there is when none does."""
        most = budget // per_token
        sizes = [*self.fixed, *(max(base, most // base * base) for base in self.multiples)]
        if not sizes:
            return fallback
        return max((size for size in sizes if size * per_token <= budget), default=min(sizes))

    def pack(self, cache: AttentionCache) -> AttentionCache:
        """``cache`` as this backend stores it: its packing and the stride its kernels ask for."""
        if cache.state_bytes is None and cache.quant in _packed_modes(self.packs):
            packed = packed_cell(cache.quant, cache.head_dim, cache.head_dim_v)
            if packed is not None:
                slots, content = packed
                cache = replace(cache, state_bytes=content, head_slots=None if slots == 1 else slots * cache.kv_heads)
        if self.row_stride and cache.quant == "NONE":
            cache = replace(cache, stride=cache.bytes_per_state)
        elif self.row_stride:
            cache = replace(cache, stride=KernelBlocks(64))
        if cache.stride is None and self.fixed and not self.multiples:
            cache = replace(cache, stride=KernelBlocks(max(self.fixed)))
        return cache


def _packed_modes(values: tuple[str, ...]) -> frozenset[str]:
    return frozenset(kv_dtype(value).quant for value in values)


_ALL = (
    Backend("FLASH_ATTN", (*_SIXTEEN_BIT, *_FP8), multiples=(16,)),
    Backend(
        "FLASHINFER",
        (*_SIXTEEN_BIT, *_FP8, "fp8_e5m2", "nvfp4", "nvfp4_4over6"),
        fixed=(16, 32, 64),
        packs=("nvfp4", "nvfp4_4over6"),
    ),
    Backend(
        "TRITON_ATTN",
        (*_SIXTEEN_BIT, *_FP8, "fp8_e5m2", *_PER_TOKEN_HEAD),
        multiples=(16,),
        packs=_PER_TOKEN_HEAD,
    ),
    Backend("FLEX_ATTENTION", _SIXTEEN_BIT, multiples=(16,), layouts=(KvLayout.LBNHC,)),
    Backend("CPU_ATTN", ("auto", *_FP8, "fp8_e5m2"), multiples=(32,), preferred=128, layouts=(KvLayout.LBHNC,)),
    Backend("TURBOQUANT", _TURBOQUANT, fixed=(16, 32, 64, 128), packs=_TURBOQUANT, layouts=(KvLayout.LBNHC,)),
    Backend(
        "ULTRAQUANT",
        ("ultraquant_4bit",),
        fixed=(16, 32, 64, 128),
        preferred=64,
        packs=("ultraquant_4bit",),
        layouts=(KvLayout.LBNHC,),
    ),
    Backend("ROCM_ATTN", (*_SIXTEEN_BIT, *_FP8, "fp8_e5m2"), multiples=(16,), layouts=(KvLayout.LHBNC, KvLayout.LBHNC)),
    Backend("ROCM_AITER_FA", (*_SIXTEEN_BIT, *_FP8, "fp8_e5m2"), fixed=(16, 32)),
    Backend("ROCM_AITER_UNIFIED_ATTN", (*_SIXTEEN_BIT, *_FP8, "fp8_e5m2"), multiples=(16,), preferred=64),
    Backend("FLASHMLA", (*_SIXTEEN_BIT, *_FP8), fixed=(64,), latent=True),
    Backend("FLASHINFER_MLA", (*_SIXTEEN_BIT, *_FP8), fixed=(32, 64), latent=True),
    Backend("CUTLASS_MLA", (*_SIXTEEN_BIT, *_FP8), fixed=(128,), latent=True),
    Backend(
        "TRITON_MLA", (*_SIXTEEN_BIT, *_FP8, *_PER_TOKEN_HEAD), multiples=(16,), packs=_PER_TOKEN_HEAD, latent=True
    ),
    Backend("ROCM_AITER_MLA", (*_SIXTEEN_BIT, *_FP8, "fp8_e5m2"), multiples=(1,), latent=True),
    Backend("FLASH_ATTN_MLA", _SIXTEEN_BIT, multiples=(16,), latent=True),
    Backend("TOKENSPEED_MLA", _FP8, fixed=(32, 64), latent=True),
    Backend("CPU_MLA", ("auto",), fixed=(16,), latent=True, layouts=(KvLayout.LBHNC,)),
    Backend("FLASH_ATTN_MLA_SPARSE", _SIXTEEN_BIT, multiples=(64,), latent=True, row_stride=True),
    Backend(
        "FLASHMLA_SPARSE",
        ("auto", "bfloat16", "fp8_ds_mla", "fp8", "nvfp4_ds_mla"),
        multiples=(64,),
        latent=True,
        row_stride=True,
    ),
    Backend("FLASHINFER_MLA_SPARSE", (*_SIXTEEN_BIT, *_FP8), multiples=(32,), latent=True, row_stride=True),
    Backend(
        "FLASHINFER_MLA_SPARSE_SM120", ("auto", *_FP8, "fp8_ds_mla"), multiples=(64,), latent=True, row_stride=True
    ),
    Backend(
        "FLASHMLA_SPARSE_DSV4",
        ("auto", *_FP8, "fp8_ds_mla"),
        fixed=(256,),
        preferred=256,
        latent=True,
        layouts=(KvLayout.BLHNC, KvLayout.BLNHC),
    ),
    Backend("INDEXER", ("auto",), fixed=(64,), latent=True),
)
BACKENDS = {backend.name: backend for backend in _ALL}
"""Every backend by vLLM's name. INDEXER is the one of sparse attention's index keys."""

INDEXER_BACKEND = BACKENDS["INDEXER"]


def find_backend(name: str) -> Backend:
    """The backend called ``name``, in any case. Raises ConfigError when there is none."""
    found = BACKENDS.get(name.upper())
    if found is None or found is INDEXER_BACKEND:
        known = ", ".join(sorted(set(BACKENDS) - {"INDEXER"}))
        raise ConfigError(f"--attention-backend {name}: there is no such backend here; there are: {known}")
    return found


def canonical_kv_dtype(value: str, model: ModelSpec, backend: Backend) -> str:
    """What ``--kv-cache-dtype VALUE`` becomes for this model and backend (section 1.2, rules 2 and 3).

    ``auto`` may stay ``auto``. Raises ConfigError when the model's attention cannot keep the type.
    """
    if value == "auto" and model.kv_dtype is not None:
        value = model.kv_dtype
    if value.startswith("nvfp4") and value != "nvfp4_ds_mla" and backend.latent:
        raise ConfigError(
            f"--kv-cache-dtype {value} is for K and V; a latent model keeps nvfp4_ds_mla where its backend can"
        )
    sparse = any(layer.record is Record.DEEPSEEK_SPARSE for layer in model.layers)
    if sparse and value == "bfloat16":
        value = "auto"
    if backend.name == "FLASHMLA_SPARSE" and value not in (*_SIXTEEN_BIT, "nvfp4_ds_mla"):
        value = "fp8_ds_mla"
    if backend.name == "FLASHINFER_MLA_SPARSE_SM120" and value in ("auto", *_FP8):
        value = "fp8_ds_mla"
    if backend.name == "FLASHMLA_SPARSE_DSV4" and value in ("auto", *_FP8):
        value = "fp8_ds_mla"
    return value


def check_kv_dtype(value: str, backend: Backend) -> None:
    """Raise ConfigError unless ``backend`` takes the resolved type, naming those that do."""
    if value in (*backend.dtypes, "float32"):
        return
    others = sorted(other.name for other in _ALL if value in other.dtypes and other.latent == backend.latent)
    hint = f"; these do: {', '.join(others)}" if others else ""
    raise ConfigError(f"--kv-cache-dtype {value} is not taken by the {backend.name} backend{hint}")


def common_block_size(backends: Sequence[Backend], default: int) -> int:
    """The block size that several backends share: the default, else the smallest one that all accept.

    Raises ConfigError when there is none.
    """
    if len(backends) == 1:
        return backends[0].preferred_block(default)
    if all(backend.accepts_block(default) for backend in backends):
        return default
    sizes = [(*backend.fixed, *backend.multiples) or (1,) for backend in backends]
    for candidate in sorted({math.lcm(*combination) for combination in itertools.product(*sizes)}):
        if all(backend.accepts_block(candidate) for backend in backends):
            return candidate
    raise ConfigError(f"the backends {', '.join(backend.name for backend in backends)} share no block size")


def stored_type(value: str, model_dtype: str) -> KvDtype:
    """The storage of a resolved value: ``auto`` is the model's own type."""
    return kv_dtype(model_dtype if value == "auto" else value)
