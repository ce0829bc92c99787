"""The answer of `pdkv plan`: the object that ``--json`` prints (design 6.2), as plain data.

Bytes are integers of the bottleneck rank. A field that the given facts do not determine is null, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.layout.capacity import Capacity
from pdkv.plan.advice import Advice
from pdkv.plan.decode import DecodeFacts
from pdkv.plan.long_context import LongContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """``layers`` are decoder layers that own KV; ``params`` and ``weights_bytes`` (whole model) where known."""

    name: str
    layers: int
    params: int | None
    weights_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """Caches that share block tables, on the bottleneck rank.

    ``layers`` counts its caches, ``page_bytes`` is one cache, one block, one rank (the largest, where they differ);
    ``bytes_per_block`` are all of them without padding. ``window`` (or chunk) in tokens, null where there is none.
    """

    kind: str
    layers: int
    block_size: int
    page_bytes: int
    window: int | None
    bytes_per_block: int
    blocks_per_max_len_request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFacts:
    """``bytes_per_token`` is marginal, at long context, on the bottleneck rank; replicas count in ``_all_ranks``.

    ``fixed_bytes_per_request`` are what windows, chunks and states take of a long request, whatever its length.
    ``block_size`` is the smallest of the groups', in tokens on one rank.
    """

    bytes_per_token: int
    bytes_per_token_all_ranks: int
    fixed_bytes_per_request: int
    bytes_per_block: int
    block_size: int
    groups: tuple[GroupFacts, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Where the budget comes from, per GPU.

    ``basis`` "given": stated by the user, so that nothing had to be estimated; "estimated": ``available_kv_bytes`` lies
    between ``low_bytes`` and ``high_bytes``. ``dominated_by`` names the largest term. ``requested_bytes`` are vLLM's
    share of the GPU, ``None`` where the bytes for KV are given and the share decides nothing.
    """

    available_kv_bytes: int
    basis: str
    low_bytes: int | None = None
    high_bytes: int | None = None
    total_bytes: int | None = None
    requested_bytes: int | None = None
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    cudagraph_bytes: int | None = None
    reserve_bytes: int | None = None
    dominated_by: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One GPU. ``num_blocks`` is what it could hold alone, before all are cut to the smallest."""

    rank: int
    pipeline_stage: int
    layers: int
    bytes_per_block: int
    available_kv_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFacts:
    """All engines together: each has a pool of its own, so concurrency adds up and the longest request does not."""

    gpus: int
    engines: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    decode_context_parallel_size: int
    max_concurrency: float
    kv_cache_size_tokens: int
    hybrid_manager: bool
    attention_backend: str
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFacts:
    """Blocks that one request holds while it runs, between ``blocks_low`` and ``blocks_high``.

    The answer ends in the block in which the prompt does, so that the two are the same where every group keeps every
    token; windows and states come and go between steps.
    """

    prompt_tokens: int
    output_tokens: int
    blocks_low: int
    blocks_high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """All of it. ``decode`` is there when a connector or a load was given, ``long_context`` for long requests.
    ``usage`` is a load that `pdkv verify --probe` can put on a server.

    ``command`` is the ``vllm serve`` that the plan stands for.
    """

    model: ModelFacts
    kv: KvFacts
    memory: MemoryFacts
    capacity: Capacity
    ranks: tuple[RankFacts, ...]
    deployment: DeploymentFacts
    usage: UsageFacts | None
    decode: DecodeFacts | None
    long_context: LongContext | None
    rules: str
    command: str
    advice: tuple[Advice, ...]
    warnings: tuple[str, ...]
