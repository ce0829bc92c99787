"""The ``pdkv`` command: one file per verb, loaded only when that verb is called."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pdkv import __version__
from pdkv.errors import PdkvError

VERBS = ("plan", "models", "verify", "explain", "top", "serve", "demo", "faults")


class _Verbs(TyperGroup):
    """Looks a verb up by importing its file, so that `pdkv plan` does not pay for the options of the others."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        command = typer.main.get_command(importlib.import_module(f"pdkv.cli.{cmd_name}").app)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="pdkv",
    cls=_Verbs,
    help="The KV-cache memory of prefill/decode-disaggregated LLM serving: plan it, run it, see it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"pdkv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the command itself."""


def _open_closed_streams() -> None:
    """Give what the caller has closed (``>&-``) to /dev/null: libraries count on it, a socket would take its place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def run() -> None:
    """Run the command line. An error for people goes to stderr without a traceback, and the exit status is 2."""
    _open_closed_streams()
    try:
        app()
    except PdkvError as error:
        print(f"pdkv: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the rest of it fails again at the exit
        print(f"pdkv: cannot write: {error.strerror}", file=sys.stderr)
        sys.exit(1)
