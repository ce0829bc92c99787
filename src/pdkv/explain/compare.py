"""Two starts -> what changed between them, as named causes whose bytes and tokens add up to the difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from pdkv.errors import PdkvError
from pdkv.explain.budget import available_of, graphs_subtracted
from pdkv.explain.recompute import recompute
from pdkv.explain.report import Explanation, Finding, Severity
from pdkv.explain.start import Start
from pdkv.explain.startup import explain_start
from pdkv.logs.printed import Printed
from pdkv.logs.startup import FailureKind, RankLog, Settings, StartupLog
from pdkv.models.spec import ModelSpec
from pdkv.units import MIB, format_bytes

_NOTEWORTHY_BYTES = 64 * MIB

# Which settings move a term of the budget; what of them changed is named as its reason.
_MOVES = {
    "weights": ("model", "quantization", "dtype", "tensor_parallel_size", "pipeline_parallel_size", "version"),
    "activation-peak": (
        "max_num_batched_tokens", "max_num_seqs", "max_model_len", "model", "dtype", "tensor_parallel_size",
        "attention_backend", "enforce_eager", "quantization", "version",
    ),
    "non-torch": ("tensor_parallel_size", "pipeline_parallel_size", "kv_connector", "attention_backend", "version"),
    "cuda-graphs": ("enforce_eager", "max_num_seqs", "tensor_parallel_size", "version"),
}  # fmt: skip

# Settings that change how many tokens the same bytes hold, in the order in which they are applied.
_RESHAPES = (
    ("kv_cache_dtype", "dtype", "enable_prefix_caching", "attention_backend", "block_size"),
    ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"),
    ("hybrid_manager_off", "kv_connector"),
    ("max_num_batched_tokens", "async_scheduling"),
    ("max_model_len",),
    ("version", "engine"),
)
_IGNORED = ("asked", "device", "architecture")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A setting that differs."""

    setting: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One reason for the difference: by how much it changes memory for KV (``bytes``) or what is printed (``tokens``).

    ``because`` are the settings that changed and move this term; none means that the logs show no reason.
    """

    id: str
    text: str
    bytes: int | None = None
    tokens: int | None = None
    because: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """B minus A. ``memory`` adds up to ``kv_bytes``, ``capacity`` to ``kv_cache_size_tokens``; each has a remainder."""

    kv_bytes: int | None
    kv_cache_size_tokens: int | None
    memory: tuple[Cause, ...]
    capacity: tuple[Cause, ...]
    changed: tuple[Change, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two starts, each explained, and what lies between them."""

    a: Explanation
    b: Explanation
    difference: Difference


def compare(a: Start, b: Start) -> Comparison:
    """What changed from ``a`` to ``b``."""
    changed = tuple(_changed(a.log.settings, b.log.settings))
    bytes_a, bytes_b = _kv_bytes(a), _kv_bytes(b)
    tokens_a, tokens_b = _printed_tokens(a.log), _printed_tokens(b.log)
    return Comparison(
        a=explain_start(a.source, a.log, a.spec),
        b=explain_start(b.source, b.log, b.spec),
        difference=Difference(
            kv_bytes=None if bytes_a is None or bytes_b is None else bytes_b - bytes_a,
            kv_cache_size_tokens=None if tokens_a is None or tokens_b is None else tokens_b - tokens_a,
            memory=_memory(a, b, changed) if bytes_a is not None and bytes_b is not None else (),
            capacity=_capacity(a, b, changed) if tokens_a is not None and tokens_b is not None else (),
            changed=changed,
            findings=tuple(_findings(a, b, changed)),
        ),
    )


def _changed(a: Settings, b: Settings) -> Iterator[Change]:
    for field in fields(Settings):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if field.name not in _IGNORED and one != other:
            yield Change(
                setting=field.name,
                a=None if one is None else str(one),
                b=None if other is None else str(other),
            )


def _because(term: str, changed: Sequence[Change]) -> tuple[str, ...]:
    return tuple(_worded(change) for change in changed if change.setting in _MOVES[term])


def _worded(change: Change) -> str:
    if change.setting == "version":
        return f"vLLM {change.a or '?'} -> {change.b or '?'}"
    return f"{change.setting} {change.a or 'not stated'} -> {change.b or 'not stated'}"


# -------------------------------------------------------------------------------------------------------------- memory


def _kv_of(start: Start) -> tuple[RankLog, Printed] | None:
    """The bottleneck rank and its memory for KV."""
    rank = start.bottleneck
    size = None if rank is None else available_of(rank, with_graphs=graphs_subtracted(start.log))
    return None if rank is None or size is None else (rank, size)


def _kv_bytes(start: Start) -> int | None:
    found = _kv_of(start)
    return None if found is None else found[1].bytes


def _printed_tokens(log: StartupLog) -> int | None:
    return None if log.engine is None else log.engine.kv_cache_size_tokens


def _memory(a: Start, b: Start, changed: Sequence[Change]) -> tuple[Cause, ...]:
    """Every term of the budget that changed, and what is left: the causes add up to the change of memory for KV."""
    one, other = _kv_of(a), _kv_of(b)
    assert one is not None
    assert other is not None
    (rank_a, kv_a), (rank_b, kv_b) = one, other
    whole = kv_b.bytes - kv_a.bytes
    if (rank_a.reserved is None) != (rank_b.reserved is None) or (rank_a.reserved and rank_b.reserved):
        text = f"memory for KV was given by hand: {kv_a.text} and {kv_b.text}"
        return (Cause(id="kv-cache-memory-bytes", text=text, bytes=whole),) if whole else ()
    found = [*_requested(a, b, rank_a, rank_b), *_terms(a, b, rank_a, rank_b, changed)]
    left = whole - sum(cause.bytes or 0 for cause in found)
    if left:
        text = "rounding of the printed sizes"
        if abs(left) > _NOTEWORTHY_BYTES:
            text = "not explained by what the logs print: another process on the GPU, or a term that one log leaves out"
        found.append(Cause(id="remainder", text=text, bytes=left))
    return tuple(found)


def _requested(a: Start, b: Start, rank_a: RankLog, rank_b: RankLog) -> list[Cause]:
    """The device and the share of it, which together make the requested memory."""
    if rank_a.requested is None or rank_b.requested is None:
        return []
    whole = rank_b.requested.bytes - rank_a.requested.bytes
    share_a, share_b = a.log.settings.gpu_memory_utilization, b.log.settings.gpu_memory_utilization
    if not whole:
        return []
    if rank_a.total is None or rank_b.total is None or share_a is None or share_b is None:
        text = f"requested memory {rank_a.requested.text} -> {rank_b.requested.text}"
        return [Cause(id="requested-memory", text=text, bytes=whole)]
    found = []
    device = int((rank_b.total.bytes - rank_a.total.bytes) * share_a)
    if device:
        text = f"another device: {rank_a.total.text} -> {rank_b.total.text}"
        found.append(Cause(id="device-memory", text=text, bytes=device))
    if share_a != share_b:
        text = f"--gpu-memory-utilization {share_a:g} -> {share_b:g}"
        found.append(Cause(id="gpu-memory-utilization", text=text, bytes=whole - device))
    return found


def _terms(a: Start, b: Start, rank_a: RankLog, rank_b: RankLog, changed: Sequence[Change]) -> list[Cause]:
    """Weights, activations, non-torch memory and graphs: more of one is less for KV."""
    found = []
    pairs = {
        "weights": (rank_a.weights, rank_b.weights),
        "activation-peak": (rank_a.activation_peak, rank_b.activation_peak),
        "non-torch": (_non_torch(rank_a), _non_torch(rank_b)),
        "cuda-graphs": (_graphs(a, rank_a), _graphs(b, rank_b)),
    }
    for term, (size_a, size_b) in pairs.items():
        if size_a is None or size_b is None or size_a.bytes == size_b.bytes:
            continue
        because = _because(term, changed)
        other = _other_process(rank_a, rank_b, size_b.bytes - size_a.bytes) if term == "non-torch" else ()
        reason = ", ".join(other or because) or "no setting in the logs explains it"
        text = f"{term.replace('-', ' ')} {size_a.text} -> {size_b.text}: {reason}"
        found.append(Cause(id=term, text=text, bytes=size_a.bytes - size_b.bytes, because=other or because))
    return found


def _non_torch(rank: RankLog) -> Printed | None:
    if rank.non_torch is None and rank.consumed is not None and rank.weights is not None:
        return rank.consumed.minus(rank.weights)
    return rank.non_torch


def _graphs(start: Start, rank: RankLog) -> Printed | None:
    """What graphs take off the memory for KV: nothing where the release does not subtract them."""
    return rank.graph_estimate if graphs_subtracted(start.log) else Printed.exactly(0)


def _other_process(rank_a: RankLog, rank_b: RankLog, more: int) -> tuple[str, ...]:
    """Non-torch memory that changed as free memory did belongs to another process."""
    if rank_a.free_at_start is None or rank_b.free_at_start is None:
        return ()
    less_free = rank_a.free_at_start.bytes - rank_b.free_at_start.bytes
    if abs(less_free) < _NOTEWORTHY_BYTES or abs(less_free - more) > abs(more) // 4:
        return ()
    return (
        f"another process on the GPU: {rank_a.free_at_start.text} -> {rank_b.free_at_start.text} free at the start",
    )


# ------------------------------------------------------------------------------------------------------------ capacity


def _capacity(a: Start, b: Start, changed: Sequence[Change]) -> tuple[Cause, ...]:
    """The change of the printed tokens, one step after the other: memory first, then each setting that reshapes KV."""
    before, after = _printed_tokens(a.log), _printed_tokens(b.log)
    assert before is not None
    assert after is not None
    found, now, computed = [], before, None
    for name, text, tokens in _steps(a, b, changed):
        # The first is A itself: what follows is counted from it, so that A's rounding is no cause.
        if computed is not None and tokens != computed:
            found.append(Cause(id=name, text=text, tokens=tokens - computed))
            now += tokens - computed
        computed = tokens
    if now != after:
        what = "the model or its memory is not known" if computed is None else "rounding of the printed sizes"
        found.append(Cause(id="remainder", text=what, tokens=after - now))
    return tuple(found)


def _steps(a: Start, b: Start, changed: Sequence[Change]) -> Iterator[tuple[str, str, int]]:
    """Printed tokens after every step from A to B: (cause, words, tokens)."""
    memory_a, memory_b = _kv_of(a), _kv_of(b)
    if a.spec is None or b.spec is None or memory_a is None or memory_b is None or a.verdict is None:
        return
    settings, spec = _own(a), a.spec
    first, tokens = (_tokens(spec, settings, size) for size in (memory_a[1], memory_b[1]))
    if first is None or tokens is None:
        return
    yield "a", "A as it was", first
    yield "memory-for-kv", f"memory for KV {memory_a[1].text} -> {memory_b[1].text}", tokens
    if a.spec.layers != b.spec.layers:
        spec = b.spec
        tokens = _tokens(spec, settings, memory_b[1])
        if tokens is not None:
            yield "model", f"model {a.log.settings.model} -> {b.log.settings.model}", tokens
    theirs, differ = _own(b), {change.setting: change for change in changed}
    for names in _RESHAPES:
        moved = [name for name in names if name in differ]
        if not moved:
            continue
        settings = replace(settings, **{name: getattr(theirs, name) for name in names})
        tokens = _tokens(spec, settings, memory_b[1])
        if tokens is not None:
            yield moved[0].replace("_", "-"), ", ".join(_worded(differ[name]) for name in moved), tokens


def _own(start: Start) -> Settings:
    """The settings of a start with the length that its capacity was printed for."""
    engine = start.log.engine
    length = None if engine is None else engine.max_model_len
    return replace(start.log.settings, max_model_len=length or start.log.settings.max_model_len)


def _tokens(spec: ModelSpec, settings: Settings, memory: Printed) -> int | None:
    """What would be printed, with the same memory on every stage."""
    try:
        verdict = recompute(spec, settings, [memory] * (settings.pipeline_parallel_size or 1), None)
    except PdkvError:
        return None
    if verdict is None:
        return None
    middle = memory.bytes // max(1, verdict.sizing.capacity(1).bytes_per_block)
    return verdict.sizing.capacity(middle).kv_cache_size_tokens


# ------------------------------------------------------------------------------------------------------------ findings


def _findings(a: Start, b: Start, changed: Sequence[Change]) -> Iterator[Finding]:
    yield from _occupied(a, b)
    if not changed:
        yield Finding(id="same-settings", text="the two starts ran with the same settings, as far as the logs show")
    rules_a = a.verdict.sizing.rules if a.verdict else None
    rules_b = b.verdict.sizing.rules if b.verdict else None
    if rules_a and rules_b and rules_a.tokens_follow_concurrency != rules_b.tokens_follow_concurrency:
        yield Finding(
            id="printed-size-means-something-else",
            severity=Severity.WARNING,
            text='"KV cache size" is blocks x block size before vLLM 0.21 and concurrency x length since: compare '
            "concurrency, not tokens",
        )
    if (a.log.failure is None) != (b.log.failure is None):
        failed, other = (a, b) if a.log.failure else (b, a)
        failure = failed.log.failure
        assert failure is not None
        yield Finding(
            id="one-failed",
            severity=Severity.ERROR,
            text=f"{failed.source} failed ({failure.kind.value}) where {other.source} did not",
        )


def _occupied(a: Start, b: Start) -> Iterator[Finding]:
    """Another process: what was free at the start differs although the device is the same."""
    free_a, free_b = _least_free(a.log), _least_free(b.log)
    if free_a is None or free_b is None or abs(free_a.bytes - free_b.bytes) < _NOTEWORTHY_BYTES:
        return
    more = free_a.bytes - free_b.bytes
    yield Finding(
        id="other-process",
        severity=Severity.WARNING if abs(more) > 1024 * MIB else Severity.INFO,
        text=f"{free_a.text} were free at A's start and {free_b.text} at B's: {format_bytes(abs(more))} "
        f"{'more' if more > 0 else 'less'} in use by other processes or by NCCL",
        bytes=more,
        effect="the requested memory is a share of the whole device: it does not shrink, the start fails instead",
    )


def _least_free(log: StartupLog) -> Printed | None:
    sizes = [rank.free_at_start for rank in log.ranks if rank.free_at_start is not None]
    shared = next((item for item in log.failures if item.kind is FailureKind.DEVICE_SHARED), None)
    told = None if shared is None else shared.memory("free")
    return min([*sizes, *([told] if told else [])], key=lambda size: size.bytes, default=None)
