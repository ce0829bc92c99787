"""What `pdkv serve` can be told, checked once here and passed whole afterwards (light: the CLI imports it)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from pdkv.core.blocks.vllm_hashing import VLLM_ALGORITHMS
from pdkv.core.transfer.messages import TransferMode
from pdkv.errors import ConfigError
from pdkv.units import format_bytes

Role = Literal["prefill", "decode"]
Transport = Literal["auto", "nixl", "shm"]
Policy = Literal["strict", "vllm"]
LoadFailurePolicy = Literal["recompute", "fail"]
Dtype = Literal["auto", "float32", "bfloat16"]
WeightStorage = Literal["auto", "bf16"]
PrefillFallback = Literal["local", "fail"]

DEFAULT_PORT = 8000
MAX_RANKS = 64
DEFAULT_INSTANCE_TIMEOUT_S = 30.0
DEFAULT_TURN_TTL_S = 480


def _fraction(option: str, value: float | None) -> None:
    _require(value is None or 0 < value <= 1, f"{option} {value}: a fraction above 0 and at most 1")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ConfigError(text)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, f"{option} {value}: there is no such choice; use one of {', '.join(allowed)}")


def _port(option: str, value: int) -> None:
    _require(0 <= value <= 65535, f"{option} {value}: a TCP port is 0 (any free one) to 65535")


def _positive(option: str, value: float | None) -> None:
    _require(value is None or value > 0, f"{option} {value}: must be greater than 0")


def _host(option: str, value: str) -> None:
    """A host is an address or a name without port or scheme."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        _require(
            bool(value) and not any(c in value for c in "/: \t"),
            f"{option} {value!r}: give an address or host name alone, for example 127.0.0.1",
        )


def _reachable(host: str, side_channel_host: str | None) -> None:
    """Peers are told the side channel's address, so it must be one that they can connect to."""
    if side_channel_host is not None:
        _host("--side-channel-host", side_channel_host)
    try:
        wildcard = ipaddress.ip_address(side_channel_host or host).is_unspecified
    except ValueError:  # a name
        return
    given = f"--host {host}" if side_channel_host is None else f"--side-channel-host {side_channel_host}"
    _require(
        not wildcard,
        f"{given}: the other instances are told at which address to ask for KV, and {side_channel_host or host} is "
        "every address of this host; name the one that they reach, for example --side-channel-host 10.0.0.5",
    )


def _guarded(host: str, side_channel_host: str | None, secret_file: str | None) -> None:
    """Peers on other hosts must prove a secret. (HTTP may listen anywhere: KV is only loaded under proved grants.)"""
    given = f"--host {host}" if side_channel_host is None else f"--side-channel-host {side_channel_host}"
    _require(
        secret_file is not None or _is_loopback(side_channel_host or host),
        f"{given}: the side channel would listen beyond loopback, and peers prove nothing; give "
        "--transfer-secret-file FILE (the same to all instances: openssl rand -hex 32), or --side-channel-host "
        "127.0.0.1 where all instances run on this host (HTTP may listen on any --host)",
    )
    _require(secret_file is None or bool(secret_file.strip()), "--transfer-secret-file is empty: give a file's path")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # what another name stands for is known only where it is looked up
        return host == "localhost"


def _pulls(bidirectional: bool, transfer_mode: str) -> None:
    _require(
        not bidirectional or transfer_mode == "pull",
        f"--bidirectional-kv-xfer with --transfer-mode {transfer_mode}: prefill instances read the turn before when "
        "they are asked, which is pull; leave one of the two options out",
    )


def check_url(option: str, url: str) -> str:
    """``url`` without a trailing slash. Raises `ConfigError` unless it is http(s)://host[:port]."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    _require(
        usable and not parts.query and not parts.fragment,
        f"{option} {url}: not a URL of an instance; write it as http://127.0.0.1:8100",
    )
    return url.rstrip("/")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceOptions:
    """One prefill or decode instance. ``None`` always means "not set: decide from the model and the machine".

    ``port`` 0 and ``side_channel_port`` 0 take any free port. ``side_channel_host`` None is ``host``; it is what peers
    are told, so it cannot be a wildcard, and beyond loopback it needs a ``transfer_secret_file``.
    ``kv_load_failure_policy`` None follows ``policy`` (``recompute`` under strict, ``fail`` under vllm).
    ``engine_ttl_s`` 0 or less remembers idle peers for ever. ``memory_share`` is this instance's part of what
    ``gpu_memory_utilization`` allows, when several instances share a machine. Raises `ConfigError` on construction,
    naming the option.
    """

    role: Role
    model: str
    host: str = "127.0.0.1"
    port: int = 0
    device: str = "auto"
    dtype: Dtype = "auto"
    weight_storage: WeightStorage = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | Literal["auto"] | None = None
    block_size: int = 16
    gpu_memory_utilization: float | None = None
    memory_share: float = 1.0
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "raw_sha256"
    watermark: float = 0.0
    transport: Transport = "auto"
    policy: Policy = "strict"
    kv_load_failure_policy: LoadFailurePolicy | None = None
    kv_load_timeout_s: float = 60.0
    push_registration_timeout_s: float = 480.0
    kv_lease_duration_s: int = 30
    max_leased_fraction: float = 0.8
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl_s: int = DEFAULT_TURN_TTL_S
    kv_recompute_threshold: int = 64
    max_kept_fraction: float = 0.8
    engine_ttl_s: int = 3600
    side_channel_host: str | None = None
    side_channel_port: int = 0
    transfer_secret_file: str | None = None
    threads: int | None = None
    served_model_name: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        _one_of("role", self.role, ("prefill", "decode"))
        _require(bool(self.model.strip()), "MODEL is empty: give smollm2, a directory, a .gguf file or a hub id")
        _host("--host", self.host)
        _port("--port", self.port)
        _reachable(self.host, self.side_channel_host)
        _guarded(self.host, self.side_channel_host, self.transfer_secret_file)
        _port("--side-channel-port", self.side_channel_port)
        device_ok = self.device in ("auto", "cpu", "cuda") or (
            self.device.startswith("cuda:") and self.device[5:].isdigit()
        )
        _require(device_ok, f"--device {self.device}: use auto, cpu, cuda or cuda:N")
        _one_of("--dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _one_of("--weight-storage", self.weight_storage, ("auto", "bf16"))
        ranks = self.tensor_parallel_size
        _require(1 <= ranks <= MAX_RANKS, f"--tensor-parallel-size {ranks}: from 1 to {MAX_RANKS} ranks")
        if self.max_model_len is not None and self.max_model_len != "auto":
            _require(
                isinstance(self.max_model_len, int) and self.max_model_len >= 2,
                f"--max-model-len {self.max_model_len}: at least 2 tokens (one of prompt, one of answer), or auto",
            )
        block_size_ok = 1 <= self.block_size <= 1024 and self.block_size & (self.block_size - 1) == 0
        _require(block_size_ok, f"--block-size {self.block_size}: use a power of two from 1 to 1024, for example 16")
        _fraction("--gpu-memory-utilization", self.gpu_memory_utilization)
        _require(0 < self.memory_share <= 1, f"memory share {self.memory_share}: above 0 and at most 1")
        _require(
            self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes >= 1 << 20,
            f"--kv-cache-memory-bytes {format_bytes(self.kv_cache_memory_bytes or 0)}: give at least 1 MiB",
        )
        _require(
            self.num_gpu_blocks_override is None or self.num_gpu_blocks_override >= 2,
            f"--num-gpu-blocks-override {self.num_gpu_blocks_override}: at least 2 (one block is the null block)",
        )
        _require(self.max_num_seqs >= 1, f"--max-num-seqs {self.max_num_seqs}: at least 1")
        budget = self.max_num_batched_tokens
        _require(budget >= 1, f"--max-num-batched-tokens {budget}: at least 1")
        for option, most in (
            ("--max-num-queued-reqs", self.max_num_queued_reqs),
            ("--max-num-queued-tokens", self.max_num_queued_tokens),
        ):
            _require(most is None or most >= 0, f"{option} {most}: 0 (nobody is let in) or more, or left out: no limit")
        _one_of("--prefix-caching-hash-algo", self.prefix_caching_hash_algo, ("raw_sha256", *VLLM_ALGORITHMS))
        _require(0 <= self.watermark < 1, f"--watermark {self.watermark}: a fraction of the pool, 0 up to below 1")
        _one_of("--transport", self.transport, ("auto", "nixl", "shm"))
        _one_of("--policy", self.policy, ("strict", "vllm"))
        if self.kv_load_failure_policy is not None:
            _one_of("--kv-load-failure-policy", self.kv_load_failure_policy, ("recompute", "fail"))
        _positive("--kv-load-timeout", self.kv_load_timeout_s)
        _positive("--push-registration-timeout", self.push_registration_timeout_s)
        _require(
            self.kv_lease_duration_s >= 6,
            f"--kv-lease-duration {self.kv_lease_duration_s}: at least 6 s, for a heartbeat is sent every sixth of it",
        )
        _fraction("--max-leased-fraction", self.max_leased_fraction)
        ttl = self.decoder_kv_blocks_ttl_s
        _require(
            ttl >= 6, f"--decoder-kv-blocks-ttl {ttl}: at least 6 s, for what ends within 5 s is not read any more"
        )
        threshold = self.kv_recompute_threshold
        _require(threshold >= 0, f"--kv-recompute-threshold {threshold}: a number of tokens, 0 or more")
        _fraction("--max-kept-fraction", self.max_kept_fraction)
        _require(self.threads is None or self.threads >= 1, f"--threads {self.threads}: at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterOptions:
    """The proxy in front of prefill and decode instances (URLs like ``http://127.0.0.1:8100``).

    ``prefill_fallback`` says what happens when no prefill instance can be reached: ``local`` lets the decode instance
    compute the prompt itself (the answer carries ``x-pdkv-prefill: local``), ``fail`` answers 503 naming P.
    ``instance_timeout_s`` is how long an instance may give no sign of life (an answer, or `/health`) while the router
    waits for it; one that is only busy is waited for without limit. ``transfer_mode`` ``pull`` asks the decode instance
    when the prefill has ended, ``push`` and ``write`` both at once: D reads what P has announced, or P writes it.
    ``bidirectional_kv_xfer`` remembers of each conversation what the decode instance has kept, for
    ``decoder_kv_blocks_ttl_s``, and gives it to the next turn's prefill instance.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    prefill_fallback: PrefillFallback = "local"
    transfer_mode: TransferMode = "pull"
    connect_timeout_s: float = 5.0
    instance_timeout_s: float = DEFAULT_INSTANCE_TIMEOUT_S
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl_s: int = DEFAULT_TURN_TTL_S

    def __post_init__(self) -> None:
        _require(bool(self.prefill), "--prefill: give the URL of at least one prefill instance")
        _require(bool(self.decode), "--decode: give the URL of at least one decode instance")
        for role in ("prefill", "decode"):
            urls = tuple(check_url(f"--{role}", url) for url in getattr(self, role))
            twice = next((url for url in urls if urls.count(url) > 1), None)  # its memory would be counted twice
            _require(twice is None, f"--{role} {twice}: given more than once; name each instance once")
            object.__setattr__(self, role, urls)
        _host("--host", self.host)
        _port("--port", self.port)
        _one_of("--prefill-fallback", self.prefill_fallback, ("local", "fail"))
        _one_of("--transfer-mode", self.transfer_mode, get_args(TransferMode))
        _positive("--connect-timeout", self.connect_timeout_s)
        _pulls(self.bidirectional_kv_xfer, self.transfer_mode)
        _positive("--decoder-kv-blocks-ttl", self.decoder_kv_blocks_ttl_s)
        _positive("--instance-timeout", self.instance_timeout_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """`pdkv serve MODEL`: one P, one D and the router; only ``host:port`` is public, the rest is on loopback.

    ``log_dir`` None keeps the children's logs in a temporary directory that is removed after a clean stop.
    """

    prefill: InstanceOptions
    decode: InstanceOptions
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    prefill_fallback: PrefillFallback = "local"
    transfer_mode: TransferMode = "pull"
    instance_timeout_s: float = DEFAULT_INSTANCE_TIMEOUT_S
    start_timeout_s: float = 600.0
    stop_grace_s: float = 10.0
    log_dir: str | None = None

    def __post_init__(self) -> None:
        _require(self.prefill.role == "prefill", "the first instance of `pdkv serve` must have the role prefill")
        _require(self.decode.role == "decode", "the second instance of `pdkv serve` must have the role decode")
        _host("--host", self.host)
        _port("--port", self.port)
        _one_of("--prefill-fallback", self.prefill_fallback, ("local", "fail"))
        _one_of("--transfer-mode", self.transfer_mode, get_args(TransferMode))
        _pulls(self.prefill.bidirectional_kv_xfer or self.decode.bidirectional_kv_xfer, self.transfer_mode)
        _positive("--instance-timeout", self.instance_timeout_s)
        _positive("--start-timeout", self.start_timeout_s)
        _positive("--stop-grace", self.stop_grace_s)
