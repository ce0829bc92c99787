"""What every benchmark says about itself: progress lines, and the machine it ran on."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from pathlib import Path
from typing import Any


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


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
