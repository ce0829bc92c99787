"""How fast pdkv serves: decode, prefill, transfers and P/D legs; with ``--peer-python`` beside vLLM in the same run.

    python benchmarks/serve.py --json --peer-python /path/to/venv-with-vllm/bin/python

Everything is measured in child processes, one running at a time and the others stopped, in interleaved rounds. A ratio
is the median over pairs of the same round (higher: pdkv is faster); those that need an absent peer are null.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import measure
import pd_legs
from children import PYTHONPATH, Engine
from report import add_output_options, machine, main, say
from workload import paired_ratio, percentile, summary

TRANSFER = {
    "block_bytes": 737_280,  # 16 tokens of SmolLM2-135M in fp32: all layers, K and V
    "num_blocks": 256,
    "count": 87,  # 64 MB
    "bare_nixl": True,
}
BARS = {
    "decode_1": 1.0,
    "decode_8": 1.0,
    "decode_32": 0.75,
    "prefill_512": 0.85,
    "prefill_2048": 1.0,
    "d_leg_vs_peer": 1.0,
    "d_leg_vs_local": 6.0,
    "transfer_vs_nixl": 0.8,
}
BARS_BF16 = {"decode_1": 1.3, "decode_32": 0.9}
SUBMIT_P99_BAR_MS = 2.0
_PARTS = ("transfer", "compute", "legs")


def transfers(args: argparse.Namespace, log_dir: Path) -> dict[str, Any]:
    """GB/s of pdkv's READ, of a bare NIXL READ and of a memory copy of the same blocks; `Control.submit` times."""
    env = {"PYTHONPATH": PYTHONPATH}
    config = {"transport": args.transport, **TRANSFER}
    child = Engine("transfer", [sys.executable, "engine_transfer.py"], env, log_dir, config, 120.0)
    try:
        ways = ("pdkv", "bare_nixl", "memcpy")
        for _ in range(4):  # the first READs make the connection and touch the pages
            for way in ways:
                child.do(way)
        runs: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(args.transfer_rounds):
            for way in ways if turn % 2 == 0 else ways[::-1]:
                rate = child.do(way)
                if rate is not None:
                    runs[way].append(rate / 1e9)
        submits_ms = child.do("submits", reads=args.transfer_rounds)
        facts = child.facts
    finally:
        child.close()
    result: dict[str, Any] = {**facts, "gb_per_s": {way: summary(of) for way, of in runs.items() if of}}
    result["submit_ms"] = {
        "calls": len(submits_ms),
        "p50": statistics.median(submits_ms),
        "p99": percentile(submits_ms, 99),
        "max": max(submits_ms),
        "bar_p99": SUBMIT_P99_BAR_MS,
    }
    vs_nixl = paired_ratio(runs["pdkv"], runs["bare_nixl"]) if runs["bare_nixl"] else None
    result["ratios"] = {"transfer_vs_nixl": vs_nixl, "transfer_vs_memcpy": paired_ratio(runs["pdkv"], runs["memcpy"])}
    say(f"transfer_vs_nixl {vs_nixl['median']:.2f}" if vs_nixl else "no NIXL here")
    return result


def compute(args: argparse.Namespace, log_dir: Path) -> dict[str, Any]:
    """Decode and prefill of every engine, and their paired ratios."""
    with ExitStack() as stack:
        engines = [measure.pdkv_engine(args.model, args.threads, log_dir)]
        stack.callback(engines[0].close)
        if not args.no_bf16:
            engines.append(measure.pdkv_engine(args.model, args.threads, log_dir, weight_storage="bf16"))
            stack.callback(engines[-1].close)
        if args.peer_python:
            say("starting vLLM")
            peer = measure.peer_engine(
                args.peer_python, engines[0].facts, args.threads, log_dir, eager=not args.peer_compile
            )
            engines.append(peer)
            stack.callback(peer.close)
        samples = measure.measure(engines, args.rounds, args.steps, say, args.figures)
        facts = {engine.name: engine.facts for engine in engines}
    for of in facts.values():
        of.pop("word_ids", None)
    result: dict[str, Any] = {"engines": facts, "figures": measure.report(samples)}
    for key, clock in (("ratios", "per_wall_s"), ("ratios_cpu", "per_cpu_s")):
        result[key] = measure.ratios(samples, "pdkv", "vllm", clock)
        result[f"{key}_bf16"] = measure.ratios(samples, "pdkv_bf16", "vllm", clock)
    result["bf16_vs_fp32"] = measure.ratios(samples, "pdkv_bf16", "pdkv")
    return result


def legs(args: argparse.Namespace, log_dir: Path) -> dict[str, Any]:
    """The P and D legs over HTTP; P and D share the machine, so each gets half of the threads."""
    threads = max(1, args.threads // 2)
    with ExitStack() as stack:
        probe = measure.pdkv_engine(args.model, threads, log_dir)
        facts = probe.facts
        probe.close()
        pairs = [pd_legs.pdkv_pair(stack, args.model, args.transport, threads, log_dir)]
        if args.peer_python:
            say("starting vLLM's P and D")
            pairs.append(
                pd_legs.peer_pair(
                    stack, args.peer_python, facts["model_dir"], threads, log_dir, eager=not args.peer_compile
                )
            )
        runs = pd_legs.measure_pairs(pairs, facts["word_ids"], args.leg_rounds, say)
    return {"threads": threads, "figures": pd_legs.report(runs), "ratios": pd_legs.ratios(runs)}


def medians(ratios: dict[str, Any], names: dict[str, float]) -> dict[str, float | None]:
    """The median of each named ratio; null when it was not measured."""
    return {name: round(ratios[name]["median"], 3) if ratios.get(name) else None for name in names}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Options; ``--quick`` sets fewer rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output_options(parser)
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter that has vllm: measure it as well")
    parser.add_argument("--peer-compile", action="store_true", help="let the peer compile its model (default: eager)")
    parser.add_argument("--quick", action="store_true", help="two rounds, short decodes: a check, not a figure")
    parser.add_argument("--rounds", type=int, help="rounds of the compute part (default 7)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--transport", default="auto", help="auto, nixl or shm")
    parser.add_argument("--no-bf16", action="store_true", help="leave the bf16-stored weights out")
    parser.add_argument("--only", action="append", choices=_PARTS, help="only this part; may be repeated")
    parser.add_argument(
        "--figures", nargs="+", choices=measure.FIGURES, default=measure.FIGURES, help="of the compute part, only these"
    )
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (2 if args.quick else 7)
    args.leg_rounds = 2 if args.quick else max(args.rounds, 7)
    args.transfer_rounds = 8 if args.quick else 40
    args.steps = {1: 12, 8: 8, 32: 4} if args.quick else {1: 24, 8: 16, 32: 12}
    if args.peer_python and shutil.which(args.peer_python) is None:
        parser.error(f"--peer-python {args.peer_python}: there is no such program")
    return args


def run(args: argparse.Namespace, log_dir: Path) -> dict[str, Any]:
    """All parts; the result that ``--json`` prints."""
    result: dict[str, Any] = {"machine": machine()}
    result["settings"] = {
        "model": args.model,
        "threads": args.threads,
        "rounds": args.rounds,
        "figures": list(args.figures),
        "context_tokens": 512,
        "max_batched_tokens": measure.MAX_BATCHED_TOKENS,
        "peer_eager": not args.peer_compile,
    }
    spreads: dict[str, Any] = {}
    for name, part in (("transfer", transfers), ("compute", compute), ("legs", legs)):
        if args.only and name not in args.only:
            continue
        say(f"--- {name}")
        result[name] = part(args, log_dir)
        spreads.update(result[name]["ratios"])
    bf16 = result.get("compute", {}).get("ratios_bf16", {})
    result["ratios"] = medians(spreads, BARS)
    result["ratios_bf16"] = medians(bf16, {name: 0.0 for name in BARS if name.startswith(("decode", "prefill"))})
    result["bars"] = {"fp32": BARS, "bf16_stored": BARS_BF16, "submit_p99_ms": SUBMIT_P99_BAR_MS}
    result["below_bar"] = _below(result)
    result["machine"]["load_average_after"] = os.getloadavg()
    return result


def _below(result: dict[str, Any]) -> list[str]:
    found = []
    for which, bars in (("ratios", BARS), ("ratios_bf16", BARS_BF16)):
        for name, bar in bars.items():
            value = result[which][name]
            if value is not None and value < bar:
                found.append(f"{which}.{name} {value} < {bar}")
    p99 = result.get("transfer", {}).get("submit_ms", {}).get("p99")
    if p99 is not None and p99 > SUBMIT_P99_BAR_MS:
        found.append(f"submit p99 {p99:.2f} ms > {SUBMIT_P99_BAR_MS}")
    return found


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{result['machine']['cpu']}, {result['settings']['threads']} threads, {result['machine']['date']}"]
    for figure, by_engine in result.get("compute", {}).get("figures", {}).items():
        cells = [
            f"{name} {of['tokens_per_s']['median']:.1f} ({of['tokens_per_s']['min']:.1f}-"
            f"{of['tokens_per_s']['max']:.1f})"
            for name, of in by_engine.items()
        ]
        lines.append(f"{figure:13} tok/s  " + "   ".join(cells))
    if "transfer" in result:
        rates = result["transfer"]["gb_per_s"]
        lines.append("transfer      GB/s   " + "   ".join(f"{way} {of['median']:.2f}" for way, of in rates.items()))
        submit = result["transfer"]["submit_ms"]
        lines.append(
            f"submit        ms     p50 {submit['p50']:.3f}   p99 {submit['p99']:.3f}   max {submit['max']:.3f}"
        )
    for name, of in result.get("legs", {}).get("figures", {}).items():
        lines.append(f"legs {name:8} s      " + "   ".join(f"{leg[:-2]} {v['median']:.3f}" for leg, v in of.items()))
    for which, bars in (("ratios", BARS), ("ratios_bf16", BARS_BF16)):
        for name, value in result[which].items():
            if value is not None:
                bar = f"   bar {bars[name]}" if name in bars else ""
                lines.append(f"{which + '.' + name:26} {value:.3f}{bar}")
    lines.append("below a bar: " + ("; ".join(result["below_bar"]) or "nothing"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(parse(), run, table))
