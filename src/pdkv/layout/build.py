"""A model and the settings of a deployment -> the caches of every rank, ready to be grouped.

The order is vLLM's: the type (`backends.canonical_kv_dtype`), the block size (`block_size`), then every layer's cache
as its backend packs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pdkv.errors import ConfigError
from pdkv.layout.backend_choice import check_runs_on, default_backend
from pdkv.layout.backends import INDEXER_BACKEND, Backend, canonical_kv_dtype, check_kv_dtype, stored_type
from pdkv.layout.block_size import BlockSizes, resolve_block_size
from pdkv.layout.dtypes import KvDtype
from pdkv.layout.pages import attention_cache, check_tensor_parallel, stage_layers, state_cache
from pdkv.layout.placement import KvLayout
from pdkv.layout.rules import DEFAULT_RULES, VllmRules
from pdkv.layout.specs import FULL_LIKE, WINDOWED, AttentionCache, Cache
from pdkv.models.spec import LayerKind, LayerSpec, ModelSpec, Record

_UNPACKED_RECORDS = frozenset({Record.V4_WINDOW, Record.V4_COMPRESSED, Record.V4_COMPRESSOR, Record.V4_INDEXER})


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSettings:
    """What decides the caches besides the model; names and defaults are vLLM's. ``None`` is "not set".

    ``model_dtype`` is what the model computes in. ``skip_layers`` are layer indices as strings, or the word
    ``sliding_window``: those layers keep the model's own type. ``mamba_cache_mode`` follows ``prefix_caching`` when not
    set. ``compute`` is the device's architecture, as in `models.gpus`; not set is an NVIDIA Hopper. With
    ``check_backend`` off, a backend is taken for types and block sizes that it says it does not support.
    """

    model_dtype: str
    max_model_len: int
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    backend: Backend | None = None
    compute: str | None = None
    check_backend: bool = True
    skip_layers: tuple[str, ...] = ()
    prefix_caching: bool = True
    mamba_cache_mode: str | None = None
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    speculative_tokens: int = 0
    rules: VllmRules = DEFAULT_RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltCaches:
    """``stages`` maps layer names to caches per pipeline stage, in vLLM's order of layers.

    ``value`` is the resolved --kv-cache-dtype (``auto`` when the model's own type is kept) and ``dtype`` how it is
    stored; ``block_size`` is what attention layers got, and ``layout`` the physical layout of their backend.
    """

    stages: tuple[Mapping[str, Cache], ...]
    value: str
    dtype: KvDtype
    backend: Backend
    block_size: int
    layout: KvLayout


def stage_caches(model: ModelSpec, settings: KvSettings) -> BuiltCaches:
    """The caches of ``model`` under ``settings``. Raises ConfigError for combinations that cannot be."""
    tensor_parallel = settings.tensor_parallel
    check_tensor_parallel(model, tensor_parallel)
    _check_context_parallel(model, settings)
    asked = settings.kv_cache_dtype if settings.kv_cache_dtype != "auto" else (model.kv_dtype or "auto")
    backend = settings.backend or default_backend(model, asked, settings.compute, settings.rules)
    value = canonical_kv_dtype(settings.kv_cache_dtype, model, backend)
    dtype, own = stored_type(value, settings.model_dtype), stored_type("auto", settings.model_dtype)
    if settings.check_backend:
        check_kv_dtype(value, backend)
        check_runs_on(backend, settings.compute)
    state = next((layer for layer in model.layers if layer.state is not None), None)
    attention = _standing_for_all(model)
    sizes = resolve_block_size(
        _backends_in_use(model, backend),
        settings.block_size,
        settings.rules.default_block_size,
        attention=attention,
        dtype=dtype,
        model_dtype=own,
        tensor_parallel=tensor_parallel,
        state_bytes=None if state is None else _state(state, settings, BlockSizes(1)).page_bytes,
        skip_layers=bool(settings.skip_layers),
    )
    if settings.check_backend and attention is not None and not backend.accepts_block(sizes.block_size):
        raise ConfigError(
            f"--block-size {sizes.block_size}: the {backend.name} backend takes multiples of {backend.smallest_block}"
        )
    *others, last = stage_layers(model.decoder_layers, settings.pipeline_parallel)
    # What stands behind the decoder layers (a draft's) lives on the last stage.
    behind = max((layer.layer for layer in model.layers), default=0) + 1
    stages: list[dict[str, Cache]] = [
        {
            layer.name: _cache(layer, model, settings, backend, value, sizes)
            for layer in model.layers
            if layer.layer in stage
        }
        for stage in (*others, range(last.start, max(last.stop, behind)))
    ]
    return BuiltCaches(
        stages=tuple(stages),
        value=value,
        dtype=dtype,
        backend=backend,
        block_size=sizes.block_size,
        layout=backend.layouts[0],
    )


def boundary_layers(model: ModelSpec, value: str) -> tuple[str, ...]:
    """Layers that ``vllm serve`` keeps out of turboquant and ultraquant: the first and last two, except in hybrids."""
    if not value.startswith(("turboquant_", "ultraquant_")) or model.has(LayerKind.MAMBA):
        return ()
    count = model.decoder_layers
    edge = min(2, count // 2)
    return tuple(str(index) for index in sorted({*range(edge), *range(count - edge, count)}))


def in_flight_tokens(
    max_num_batched_tokens: int,
    pipeline_parallel: int,
    *,
    async_scheduling: bool,
    rules: VllmRules = DEFAULT_RULES,
) -> int:
    """Tokens scheduled but not settled: a batch for every step in flight (V2 runner, the default on GPUs)."""
    if not rules.reserves_every_batch_in_flight:
        return max_num_batched_tokens
    return max_num_batched_tokens * (pipeline_parallel + (1 if async_scheduling else 0))


def _check_context_parallel(model: ModelSpec, settings: KvSettings) -> None:
    """Decode context parallelism uses ranks that would hold copies, so there must be some."""
    size = settings.decode_context_parallel
    if size == 1:
        return
    flag = f"--decode-context-parallel-size {size}"
    if settings.tensor_parallel % size:
        raise ConfigError(f"{flag} must divide --tensor-parallel-size {settings.tensor_parallel}")
    if model.has(*WINDOWED, LayerKind.CHUNKED_LOCAL):
        raise ConfigError(
            f"{flag}: {model.name} has sliding-window or chunked layers, which cannot be divided by tokens"
        )
    for layer in model.layers:
        if layer.kind in FULL_LIKE and not layer.replicated and layer.kv_heads * size > settings.tensor_parallel:
            raise ConfigError(
                f"{flag}: {model.name} has {layer.kv_heads} KV heads, so --tensor-parallel-size must be at least "
                f"{layer.kv_heads * size}"
            )
        if layer.kind in FULL_LIKE and not layer.replicated and model.attention_heads // layer.kv_heads % size:
            raise ConfigError(
                f"{flag} must divide the {model.attention_heads // layer.kv_heads} query heads of a KV head"
            )


def _standing_for_all(model: ModelSpec) -> LayerSpec | None:
    """The heads that vLLM reckons block sizes with: the model's, else those of the first layer with full attention."""
    plain = [layer for layer in model.layers if layer.state is None and layer.record is not Record.INDEXER]
    if model.heads is not None and plain:
        return LayerSpec(LayerKind.FULL_ATTENTION, *model.heads, model.heads[1])
    return next((layer for layer in plain if layer.kind in FULL_LIKE), plain[0] if plain else None)


def _backends_in_use(model: ModelSpec, backend: Backend) -> list[Backend]:
    """Backends in layer order, each once."""
    found = []
    for layer in model.layers:
        if layer.state is None:
            used = INDEXER_BACKEND if layer.record is Record.INDEXER else backend
            if used not in found:
                found.append(used)
    # The attention's own backend decides alignments, also where its indexer comes first.
    return sorted(found, key=lambda used: used is INDEXER_BACKEND)


def _cache(
    layer: LayerSpec, model: ModelSpec, settings: KvSettings, backend: Backend, value: str, sizes: BlockSizes
) -> Cache:
    if layer.state is not None:
        return _state(layer, settings, sizes)
    if _skipped(layer, settings.skip_layers):
        value = "auto"
    dtype = stored_type(value, settings.model_dtype)
    cache = attention_cache(
        layer,
        block_size=sizes.block_size,
        dtype=dtype,
        tensor_parallel=settings.tensor_parallel,
        storage=value,
    )
    if layer.record in _UNPACKED_RECORDS:
        return cache
    if layer.kind is LayerKind.SLIDING_WINDOW:
        cache = _window_block(cache, backend, sizes)
    return (INDEXER_BACKEND if layer.record is Record.INDEXER else backend).pack(cache)


def _skipped(layer: LayerSpec, skip_layers: tuple[str, ...]) -> bool:
    if layer.kind in WINDOWED and "sliding_window" in skip_layers:
        return True
    return str(layer.layer) in skip_layers


def _window_block(cache: AttentionCache, backend: Backend, sizes: BlockSizes) -> AttentionCache:
    """A window chooses its own block: the largest kernel block that fits into the page it will share."""
    per_token = backend.pack(cache.with_block_size(1)).dense_page_bytes
    budget = sizes.window_page_bytes or per_token * sizes.block_size
    block_size = backend.largest_block_within(per_token, budget, sizes.block_size)
    # Padding is only known to fit after packing, so that the packed cache is padded.
    packed = backend.pack(cache.with_block_size(block_size))
    return replace(packed, padded_page_bytes=sizes.window_page_bytes)


def _state(layer: LayerSpec, settings: KvSettings, sizes: BlockSizes) -> Cache:
    assert layer.state is not None
    mode = (settings.mamba_cache_mode or "align") if settings.prefix_caching else "none"
    conv = settings.model_dtype if settings.mamba_cache_dtype == "auto" else settings.mamba_cache_dtype
    cells = settings.mamba_ssm_cache_dtype
    if cells == "auto":
        cells = layer.state.cells_dtype or conv
    return state_cache(
        layer.state,
        block_size=sizes.block_size if mode == "align" else settings.max_model_len,
        tensor_parallel=settings.tensor_parallel,
        conv_dtype=conv,
        cells_dtype=cells,
        mode=mode,
        speculative_tokens=settings.speculative_tokens,
        padded_page_bytes=sizes.state_page_bytes,
    )
