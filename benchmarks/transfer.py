"""How fast KV gets from P to D: over NIXL and shared memory, in every mode, beside a plain memcpy of the same blocks.

    python benchmarks/transfer.py --json

P and D are processes with real control threads and real movers, without engines. One transport is measured while the
other stands still, in interleaved rounds; a ratio is the median over pairs of the same round (1: as fast as memcpy).
Added latency is what a transfer puts between P's finish and D's first usable block, for a small prompt. In pull mode
the grant goes to D by a pipe: in `serve` the router's HTTP answer and request take its place, and come on top.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from children import PYTHONPATH, Engine
from report import add_output_options, machine, main, say
from workload import paired_ratio, percentile, summary

MODES = ("pull", "push", "write")
SHAPES = ("scattered", "contiguous")
TRANSPORTS = ("nixl", "shm")
BLOCKS = {"block_bytes": 64 << 10, "num_blocks": 2048, "count": 1000}
_WARM_UP = 3

Rates = dict[str, dict[str, dict[str, list[float]]]]  # transport -> shape -> way -> GB/s of each round
Latencies = dict[str, dict[str, list[float]]]  # transport -> mode -> milliseconds of each request


def start(transport: str, log_dir: Path) -> Engine:
    """P and D over one transport, connected; whatever arrives in any mode has been compared byte by byte."""
    env = {"PYTHONPATH": PYTHONPATH}
    config = {"transport": transport, **BLOCKS}
    engine = Engine(transport, [sys.executable, "engine_transfer.py"], env, log_dir, config, 120.0)
    try:
        for shape in SHAPES:
            for mode in MODES:
                engine.do("verify", mode=mode, shape=shape)
        for _ in range(_WARM_UP):
            _round(engine, turn=0)
        engine.pause()
    except BaseException:
        engine.close()
        raise
    return engine


def measure(engines: list[Engine], args: argparse.Namespace) -> tuple[Rates, Latencies]:
    """All rates and latencies, ``args.rounds`` times, the order turned every round."""
    rates: Rates = {e.name: {shape: {way: [] for way in (*MODES, "memcpy")} for shape in SHAPES} for e in engines}
    latencies: Latencies = {e.name: {mode: [] for mode in MODES} for e in engines}
    for turn in range(args.rounds):
        for engine in engines if turn % 2 == 0 else engines[::-1]:
            engine.resume()
            _round(engine, turn)  # not counted: what stood still has cold caches
            for shape, by_way in _round(engine, turn).items():
                for way, rate in by_way.items():
                    rates[engine.name][shape][way].append(rate / 1e9)
            for mode in MODES if turn % 2 == 0 else MODES[::-1]:
                blocks, requests = args.latency_blocks, args.latency_requests
                latencies[engine.name][mode] += engine.do("latency", mode=mode, blocks=blocks, requests=requests)
            engine.pause()
    return rates, latencies


def _round(engine: Engine, turn: int) -> dict[str, dict[str, float]]:
    """Bytes per second of every shape in every way, once."""
    rates: dict[str, dict[str, float]] = {}
    for shape in SHAPES:
        calls = [(mode, "pdkv", {"mode": mode}) for mode in MODES] + [("memcpy", "memcpy", {})]
        order = calls if turn % 2 == 0 else calls[::-1]
        rates[shape] = {way: engine.do(command, shape=shape, **more) for way, command, more in order}
    return rates


def report(rates: Rates, latencies: Latencies) -> dict[str, Any]:
    """GB/s, ratios to memcpy, and milliseconds, each with its spread."""
    return {
        "gb_per_s": {
            transport: {shape: {way: summary(of) for way, of in ways.items()} for shape, ways in shapes.items()}
            for transport, shapes in rates.items()
        },
        "vs_memcpy": {
            transport: {
                shape: {mode: paired_ratio(ways[mode], ways["memcpy"]) for mode in MODES}
                for shape, ways in shapes.items()
            }
            for transport, shapes in rates.items()
        },
        "added_latency_ms": {
            transport: {mode: {"p95": percentile(of, 95), **summary(of)} for mode, of in modes.items()}
            for transport, modes in latencies.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    what = result["settings"]
    lines = [
        f"{result['machine']['cpu']}, {result['machine']['cores']} cores, {result['machine']['date']}",
        f"{what['count']} blocks of {what['block_bytes'] >> 10} KiB, GB/s: median (extremes), and its ratio to memcpy "
        "(half-width of the middle half)",
    ]
    for transport, shapes in result["gb_per_s"].items():
        for shape, ways in shapes.items():
            for way, of in ways.items():
                line = f"{transport:4} {shape:10} {way:6} {of['median']:6.2f} ({of['min']:.2f}-{of['max']:.2f})"
                if way != "memcpy":
                    ratio = result["vs_memcpy"][transport][shape][way]
                    line += f"   {ratio['median']:.2f} (+-{ratio['spread']:.2f})"
                lines.append(line)
    lines.append(f"added latency of {what['latency_blocks']} blocks, ms: median, 95th percentile, extremes")
    for transport, modes in result["added_latency_ms"].items():
        for mode, of in modes.items():
            spread = f"p95 {of['p95']:.2f} ({of['min']:.2f}-{of['max']:.2f})"
            lines.append(f"{transport:4} {mode:17} {of['median']:6.2f}   {spread}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    parser.add_argument("--rounds", type=int, default=30, help="rounds (default 30)")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="only this one; may be repeated")
    parser.add_argument("--latency-blocks", type=int, default=2, help="blocks of the small prompt (default 2)")
    parser.add_argument("--latency-requests", type=int, default=10, help="small prompts of a round (default 10)")
    return parser.parse_args()


def run(args: argparse.Namespace, log_dir: Path) -> dict[str, Any]:
    """Everything; the result that ``--json`` prints."""
    result: dict[str, Any] = {"machine": machine()}
    result["settings"] = {
        **BLOCKS,
        "rounds": args.rounds,
        "latency_blocks": args.latency_blocks,
        "latency_requests": args.latency_requests * args.rounds,
    }
    with ExitStack() as stack:
        engines = []
        for transport in args.transport or TRANSPORTS:
            engines.append(start(transport, log_dir))
            stack.callback(engines[-1].close)
            say(f"{transport}: every byte arrives, in every mode")
        result |= report(*measure(engines, args))
    result["machine"]["load_average_after"] = os.getloadavg()
    return result


if __name__ == "__main__":
    sys.exit(main(parse(), run, table, "where NIXL has no wheel: --transport shm"))
