"""The lines of a vLLM start-up log, 0.6 to 0.32 (spec memory-profile, section 12), as patterns.

A shape has fixed words (its anchors, by which lines are found) and a pattern that takes the numbers. Nothing is tied to
the start of a line: prefixes come and go with the release, the launcher and the log collector.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIZE = r"(-?\d{1,9}(?:\.\d{1,9})?) ?(GiB|GB)"
_GIB = r"(-?\d{1,9}(?:\.\d{1,9})?)"
_INT = r"(\d{1,18})"
_TOKENS = r"(\d[\d,]{0,23})"


@dataclass(frozen=True, slots=True)
class Shape:
    """``name`` is what the parser calls it."""

    name: str
    anchors: tuple[str, ...]
    pattern: re.Pattern[str]


def _shape(name: str, anchor: str | tuple[str, ...], pattern: str) -> Shape:
    return Shape(name, (anchor,) if isinstance(anchor, str) else anchor, re.compile(pattern, re.ASCII))


PROCESS = re.compile(
    r"\((?P<name>[A-Za-z][\w-]{0,63})(?: rank=(?P<rank>\d{1,6}))? pid=(?P<pid>\d{1,10})"
    r"(?:, ip=(?P<ip>[0-9A-Fa-f.:]{1,45}))?\)"
)
"""Who wrote a line: ``(Worker_TP0 pid=44)``, ``(VllmWorker rank=1 pid=7)``, ``(RayWorkerProc pid=9, ip=10.0.0.2)``."""

# ---------------------------------------------------------------------------------------- who, which model, which flags

_SETTINGS = (
    _shape("banner", "█  version ", r"█  version (\S{1,80})"),
    _shape("banner", "API server version ", r"vLLM API server version (\S{1,80})"),
    _shape(
        "engine_config",
        " engine (v",
        r"Initializing an? (?:(V[01]) )?LLM engine \(v([^)\s]{1,80})\) with config: ?(.*)",
    ),
    _shape("arguments", "non-default args: ", r"non-default args: (\{.*)"),
    _shape("arguments", "args: Namespace(", r"args: Namespace\((.*)"),
    _shape("architecture", "Resolved architecture: ", r"Resolved architecture: (\w{1,100})"),
    _shape("max_num_batched_tokens", "max_num_batched_tokens", rf"with max_num_batched_tokens={_INT}"),
    _shape("max_num_batched_tokens", "max_num_batched_tokens", rf"Defaulting max_num_batched_tokens to {_INT}"),
    _shape("max_num_seqs", "Defaulting max_num_seqs", rf"Defaulting max_num_seqs to {_INT}"),
    _shape("async_scheduling", "Asynchronous scheduling is ", r"Asynchronous scheduling is (enabled|disabled)"),
    _shape(
        "backend",
        ("ttention backend", " backend on V1 engine", "Using Flash Attention", "Using FlashInfer", "Using XFormers"),
        r"Using (?:AttentionBackendEnum\.)?([A-Za-z][\w ]{1,40}?) (?:attention )?backend"
        r"(?: out of| on V1| with|[.,]|$)",
    ),
    _shape("backend", "Using AttentionBackendEnum", r"Using AttentionBackendEnum\.(\w{1,60}) backend"),
    _shape(
        "hybrid_off",
        ("ybrid kv cache manager", "ybrid KV cache manager"),
        r"((?:Turning off|Disabling|There is a latency regression).{0,160}?ybrid (?:kv|KV) cache manager.{0,240})",
    ),
)

# ----------------------------------------------------------------------------------------------------- memory of a rank

_MEMORY = (
    _shape(
        "place",
        "is assigned as DP rank ",
        rf"rank {_INT} in world size \d+ is assigned as DP rank {_INT}, PP rank {_INT},.{{0,60}}?TP rank {_INT}",
    ),
    _shape("snapshot", "memory snapshot: ", rf"memory snapshot: .{{0,200}}?free_memory={_SIZE}, total_memory={_SIZE}"),
    _shape("requested", "worker requested memory: ", rf"worker requested memory: {_SIZE}"),
    _shape("weights", "odel loading took ", rf"odel loading took {_SIZE}"),
    _shape("weights", "Loading model weights took ", rf"Loading model weights took {_SIZE}"),
    _shape(
        "profile",
        "Total non KV cache memory: ",
        rf"Total non KV cache memory: {_SIZE}; torch peak memory increase: {_SIZE}; (non-torch forward increase memory"
        rf"|total consumed \(from mem_get_info\)): {_SIZE}; weights memory: {_SIZE}",
    ),
    _shape(
        "initial",
        "Initial free memory: ",
        rf"Initial free memory: {_SIZE}; Requested memory: (\d\.\d{{1,9}}) \(util\), {_SIZE}",
    ),
    _shape(
        "after_profiling",
        "Free memory after profiling: ",
        rf"Free memory after profiling: {_SIZE} \(total\), {_SIZE} \(within requested\)",
    ),
    _shape("available", "Available KV cache memory: ", rf"Available KV cache memory: {_SIZE}"),
    _shape("graph_estimate", "Estimated CUDA graph memory: ", rf"Estimated CUDA graph memory: {_SIZE} total"),
    _shape("graph_actual", "Graph capturing finished in ", rf"Graph capturing finished in \d+ secs?, took {_SIZE}"),
    _shape(
        "graph_compare",
        "CUDA graph pool memory: ",
        rf"CUDA graph pool memory: {_SIZE} \(actual\), {_SIZE} \(estimated\)",
    ),
    _shape("reserved", "Initial free memory ", rf"Initial free memory {_SIZE}, reserved {_SIZE} memory for KV Cache"),
    _shape(
        "summary",
        "Desired GPU memory utilization is ",
        rf"Free memory on device \({_GIB}/{_GIB} GiB\) on startup\. Desired GPU memory utilization is "
        rf"\((\d\.\d{{1,9}}), {_GIB} GiB\)\. Actual usage is {_GIB} GiB for (weight|consumed memory).{{0,40}}?, "
        rf"{_GIB} GiB for peak activation, (?:{_GIB} GiB for non-torch memory, )?and {_GIB} GiB for CUDAGraph memory\."
        r".{0,120}?--kv-cache-memory=(-?\d{1,18}).{0,120}?--kv-cache-memory=(-?\d{1,18})",
    ),
    # 0.6.6 to 0.8 on the V0 engine: sentences on one line, on three, or wrapped anywhere.
    _shape(
        "v0_limit",
        "x gpu_memory_utilization (",
        rf"total_gpu_memory \({_SIZE}\) x gpu_memory_utilization \((\d\.\d{{1,9}})\) = {_SIZE}",
    ),
    _shape(
        "v0_term",
        (
            "model weights take ",
            "non_torch_memory takes ",
            "activation peak memory takes ",
            "reserved for KV Cache is ",
        ),
        r"(model weights take|non_torch_memory takes|PyTorch activation peak memory takes"
        rf"|the rest of the memory reserved for KV Cache is) {_SIZE}",
    ),
    # 0.6.4 and 0.6.5: name=value, or a table.
    _shape(
        "v0_results",
        "Memory profiling results: ",
        rf"total_gpu_memory={_SIZE}.{{0,200}}?non_torch_memory={_SIZE}.{{0,40}}?kv_cache_size={_SIZE}"
        r".{0,40}?gpu_memory_utilization=(\d\.\d{1,9})",
    ),
    _shape(
        "v0_row",
        (
            "total_gpu_memory",
            "current vLLM instance can use",
            "model weights take",
            "non_torch_memory",
            "PyTorch activation peak memory",
            "available_kv_cache_memory",
        ),
        r"(total_gpu_memory|the current vLLM instance can use|model weights take|non_torch_memory"
        rf"|PyTorch activation peak memory|available_kv_cache_memory)\s+{_SIZE}\s*$",
    ),
    _shape(
        "cpu_reserved",
        "GiB for KV cache on node",
        rf"(Explicitly|Auto) set \({_GIB}/{_GIB}\) GiB for KV cache on node",
    ),
)

# ------------------------------------------------------------------------------------------------ capacity of an engine

_CAPACITY = (
    _shape("tokens", " KV cache size: ", rf"(\w[\w ]{{0,30}}?)(?: \+ host)? KV cache size: {_TOKENS} tokens"),
    _shape(
        "concurrency",
        "aximum concurrency for ",
        rf"aximum concurrency for {_TOKENS} tokens per request: (\d{{1,12}}\.\d{{1,6}})x",
    ),
    _shape("blocks", " blocks: ", rf"\b(GPU|CUDA|cuda|rocm|xpu|hpu|cpu|neuron|tpu) blocks: {_INT}"),
    _shape(
        "final_blocks",
        "num_gpu_blocks is: ",
        rf"Engine {_INT}: vllm cache_config_info with initialization after num_gpu_blocks is: {_INT}",
    ),
    _shape("override", "with num_gpu_blocks_override=", rf"num_gpu_blocks={_INT} with num_gpu_blocks_override={_INT}"),
    _shape("fitted", "Auto-fit max_model_len: reduced", rf"Auto-fit max_model_len: reduced from {_INT} to {_INT}"),
    _shape("fits_whole", "Auto-fit max_model_len: full", rf"full model context length {_INT} fits"),
    _shape("mm_reserve", "GiB of GPU memory", rf"Reserving {_SIZE} of GPU memory"),
    _shape(
        "padding",
        " padding layers, may waste",
        rf"Add {_INT} padding layers, may waste at most (\d{{1,6}}\.\d{{1,6}})%",
    ),
    _shape("group_sizes", "kv cache group sizes (", r"kv cache group sizes \((\d{1,12}(?:, ?\d{1,12}){0,64}),?\)"),
    _shape("block_size", "Setting kv cache block size to ", rf"Setting kv cache block size to {_INT}"),
    _shape("attention_block", "Setting attention block size to ", rf"Setting attention block size to {_INT}"),
    _shape("kv_layout", " KV cache layout", r"Using ([A-Z]{3,6}) KV cache layout"),
    _shape(
        "ready",
        ("Application startup complete", "Starting vLLM API server", "init engine (profile"),
        r"(Application startup complete|Starting vLLM API server|init engine \(profile)",
    ),
    _shape(
        "stats",
        " KV cache usage: ",
        rf"Running: {_INT} reqs?.{{0,200}}?(?:Waiting|Pending): {_INT} reqs?"
        rf"(?:.{{0,200}}?Preemptions: {_INT})?.{{0,200}}?"
        r"\w+ KV cache usage: (\d{1,3}(?:\.\d{1,4})?)%",
    ),
)

SHAPES = (*_SETTINGS, *_MEMORY, *_CAPACITY)
"""Every line that the parser knows besides errors."""
