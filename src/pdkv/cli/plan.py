"""``pdkv plan``: will this model fit, how many tokens, how many requests?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pdkv.cli.values import TOKENS, parse_max_model_len, parse_optional_count
from pdkv.errors import ConfigError

# Flags of vLLM that are not options of our own are left to the reader of its command lines.
_SETTINGS = {"help_option_names": ["-h", "--help"], "allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(context_settings=_SETTINGS, add_completion=False)

_MODEL, _SPLIT, _TYPES = "Model and memory", "How it is split over GPUs", "How KV is kept"
_SPLIT_PD, _ANSWERS = "Prefill and decode apart", "Other answers than a plan"


@app.command(context_settings=_SETTINGS)
def plan(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A model of `pdkv models`, a directory, or a config.json."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="A pasted `vllm serve ...`, docker run, compose or Kubernetes text; - reads stdin."
        ),
    ] = None,
    kv_cache_memory_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", rich_help_panel=_MODEL, help="Memory for KV on each GPU: 42949672960, 40GiB, 40G."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", rich_help_panel=_MODEL, help="h100, h200, a100-80gb ...: the budget is estimated."
        ),
    ] = None,
    gpu_memory_bytes: Annotated[
        str | None,
        typer.Option(metavar="BYTES", rich_help_panel=_MODEL, help="What the GPU's driver reports, of any other GPU."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(metavar="SHARE", rich_help_panel=_MODEL, help="Of that memory: 0.92.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="LOG",
            rich_help_panel=_MODEL,
            help="Take settings and the terms of the budget from a start-up log.",
        ),
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=_MODEL, help="This many blocks, whatever the memory.")
    ] = None,
    max_model_len: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS|auto", rich_help_panel=_MODEL, help="Longest request: 4096, 8k, 1M; auto: what fits."
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", rich_help_panel=_MODEL, help="Tokens of one step; windows and chunks reserve for them."
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=_MODEL, help="Most requests in one step.")
    ] = None,
    async_scheduling: Annotated[
        bool | None, typer.Option(rich_help_panel=_MODEL, help="Two steps are in flight then (default).")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(rich_help_panel=_MODEL, help="What the model computes in: auto, bfloat16, float16 ...")
    ] = None,
    vllm_version: Annotated[
        str | None, typer.Option(metavar="0.N", rich_help_panel=_MODEL, help="The release whose rules hold: 0.32.")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option("--tensor-parallel-size", "-tp", rich_help_panel=_SPLIT, help="GPUs a layer is split over."),
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--pipeline-parallel-size", "-pp", rich_help_panel=_SPLIT, help="Stages the layers are split into."
        ),
    ] = None,
    data_parallel_size: Annotated[
        int | None,
        typer.Option("--data-parallel-size", "-dp", rich_help_panel=_SPLIT, help="Engines, each with a pool."),
    ] = None,
    decode_context_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--decode-context-parallel-size", "-dcp", rich_help_panel=_SPLIT, help="GPUs that share a layer's tokens."
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(rich_help_panel=_TYPES, help="Any value of vLLM: auto, bfloat16, fp8, nvfp4, fp8_ds_mla ..."),
    ] = None,
    kv_cache_dtype_skip_layers: Annotated[
        str | None,
        typer.Option(
            metavar="0,1,..", rich_help_panel=_TYPES, help="Layers that keep the model's own type; or: sliding_window."
        ),
    ] = None,
    mamba_ssm_cache_dtype: Annotated[
        str | None, typer.Option(rich_help_panel=_TYPES, help="What recurrent states are kept in: auto, float32 ...")
    ] = None,
    attention_backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_TYPES,
            help="As in vLLM; when not given, what it takes on that GPU (else an NVIDIA Hopper).",
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", rich_help_panel=_TYPES, help="Tokens per block; what the backend prefers when not given."
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None, typer.Option(rich_help_panel=_TYPES, help="States are saved at block ends then (default).")
    ] = None,
    disable_hybrid_kv_cache_manager: Annotated[
        bool | None, typer.Option(rich_help_panel=_TYPES, help="Allocate windows in full.")
    ] = None,
    kv_transfer_config: Annotated[
        str | None, typer.Option(metavar="JSON", rich_help_panel=_TYPES, help="The KV connector, as vLLM's.")
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(metavar="decode|prefill", rich_help_panel=_SPLIT_PD, help="One side of a P/D pair, over NIXL."),
    ] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option(metavar="TOKENS", rich_help_panel=_SPLIT_PD, help="Of an average request: 4000, 8k.")
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(metavar="TOKENS", rich_help_panel=_SPLIT_PD, help="Of an average request.")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(metavar="PER_S", rich_help_panel=_SPLIT_PD, help="Requests a second, all together.")
    ] = None,
    time_per_output_token: Annotated[
        float | None, typer.Option(metavar="S", rich_help_panel=_SPLIT_PD, help="What D takes for one token, measured.")
    ] = None,
    prefill_time: Annotated[
        float | None,
        typer.Option(metavar="S", rich_help_panel=_SPLIT_PD, help="What P takes for one prompt, measured."),
    ] = None,
    transfer_bandwidth: Annotated[
        str | None, typer.Option(metavar="BYTES_PER_S", rich_help_panel=_SPLIT_PD, help="Of one GPU: 50G, 12.5GB.")
    ] = None,
    target_concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", rich_help_panel=_ANSWERS, help="Find the fewest GPUs that hold N requests at once."),
    ] = None,
    at_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", rich_help_panel=_ANSWERS, help="Length of each of them, prompt and answer: 32k."
        ),
    ] = None,
    max_gpus: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=_ANSWERS, help="Look no further than this (64).")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[=A:B],..",
            rich_help_panel=_ANSWERS,
            help="A table over settings: kv_cache_dtype,tensor_parallel_size=1:2:4 ...",
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", rich_help_panel=_ANSWERS, help="Write the plan as one HTML page.")
    ] = None,
    emit: Annotated[
        bool, typer.Option("--emit", rich_help_panel=_ANSWERS, help="Print the `vllm serve` that this plan stands for.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """KV capacity of MODEL by vLLM's own rules, to the block. Needs no GPU and no torch.

    Any other flag of `vllm serve` may be given too (--enforce-eager, --speculative-config ...).
    """
    from pdkv.cli.plan_run import Asked, transfer, workload

    given: dict[str, Any] = {
        "gpu": gpu,
        "gpu_memory_bytes": parse_optional_count("--gpu-memory-bytes", gpu_memory_bytes),
        "gpu_memory_utilization": gpu_memory_utilization,
        "kv_cache_memory_bytes": parse_optional_count("--kv-cache-memory-bytes", kv_cache_memory_bytes),
        "num_gpu_blocks_override": num_gpu_blocks_override,
        "block_size": block_size,
        "max_model_len": parse_max_model_len(max_model_len),
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "async_scheduling": async_scheduling,
        "enable_prefix_caching": enable_prefix_caching,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "kv_cache_dtype_skip_layers": None
        if kv_cache_dtype_skip_layers is None
        else _split(kv_cache_dtype_skip_layers),
        "mamba_ssm_cache_dtype": mamba_ssm_cache_dtype,
        "attention_backend": attention_backend,
        "disable_hybrid_kv_cache_manager": disable_hybrid_kv_cache_manager,
        "kv_transfer": transfer(kv_transfer_config, role),
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "data_parallel_size": data_parallel_size,
        "decode_context_parallel_size": decode_context_parallel_size,
        "vllm_version": vllm_version,
    }
    given = {name: value for name, value in given.items() if value is not None}
    words = [] if model is None else [model]
    asked = Asked([*words, *context.args], command, given, calibrate)
    if target_concurrency is not None or at_tokens is not None or max_gpus is not None:
        if compare is not None or report is not None or emit:
            raise ConfigError("--target-concurrency is an answer of its own: leave out --compare, --report and --emit")
        asked.solve(target_concurrency, at_tokens, max_gpus, as_json=as_json)
        return
    load = {
        "prompt_tokens": parse_optional_count("--prompt-tokens", prompt_tokens, TOKENS),
        "output_tokens": parse_optional_count("--output-tokens", output_tokens, TOKENS),
        "requests_per_s": request_rate,
        "time_per_output_token_s": time_per_output_token,
        "prefill_time_s": prefill_time,
        "transfer_bandwidth": parse_optional_count("--transfer-bandwidth", transfer_bandwidth),
    }
    asked.plan(workload(load), compare, report, emit=emit, as_json=as_json)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
