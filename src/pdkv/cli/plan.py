"""``pdkv plan``: will this model fit, how many tokens, how many requests?"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from pdkv.cli.values import parse_max_model_len, parse_optional_count
from pdkv.errors import ConfigError

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)

_MODEL, _SPLIT, _TYPES = "Model and memory", "How it is split over GPUs", "How KV is kept"


@app.command()
def plan(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A known model (smollm2), a directory, or a config.json.")
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
            help="As in vLLM; when not given, what it takes on an NVIDIA Hopper.",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """KV capacity of MODEL by vLLM's own rules, to the block. Needs no GPU and no torch."""
    from pdkv.plan.kv_transfer import parse_kv_transfer

    given: dict[str, Any] = {
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
        "kv_transfer": None if kv_transfer_config is None else parse_kv_transfer(kv_transfer_config),
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "data_parallel_size": data_parallel_size,
        "decode_context_parallel_size": decode_context_parallel_size,
        "vllm_version": vllm_version,
    }
    given = {name: value for name, value in given.items() if value is not None}
    _run(model, command, given, as_json=as_json)


def _run(model: str | None, command: str | None, given: dict[str, Any], *, as_json: bool) -> None:
    from pdkv.plan.planner import make_plan
    from pdkv.plan.vllm_args import ServeCommand, parse_command
    from pdkv.source import find_spec

    if command is None:
        from pdkv.plan.options import PlanOptions

        asked = ServeCommand(model=None, options=PlanOptions())
    else:
        asked = parse_command(_text(command))
    name = model or asked.model
    if name is None:
        raise ConfigError(
            "which model? Give MODEL, for example `pdkv plan smollm2`, a directory or a config.json"
            + ("; the text of --command names none" if command is not None else "")
        )
    # What was said on our own command line wins over the pasted one.
    report = make_plan(find_spec(name, asked.overrides), replace(asked.options, **given))
    report = replace(report, warnings=(*asked.warnings, *report.warnings))
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        from pdkv.cli.plan_text import print_report

        print_report(report)
        if asked.irrelevant:
            print(f"no effect on KV memory: {', '.join(asked.irrelevant)}")


def _text(command: str) -> str:
    """The text itself, or what stands on stdin; at most what could be a command."""
    if command != "-":
        return command
    import sys

    from pdkv.plan.command_text import MOST_CHARACTERS

    return sys.stdin.read(MOST_CHARACTERS + 1)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
