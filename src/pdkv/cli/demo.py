"""``pdkv demo``: a real model, two instances, three prompts, and where the memory was."""

from __future__ import annotations

import typer

from pdkv.cli.engine_extra import engine_module

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)


@app.command()
def demo() -> None:
    """Serve smollm2 through a prefill and a decode instance, stream three answers, show where the KV memory was."""
    raise typer.Exit(engine_module("demo").run())
