"""What one instance is told, as the runtime reads it, and the core's configuration made from it (without torch)."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from pdkv.core.config import TRANSFER_POLICIES, EngineConfig, TransferPolicy
from pdkv.units import seconds_to_ns


class InstanceSettings(Protocol):
    """What one instance is told (`serve.options.InstanceOptions` has these fields). ``None`` means "not set"."""

    @property
    def role(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def weight_storage(self) -> str: ...
    @property
    def max_model_len(self) -> int | Literal["auto"] | None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def gpu_memory_utilization(self) -> float | None: ...
    @property
    def memory_share(self) -> float: ...
    @property
    def kv_cache_memory_bytes(self) -> int | None: ...
    @property
    def num_gpu_blocks_override(self) -> int | None: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def prefix_caching_hash_algo(self) -> str: ...
    @property
    def watermark(self) -> float: ...
    @property
    def transport(self) -> str: ...
    @property
    def policy(self) -> str: ...
    @property
    def kv_load_failure_policy(self) -> str | None: ...
    @property
    def kv_load_timeout_s(self) -> float: ...
    @property
    def push_registration_timeout_s(self) -> float: ...
    @property
    def kv_lease_duration_s(self) -> int: ...
    @property
    def max_leased_fraction(self) -> float: ...
    @property
    def side_channel_host(self) -> str | None: ...
    @property
    def side_channel_port(self) -> int: ...
    @property
    def transfer_secret_file(self) -> str | None: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def served_model_name(self) -> str | None: ...
    @property
    def debug(self) -> bool: ...


def transfer_policy(settings: InstanceSettings) -> TransferPolicy:
    """The preset of ``--policy``, with its load-failure rule replaced when one was given."""
    preset = TRANSFER_POLICIES[settings.policy]
    if settings.kv_load_failure_policy is None:
        return preset
    return dataclasses.replace(preset, load_failure=settings.kv_load_failure_policy)


def engine_config(settings: InstanceSettings, num_blocks: int, max_model_len: int) -> EngineConfig:
    """The core's configuration. Raises `ConfigError` for combinations that cannot work."""
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_prefix_caching=settings.enable_prefix_caching,
        watermark=settings.watermark,
        transfer=transfer_policy(settings),
        kv_load_timeout_ns=seconds_to_ns(settings.kv_load_timeout_s),
        push_registration_timeout_ns=seconds_to_ns(settings.push_registration_timeout_s),
        lease_ns=seconds_to_ns(settings.kv_lease_duration_s),
        max_leased_fraction=settings.max_leased_fraction,
    )
