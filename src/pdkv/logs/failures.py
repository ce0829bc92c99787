"""The errors that end a start -> `Failure`: what was asked, what there was, in numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pdkv.logs.printed import Printed
from pdkv.logs.startup import Failure, FailureKind

_GIB = r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)"
_INT = r"([0-9]{1,18})"
_INDEX = r"([0-9]{1,6})"
_TEXT_LENGTH = 400

_Numbers = dict[str, "Printed | int"]


@dataclass(frozen=True, slots=True)
class _Error:
    """``read`` takes the numbers out of a match."""

    kind: FailureKind
    anchors: tuple[str, ...]
    pattern: re.Pattern[str]
    read: Callable[[re.Match[str]], _Numbers]


def _gib(*names: str) -> Callable[[re.Match[str]], _Numbers]:
    return lambda match: {
        name: Printed.of(match[place]) for place, name in enumerate(names, 1) if match[place] is not None
    }


def _counts(*names: str) -> Callable[[re.Match[str]], _Numbers]:
    return lambda match: {name: int(match[place]) for place, name in enumerate(names, 1) if match[place] is not None}


def _too_long(match: re.Match[str]) -> _Numbers:
    found: _Numbers = {
        "max_model_len": int(match[1]),
        "needed": Printed.of(match[2]),
        "available": Printed.of(match[3]),
    }
    if match[4] is not None:
        found["estimated_max_model_len"] = int(match[4])
    return found


def _shared(match: re.Match[str]) -> _Numbers:
    found: _Numbers = {"free": Printed.of(match[2]), "total": Printed.of(match[3]), "requested": Printed.of(match[5])}
    if match[1] is not None:
        found["device"] = int(match[1])
    return found


def _out_of_memory(match: re.Match[str]) -> _Numbers:
    names = ("tried", "total", "free", "in_use")
    places = ((1, 2), (4, 5), (6, 7), (8, 9))
    found: _Numbers = {
        name: Printed.of(match[number], match[unit])
        for name, (number, unit) in zip(names, places, strict=True)
        if match[number] is not None
    }
    if match[3] is not None:
        found["device"] = int(match[3])
    return found


def _nothing(_match: re.Match[str]) -> _Numbers:
    return {}


_BYTES = rf"{_GIB} ?(GiB|MiB)"
_ERRORS = (
    _Error(
        FailureKind.DEVICE_SHARED,
        ("on startup is less than",),
        re.compile(
            rf"Free memory on device (?:\w+:{_INDEX} )?\({_GIB}/{_GIB} GiB\) on startup is less than .{{0,80}}?"
            rf"\(([0-9.]{{1,12}}), {_GIB} GiB\)"
        ),
        _shared,
    ),
    _Error(
        FailureKind.REQUEST_TOO_LONG,
        ("KV cache is needed",),
        re.compile(
            rf"max seq len \({_INT}\), \({_GIB} GiB KV cache is needed, which is larger than the available KV cache "
            rf"memory \({_GIB} GiB\)(?:.{{0,120}}?maximum model length is {_INT})?"
        ),
        _too_long,
    ),
    _Error(
        FailureKind.REQUEST_TOO_LONG,
        ("that can be stored in KV cache",),
        re.compile(
            rf"max seq len \({_INT}\) is larger than the maximum number of tokens that can be stored in KV cache "
            rf"\({_INT}\)"
        ),
        _counts("max_model_len", "kv_cache_size_tokens"),
    ),
    _Error(
        FailureKind.NO_KV_MEMORY,
        ("No available memory for the cache blocks",),
        re.compile(r"No available memory for the cache blocks"),
        _nothing,
    ),
    _Error(
        FailureKind.STATE_BLOCKS,
        ("exceeds available Mamba cache blocks",),
        re.compile(rf"max_num_seqs \({_INT}\) exceeds available Mamba cache blocks \({_INT}\)"),
        _counts("max_num_seqs", "blocks"),
    ),
    _Error(
        FailureKind.SAMPLER_OOM,
        ("out of memory occurred when warming up",),
        re.compile(rf"out of memory occurred when warming up (?:sampler|pooler) with {_INT} dummy requests"),
        _counts("max_num_seqs"),
    ),
    _Error(
        FailureKind.OUT_OF_MEMORY,
        ("out of memory. Tried to allocate",),
        re.compile(
            rf"out of memory\. Tried to allocate {_BYTES}\.(?: GPU {_INDEX} has a total capacity of {_BYTES} of "
            rf"which {_BYTES} is free\.)?(?:.{{0,200}}?this process has {_BYTES} memory in use)?"
        ),
        _out_of_memory,
    ),
    _Error(
        FailureKind.PROFILING_DISTURBED,
        ("Error in memory profiling",),
        re.compile(rf"Initial free memory {_GIB} GiB, current free memory {_GIB} GiB"),
        _gib("free_before", "free_after"),
    ),
    _Error(
        FailureKind.CPU_MEMORY,
        ("on NUMA node", "VLLM_CPU_KVCACHE_SPACE"),
        re.compile(
            rf"(?:ValueError|RuntimeError): .{{0,160}}?{_GIB} ?/ ?{_GIB}\)? ?GiB.{{0,200}}?(?:node|CPU_KVCACHE_SPACE)"
        ),
        _gib("free", "total"),
    ),
    _Error(
        FailureKind.LENGTH_ABOVE_MODEL,
        ("is greater than the derived max_model_len",),
        re.compile(
            rf"User-specified max_model_len \({_INT}\) is greater than the derived max_model_len \(\w+={_INT}(?:\.0)?"
        ),
        _counts("max_model_len", "model_limit"),
    ),
    _Error(
        FailureKind.HEADS_NOT_DIVISIBLE,
        ("must be divisible by tensor parallel size",),
        re.compile(rf"attention heads \({_INT}\) must be divisible by tensor parallel size \({_INT}\)"),
        _counts("heads", "tensor_parallel_size"),
    ),
    _Error(
        FailureKind.MISSING_DEVICE,
        ("local rank",),
        re.compile(rf"adjusted local rank {_INT} is out of bounds"),
        _counts("rank"),
    ),
    _Error(
        FailureKind.MODEL_NOT_FOUND,
        ("huggingface.co", "gated repo", "not a valid model identifier"),
        re.compile(
            r"((?:401|403|404) Client Error.{0,300}|We couldn't connect to .{0,300}|.{0,200}gated repo.{0,200})"
        ),
        _nothing,
    ),
    _Error(
        FailureKind.ENGINE_DIED,
        ("ngine core initialization failed", "EngineCore failed to start", "Engine process failed to start"),
        re.compile(r"(ngine core initialization failed|EngineCore failed to start|Engine process failed to start)"),
        _nothing,
    ),
    # Last, so that every error above is already known for what it is.
    _Error(
        FailureKind.ERROR,
        ("Error: ",),
        re.compile(r"(?:^|[\s\]])((?:[A-Za-z_]\w*\.){0,6}[A-Z]\w{0,60}Error: .{1,400})"),
        _nothing,
    ),
)

ERROR_ANCHORS = tuple(anchor for error in _ERRORS for anchor in error.anchors)
"""Words by which lines that may hold an error are found."""


def find_failure(line: str) -> tuple[int, Failure] | None:
    """The error that ``line`` states and where it starts, ``None`` when it states none."""
    for error in _ERRORS:
        if not any(anchor in line for anchor in error.anchors):
            continue
        match = error.pattern.search(line)
        if match is not None:
            text = _sentence(line, match)
            return match.start(), Failure(kind=error.kind, text=text, numbers=error.read(match))
    return None


def _sentence(line: str, match: re.Match[str]) -> str:
    """The error in vLLM's words, from its start to a readable length."""
    text = line[match.start() :].strip()
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 1] + "…"
