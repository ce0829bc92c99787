"""``pdkv faults``: whole P/D systems of the real memory core under seeded faults."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pdkv.core.config import TRANSFER_POLICIES
from pdkv.errors import ConfigError
from pdkv.simulate.faults import play_seeds, trace
from pdkv.simulate.world import Story

app = typer.Typer(add_completion=False)

_SEEDS = re.compile(r"(\d{1,15}):(\d{1,15})")
_SHOWN = 20


@app.command()
def faults(
    seeds: Annotated[
        str | None, typer.Option(help="Worlds to play, FIRST:END (END is not played).", show_default="0:100")
    ] = None,
    policy: Annotated[str, typer.Option(help="Transfer policy: strict, or vllm (the reference's rules).")] = "strict",
    requests: Annotated[int, typer.Option(help="Client requests in each world.", min=1)] = 200,
    jobs: Annotated[int, typer.Option(help="Processes; 0: one a core.", min=0)] = 0,
    seed: Annotated[int | None, typer.Option(help="Play this one world again.", min=0)] = None,
    show_trace: Annotated[bool, typer.Option("--trace", help="With --seed: print its timeline.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Play prefill and decode instances, router and clients in virtual time, and break everything on purpose.

    Messages are lost, doubled, late and reordered; transfers are slow, fail, hang or end after their lease; instances
    die, restart and stand still; clocks drift; clients leave. After every event the memory is judged by its content.
    Prints a seed for each violation; exit status 1 when there is one.
    """
    if policy not in TRANSFER_POLICIES:
        raise ConfigError(f"--policy is {policy!r}; there are {', '.join(sorted(TRANSFER_POLICIES))}")
    if seed is not None and seeds is not None:
        raise ConfigError(f"--seed {seed} and --seeds {seeds}: one world or many; leave one of the two out")
    if seed is not None:
        stories = [trace(seed, policy, requests, print if show_trace else _say_nothing)]
    elif show_trace:
        raise ConfigError("--trace prints the timeline of one world; name it with --seed N")
    else:
        stories = _play(_parse("0:100" if seeds is None else seeds), policy, requests, jobs or os.cpu_count() or 1)
    _report(stories, policy, requests, as_json=as_json)
    if any(story.violation for story in stories):
        raise typer.Exit(1)


def _say_nothing(_: str) -> None:
    return


def _parse(seeds: str) -> range:
    match = _SEEDS.fullmatch(seeds)
    found = range(int(match[1]), int(match[2])) if match else range(0)
    if not found:
        raise ConfigError(f"--seeds is {seeds!r}; write FIRST:END with FIRST below END, for example 0:300")
    return found


def _play(seeds: range, policy: str, requests: int, jobs: int) -> list[Story]:
    stories: list[Story] = []
    columns = (TextColumn("worlds"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[found]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(seeds), found="")
        for story in play_seeds(seeds, policy, requests, min(jobs, len(seeds))):
            stories.append(story)
            if story.violation is not None:
                progress.console.print(_line(story), soft_wrap=True, markup=False, highlight=False)
            found = sum(story.violation is not None for story in stories)
            progress.update(bar, advance=1, found=f"{found} violations")
    return sorted(stories, key=lambda story: story.seed)


def _line(story: Story) -> str:
    assert story.violation is not None
    return f"seed {story.seed}: {story.violation.kind.value}: {story.violation.text}"


def _report(stories: list[Story], policy: str, requests: int, *, as_json: bool) -> None:
    broken = [story for story in stories if story.violation is not None]
    counts: Counter[str] = Counter()
    for story in stories:
        counts.update(story.counts)
    if as_json:
        violations = [
            {"seed": story.seed, "kind": story.violation.kind.name, "text": story.violation.text,
             "weather": str(story.weather)}
            for story in broken if story.violation is not None
        ]  # fmt: skip
        result = {
            "policy": policy, "worlds": len(stories), "requests": requests * len(stories),
            "violations": violations, "counts": dict(sorted(counts.items())),
        }  # fmt: skip
        print(msgspec.json.encode(result).decode())
        return
    virtual_s = sum(story.virtual_ns for story in stories) / 1e9
    print(f"{len(stories)} worlds of {requests} requests under policy {policy}, {virtual_s:,.0f} virtual seconds")
    print(", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    for story in broken[:_SHOWN]:
        print(f"{_line(story)}\n    weather: {story.weather}")
        print(f"    pdkv faults --policy {policy} --requests {requests} --seed {story.seed} --trace")
    if len(broken) > _SHOWN:
        print(f"... and {len(broken) - _SHOWN} more: seeds {', '.join(str(story.seed) for story in broken[_SHOWN:])}")
    print(f"{len(broken)} violations" if broken else "no violation")
