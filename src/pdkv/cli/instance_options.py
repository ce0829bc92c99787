"""The options that every instance of ``pdkv serve`` takes, written once and added to each command's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdkv.cli.values import parse_max_model_len, parse_optional_count

if TYPE_CHECKING:
    from pdkv.serve.options import InstanceOptions, Role

_MEMORY, _SCHEDULING, _TRANSFER = "Memory", "Scheduling", "Transfer"


def _template(
    device: Annotated[str, typer.Option(help="auto (CUDA when present), cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto (float32 on a CPU, else what the model was saved in), float32 or bfloat16.")
    ] = "auto",
    weight_storage: Annotated[
        str, typer.Option(help="auto, or bf16: keep float32 weights in half the bytes on a CPU (rounded; faster).")
    ] = "auto",
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size",
            "-tp",
            metavar="N",
            help="Processes (ranks) that share an instance's model and KV.",
        ),
    ] = 1,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of an instance, all ranks; default: its share of the cores.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name the API calls the model.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Recount all memory after every step; verbose log.")] = False,
    max_model_len: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS|auto", help="Longest request; auto: the longest that fits.", rich_help_panel=_MEMORY
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option(metavar="TOKENS", help="Tokens per KV block.", rich_help_panel=_MEMORY)
    ] = 16,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of the memory to use; default: 0.92 of a GPU's, 0.4 of the RAM available on a CPU.",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    kv_cache_memory_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Memory for KV per instance (per rank), e.g. 2GiB; instead of a share.",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(metavar="N", help="This many blocks, whatever the memory.", rich_help_panel=_MEMORY)
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests in one step.", rich_help_panel=_SCHEDULING)] = 128,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Most tokens in one step (longer prompts are chunked).", rich_help_panel=_SCHEDULING)
    ] = 2048,
    max_num_queued_reqs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With so many requests waiting or running the next gets HTTP 503; default: no limit.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="With so many prompt tokens waiting for a first token the next gets HTTP 503; default: no limit.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the KV of prefixes seen before.", rich_help_panel=_SCHEDULING)
    ] = True,
    prefix_caching_hash_algo: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Names blocks in the prefix cache: raw_sha256, or as vLLM: sha256, sha256_cbor, xxhash, xxhash_cbor.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = "raw_sha256",
    watermark: Annotated[
        float, typer.Option(help="Share of the pool kept free when admitting.", rich_help_panel=_SCHEDULING)
    ] = 0.0,
    transport: Annotated[
        str, typer.Option(help="How KV moves: auto, nixl, or shm (shared memory, one host).", rich_help_panel=_TRANSFER)
    ] = "auto",
    policy: Annotated[
        str,
        typer.Option(
            help="strict (bounded waits, shared loads) or vllm (its rules exactly).", rich_help_panel=_TRANSFER
        ),
    ] = "strict",
    kv_load_failure_policy: Annotated[
        str | None,
        typer.Option(help="recompute or fail; default: recompute (strict), fail (vllm).", rich_help_panel=_TRANSFER),
    ] = None,
    kv_load_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Most a load may take.", rich_help_panel=_TRANSFER)
    ] = 60.0,
    push_registration_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="How long D waits for P to announce a prompt's KV (--transfer-mode push).",
            rich_help_panel=_TRANSFER,
        ),
    ] = 480.0,
    kv_lease_duration: Annotated[
        int, typer.Option(metavar="SECONDS", help="How long P keeps KV that nobody renews.", rich_help_panel=_TRANSFER)
    ] = 30,
    max_leased_fraction: Annotated[
        float, typer.Option(help="Most of P's pool that leases may hold.", rich_help_panel=_TRANSFER)
    ] = 0.8,
    bidirectional_kv_xfer: Annotated[
        bool,
        typer.Option(
            "--bidirectional-kv-xfer",
            help="D keeps an answer's KV for the conversation's next turn, which P reads (with --transfer-mode pull).",
            rich_help_panel=_TRANSFER,
        ),
    ] = False,
    decoder_kv_blocks_ttl: Annotated[
        int, typer.Option(metavar="SECONDS", help="For how long D keeps it.", rich_help_panel=_TRANSFER)
    ] = 480,
    kv_recompute_threshold: Annotated[
        int,
        typer.Option(metavar="TOKENS", help="P computes what it lacks if that is less.", rich_help_panel=_TRANSFER),
    ] = 64,
    max_kept_fraction: Annotated[
        float, typer.Option(help="Most of D's pool that kept answers may hold.", rich_help_panel=_TRANSFER)
    ] = 0.8,
    engine_ttl: Annotated[
        int,
        typer.Option(
            metavar="SECONDS",
            help="How long an idle peer is remembered, its connection kept; 0: for ever.",
            rich_help_panel=_TRANSFER,
        ),
    ] = 3600,
    side_channel_host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Address for handshakes and heartbeats, which the other instances are told; default: --host.",
            rich_help_panel=_TRANSFER,
        ),
    ] = None,
    side_channel_port: Annotated[
        int,
        typer.Option(metavar="PORT", help="Handshakes and heartbeats; 0: any free port.", rich_help_panel=_TRANSFER),
    ] = 0,
    transfer_secret_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Peers must prove that they have the same; needed wherever the side channel is not on loopback.",
            rich_help_panel=_TRANSFER,
        ),
    ] = None,
) -> None:
    """Never called: its parameters are the options."""


def with_instance_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command(..., **options)`` with the options above in place of ``**options``, for Typer to read."""
    own = [p for p in _parameters(command) if p.kind is not inspect.Parameter.VAR_KEYWORD]
    shared = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in _parameters(_template)]

    def wrapped(**given: Any) -> None:
        command(**given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shared
    wrapped.__name__ = command.__name__
    wrapped.__doc__ = command.__doc__
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def _parameters(function: Callable[..., None]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


def build_instance(role: Role, model: str, *, host: str, port: int, options: dict[str, Any]) -> InstanceOptions:
    """InstanceOptions from what Typer parsed. Raises ConfigError naming the option that is wrong."""
    from pdkv.serve.options import InstanceOptions

    given = dict(options)
    return InstanceOptions(
        role=role,
        model=model,
        host=host,
        port=port,
        max_model_len=parse_max_model_len(given.pop("max_model_len")),
        kv_cache_memory_bytes=parse_optional_count("--kv-cache-memory-bytes", given.pop("kv_cache_memory_bytes")),
        kv_load_timeout_s=given.pop("kv_load_timeout"),
        push_registration_timeout_s=given.pop("push_registration_timeout"),
        kv_lease_duration_s=given.pop("kv_lease_duration"),
        decoder_kv_blocks_ttl_s=given.pop("decoder_kv_blocks_ttl"),
        engine_ttl_s=given.pop("engine_ttl"),
        **given,
    )
