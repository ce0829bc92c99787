"""``pdkv explain``: where does decode memory go, is the printed number true, what is stuck?"""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)


@app.command()
def explain(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...", help="A start-up log of vLLM, - (stdin), a directory of logs, two logs, or URLs."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model of the log: a known name, a directory, or a config.json."),
    ] = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, max=3600, help="Between two readings of a URL; 0: read it once.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Explain a start of vLLM by its log, compare two, or look at the KV memory of running servers."""
    from pdkv.cli.explain_text import print_all
    from pdkv.explain.sources import explain_sources

    answer = explain_sources(sources, model=model, interval_s=interval)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        print_all(answer)
