"""Arguments and configurations as vLLM prints them: a dict, a Namespace or name=value, read field by field.

They hold the text of arbitrary objects, so they are searched for the fields that matter rather than evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pdkv.logs.startup import Settings

_LARGEST_SIZE = 1 << 16
_VALUE = r"""('[^']{0,400}'|"[^"]{0,400}"|[^\s,(){}\[\]'"]{1,120})"""


def _field(name: str) -> re.Pattern[str]:
    """``name=value``, ``'name': value`` and ``"name": value``; not ``other_name=``."""
    return re.compile(rf"""(?<![\w.])["']?{name}["']?\s?[=:]\s?{_VALUE}""")


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


def _size(text: str) -> int | None:
    """A count of GPUs, stages or tokens of a block; what no deployment has is not read."""
    value = _integer(text)
    return value if value is not None and 1 <= value <= _LARGEST_SIZE else None


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,12})?", text) else None


def _flag(text: str) -> bool | None:
    return {"True": True, "true": True, "False": False, "false": False}.get(text)


def _word(text: str) -> str | None:
    return None if text in ("None", "null", "") else text


def _dtype(text: str) -> str | None:
    return _word(text.removeprefix("torch."))


_READERS: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("model", "model", _word),
    ("dtype", "dtype", _dtype),
    ("quantization", "quantization", _word),
    ("kv_cache_dtype", "kv_cache_dtype", _word),
    ("max_seq_len", "max_model_len", _integer),
    ("max_model_len", "max_model_len", _integer),
    ("tensor_parallel_size", "tensor_parallel_size", _size),
    ("pipeline_parallel_size", "pipeline_parallel_size", _size),
    ("data_parallel_size", "data_parallel_size", _size),
    ("decode_context_parallel_size", "decode_context_parallel_size", _size),
    ("block_size", "block_size", _size),
    ("max_num_batched_tokens", "max_num_batched_tokens", _integer),
    ("max_num_seqs", "max_num_seqs", _integer),
    ("gpu_memory_utilization", "gpu_memory_utilization", _number),
    ("kv_cache_memory_bytes", "kv_cache_memory_bytes", _integer),
    ("num_gpu_blocks_override", "num_gpu_blocks_override", _integer),
    ("enable_prefix_caching", "enable_prefix_caching", _flag),
    ("enforce_eager", "enforce_eager", _flag),
    ("async_scheduling", "async_scheduling", _flag),
    ("attention_backend", "attention_backend", _word),
    ("kv_connector", "kv_connector", _word),
    ("kv_role", "kv_role", _word),
    ("method", "speculative_method", _word),
    ("num_speculative_tokens", "num_speculative_tokens", _size),
    ("num_spec_tokens", "num_speculative_tokens", _size),
    ("device_config", "device", _word),
)
_PATTERNS = {name: _field(name) for name, _target, _read in _READERS}


def read_config(settings: Settings, text: str) -> None:
    """Take what the engine's configuration says; it is resolved, so it wins over what was asked."""
    for name, target, read in _READERS:
        if name in ("method", "num_speculative_tokens", "num_spec_tokens") and "SpeculativeConfig(" not in text:
            continue
        value = _first(name, text, read)
        if value is not None:
            setattr(settings, target, value)


def read_arguments(settings: Settings, text: str) -> None:
    """Take the arguments that the user gave: kept as text, and used until the resolved configuration comes."""
    for name, target, read in _READERS:
        value = _first(name, text, read)
        if value is None:
            continue
        settings.asked.setdefault(name, str(value))
        # -1 stands for "auto": the resolved length comes later.
        if value != -1 and getattr(settings, target) is None:
            setattr(settings, target, value)
    if re.search(r"""disable_hybrid_kv_cache_manager["']?\s?[=:]\s?True""", text):
        settings.hybrid_manager_off = "--disable-hybrid-kv-cache-manager was given"


def _first(name: str, text: str, read: Callable[[str], Any]) -> Any:
    """The first value of field ``name`` that reads as what it should be."""
    for match in _PATTERNS[name].finditer(text):
        value = read(match[1].strip("'\""))
        if value is not None:
            return value
    return None
