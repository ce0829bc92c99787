"""``pdkv top``: the KV memory of running servers, live in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)


@app.command()
def top(
    urls: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Servers: a router, or decode and prefill instances.")
    ],
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between two readings.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame after one interval and end.")] = False,
) -> None:
    """Show where the KV memory of running servers is, and what is wrong with it, until q or Ctrl-C."""
    from rich.console import Console
    from rich.text import Text

    from pdkv.cli.live_text import live_view
    from pdkv.errors import PdkvError
    from pdkv.explain.live import diagnose, read_all

    console = Console(highlight=False)
    before = read_all(urls)
    if once:
        time.sleep(interval)
        console.print(live_view(diagnose(read_all(urls), before)))
        return
    try:
        with _keys() as pressed, _frames(console) as show:
            show(live_view(diagnose(before, None)))
            while not pressed(interval):
                try:
                    now = read_all(urls)
                except PdkvError as error:
                    # A server that restarts comes back: what it said last is no longer true, so only the reason shows.
                    show(Text(f"{error}\nstill trying; q ends"))
                    continue
                show(live_view(diagnose(now, before)))
                before = now
    except KeyboardInterrupt:
        pass


@contextmanager
def _frames(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """Gives what shows a frame: in place of the one before on a terminal, below it in a file or a pipe."""
    if not console.is_terminal:
        yield console.print
        return
    from rich.live import Live as Screen

    with Screen(console=console, screen=True, auto_refresh=False) as screen:
        yield lambda frame: screen.update(frame, refresh=True)


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Gives a wait that ends early, and says so, when q is pressed; where there is no terminal it only sleeps."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import select
    import termios
    import tty

    stream = sys.stdin.fileno()
    saved = termios.tcgetattr(stream)

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([stream], [], [], left)
            if ready and sys.stdin.read(1) in ("q", "Q", "\x03"):
                return True
        return False

    try:
        tty.setcbreak(stream)
        yield wait
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, saved)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
