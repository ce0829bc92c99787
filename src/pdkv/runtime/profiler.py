"""How many bytes of KV cache this instance may plan: `determine_available_memory` for CUDA and CPU.

CUDA follows vLLM 0.32 (../shared/spec/memory-profile.md sections 1-3): what the device lost between a baseline taken
before the weights and the end of a profile run, plus the room that the run's peak needed above that.
CPU follows section 9 (requested minus what the process holds), with three changes for machines that people also work
on: the budget is a share of the RAM that is *available*, not of all there is; a short profile run is charged; and the
plan never exceeds what ``max_num_seqs`` requests of ``max_model_len`` tokens can fill.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from pdkv.errors import ConfigError, DoesNotFit
from pdkv.runtime.attention import STEP_KWARG, cacheless_step, scratch_bytes
from pdkv.runtime.models.loader import LoadedModel
from pdkv.runtime.precheck import too_large_a_cache
from pdkv.runtime.runner import attending_kernels
from pdkv.units import cdiv, format_bytes

DEFAULT_UTILIZATION = {"cuda": 0.92, "cpu": 0.4}
"""Share of device memory (cuda: of the total, as vLLM; cpu: of the RAM available at start) when none is given."""

_CPU_PROFILE_TOKENS = 256  # a full chunk takes seconds on a CPU; activations grow linearly, so scale this up
_LOGIT_COPIES = 6  # float32 logits and what sampling makes of them: float64 probabilities, their sum, a sort
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryBaseline:
    """The device before any weights: ``total_bytes`` and ``free_bytes`` (CPU: available RAM)."""

    device: torch.device
    total_bytes: int
    free_bytes: int

    @classmethod
    def take(cls, device: str) -> MemoryBaseline:
        """Measure now. Call before `load_model`, so that the weights count as consumed."""
        target = torch.device(device)
        if target.type == "cuda":
            _settle(target)
            free, total = torch.cuda.mem_get_info(target)
            return cls(target, total, free)
        total, available = _ram()
        return cls(target, total, available)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLimits:
    """What the scheduler may ask of one step, and the KV geometry (bytes_per_block as of `KvPool`)."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    bytes_per_block: int

    @property
    def most_useful_bytes(self) -> int:
        """KV bytes that the running requests can fill at most, and the null block."""
        return (self.max_num_seqs * cdiv(self.max_model_len, self.block_size) + 1) * self.bytes_per_block


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Where the memory goes; every term in bytes.

    ``requested = weights + activation + non_torch + available_kv`` holds exactly for basis ``measured``; ``capped``
    plans less KV than that leaves, ``given`` takes it from the caller. ``non_torch`` is whatever else this process (on
    CUDA: anybody, vLLM's definition) took since the baseline.
    """

    device: str
    total_bytes: int
    free_bytes: int
    requested_bytes: int
    weights_bytes: int
    activation_bytes: int
    non_torch_bytes: int
    available_kv_bytes: int
    utilization: float
    share: float
    basis: str

    def lines(self) -> list[str]:
        """The breakdown for the start-up log, one term a line."""
        of = "of available RAM" if self.device == "cpu" else "of device memory"
        share = "" if self.share == 1 else f", share {self.share:g}"
        terms = (
            ("total", self.total_bytes, ""),
            ("free before loading", self.free_bytes, ""),
            ("requested", self.requested_bytes, f"  ({self.utilization:g} {of}{share})"),
            ("- weights", self.weights_bytes, ""),
            ("- activations, peak", self.activation_bytes, ""),
            ("- other (runtime, libraries)", self.non_torch_bytes, ""),
            ("= KV cache", self.available_kv_bytes, f"  ({self.basis})"),
        )
        return [f"memory {self.device}: {name:<28} {format_bytes(n):>12}{note}" for name, n, note in terms]


def determine_available_memory(
    model: LoadedModel,
    baseline: MemoryBaseline,
    limits: ProfileLimits,
    *,
    gpu_memory_utilization: float | None = None,
    kv_cache_memory_bytes: int | None = None,
    share: float = 1.0,
    ranks_here: int = 1,
) -> MemoryProfile:
    """Profile ``model`` and decide the KV bytes.

    ``gpu_memory_utilization`` in (0, 1] governs CPU memory too (`DEFAULT_UTILIZATION` when None). ``share`` in (0, 1]
    divides it between instances on one device: give 0.5 to each of P and D; ``ranks_here`` tensor-parallel ranks on one
    device (a CPU) divide it again, and all must measure at once. ``kv_cache_memory_bytes`` overrides the result, as in
    vLLM, of each rank; it must fit what is free. Raises ConfigError for bad settings, DoesNotFit with the numbers.
    """
    kind = baseline.device.type
    utilization = DEFAULT_UTILIZATION[kind] if gpu_memory_utilization is None else gpu_memory_utilization
    for name, value in (("--gpu-memory-utilization", utilization), ("share", share)):
        if not 0 < value <= 1:
            raise ConfigError(f"{name} must be above 0 and at most 1; got {value}")
    if kv_cache_memory_bytes is not None and kv_cache_memory_bytes <= 0:
        raise ConfigError(f"--kv-cache-memory-bytes must be positive; got {kv_cache_memory_bytes}")
    share /= ranks_here
    base = baseline.total_bytes if kind == "cuda" else baseline.free_bytes
    requested = math.ceil(base * utilization * share)
    if kind == "cuda":
        require_free(baseline, requested, utilization * share)
        activation, other = _profile_cuda(model, baseline, limits)
        free_now = torch.cuda.mem_get_info(baseline.device)[0]
    else:
        activation = _profile_cpu(model, limits)
        other = max(_rss() - model.weights_bytes, 0)
        free_now = _ram()[1]

    if attending_kernels(model, model.dtype) is None:  # else K/V are read where they lie
        # The profile runs have no cache to gather from.
        activation += scratch_bytes(
            model.heads,
            model.kv_heads,
            model.head_dim,
            model.dtype.itemsize,
            chunk_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
        )
    left = requested - model.weights_bytes - activation - other
    kv_bytes, basis = left, "measured"
    if kv_cache_memory_bytes is not None:
        kv_bytes, basis = kv_cache_memory_bytes, "given"
    elif kind == "cpu" and limits.most_useful_bytes < left:
        kv_bytes, basis = limits.most_useful_bytes, "capped"
    profile = MemoryProfile(
        device=str(baseline.device),
        total_bytes=baseline.total_bytes,
        free_bytes=baseline.free_bytes,
        requested_bytes=requested,
        weights_bytes=model.weights_bytes,
        activation_bytes=activation,
        non_torch_bytes=other,
        available_kv_bytes=kv_bytes,
        utilization=utilization,
        share=share,
        basis=basis,
    )
    _check(profile, free_now, ranks_here)
    return profile


def require_free(baseline: MemoryBaseline, requested: int, utilization: float) -> None:
    """vLLM's start-up check: the requested share must be free before anything is loaded, or DoesNotFit."""
    if baseline.free_bytes < requested:
        raise DoesNotFit(
            f"{baseline.device} has {format_bytes(baseline.free_bytes)} of {format_bytes(baseline.total_bytes)} free, "
            f"less than the {format_bytes(requested)} that --gpu-memory-utilization {utilization:g} asks for; set it "
            f"to at most {math.floor(100 * baseline.free_bytes / baseline.total_bytes) / 100:g} or free the device"
        )


def _check(profile: MemoryProfile, free_now: int, ranks_here: int) -> None:
    if profile.available_kv_bytes <= 0:
        raise DoesNotFit(
            f"no memory is left for the KV cache on {profile.device}: requested "
            f"{format_bytes(profile.requested_bytes)} (--gpu-memory-utilization {profile.utilization:g}, share "
            f"{profile.share:g}), of which weights take {format_bytes(profile.weights_bytes)}, activations "
            f"{format_bytes(profile.activation_bytes)} and the runtime {format_bytes(profile.non_torch_bytes)}; raise "
            f"--gpu-memory-utilization, set --kv-cache-memory-bytes, or lower --max-num-batched-tokens"
        )
    if ranks_here * profile.available_kv_bytes > free_now:
        free = f"{format_bytes(free_now)} free on {profile.device}"
        if profile.basis == "given":
            raise DoesNotFit(too_large_a_cache(profile.available_kv_bytes, free, ranks_here))
        raise DoesNotFit(
            f"a KV cache of {format_bytes(profile.available_kv_bytes)} is more than the {free}; lower "
            f"--gpu-memory-utilization (now {profile.utilization:g}) or set --kv-cache-memory-bytes"
        )


# ------------------------------------------------------------------------------------------------------ profile runs


@torch.inference_mode()
def _dummy_pass(model: LoadedModel, num_tokens: int, max_model_len: int, num_logits: int) -> None:
    """A forward pass over ``num_tokens`` dummy tokens, in prompts of at most ``max_model_len``, without a cache."""
    lengths = [min(max_model_len, num_tokens - start) for start in range(0, num_tokens, max_model_len)]
    step = cacheless_step(lengths, model.device)
    tokens = torch.zeros(1, num_tokens, dtype=torch.int64, device=model.device)
    keep = torch.arange(num_logits, device=model.device)
    output = model.model(
        tokens, position_ids=step.position_ids, use_cache=False, logits_to_keep=keep, **{STEP_KWARG: step}
    )
    if num_logits:
        output.logits.float().softmax(-1, dtype=torch.float64).sort(dim=-1)


def _profile_cuda(model: LoadedModel, baseline: MemoryBaseline, limits: ProfileLimits) -> tuple[int, int]:
    """(activation, other) bytes: the peak's headroom over what stays allocated, and consumption beyond the weights."""
    device = baseline.device
    _settle(device)
    torch.cuda.reset_peak_memory_stats(device)
    tokens = limits.max_num_batched_tokens
    _dummy_pass(model, tokens, limits.max_model_len, min(limits.max_num_seqs, tokens))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    _settle(device)
    headroom = peak - torch.cuda.memory_allocated(device)
    consumed = baseline.free_bytes - torch.cuda.mem_get_info(device)[0]
    if consumed < 0:
        raise ConfigError(
            f"free memory of {device} grew by {format_bytes(-consumed)} while profiling: another process released "
            f"memory meanwhile; start again when the device is quiet"
        )
    return headroom, consumed - model.weights_bytes


def _profile_cpu(model: LoadedModel, limits: ProfileLimits) -> int:
    """Activation bytes of a full step: the RSS peak of a short pass, scaled to the full chunk, plus logits."""
    tokens = min(limits.max_num_batched_tokens, limits.max_model_len, _CPU_PROFILE_TOKENS)
    _dummy_pass(model, min(tokens, 16), limits.max_model_len, 0)  # libraries set themselves up; that is not activation
    _trim_heap()
    before = _rss()
    _reset_peak()
    _dummy_pass(model, tokens, limits.max_model_len, 0)
    growth = max(_peak_rss() - before, 0)
    rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    return growth * limits.max_num_batched_tokens // tokens + rows * model.vocab_size * 4 * _LOGIT_COPIES


def _trim_heap() -> None:
    """Give freed heap back to the system (glibc), or the next pass would reuse it unseen and look free of charge."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass


def _settle(device: torch.device) -> None:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------- host RAM


def _status_bytes(field: str) -> int | None:
    """A ``kB`` line of /proc/self/status in bytes; None where there is no such file."""
    try:
        match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def _rss() -> int:
    return _status_bytes("VmRSS") or _getrusage_peak()


def _peak_rss() -> int:
    return _status_bytes("VmHWM") or _getrusage_peak()


def _getrusage_peak() -> int:
    """Peak RSS in bytes, where /proc does not exist (macOS counts in bytes)."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _reset_peak() -> None:
    """Start VmHWM again from now; where the kernel refuses, the peak so far is counted, which is only safer."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def _ram() -> tuple[int, int]:
    """(total, available) bytes of RAM for this process: the machine's, or the control group's if that is less."""
    total, available = _machine_ram()
    for limit_file, usage_file in (
        (_CGROUP / "memory.max", _CGROUP / "memory.current"),
        (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = int(limit_file.read_text()), int(usage_file.read_text())
        except (OSError, ValueError):  # no such control group, or "max"
            continue
        if limit < total:
            total, available = limit, min(available, max(limit - used + _reclaimable(limit_file.parent), 0))
    return total, available


def _machine_ram() -> tuple[int, int]:
    try:
        text = Path("/proc/meminfo").read_text()
        fields = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.MULTILINE))
        return int(fields["MemTotal"]) * 1024, int(fields["MemAvailable"]) * 1024
    except (OSError, KeyError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total // 2  # no way to ask: plan with half


def _reclaimable(group: Path) -> int:
    """File cache that the kernel gives back before it kills, in bytes."""
    try:
        match = re.search(r"^(?:total_)?inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0
