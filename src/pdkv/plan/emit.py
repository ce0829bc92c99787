"""The options of a plan -> the ``vllm serve`` that they stand for. Reading it back gives the same options."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pdkv.plan.kv_transfer import KvTransfer
from pdkv.plan.model_length import ALLOW_LONG
from pdkv.plan.options import PlanOptions
from pdkv.plan.vllm_values import FIELDS
from pdkv.units import GIB

_FLAG_OF = {name: flag for flag, (name, _) in FIELDS.items()}
_IN_GIB = ("kv_offloading_bytes", "mm_ipc_gpu_memory_bytes")
_NOT_OF_VLLM = ("gpu", "gpu_memory_bytes", "vllm_version")
# Set by variables or inside JSON, below.
_APART = (
    "kv_transfer", "kv_cache_layout", "v1_runner", "estimate_cudagraphs", "chunked_local_with_hybrid", "cudagraph_mode",
    "throughput_mode", "speculative_method", "speculative_model", "speculative_tokens",
)  # fmt: skip


def serve_command(
    model: str, options: PlanOptions, overrides: Mapping[str, Any] | None = None, *, allow_long: bool = False
) -> str:
    """A command for a shell, one flag a line; flags that are vLLM's defaults are left out.

    ``allow_long`` sets the variable without which vLLM refuses a length beyond the model's own.
    """
    lines = [shlex.join(line) for line in _lines(options, overrides or {})]
    variables = [*([(ALLOW_LONG, "1")] if allow_long else []), *_environment(options)]
    start = " ".join([*(f"{name}={value}" for name, value in variables), "vllm serve", shlex.quote(model)])
    return " \\\n  ".join([start, *lines])


def _lines(options: PlanOptions, overrides: Mapping[str, Any]) -> list[list[str]]:
    default = PlanOptions()
    found = []
    for field in fields(PlanOptions):
        value = getattr(options, field.name)
        if value != getattr(default, field.name) and field.name not in (*_APART, *_NOT_OF_VLLM):
            found.append(_flag(field.name, value))
    if options.throughput_mode:
        found.append(["--performance-mode", "throughput"])
    speculative = {
        "method": options.speculative_method,
        "model": options.speculative_model,
        "num_speculative_tokens": options.speculative_tokens,
    }
    for flag, value in (
        ("--speculative-config", {key: part for key, part in speculative.items() if part is not None}),
        ("--compilation-config", {"cudagraph_mode": options.cudagraph_mode} if options.cudagraph_mode else {}),
        ("--kv-transfer-config", {} if options.kv_transfer is None else transfer_config(options.kv_transfer)),
        ("--hf-overrides", overrides),
    ):
        if value:
            found.append([flag, json.dumps(value, separators=(",", ":"))])
    return found


def _flag(name: str, value: Any) -> list[str]:
    flag = _FLAG_OF[name]
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if name in _IN_GIB:
        return [flag, f"{value / GIB:.17g}"]
    return [flag, *map(str, value)] if isinstance(value, tuple) else [flag, str(value)]


def transfer_config(transfer: KvTransfer) -> dict[str, Any]:
    """The object of ``--kv-transfer-config``: as it was read, or from the facts."""
    if transfer.raw:
        found: dict[str, Any] = json.loads(transfer.raw)
        return found
    extra: dict[str, Any] = {}
    if transfer.lease_s != 30:
        extra["kv_lease_duration"] = transfer.lease_s
    if transfer.bidirectional:
        extra |= {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": transfer.blocks_ttl_s}
    if transfer.children:
        extra["connectors"] = [transfer_config(child) for child in transfer.children]
    config: dict[str, Any] = {"kv_connector": transfer.connector, "kv_role": transfer.role}
    if transfer.buffer_device is not None:
        config["kv_buffer_device"] = transfer.buffer_device
    if transfer.load_failure_policy != "fail":
        config["kv_load_failure_policy"] = transfer.load_failure_policy
    return config | ({"kv_connector_extra_config": extra} if extra else {})


def _environment(options: PlanOptions) -> list[tuple[str, str]]:
    found = []
    if options.kv_cache_layout is not None:
        found.append(("VLLM_KV_CACHE_LAYOUT", shlex.quote(options.kv_cache_layout)))
    if options.v1_runner:
        found.append(("VLLM_USE_V2_MODEL_RUNNER", "0"))
    if not options.estimate_cudagraphs:
        found.append(("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "0"))
    if not options.chunked_local_with_hybrid:
        found.append(("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "0"))
    return found
