"""What `pdkv plan` does with what was asked: reads the model and the settings, and prints one of its answers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from pdkv.cli.values import TOKENS, parse_count
from pdkv.errors import ConfigError
from pdkv.models.catalog import find_model
from pdkv.plan.calibrate import calibration
from pdkv.plan.command_text import MOST_CHARACTERS, ServeCall
from pdkv.plan.compare import Comparison, compare, parse_dimensions
from pdkv.plan.decode import Workload
from pdkv.plan.kv_transfer import KvTransfer, parse_kv_transfer
from pdkv.plan.model_length import is_beyond_model_length
from pdkv.plan.options import PlanOptions
from pdkv.plan.planner import make_plan, size_planned
from pdkv.plan.report import PlanReport
from pdkv.plan.sizing import Sized
from pdkv.plan.vllm_args import ServeCommand, parse_call, parse_command
from pdkv.source import PlannedModel, find_spec

_MOST_GPUS = 64


class Asked:
    """What was asked for: the model and the settings, of the pasted command and of our own command line."""

    def __init__(self, words: list[str], command: str | None, given: dict[str, Any], log: Path | None) -> None:
        own = parse_call(ServeCall(tuple(words)))
        if own.unknown:
            raise ConfigError(f"{own.unknown[0]}: neither an option of pdkv plan nor a flag of vLLM; see --help")
        pasted = None if command is None else parse_command(_text(command))
        read = (own,) if pasted is None else (pasted, own)
        name = own.model or (None if pasted is None else pasted.model)
        if name is None:
            raise ConfigError(
                "which model? Give MODEL, for example `pdkv plan smollm2`, a directory or a config.json"
                + ("; the text of --command names none" if command is not None else "")
            )
        self.name = name
        self.overrides = {key: value for part in read for key, value in part.overrides.items()}
        self.warnings = [warning for part in read for warning in part.warnings]
        self.irrelevant = [flag for part in read for flag in part.irrelevant]
        self.calibration = None if log is None else calibration(log)
        # What was said on our own command line wins over the pasted one, and that over the log's.
        base = {} if self.calibration is None else dict(self.calibration.options)
        for part in read:
            base |= part.given
        self.options = PlanOptions(**{**base, **given})
        self.model = _find(name, own, pasted, self.overrides)

    def resize(self, options: PlanOptions) -> Sized:
        """The model under other options."""
        return size_planned(self.model, options, self.calibration)

    def solve(self, concurrency: int | None, at_tokens: str | None, max_gpus: int | None, *, as_json: bool) -> None:
        """Print the fewest GPUs that hold the target."""
        from pdkv.plan.solve import Target, solve

        if concurrency is None or at_tokens is None:
            raise ConfigError(
                "--target-concurrency N and --at-tokens L belong together: N requests of L tokens at once"
            )
        most = _MOST_GPUS if max_gpus is None else max_gpus
        tokens = parse_count("--at-tokens", at_tokens, TOKENS)
        target = Target(concurrency=concurrency, tokens=tokens, max_gpus=most)
        found = solve(self.model.spec, self.options, target, self.resize)
        found = replace(found, warnings=(*self.warnings, *found.warnings))
        if as_json:
            _print_json(found)
        else:
            from pdkv.cli.plan_tables import print_solution

            print_solution(found)

    def plan(
        self, workload: Workload | None, compare: str | None, report: Path | None, *, emit: bool, as_json: bool
    ) -> None:
        """Print the plan, or the table, the page or the command that was asked for instead."""
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
            served_as=_served_as(self.name),
            overrides=self.overrides,
        )
        plan = replace(plan, warnings=(*self.warnings, *plan.warnings))
        if report is not None:
            self._write(report, plan, table)
        elif emit:
            print(plan.command)
            for warning in (*self.warnings, *filter(is_beyond_model_length, plan.warnings)):
                print(f"pdkv: {warning}", file=sys.stderr)
            if not plan.capacity.fits:
                print("pdkv: vLLM will not start like this: the longest request does not fit", file=sys.stderr)
        elif as_json:
            _print_json(plan)
        else:
            from pdkv.cli.plan_text import print_report

            print_report(plan, irrelevant=self.irrelevant)

    def _compare(self, text: str) -> Comparison:
        table = compare(parse_dimensions(text, self.model.spec, self.options), self.options, self.resize)
        return replace(table, warnings=(*self.warnings, *table.warnings))

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


def _find(name: str, own: ServeCommand, pasted: ServeCommand | None, overrides: Mapping[str, Any]) -> PlannedModel:
    """The model; an error says where its name stood, and which words of the pasted command are no flags either."""
    try:
        return find_spec(name, overrides)
    except ConfigError as error:
        if pasted is None:
            raise
        where = "" if own.model is not None else "--command: the model "
        also = f". Also in --command, no flags of vLLM 0.32: {', '.join(pasted.unknown)}" if pasted.unknown else ""
        raise type(error)(f"{where}{error}{also}") from error


def _served_as(ref: str) -> str:
    """What vLLM calls the model: the hub id that was meant, of a name in the catalogue; the directory of a config."""
    known = find_model(ref)
    if known is None:
        path = Path(ref).expanduser()
        return str(path.parent if path.name == "config.json" and path.is_file() else path)
    ids = [name for name in known.names if "/" in name]
    meant = [name for name in ids if ref.lower() in (name.lower(), name.lower().rpartition("/")[2])]
    return next(iter([*meant, *ids]), ref)


def transfer(config: str | None, role: str | None) -> KvTransfer | None:
    """The connector of ``--kv-transfer-config``, or what ``--role`` stands for: NIXL, pulled by D."""
    roles = {"decode": "kv_consumer", "prefill": "kv_producer"}
    if role is not None and role not in roles:
        raise ConfigError(f"--role {role}: there are {', '.join(roles)}")
    if config is not None and role is not None:
        raise ConfigError("--role and --kv-transfer-config say the same thing; give one of them")
    if role is not None:
        return parse_kv_transfer({"kv_connector": "NixlConnector", "kv_role": roles[role]})
    return None if config is None else parse_kv_transfer(config)


def workload(load: dict[str, Any]) -> Workload | None:
    """The load, when one was described. Raises ConfigError for one without its lengths."""
    if all(value is None for value in load.values()):
        return None
    if load["prompt_tokens"] is None or load["output_tokens"] is None:
        raise ConfigError("a load needs --prompt-tokens and --output-tokens of an average request")
    return Workload(**load)


def _print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _text(command: str) -> str:
    """The text itself, or what stands on stdin; at most what could be a command."""
    if command != "-":
        return command
    return sys.stdin.read(MOST_CHARACTERS + 1)
