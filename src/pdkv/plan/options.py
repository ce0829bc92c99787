"""What vLLM would be told; names and defaults are its own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from pdkv.errors import ConfigError
from pdkv.layout.backends import Backend, find_backend
from pdkv.layout.build import KvSettings, boundary_layers, in_flight_tokens
from pdkv.layout.dtypes import MODEL_DTYPES
from pdkv.layout.rules import VllmRules
from pdkv.layout.specs import Limits
from pdkv.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The settings of a plan. ``None`` is "not set". Raises ConfigError when one cannot be.

    ``attention_backend`` not set is what vLLM takes on an NVIDIA Hopper GPU. ``vllm_version`` is the release whose
    rules hold.
    """

    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None
    max_model_len: int | Literal["auto"] | None = None
    max_num_batched_tokens: int = 8192
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    mamba_ssm_cache_dtype: str = "auto"
    attention_backend: str | None = None
    disable_hybrid_kv_cache_manager: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    vllm_version: str = VllmRules().version

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ConfigError(f"--{field.name.replace('_', '-')} {value}: must be at least 1")
        if self.dtype not in ("auto", *MODEL_DTYPES):
            raise ConfigError(f"--dtype {self.dtype}: there are auto, {', '.join(MODEL_DTYPES)}")
        if self.mamba_ssm_cache_dtype not in ("auto", *MODEL_DTYPES):
            raise ConfigError(
                f"--mamba-ssm-cache-dtype {self.mamba_ssm_cache_dtype}: there are auto, {', '.join(MODEL_DTYPES)}"
            )

    @property
    def rules(self) -> VllmRules:
        """The rules of ``vllm_version``. Raises ConfigError for a release that is not known."""
        return VllmRules(self.vllm_version)

    @property
    def backend(self) -> Backend | None:
        """The backend that was asked for."""
        return None if self.attention_backend is None else find_backend(self.attention_backend)

    def model_dtype(self, spec: ModelSpec) -> str:
        """The type the model computes in. As in vLLM, auto halves a 32-bit checkpoint (and one that does not say)."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if spec.dtype in (None, "float32") else spec.dtype

    def length(self, spec: ModelSpec) -> int:
        """The longest request that was asked for, or the model's own. Raises ConfigError when the model is shorter."""
        if not isinstance(self.max_model_len, int):
            return spec.served_model_len or spec.max_model_len
        if self.max_model_len > spec.max_model_len:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} is more than {spec.name} was made for ({spec.max_model_len} "
                "tokens, by its config.json); lower it"
            )
        return self.max_model_len

    def skip_layers(self, spec: ModelSpec) -> tuple[str, ...]:
        """The layers that keep the model's own type: those asked for, and those that vLLM adds."""
        value = self.kv_cache_dtype if self.kv_cache_dtype != "auto" else (spec.kv_dtype or "auto")
        return tuple(sorted({*self.kv_cache_dtype_skip_layers, *boundary_layers(spec, value)}))

    def settings(self, spec: ModelSpec) -> KvSettings:
        """What the layout is built from."""
        return KvSettings(
            model_dtype=self.model_dtype(spec),
            max_model_len=self.length(spec),
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=self.block_size,
            tensor_parallel=self.tensor_parallel_size,
            pipeline_parallel=self.pipeline_parallel_size,
            decode_context_parallel=self.decode_context_parallel_size,
            backend=self.backend,
            skip_layers=self.skip_layers(spec),
            prefix_caching=self.enable_prefix_caching,
            mamba_ssm_cache_dtype=self.mamba_ssm_cache_dtype,
            rules=self.rules,
        )

    @property
    def limits(self) -> Limits:
        """What the size of a request depends on besides its length."""
        return Limits(
            max_in_flight_tokens=in_flight_tokens(
                self.max_num_batched_tokens,
                self.pipeline_parallel_size,
                async_scheduling=self.async_scheduling,
                rules=self.rules,
            ),
            decode_context_parallel=self.decode_context_parallel_size,
        )
