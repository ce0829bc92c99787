"""What to change, and what it would do: every effect is computed by planning again with the change applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pdkv.errors import PdkvError
from pdkv.layout.specs import WINDOWED
from pdkv.models.spec import LayerKind
from pdkv.plan.options import PlanOptions
from pdkv.plan.sizing import Sized
from pdkv.units import format_bytes

_FULL_SHARE = 0.95

Resize = Callable[[PlanOptions], Sized]
"""Sizes the same model, in the same memory, under other options."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Something to change, what it would do, and the options (names of PlanOptions) that it changes.

    Planning again with ``changes`` gives the numbers of ``effect``.
    """

    id: str
    text: str
    effect: str
    changes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lever:
    """A change that may help: an id, what to do in a sentence, and the options that it changes."""

    id: str
    text: str
    changes: dict[str, Any]


def advise(sized: Sized, resize: Resize) -> tuple[Advice, ...]:
    """What makes the longest request fit, when it does not; then every lever that gives room for more tokens."""
    found = list(_to_fit(sized))
    if sized.options.num_gpu_blocks_override is not None:
        return tuple(found)
    for lever in levers(sized):
        other = applied(sized, lever, resize)
        if other is not None and _gains(sized, other):
            found.append(Advice(lever.id, lever.text, _effect(sized, other), lever.changes))
    found += _enough_ranks(sized, resize)
    return tuple(found)


def _enough_ranks(sized: Sized, resize: Resize) -> Iterator[Advice]:
    """The fewest tensor-parallel ranks that make the longest request fit, where a GPU's budget is estimated."""
    options = sized.options
    if sized.capacity.fits or options.kv_cache_memory_bytes is not None:
        return
    for size in (options.tensor_parallel_size << power for power in range(1, 6)):
        text = f"divide weights and KV heads over {size} GPUs: --tensor-parallel-size {size}"
        lever = Lever("tensor-parallel-size", text, {"tensor_parallel_size": size})
        other = applied(sized, lever, resize)
        if other is not None and other.capacity.fits:
            yield Advice(lever.id, text, _effect(sized, other), lever.changes)
            return


def applied(sized: Sized, lever: Lever, resize: Resize) -> Sized | None:
    """The model under ``lever``'s changes; ``None`` where vLLM would refuse them."""
    try:
        return resize(replace(sized.options, **lever.changes))
    except PdkvError:
        return None


def _gains(now: Sized, then: Sized) -> bool:
    """By concurrency at the same length: a longer auto length is a gain too."""
    length = now.capacity.max_model_len
    return then.concurrency(length) > now.concurrency(length) or (
        then.capacity.estimated_max_model_len > now.capacity.estimated_max_model_len
    )


def _effect(now: Sized, then: Sized) -> str:
    before, after = now.capacity, then.capacity
    tokens = f"{after.kv_cache_size_tokens} tokens instead of {before.kv_cache_size_tokens}"
    if before.fits:
        return tokens
    if after.fits:
        return f"one request of {after.max_model_len} tokens fits; {tokens}"
    return f"the longest that fits has {after.estimated_max_model_len} tokens, not {before.estimated_max_model_len}"


def _to_fit(sized: Sized) -> Iterator[Advice]:
    capacity = sized.capacity
    if capacity.fits:
        return
    longest = capacity.estimated_max_model_len
    if longest > 0:
        yield Advice(
            "max-model-len",
            f"set --max-model-len {longest}, or auto",
            f"one request of {longest} tokens fits",
            {"max_model_len": longest},
        )
    if sized.options.kv_cache_memory_bytes is not None and sized.options.num_gpu_blocks_override is None:
        needed = capacity.needed_bytes
        yield Advice(
            "kv-cache-memory-bytes",
            f"give at least {needed} bytes ({format_bytes(needed)}) per GPU for KV",
            f"one request of {capacity.max_model_len} tokens fits",
            {"kv_cache_memory_bytes": needed},
        )


def levers(sized: Sized) -> Iterator[Lever]:
    """Everything that could be changed here, whether or not it helps."""
    yield from _hybrid(sized)
    yield from _types(sized)
    yield from _parallel(sized)
    yield from _batch(sized)
    yield from _budget(sized)


def _hybrid(sized: Sized) -> Iterator[Lever]:
    options, spec = sized.options, sized.spec
    if options.hybrid_manager(spec):
        return
    without = replace(options, disable_hybrid_kv_cache_manager=None).hybrid_manager(spec)
    if not without and options.kv_transfer is not None:
        names = options.kv_transfer.without_hybrid_support
        if not names:
            yield Lever(
                "hybrid-manager",
                f"vLLM {options.rules.version} switches the hybrid manager off under any connector; say "
                "--no-disable-hybrid-kv-cache-manager",
                {"disable_hybrid_kv_cache_manager": False},
            )
            return
        yield Lever(
            "connector",
            f"{', '.join(names)} switches the hybrid manager off, so windows are kept in full; use a connector that "
            "supports it (NixlConnector, MooncakeConnector, OffloadingConnector ...)",
            {"kv_transfer": None, "disable_hybrid_kv_cache_manager": None},
        )
        return
    yield Lever(
        "hybrid-manager",
        "leave out --disable-hybrid-kv-cache-manager, so that what is behind a window is freed",
        {"disable_hybrid_kv_cache_manager": None},
    )


def _types(sized: Sized) -> Iterator[Lever]:
    options, built = sized.options, sized.built
    if built.dtype.element_bytes > 1:
        yield Lever(
            "kv-cache-dtype",
            "store KV in 8 bits, where the model's quality allows: --kv-cache-dtype fp8",
            {"kv_cache_dtype": "fp8"},
        )
    wide = any(layer.state is not None and layer.state.cells_dtype == "float32" for layer in sized.spec.layers)
    if wide and options.mamba_ssm_cache_dtype == "auto":
        yield Lever(
            "mamba-ssm-cache-dtype",
            "keep recurrent states in 16 bits, where the model's quality allows: --mamba-ssm-cache-dtype bfloat16",
            {"mamba_ssm_cache_dtype": "bfloat16"},
        )


def _parallel(sized: Sized) -> Iterator[Lever]:
    options, spec = sized.options, sized.spec
    size, context = options.tensor_parallel_size, options.decode_context_parallel_size
    divided = [layer.kv_heads for layer in spec.layers if layer.kv_heads and not layer.replicated]
    copies = size // min(divided, default=1) if divided or spec.has(LayerKind.MLA) else 1
    if copies > context:
        what = "the latents" if not divided else "each KV head's tokens"
        yield Lever(
            "decode-context-parallel-size",
            f"divide {what} by tokens, rather than keep {copies} copies: --decode-context-parallel-size {copies}",
            {"decode_context_parallel_size": copies},
        )


def _budget(sized: Sized) -> Iterator[Lever]:
    """What leaves more of a GPU to KV, where its bytes are not given."""
    options = sized.options
    if options.kv_cache_memory_bytes is not None or options.num_gpu_blocks_override is not None:
        return
    if options.utilization < _FULL_SHARE:
        yield Lever(
            "gpu-memory-utilization",
            f"where nothing else runs on the GPU, give vLLM more of it: --gpu-memory-utilization {_FULL_SHARE}",
            {"gpu_memory_utilization": _FULL_SHARE},
        )
    if not sized.capacity.fits and not options.enforce_eager:
        yield Lever(
            "enforce-eager", "do without CUDA graphs, which costs speed: --enforce-eager", {"enforce_eager": True}
        )


def _batch(sized: Sized) -> Iterator[Lever]:
    options = sized.options
    if not sized.spec.has(*WINDOWED, LayerKind.CHUNKED_LOCAL):
        return
    # A step of a decode instance is a token a request, and now and then the rest of a prompt.
    smaller = max(512, 1 << (options.seqs(sized.spec) - 1).bit_length())
    if smaller < options.batched_tokens(sized.spec):
        yield Lever(
            "max-num-batched-tokens",
            "on a decode instance, whose prompts arrive computed, let windows reserve for smaller steps: "
            f"--max-num-batched-tokens {smaller}",
            {"max_num_batched_tokens": smaller},
        )
