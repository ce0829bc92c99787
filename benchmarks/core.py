"""How fast pdkv's memory core is; with ``--peer-python`` beside vLLM's own Python classes in the same run.

    python benchmarks/core.py --json --peer-python /path/to/venv-with-vllm/bin/python

The clock is the CPU time of the one thread that works (`time.thread_time`), so other load on the machine disturbs
little. The peer runs in a child process; the two take turns, and a ratio is the median over pairs of the same round,
peer time / our time (higher: pdkv is faster). Ratios that need an absent peer or package are null.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core_ours import Side
from core_work import BLOCK, DECODERS, MILLION
from report import say

_HERE = Path(__file__).parent

BARS = {
    "hash_raw": 2.0, "hash_vllm": 1.3, "hash_xxh3": 5.0, "alloc_free": 10.0, "lookup": 8.0, "decode": 20.0,
    "decode_hybrid": 15.0, "scheduler_step": 15.0, "churn": 8.0,
}  # fmt: skip
STRIDE_BAR = 20.0

Call = tuple[str, dict[str, Any]]


class Peer:
    """vLLM's side, in a child process that waits while ours works."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, str(_HERE / "core_peer.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONHASHSEED": "0"},
        )  # fmt: skip

    def run(self, call: Call) -> Any:
        """Its figure."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(
                f"the peer died at {call[0]}; run `echo '{json.dumps(call)}' | PYTHON core_peer.py` to see why"
            )
        return json.loads(answer)

    def close(self) -> None:
        """End the child."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)


class Comparison:
    """Interleaved rounds of ours and the peer's."""

    def __init__(self, ours: Side, peer: Peer | None, rounds: int, only: list[str]) -> None:
        self._ours, self._peer, self._rounds, self._only = ours, peer, rounds, only
        self.figures: dict[str, Any] = {}
        self.ratios: dict[str, float | None] = dict.fromkeys(BARS)

    def compare(
        self, name: str, ours: Call, peer: Call, *, unit: str, scale: float, seconds: Callable[[Any], float] = float,
        rounds: int | None = None, check: Callable[[Any, Any], None] | None = None,
    ) -> None:  # fmt: skip
        """Measure ``ours`` and ``peer`` in turns; ``scale`` turns seconds into ``unit``."""
        if self._only and name not in self._only:
            return
        pairs: list[tuple[float, float | None]] = []
        for turn in range(rounds or self._rounds):
            results: dict[bool, Any] = {}
            for is_peer in (False, True) if turn % 2 == 0 else (True, False):
                if is_peer and self._peer is not None:
                    results[True] = self._peer.run(peer)
                elif not is_peer:
                    results[False] = getattr(self._ours, ours[0])(**ours[1])
            if check is not None and True in results:
                check(results[False], results[True])
            pairs.append((seconds(results[False]), seconds(results[True]) if True in results else None))
        figure: dict[str, Any] = {
            "unit": unit,
            "ours": statistics.median(mine for mine, _ in pairs) * scale,
            "peer": None,
        }
        theirs = [other for _, other in pairs if other is not None]
        ratio = None
        if theirs:
            figure["peer"] = statistics.median(theirs) * scale
            ratio = statistics.median(other / mine for mine, other in pairs if other is not None)
        figure["ratio"] = ratio
        self.figures[name] = figure
        if name in self.ratios:
            self.ratios[name] = ratio
        shown = f"{figure['ours']:.4g} {unit}" + (f", peer {figure['peer']:.4g}, ratio {ratio:.2f}" if ratio else "")
        say(f"{name}: {shown}")


def same_digest(ours: Any, peer: Any) -> None:
    """The two chains end in the same digest."""
    assert ours[1] == peer[1], "pdkv's digest differs from vLLM's"


def hashing(comparison: Comparison) -> None:
    """A 1M-token prompt, 16 tokens a block."""
    has_xxhash = importlib.util.find_spec("xxhash") is not None

    def first(result: Any) -> float:
        return float(result[0])

    pairs = [
        ("hash_raw", "raw", "sha256"),
        ("hash_vllm", "sha256", "sha256"),
        ("hash_vllm_cbor", "sha256_cbor", "sha256_cbor"),
    ]
    if has_xxhash:
        pairs += [("hash_xxh3", "raw_xxh3", "xxhash"), ("hash_vllm_xxh3", "xxhash", "xxhash")]
    for name, ours, peer in pairs:
        comparison.compare(
            name, ("hashes", {"algorithm": ours}), ("hashes", {"algorithm": peer}), unit="ms", scale=1e3, seconds=first,
            check=same_digest if ours == peer else None,
        )  # fmt: skip


def measure(comparison: Comparison, args: argparse.Namespace) -> None:
    """Everything that has a peer."""
    hashing(comparison)
    for name in ("alloc_free", "lookup"):
        comparison.compare(name, (name, {}), (name, {}), unit="ms", scale=1e3)
    steps = args.decode_steps
    for name, more in (("decode", {}), ("decode_hybrid", {"hybrid": True})):
        call = ("decode", {"steps": steps} | more)
        comparison.compare(name, call, call, unit="us/request-step", scale=1e6 / steps / DECODERS)
    call = ("scheduler_step", {"steps": args.scheduler_steps})
    comparison.compare("scheduler_step", call, call, unit="ms/step", scale=1e3, seconds=statistics.median)
    call = ("churn", {"count": args.churn_requests})
    comparison.compare(
        "churn", call, call, unit="us/request", scale=1e6 / args.churn_requests, rounds=args.churn_rounds
    )


def alone(ours: Side, steps: int, rounds: int) -> dict[str, Any]:
    """What has no peer: one `advance` against as many single steps, and a request of a million tokens."""
    pairs = [ours.stride(steps) for _ in range(rounds)]
    single, strided = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = sorted(one / at_once for one, at_once in pairs)
    ratio = statistics.median(ratios)
    say(
        f"advance: {steps} steps in {strided * 1e3:.1f} ms, singly {single * 1e3:.0f} ms: "
        f"{ratio:.1f}x ({ratios[0]:.1f}-{ratios[-1]:.1f})"
    )
    million = ours.million()
    say("1M tokens: " + ", ".join(f"{name} {value:.4g}" for name, value in million.items()))
    advance = {
        "steps": steps,
        "single_seconds": single,
        "advance_seconds": strided,
        "ratio": ratio,
        "ratios": ratios,
        "bar": STRIDE_BAR,
    }
    return {"advance": advance, "million": million}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--peer-python", help="a Python that has vLLM 0.32; without it there are no ratios")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these figures and no others")
    parser.add_argument("--rounds", type=int, default=5, help="pairs per figure (default 5)")
    parser.add_argument("--decode-steps", type=int, default=1000, help="steps of the decode figures (default 1000)")
    parser.add_argument("--scheduler-steps", type=int, default=400, help="steps of scheduler_step (default 400)")
    parser.add_argument(
        "--churn-requests", type=int, default=1000, help="requests of churn (default 1000; the whole is 10000)"
    )
    parser.add_argument("--churn-rounds", type=int, default=5, help="pairs of churn (default 5)")
    parser.add_argument("--stride", type=int, default=1000, help="steps of one advance (default 1000)")
    return parser.parse_args()


def main() -> int:
    """0; figures below their bars are marked, not failed on."""
    args = parse()
    ours, peer = Side(), Peer(args.peer_python) if args.peer_python else None
    load = os.getloadavg()
    comparison = Comparison(ours, peer, args.rounds, args.only)
    try:
        measure(comparison, args)
    finally:
        if peer is not None:
            peer.close()
    extra = {} if args.only else alone(ours, args.stride, args.rounds)
    machine = {"cpus": os.cpu_count(), "cpu": platform.machine(), "python": platform.python_version()}
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "clock": "time.thread_time",
        "machine": machine,
        "loadavg": {"start": load, "end": os.getloadavg()},
        "work": {"tokens": MILLION, "block_tokens": BLOCK, "decoding": DECODERS, "arguments": vars(args)},
        "figures": comparison.figures,
        "ratios": comparison.ratios,
        "bars": BARS,
        **extra,
    }
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        for name, bar in BARS.items():
            ratio = comparison.ratios[name]
            print(f"{name:15} {'-' if ratio is None else f'{ratio:7.2f}x'}  bar {bar:g}x")
        if extra:
            print(f"{'advance':15} {extra['advance']['ratio']:7.2f}x  bar {STRIDE_BAR:g}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
