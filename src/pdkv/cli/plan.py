"""``pdkv plan``: will this model fit, how many tokens, how many requests?"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdkv.cli.values import parse_count, parse_max_model_len, parse_optional_count
from pdkv.errors import ConfigError

if TYPE_CHECKING:
    from pdkv.plan.compare import Comparison
    from pdkv.plan.decode import Workload
    from pdkv.plan.kv_transfer import KvTransfer
    from pdkv.plan.options import PlanOptions
    from pdkv.plan.report import PlanReport
    from pdkv.plan.sizing import Sized

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)

_MODEL, _SPLIT, _TYPES = "Model and memory", "How it is split over GPUs", "How KV is kept"
_SPLIT_PD, _ANSWERS = "Prefill and decode apart", "Other answers than a plan"


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
    role: Annotated[
        str | None,
        typer.Option(metavar="decode|prefill", rich_help_panel=_SPLIT_PD, help="One side of a P/D pair, over NIXL."),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=_SPLIT_PD, help="Of an average request.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=_SPLIT_PD, help="Of an average request.")
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
        int, typer.Option(metavar="N", rich_help_panel=_ANSWERS, help="Look no further than this.")
    ] = 64,
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
    """KV capacity of MODEL by vLLM's own rules, to the block. Needs no GPU and no torch."""
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
        "kv_transfer": _transfer(kv_transfer_config, role),
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "data_parallel_size": data_parallel_size,
        "decode_context_parallel_size": decode_context_parallel_size,
        "vllm_version": vllm_version,
    }
    given = {name: value for name, value in given.items() if value is not None}
    asked = _Asked(model, command, given, calibrate)
    if target_concurrency is not None or at_tokens is not None:
        asked.solve(target_concurrency, at_tokens, max_gpus, as_json=as_json)
        return
    load = {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": request_rate,
        "time_per_output_token_s": time_per_output_token,
        "prefill_time_s": prefill_time,
        "transfer_bandwidth": parse_optional_count("--transfer-bandwidth", transfer_bandwidth),
    }
    asked.plan(_workload(load), compare, report, emit=emit, as_json=as_json)


class _Asked:
    """What was asked for: the model and the settings, of the pasted command and of our own command line."""

    def __init__(self, model: str | None, command: str | None, given: dict[str, Any], log: Path | None) -> None:
        from pdkv.plan.calibrate import calibration
        from pdkv.plan.options import PlanOptions
        from pdkv.plan.vllm_args import ServeCommand, parse_command
        from pdkv.source import find_spec

        asked = ServeCommand(model=None, options=PlanOptions()) if command is None else parse_command(_text(command))
        name = model or asked.model
        if name is None:
            raise ConfigError(
                "which model? Give MODEL, for example `pdkv plan smollm2`, a directory or a config.json"
                + ("; the text of --command names none" if command is not None else "")
            )
        self.name, self.command = name, asked
        self.calibration = None if log is None else calibration(log)
        # What was said on our own command line wins over the pasted one, and that over the log's.
        base = PlanOptions() if self.calibration is None else PlanOptions(**self.calibration.options)
        self.options = replace(base, **{**asked.given, **given})
        self.model = find_spec(name, asked.overrides)

    def resize(self, options: PlanOptions) -> Sized:
        """The model under other options."""
        from pdkv.plan.planner import size_planned

        return size_planned(self.model, options, self.calibration)

    def solve(self, concurrency: int | None, at_tokens: str | None, max_gpus: int, *, as_json: bool) -> None:
        from pdkv.plan.solve import Target, solve

        if concurrency is None or at_tokens is None:
            raise ConfigError(
                "--target-concurrency N and --at-tokens L belong together: N requests of L tokens at once"
            )
        target = Target(concurrency=concurrency, tokens=parse_count("--at-tokens", at_tokens), max_gpus=max_gpus)
        found = solve(self.model.spec, self.options, target, self.resize)
        if as_json:
            _print_json(found)
        else:
            from pdkv.cli.plan_tables import print_solution

            print_solution(found)

    def plan(
        self, workload: Workload | None, compare: str | None, report: Path | None, *, emit: bool, as_json: bool
    ) -> None:
        from pdkv.plan.planner import make_plan

        table = None if compare is None else self._compare(compare)
        if table is not None and report is None:
            if as_json:
                _print_json(table)
            else:
                from pdkv.cli.plan_tables import print_comparison

                print_comparison(table)
            return
        plan = make_plan(
            self.model,
            self.options,
            self.calibration,
            workload=workload,
            served_as=self.name,
            overrides=self.command.overrides,
        )
        plan = replace(plan, warnings=(*self.command.warnings, *plan.warnings))
        if report is not None:
            self._write(report, plan, table)
        elif emit:
            print(plan.command)
            if not plan.capacity.fits:
                print("pdkv: vLLM will not start like this: the longest request does not fit", file=sys.stderr)
        elif as_json:
            _print_json(plan)
        else:
            from pdkv.cli.plan_text import print_report

            print_report(plan, irrelevant=self.command.irrelevant)

    def _compare(self, text: str) -> Comparison:
        from pdkv.plan.compare import compare, parse_dimensions

        return compare(parse_dimensions(text, self.model.spec, self.options), self.options, self.resize)

    def _write(self, folder: Path, plan: PlanReport, table: Comparison | None) -> None:
        from pdkv.plan.curves import concurrency_by_length
        from pdkv.plan.page import page

        by_type = self._compare("kv_cache_dtype")
        text = page(plan, by_type, concurrency_by_length(self.resize, self.options), table)
        path = folder / "plan.html"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--report {folder}: cannot write there ({error.strerror or error})") from error
        print(path)


def _transfer(config: str | None, role: str | None) -> KvTransfer | None:
    """The connector of ``--kv-transfer-config``, or what ``--role`` stands for: NIXL, pulled by D."""
    from pdkv.plan.kv_transfer import parse_kv_transfer

    roles = {"decode": "kv_consumer", "prefill": "kv_producer"}
    if role is not None and role not in roles:
        raise ConfigError(f"--role {role}: there are {', '.join(roles)}")
    if config is not None and role is not None:
        raise ConfigError("--role and --kv-transfer-config say the same thing; give one of them")
    if role is not None:
        return parse_kv_transfer({"kv_connector": "NixlConnector", "kv_role": roles[role]})
    return None if config is None else parse_kv_transfer(config)


def _workload(load: dict[str, Any]) -> Workload | None:
    """The load, when one was described. Raises ConfigError for one without its lengths."""
    from pdkv.plan.decode import Workload

    if all(value is None for value in load.values()):
        return None
    if load["prompt_tokens"] is None or load["output_tokens"] is None:
        raise ConfigError("a load needs --prompt-tokens and --output-tokens of an average request")
    return Workload(**load)


def _print_json(value: object) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _text(command: str) -> str:
    """The text itself, or what stands on stdin; at most what could be a command."""
    if command != "-":
        return command
    from pdkv.plan.command_text import MOST_CHARACTERS

    return sys.stdin.read(MOST_CHARACTERS + 1)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
