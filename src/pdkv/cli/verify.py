"""``pdkv verify``: are the predictions of a plan true of a running server?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pdkv.plan.verify import Verification

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)


@app.command()
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="A running vLLM or pdkv server: http://127.0.0.1:8000.")],
    plan: Annotated[Path, typer.Option(metavar="FILE", help="What `pdkv plan ... --json` printed.")],
    probe: Annotated[
        bool, typer.Option("--probe", help="Send one short request and watch the usage while it runs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Put each prediction of a plan to a running server. Exit status 1 when one of them differs."""
    from pdkv.plan.http_server import connect
    from pdkv.plan.verify import read_plan
    from pdkv.plan.verify import verify as check

    found = check(read_plan(plan), connect(url), probe=probe)
    if as_json:
        import msgspec

        answer = {"url": found.url, "engines": found.engines, "agrees": found.agrees, "findings": found.findings}
        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        _print(found)
    raise typer.Exit(0 if found.agrees else 1)


def _print(found: Verification) -> None:
    from rich import box
    from rich.table import Table

    from pdkv.cli.terminal import stdout_console

    console = stdout_console()
    colours = {"agrees": "green", "differs": "bold red", "not shown": "dim"}
    console.print("[bold green]agrees[/]" if found.agrees else "[bold red]differs[/]", f"with {found.url}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("prediction", "planned", "observed", "verdict"):
        table.add_column(name, justify="left" if name in ("prediction", "verdict") else "right")
    for finding in found.findings:
        word = finding.verdict.value
        table.add_row(finding.what, finding.predicted, finding.observed or "", f"[{colours[word]}]{word}[/]")
    console.print(table, soft_wrap=False)
    for finding in found.findings:
        if finding.meaning and finding.verdict.value != "agrees":
            console.print(f"[yellow]{finding.what}[/]: {finding.meaning}")
