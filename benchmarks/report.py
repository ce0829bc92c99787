"""What every benchmark says about itself: progress lines, the machine it ran on, and how its result is given."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from children import ChildFailed


def say(line: str) -> None:
    """Progress goes to stderr: stdout is for the result."""
    print(f"{datetime.datetime.now():%H:%M:%S} load {os.getloadavg()[0]:.1f}  {line}", file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What it ran on."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average_before": os.getloadavg(),
    }


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Where result and logs go: what `main` needs."""
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--log-dir", type=Path, help="keep the children's logs here")


def main(
    args: argparse.Namespace,
    run: Callable[[argparse.Namespace, Path], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    hint: str = "",
) -> int:
    """Measure and print; the exit code. ``hint`` is for when a child fails."""
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-") as directory:
        log_dir = args.log_dir or Path(directory)
        log_dir.mkdir(parents=True, exist_ok=True)
        try:
            result = run(args, log_dir)
        except ChildFailed as error:
            print(error, hint, sep="\n", file=sys.stderr)
            return 1
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1) if args.json else table(result))
    return 0


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
