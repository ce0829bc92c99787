"""What each used flag and variable of vLLM sets in the options of a plan. Each raises ConfigError naming the flag."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdkv.errors import ConfigError
from pdkv.plan.kv_transfer import parse_kv_transfer
from pdkv.units import GIB

_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_MOST_DIGITS = 30
_SCALE = {"": 1} | {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
_SCALE |= {letter.upper(): 1024**power for power, letter in enumerate("kmgt", 1)}


@dataclass(slots=True)
class Given:
    """What was said so far: fields of PlanOptions, fields of the model's config, and what is not counted."""

    options: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def integer(flag: str, text: str) -> int:
    """vLLM's human-readable integers: ``25.6k`` is 25,600, ``16K`` 16,384; no decimals before a power of 1024."""
    match = _HUMAN.fullmatch(str(text).strip())
    if match is None or ("." in match[1] and (not match[2] or match[2].isupper())):
        raise ConfigError(f"{flag} {text!r}: vLLM takes an integer here, such as 8192, 8k (8000) or 8K (8192)")
    scale: int = _SCALE[match[2]]
    if len(match[1]) > _MOST_DIGITS:
        raise ConfigError(f"{flag} {match[1][:12]}...: a number of {len(match[1])} digits; give one that can be")
    return int(float(match[1]) * scale) if "." in match[1] else int(match[1]) * scale


def number(flag: str, text: str) -> float:
    """A decimal number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{flag} {text!r}: not a number")
    return value


Converter = Callable[[Given, str, Any], None]


def _length(flag: str, text: str) -> int | str:
    return "auto" if text.strip().lower() in ("auto", "-1") else integer(flag, text)


def _integers(flag: str, texts: Sequence[str]) -> tuple[int, ...]:
    return tuple(integer(flag, part) for text in texts for part in re.split(r"[,\s]+", text.strip("[]")) if part)


def _words(_flag: str, texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for text in texts for part in text.split(",") if part)


def _gib(flag: str, text: str) -> int | None:
    value = number(flag, text)
    if not 0 <= value < 1e12:
        raise ConfigError(f"{flag} {text}: a number of GiB, at least 0")
    return round(value * GIB) or None


def _choice(*allowed: str) -> Callable[[str, str], str]:
    def convert(flag: str, text: str) -> str:
        if text not in allowed:
            raise ConfigError(f"{flag} {text}: there are {', '.join(allowed)}")
        return text

    return convert


def _dtype(_flag: str, text: str) -> str:
    """vLLM also takes ``half`` and ``float``."""
    return {"half": "float16", "float": "float32"}.get(text, text)


def _hf_overrides(given: Given, _flag: str, value: Mapping[str, Any]) -> None:
    given.overrides.update(value)


def _attention_config(given: Given, _flag: str, value: Mapping[str, Any]) -> None:
    for key, part in value.items():
        if key == "backend" and isinstance(part, str):
            given.options["attention_backend"] = part
        else:
            given.warnings.append(f"--attention-config {key}: not looked at; it may change the kernels' blocks")


def _compilation_config(given: Given, flag: str, value: Mapping[str, Any]) -> None:
    for key, part in value.items():
        if key == "cudagraph_mode" and isinstance(part, str):
            given.options["cudagraph_mode"] = part
        elif key == "cudagraph_capture_sizes" and isinstance(part, list):
            given.options["cudagraph_capture_sizes"] = _integers(flag, [str(size) for size in part])
        elif key == "max_cudagraph_capture_size" and isinstance(part, int):
            given.options["max_cudagraph_capture_size"] = part
        elif key in ("level", "mode"):
            given.warnings.append(f"--compilation-config {key}: changes peaks a little; not counted")


def _speculative(given: Given, flag: str, value: Mapping[str, Any]) -> None:
    method, model, tokens = value.get("method"), value.get("model"), value.get("num_speculative_tokens")
    if method is not None and not isinstance(method, str):
        raise ConfigError(f"{flag}: method must be a word, not {method!r}")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        raise ConfigError(f"{flag}: num_speculative_tokens must be an integer of at least 1, not {tokens!r}")
    given.options.update(
        {
            name: part
            for name, part in (
                ("speculative_method", method),
                ("speculative_model", str(model) if model is not None else None),
                ("speculative_tokens", tokens),
            )
            if part is not None
        }
    )


def _kv_transfer(given: Given, _flag: str, value: Mapping[str, Any]) -> None:
    given.options["kv_transfer"] = parse_kv_transfer(value)


def _optimization(given: Given, flag: str, text: str) -> None:
    """Level 0 captures no graphs, level 1 no full ones; 2 is the default."""
    level = integer(flag, text)
    if level < 2:
        given.options["cudagraph_mode"] = "NONE" if level == 0 else "PIECEWISE"


def _performance(given: Given, flag: str, text: str) -> None:
    given.options["throughput_mode"] = _choice("balanced", "interactivity", "throughput")(flag, text) == "throughput"


FIELDS: Mapping[str, tuple[str, Callable[[str, Any], Any] | None]] = {
    "--dtype": ("dtype", _dtype),
    "--max-model-len": ("max_model_len", _length),
    "--quantization": ("quantization", None),
    "--enforce-eager": ("enforce_eager", None),
    "--attention-backend": ("attention_backend", None),
    "--pipeline-parallel-size": ("pipeline_parallel_size", integer),
    "--tensor-parallel-size": ("tensor_parallel_size", integer),
    "--decode-context-parallel-size": ("decode_context_parallel_size", integer),
    "--prefill-context-parallel-size": ("prefill_context_parallel_size", integer),
    "--data-parallel-size": ("data_parallel_size", integer),
    "--enable-expert-parallel": ("enable_expert_parallel", None),
    "--block-size": ("block_size", integer),
    "--gpu-memory-utilization": ("gpu_memory_utilization", number),
    "--kv-cache-memory-bytes": ("kv_cache_memory_bytes", integer),
    "--kv-cache-dtype": ("kv_cache_dtype", None),
    "--num-gpu-blocks-override": ("num_gpu_blocks_override", integer),
    "--enable-chunked-prefill": ("enable_chunked_prefill", None),
    "--enable-prefix-caching": ("enable_prefix_caching", None),
    "--kv-cache-dtype-skip-layers": ("kv_cache_dtype_skip_layers", _words),
    "--mamba-cache-dtype": ("mamba_cache_dtype", None),
    "--mamba-ssm-cache-dtype": ("mamba_ssm_cache_dtype", None),
    "--mamba-cache-mode": ("mamba_cache_mode", _choice("none", "align")),
    "--kv-offloading-size": ("kv_offloading_bytes", _gib),
    "--max-num-batched-tokens": ("max_num_batched_tokens", integer),
    "--max-num-seqs": ("max_num_seqs", integer),
    "--disable-hybrid-kv-cache-manager": ("disable_hybrid_kv_cache_manager", None),
    "--async-scheduling": ("async_scheduling", None),
    "--watermark": ("watermark", number),
    "--spec-method": ("speculative_method", None),
    "--spec-model": ("speculative_model", None),
    "--spec-tokens": ("speculative_tokens", integer),
    "--cudagraph-capture-sizes": ("cudagraph_capture_sizes", _integers),
    "--max-cudagraph-capture-size": ("max_cudagraph_capture_size", integer),
    "--mm-ipc-gpu-memory-gb": ("mm_ipc_gpu_memory_bytes", _gib),
    "--language-model-only": ("language_model_only", None),
}
"""Flags that set one option -> the option, and how their words are read (``None``: as they are)."""

_SPECIAL: Mapping[str, Converter] = {
    "--hf-overrides": _hf_overrides,
    "--attention-config": _attention_config,
    "--compilation-config": _compilation_config,
    "--kv-transfer-config": _kv_transfer,
    "--optimization-level": _optimization,
    "--performance-mode": _performance,
    "--speculative-config": _speculative,
}

USED_FLAGS = frozenset((*FIELDS, *_SPECIAL, "--model", "--config"))
"""Flags of role ``use``. --model and --config are read where the words are."""


def convert(given: Given, flag: str, value: Any) -> None:
    """Put what ``flag`` says into ``given``. Raises ConfigError when it cannot be."""
    if flag in _SPECIAL:
        _SPECIAL[flag](given, flag, value)
        return
    name, read = FIELDS[flag]
    given.options[name] = value if read is None else read(flag, value)


def _switch(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


def _cpu_space(given: Given, text: str) -> None:
    """On a CPU, where vLLM has one attention backend for K and V and no step in flight beside the present one."""
    if text.strip() not in ("", "0"):
        given.options["kv_cache_memory_bytes"] = integer("VLLM_CPU_KVCACHE_SPACE", text) * GIB
        given.options["attention_backend"] = "CPU_ATTN"
        given.options["async_scheduling"] = False


def _backend(given: Given, text: str) -> None:
    """Before 0.12 the only way to name one; the suffix of V0 and V1 is gone."""
    given.options["attention_backend"] = text.removesuffix("_VLLM_V1").removesuffix("_V1")


ENVIRONMENT: Mapping[str, Callable[[Given, str], None]] = {
    "VLLM_ATTENTION_BACKEND": _backend,
    "VLLM_KV_CACHE_LAYOUT": lambda given, text: given.options.update(kv_cache_layout=text),
    "VLLM_CPU_KVCACHE_SPACE": _cpu_space,
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": lambda given, text: given.options.update(
        estimate_cudagraphs=_switch(text)
    ),
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": lambda given, text: given.options.update(
        chunked_local_with_hybrid=_switch(text)
    ),
    "VLLM_USE_V2_MODEL_RUNNER": lambda given, text: given.options.update(v1_runner=not _switch(text)),
}
"""Variables that decide the plan."""

IRRELEVANT_ENVIRONMENT = (
    "VLLM_LOG", "VLLM_CONFIGURE_LOGGING", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_API_KEY", "VLLM_NIXL_", "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "VLLM_USAGE_", "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_ENGINE_ITERATION_TIMEOUT_S", "VLLM_RPC_", "VLLM_HTTP_TIMEOUT",
    "VLLM_SERVER_DEV_MODE", "VLLM_TORCH_PROFILER", "VLLM_USE_MODELSCOPE", "VLLM_DEBUG", "VLLM_TRACE_FUNCTION",
    "VLLM_ALLOW_RUNTIME_LORA", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_RAY_", "VLLM_DP_", "VLLM_IMAGE_FETCH",
    "VLLM_VIDEO_FETCH", "VLLM_AUDIO_FETCH", "VLLM_ASSETS_CACHE", "VLLM_KEEP_ALIVE", "VLLM_SKIP_", "VLLM_TARGET_DEVICE",
    "VLLM_SLEEP", "VLLM_EXECUTE_MODEL_TIMEOUT", "VLLM_MOONCAKE_", "VLLM_KV_EVENTS_", "VLLM_TUNED_CONFIG",
)  # fmt: skip
"""Beginnings of variables that do not change KV memory."""
