"""Page bytes: what one layer stores for one block on one rank (spec kv-layout, section 2)."""

from __future__ import annotations

from pdkv.errors import ConfigError
from pdkv.layout.dtypes import KvDtype
from pdkv.models.spec import LayerSpec, ModelSpec


def kv_heads_per_rank(kv_heads: int, tensor_parallel: int) -> int:
    """KV heads that one tensor-parallel rank keeps: divided down to one, then replicated."""
    return max(1, kv_heads // tensor_parallel)


def page_bytes(layer: LayerSpec, *, block_size: int, dtype: KvDtype, tensor_parallel: int) -> int:
    """Bytes one layer stores for one block of ``block_size`` tokens on one rank."""
    heads = kv_heads_per_rank(layer.kv_heads, tensor_parallel)
    return block_size * heads * dtype.cell_bytes(layer.head_dim, layer.head_dim_v)


def check_tensor_parallel(spec: ModelSpec, tensor_parallel: int) -> None:
    """Raise ConfigError unless the model's heads can be split or replicated over that many ranks, as vLLM asks."""
    if spec.attention_heads % tensor_parallel:
        heads = spec.attention_heads
        possible = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ConfigError(
            f"{spec.name}: {heads} attention heads do not divide over --tensor-parallel-size {tensor_parallel}; "
            f"possible: {possible}"
        )
    for layer in spec.layers:
        if max(layer.kv_heads, tensor_parallel) % min(layer.kv_heads, tensor_parallel):
            raise ConfigError(
                f"{spec.name}: {layer.kv_heads} KV heads can neither be divided nor replicated evenly over "
                f"--tensor-parallel-size {tensor_parallel}"
            )


def stage_layers(count: int, pipeline_parallel: int) -> tuple[range, ...]:
    """Layer indices of each pipeline stage: equal shares, the remainder to the stages before the last.

    (vLLM, distributed/utils.py, get_pp_indices.) Raises ConfigError when there are more stages than layers.
    """
    if pipeline_parallel > count:
        raise ConfigError(f"--pipeline-parallel-size {pipeline_parallel} is more than the model's {count} layers")
    share, remainder = divmod(count, pipeline_parallel)
    sizes = [share] * pipeline_parallel
    for back in range(2, remainder + 2):
        sizes[-back] += 1
    starts = [sum(sizes[:stage]) for stage in range(pipeline_parallel)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
