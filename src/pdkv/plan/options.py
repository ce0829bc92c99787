"""What vLLM would be told; names and defaults are its own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from pdkv.errors import ConfigError
from pdkv.layout.backends import Backend, find_backend
from pdkv.layout.build import KvSettings, boundary_layers, in_flight_tokens
from pdkv.layout.dtypes import MODEL_DTYPES
from pdkv.layout.placement import KvLayout, find_layout
from pdkv.layout.rules import VllmRules
from pdkv.layout.specs import Limits
from pdkv.models.gpus import find_gpu
from pdkv.models.spec import LayerKind, ModelSpec
from pdkv.plan.kv_transfer import KvTransfer
from pdkv.units import GIB

_MODEL_DTYPES = ("dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype")
# What `vllm serve` takes by itself: least GPU memory -> (--max-num-batched-tokens, --max-num-seqs). Below: the last.
_BATCH_DEFAULTS = ((160 * GIB, (16384, 1024)), (70 * GIB, (8192, 1024)), (0, (2048, 256)))
_HOPPER_BYTES = 80 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The settings of a plan. ``None`` is "not set". Raises ConfigError when one cannot be.

    ``attention_backend`` and ``gpu`` not set are what vLLM takes on an NVIDIA Hopper GPU. ``vllm_version`` is the
    release whose rules hold. ``gpu_memory_bytes`` is the memory that a GPU's driver reports. ``kv_offloading_bytes`` is
    the host tier of an instance, over all its ranks. ``v1_runner`` is VLLM_USE_V2_MODEL_RUNNER=0.
    """

    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    max_model_len: int | Literal["auto"] | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    throughput_mode: bool = False
    async_scheduling: bool = True
    v1_runner: bool = False
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    watermark: float = 0.0
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    mamba_cache_mode: Literal["none", "align"] | None = None
    attention_backend: str | None = None
    kv_cache_layout: str | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    chunked_local_with_hybrid: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    speculative_method: str | None = None
    speculative_model: str | None = None
    speculative_tokens: int | None = None
    kv_transfer: KvTransfer | None = None
    kv_offloading_bytes: int | None = None
    enforce_eager: bool = False
    cudagraph_mode: str | None = None
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    max_cudagraph_capture_size: int | None = None
    estimate_cudagraphs: bool = True
    language_model_only: bool = False
    mm_ipc_gpu_memory_bytes: int | None = None
    vllm_version: str = VllmRules().version

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ConfigError(f"--{field.name.replace('_', '-')} {value}: must be at least 1")
        for name in _MODEL_DTYPES:
            value = getattr(self, name)
            if value not in ("auto", *MODEL_DTYPES):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: there are auto, {', '.join(MODEL_DTYPES)}")
        if not 0 < self.utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization}: a share of the GPU's memory, above 0 and at "
                "most 1, for example 0.92"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"--watermark {self.watermark}: a share of the pool, at least 0 and below 1")

    @property
    def rules(self) -> VllmRules:
        """The rules of ``vllm_version``. Raises ConfigError for a release that is not known."""
        return VllmRules(self.vllm_version)

    @property
    def utilization(self) -> float:
        """The share of a GPU's memory that vLLM may use: as given, else the release's default."""
        return (
            self.gpu_memory_utilization if self.gpu_memory_utilization is not None else self.rules.default_utilization
        )

    @property
    def backend(self) -> Backend | None:
        """The backend that was asked for."""
        return None if self.attention_backend is None else find_backend(self.attention_backend)

    @property
    def compute(self) -> str | None:
        """The architecture of the device that was named (``"9.0"``, ``"gfx942"``), which decides the backend."""
        return None if self.gpu is None else find_gpu(self.gpu).compute

    @property
    def layout(self) -> KvLayout | None:
        """The physical layout that was asked for."""
        return None if self.kv_cache_layout is None else find_layout(self.kv_cache_layout)

    @property
    def ranks(self) -> int:
        """GPUs of one engine: tensor, pipeline and prefill context parallel."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return self.ranks * self.data_parallel_size

    def batched_tokens(self, spec: ModelSpec) -> int:
        """Tokens of one step: as given, else what ``vllm serve`` takes on a GPU of that memory for requests this long.

        Without chunked prefill at least a whole request, and never more than all requests together hold
        (engine/arg_utils.py, _set_default_max_num_seqs_and_batched_tokens_args).
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        tokens, seqs = self._batch_defaults()
        length = self.length(spec)
        if not self.enable_chunked_prefill:
            tokens = max(tokens, length)
        return min(tokens, (self.max_num_seqs or seqs) * length)

    def seqs(self, spec: ModelSpec) -> int:
        """Most requests in one step: as given, else vLLM's default, at most one a token."""
        return self.max_num_seqs or min(self._batch_defaults()[1], self.batched_tokens(spec))

    def check_batch(self, spec: ModelSpec) -> None:
        """Raise ConfigError where vLLM refuses the batch (SchedulerConfig.verify_max_model_len)."""
        tokens, seqs, length = self.batched_tokens(spec), self.seqs(spec), self.length(spec)
        if tokens < seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}: every request of a step has a "
                "token in it; raise the one or lower the other"
            )
        if not self.enable_chunked_prefill and tokens < length:
            raise ConfigError(
                f"--no-enable-chunked-prefill: a prompt of {length} tokens (--max-model-len) is one step, more than "
                f"--max-num-batched-tokens {tokens}; raise it, lower the length, or leave chunked prefill on"
            )

    def _batch_defaults(self) -> tuple[int, int]:
        gpu = None if self.gpu is None else find_gpu(self.gpu)
        memory = self.gpu_memory_bytes or (_HOPPER_BYTES if gpu is None else gpu.total_bytes)
        small = gpu is not None and gpu.name.startswith("A100")
        tokens, seqs = next(
            found for least, found in _BATCH_DEFAULTS if memory >= least and not (small and 0 < least < 160 * GIB)
        )
        return (2 * tokens, 2 * seqs) if self.throughput_mode else (tokens, seqs)

    def model_dtype(self, spec: ModelSpec) -> str:
        """The type the model computes in. As in vLLM, auto halves a 32-bit checkpoint (and one that does not say)."""
        if self.dtype != "auto":
            return self.dtype
        if spec.dtype in (None, "float32"):
            return "bfloat16"
        if spec.dtype not in MODEL_DTYPES:
            raise ConfigError(
                f"{spec.name}: its config says that it is in {spec.dtype!r}; give --dtype ({', '.join(MODEL_DTYPES)})"
            )
        return spec.dtype

    def length(self, spec: ModelSpec) -> int:
        """The longest request that was asked for (also one too long for the model), or the model's own."""
        if not isinstance(self.max_model_len, int):
            return spec.served_model_len or spec.max_model_len
        return self.max_model_len

    def hybrid_manager(self, spec: ModelSpec) -> bool:
        """Whether windows and chunks are recycled, by vLLM's rules (spec kv-layout, 5; config/vllm.py).

        Raises ConfigError when it was asked for in a configuration that has none.
        """
        prevents = None
        if self.kv_transfer is not None and (lacking := self.kv_transfer.without_hybrid_support):
            prevents = f"{', '.join(lacking)} cannot work with it"
        if spec.has(LayerKind.CHUNKED_LOCAL) and not self.chunked_local_with_hybrid:
            prevents = "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE is 0"
        elif spec.has(LayerKind.CHUNKED_LOCAL) and (self.speculative_method or "").startswith("eagle"):
            prevents = "chunked attention with EAGLE cannot work with it"
        if self.disable_hybrid_kv_cache_manager is None:
            transfer = self.kv_transfer
            return prevents is None and (transfer is None or transfer.keeps_hybrid_manager(self.rules))
        if not self.disable_hybrid_kv_cache_manager and prevents is not None:
            raise ConfigError(
                f"--no-disable-hybrid-kv-cache-manager asks for the hybrid manager, and {prevents}; leave the flag out"
            )
        return not self.disable_hybrid_kv_cache_manager

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
            compute=self.compute,
            skip_layers=self.skip_layers(spec),
            prefix_caching=self.enable_prefix_caching,
            mamba_cache_mode=self.mamba_cache_mode,
            mamba_cache_dtype=self.mamba_cache_dtype,
            mamba_ssm_cache_dtype=self.mamba_ssm_cache_dtype,
            speculative_tokens=self.speculative_tokens or 0,
            rules=self.rules,
        )

    def in_flight(self, spec: ModelSpec) -> int:
        """Tokens scheduled but not settled: what windows and chunks reserve for."""
        batch = self.batched_tokens(spec)
        if self.v1_runner:
            batches = max(self.pipeline_parallel_size, 2 if self.async_scheduling else 1)
            return batch * (batches if self.rules.reserves_every_batch_in_flight else 1)
        return in_flight_tokens(
            batch,
            self.pipeline_parallel_size,
            async_scheduling=self.async_scheduling,
            rules=self.rules,
        )

    def limits(self, spec: ModelSpec) -> Limits:
        """What the size of a request depends on besides its length."""
        return Limits(
            max_in_flight_tokens=self.in_flight(spec), decode_context_parallel=self.decode_context_parallel_size
        )
