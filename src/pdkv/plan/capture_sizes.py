"""How many CUDA graphs an engine captures: batch sizes times modes (vLLM 0.32, config/compilation.py)."""

from __future__ import annotations

from pdkv.models.spec import ModelSpec
from pdkv.plan.options import PlanOptions

_LARGEST = 512
# gpt-oss captures up to 1024 (model_executor/models/config.py).
_LARGEST_OF = {"GptOssForCausalLM": 1024}


def graph_count(options: PlanOptions, spec: ModelSpec) -> int:
    """Graphs of one rank; 0 without CUDA graphs."""
    mode = options.cudagraph_mode or "FULL_AND_PIECEWISE"
    if options.enforce_eager or mode == "NONE":
        return 0
    sizes = capture_sizes(options, spec)
    # Whole graphs are of decode steps, which have a token (and its drafts) for every request.
    most = options.seqs(spec) * (1 + (options.speculative_tokens or 0))
    whole = sum(size <= most for size in sizes)
    pieces = len(sizes) if "PIECEWISE" in mode else 0
    return pieces + (whole if "FULL" in mode else 0)


def capture_sizes(options: PlanOptions, spec: ModelSpec) -> tuple[int, ...]:
    """The batch sizes, ascending: as given, else 1, 2, 4, every 8th up to 256 and every 16th above."""
    if options.cudagraph_capture_sizes is not None:
        return tuple(sorted(set(options.cudagraph_capture_sizes)))
    largest = options.max_cudagraph_capture_size
    if largest is None:
        largest = min(2 * options.seqs(spec), _LARGEST_OF.get(spec.architecture, _LARGEST))
    largest = min(largest, options.batched_tokens(spec))
    sizes = [size for size in (1, 2, 4) if size <= largest]
    sizes += range(8, min(largest + 1, 256), 8)
    sizes += range(256, largest + 1, 16)
    return tuple(sizes)
