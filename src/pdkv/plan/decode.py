"""What a decode instance needs that a mixed one does not (spec pd-transfer; design 3): who holds KV, and how long.

Little's law over block-seconds: a pool that requests arrive at with rate r, each holding b blocks for t seconds, has
r * b * t blocks in use on average. Times come from the user; nothing about speed is guessed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.layout.groups import Group, RankLayout
from pdkv.layout.specs import FULL_LIKE, AttentionCache
from pdkv.models.spec import LayerKind
from pdkv.plan.kv_transfer import KvTransfer
from pdkv.plan.sizing import Sized
from pdkv.units import cdiv

LOAD_FLAGS = {
    "prompt_tokens": "--prompt-tokens",
    "output_tokens": "--output-tokens",
    "requests_per_s": "--request-rate",
    "time_per_output_token_s": "--time-per-output-token",
    "prefill_time_s": "--prefill-time",
    "transfer_bandwidth": "--transfer-bandwidth",
}
"""Fields of a Workload -> the options of `pdkv plan` that they come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The load of one deployment: an average request and how many arrive. Raises ConfigError for one that cannot be.

    ``prefill_time_s`` is from P's admission to its first token; ``transfer_bandwidth`` bytes a second that one GPU
    reads from a peer. ``None``: not known, and what depends on it is left out of the answer.
    """

    prompt_tokens: int
    output_tokens: int
    requests_per_s: float | None = None
    time_per_output_token_s: float | None = None
    prefill_time_s: float | None = None
    transfer_bandwidth: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e18:
                raise ConfigError(f"{LOAD_FLAGS[name]} {value}: must be above 0")

    @property
    def decode_time_s(self) -> float | None:
        """How long D writes one answer."""
        step = self.time_per_output_token_s
        return None if step is None else step * self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlocks:
    """Average blocks in use on one side, by who holds them; ``None`` where a time that decides it is not known."""

    running: float | None
    loading: float | None
    retained: float | None
    total: float | None
    engines: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFacts:
    """The answer. Bytes and blocks are those of the bottleneck rank, ``_all_ranks`` of one engine.

    ``reserved_blocks_per_request`` is what admission counts with for a request of prompt and output (windows reserve
    for every token in flight), ``decoding_blocks_per_request`` what it really holds while it decodes;
    ``watermark_blocks`` are left free by admission. ``preempted_tokens`` are computed again, on D, when D preempts it
    half-way. ``decode`` and ``prefill`` are averages over the whole deployment, ``engines`` how many pools like this
    one they fill. ``lease_bytes_bound`` is what P holds when no D reads for a whole lease. ``device_buffer_bytes`` are
    staging buffers beside the pool (``None``: not known). ``missing`` are the flags of the load that were not given, in
    whose place something above is ``None``.
    """

    role: str | None
    connector: str | None
    mode: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    reserved_blocks_per_request: int
    decoding_blocks_per_request: int
    in_flight_tokens: int
    watermark_blocks: int
    transferred_bytes_per_request: int | None
    transferred_bytes_all_ranks: int | None
    transfer_time_s: float | None
    host_buffer_bytes: int
    device_buffer_bytes: int | None
    preempted_tokens: int | None
    preempted_time_s: float | None
    decode: HeldBlocks | None
    prefill: HeldBlocks | None
    lease_bytes_bound: int | None
    prefill_engines_per_decode_engine: float | None
    notes: tuple[str, ...]
    missing: tuple[str, ...] = ()


def decode_facts(sized: Sized, workload: Workload | None) -> DecodeFacts | None:
    """What the split into P and D means for this pool; ``None`` when neither a connector nor a load was given."""
    transfer = sized.options.kv_transfer
    if transfer is None and workload is None:
        return None
    rank = sized.bottleneck
    load = workload
    length = sized.capacity.max_model_len if load is None else load.prompt_tokens + load.output_tokens
    moved = None if load is None else transferred_bytes(rank, load.prompt_tokens)
    moved_all = None
    if load is not None:
        ranks = sized.options.tensor_parallel_size
        moved_all = ranks * sum(transferred_bytes(layout, load.prompt_tokens) for layout in sized.layouts)
    seconds = (
        None if load is None or load.transfer_bandwidth is None or moved is None else moved / load.transfer_bandwidth
    )
    decode = prefill = None
    if load is not None and load.requests_per_s is not None:
        decode = _decode_side(sized, load, transfer, seconds)
        prefill = _prefill_side(sized, load, seconds)
    preempted = None if load is None else load.prompt_tokens + load.output_tokens // 2
    pool = sized.capacity.num_blocks * rank.bytes_per_block
    through_host = transfer is not None and transfer.buffer_device == "cpu"
    return DecodeFacts(
        role=None if transfer is None else transfer.role,
        connector=None if transfer is None else transfer.connector,
        mode=None
        if transfer is None or not transfer.moves_between_instances
        else ("push" if transfer.push else "pull"),
        prompt_tokens=None if load is None else load.prompt_tokens,
        output_tokens=None if load is None else load.output_tokens,
        reserved_blocks_per_request=rank.blocks_for(length),
        decoding_blocks_per_request=decoding_blocks(rank, length),
        in_flight_tokens=sized.options.in_flight(sized.spec),
        watermark_blocks=watermark_blocks(sized),
        transferred_bytes_per_request=moved,
        transferred_bytes_all_ranks=moved_all,
        transfer_time_s=seconds,
        host_buffer_bytes=pool if through_host else 0,
        device_buffer_bytes=_device_buffers(transfer),
        preempted_tokens=preempted,
        preempted_time_s=_recompute_time(load, preempted),
        decode=decode,
        prefill=prefill,
        lease_bytes_bound=_lease_bound(rank, load, transfer),
        prefill_engines_per_decode_engine=_ratio(prefill, decode),
        notes=tuple(_notes(sized, transfer)),
        missing=tuple(flag for name, flag in LOAD_FLAGS.items() if load is None or getattr(load, name) is None),
    )


def watermark_blocks(sized: Sized) -> int:
    """Blocks that admission leaves free while anything runs (SchedulerConfig.watermark; the null block counts)."""
    return int(sized.options.watermark * sized.capacity.num_blocks)


def decoding_blocks(rank: RankLayout, num_tokens: int) -> int:
    """Blocks that a request of ``num_tokens`` tokens holds between two steps of decoding: windows are recycled."""
    return sum(min(_kept(group, num_tokens), group.blocks_for(num_tokens, rank.limits)) for group in rank.groups)


def _kept(group: Group, num_tokens: int) -> int:
    cache = group.cache
    if not isinstance(cache, AttentionCache) or cache.kind in FULL_LIKE or not cache.reach_tokens:
        return 1 << 62
    if cache.kind is LayerKind.CHUNKED_LOCAL:
        return cdiv(min(cache.reach_tokens, num_tokens), cache.block_size)
    return cdiv(cache.reach_tokens - 1, cache.block_size) + 1


def transferred_bytes(rank: RankLayout, prompt_tokens: int) -> int:
    """Bytes that one rank reads for a prompt: whole blocks, of windows the last ones, of states one (section 2)."""
    found = 0
    for group in rank.groups:
        cache = group.cache
        blocks = group.blocks_for(prompt_tokens, rank.limits)
        if not isinstance(cache, AttentionCache):
            blocks = 1
        elif cache.kind not in FULL_LIKE:
            blocks = min(blocks, cdiv(prompt_tokens, cache.block_size), cdiv(cache.reach_tokens, cache.block_size) + 1)
        found += blocks * group.bytes_per_block
    return found


def _decode_side(sized: Sized, load: Workload, transfer: KvTransfer | None, transfer_s: float | None) -> HeldBlocks:
    assert load.requests_per_s is not None
    rank, rate = sized.bottleneck, load.requests_per_s
    mean = decoding_blocks(rank, load.prompt_tokens + load.output_tokens // 2)
    running = None if load.decode_time_s is None else rate * mean * load.decode_time_s
    prompt = decoding_blocks(rank, load.prompt_tokens)
    waits: float | None = transfer_s
    if transfer is not None and transfer.push:
        # D's blocks are taken before P has begun.
        waits = None if load.prefill_time_s is None or transfer_s is None else load.prefill_time_s + transfer_s
    loading = None if waits is None else rate * prompt * waits
    retained = 0.0
    if transfer is not None and transfer.bidirectional:
        retained = rate * decoding_blocks(rank, load.prompt_tokens + load.output_tokens) * transfer.blocks_ttl_s
    return _held(sized, running, loading, retained)


def _prefill_side(sized: Sized, load: Workload, transfer_s: float | None) -> HeldBlocks:
    """P like D: its own pool may differ, so this is for P instances with the same memory and settings."""
    assert load.requests_per_s is not None
    blocks = sized.bottleneck.blocks_for(load.prompt_tokens)
    running = None if load.prefill_time_s is None else load.requests_per_s * blocks * load.prefill_time_s
    retained = None if transfer_s is None else load.requests_per_s * blocks * transfer_s
    held = _held(sized, running, 0.0, retained)
    if load.prefill_time_s is None or held.engines is None:
        return held
    # A P that computes one prompt at a time is busy for rate * time of it; whichever is scarcer decides.
    busy = load.requests_per_s * load.prefill_time_s
    return HeldBlocks(
        running=held.running,
        loading=held.loading,
        retained=held.retained,
        total=held.total,
        engines=max(held.engines, busy),
    )


def _held(sized: Sized, running: float | None, loading: float | None, retained: float | None) -> HeldBlocks:
    parts = (running, loading, retained)
    total = None if None in parts else sum(part for part in parts if part is not None)
    usable = sized.capacity.usable_blocks - watermark_blocks(sized)
    return HeldBlocks(
        running=running,
        loading=loading,
        retained=retained,
        total=total,
        engines=None if total is None or usable < 1 else total / usable,
    )


def _device_buffers(transfer: KvTransfer | None) -> int | None:
    """NIXL and Mooncake read and write the pool itself; what other connectors stage through is not known here."""
    in_place = transfer is None or transfer.connector.startswith(("Nixl", "MooncakeConnector"))
    return 0 if in_place else None


def _recompute_time(load: Workload | None, tokens: int | None) -> float | None:
    """At P's speed: a D that also computes is no faster."""
    if load is None or load.prefill_time_s is None or tokens is None:
        return None
    return load.prefill_time_s * tokens / load.prompt_tokens


def _lease_bound(rank: RankLayout, load: Workload | None, transfer: KvTransfer | None) -> int | None:
    if load is None or load.requests_per_s is None or transfer is None or not transfer.moves_between_instances:
        return None
    prompt_bytes = rank.bytes_per_block * rank.blocks_for(load.prompt_tokens)
    return round(load.requests_per_s * transfer.lease_s * prompt_bytes)


def _ratio(prefill: HeldBlocks | None, decode: HeldBlocks | None) -> float | None:
    if prefill is None or decode is None or prefill.engines is None or not decode.engines:
        return None
    return prefill.engines / decode.engines


def _notes(sized: Sized, transfer: KvTransfer | None) -> list[str]:
    if transfer is None:
        return []
    found = []
    decodes = transfer.role in ("kv_consumer", "kv_both") and transfer.moves_between_instances
    if decodes and transfer.push:
        found.append(
            "push: D takes a request's blocks at admission and holds them through P's queue, prefill and the WRITE; "
            "pull (NixlConnector) takes them when the prompt is there to be read"
        )
    if decodes and transfer.bidirectional:
        found.append(
            f"bidirectional: D keeps every finished request for up to {transfer.blocks_ttl_s} s, which no heartbeat "
            "shortens; lower decoder_kv_blocks_ttl or size for it"
        )
    if decodes and transfer.load_failure_policy == "fail":
        found.append(
            'a load that fails is answered with an error (kv_load_failure_policy "fail", vLLM\'s default); "recompute" '
            "costs a prefill on D instead"
        )
    if transfer.buffer_device == "cpu":
        found.append("kv_buffer_device cpu keeps a copy of the whole pool in host memory, on every rank")
    if transfer.connector.startswith("Nixl") and sized.spec.has(LayerKind.MAMBA):
        found.append("NIXL moves recurrent states only under VLLM_SSM_CONV_STATE_LAYOUT=DS, on both sides")
    if transfer.push and sized.options.decode_context_parallel_size > 1:
        found.append("push does not work with --decode-context-parallel-size above 1")
    return found
