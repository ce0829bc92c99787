"""`make demo`: a real model, a prefill and a decode instance, three prompts, and where the KV memory was meanwhile."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.table import Table

from pdkv.errors import PdkvError, in_words
from pdkv.serve.options import InstanceOptions, ServeOptions
from pdkv.serve.progress import open_progress
from pdkv.serve.supervisor import Cluster, run_cluster
from pdkv.units import MIB, format_bytes

MODEL = "smollm2"
ANSWER_TOKENS = 96
_PIPE_WIDTH = 118

PASSAGE = (
    "Answer the question with the text below.\n\n"
    "The lighthouse of Cordouan stands on a rock seven kilometres out at sea, where the river Gironde meets the "
    "Atlantic. It was begun in 1584 by the engineer Louis de Foix and finished in 1611, which makes it the oldest "
    "lighthouse in France that is still in use. It has a royal apartment, a chapel with stained glass windows, and a "
    "spiral staircase of 301 steps. In 1823 Augustin Fresnel tried out his new lens there, a lens that was soon used "
    "in lighthouses all over the world. Keepers still live in it, two at a time, and change every two weeks."
)
PROMPTS = (
    ("long text", PASSAGE, "Who began the lighthouse, and in which year?"),
    ("same text", PASSAGE, "Write a title for this text."),
    ("other text", "You are a helpful assistant.", "Explain in two sentences why the sky is blue."),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One request as the client and D's metrics saw it. Times in seconds."""

    name: str
    prompt_tokens: int
    reused_tokens: int
    moved_blocks: int
    moved_bytes: int
    transfer_s: float
    ttft_s: float
    tokens_per_s: float


def options() -> ServeOptions:
    """A small pair: 512 MiB of KV each, 2048 tokens of context, any free port."""
    common: dict[str, Any] = {"model": MODEL, "kv_cache_memory_bytes": 512 * MIB, "max_model_len": 2048}
    return ServeOptions(
        prefill=InstanceOptions(role="prefill", **common), decode=InstanceOptions(role="decode", **common), port=0
    )


def read_metrics(client: httpx.Client) -> dict[tuple[str, str], float]:
    """Sums over all labels but the instance: (sample name, instance) -> value."""
    sums: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").raise_for_status().text):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("instance", "router"))
            sums[key] = sums.get(key, 0.0) + sample.value
    return sums


def stream_chat(client: httpx.Client, system: str, question: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Pieces of the answer as they come; the last item carries the usage. Raises `PdkvError` for an error answer."""
    body = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise PdkvError(f"HTTP {response.status_code}: {response.read().decode(errors='replace')}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise PdkvError(event["error"]["message"])
            if event.get("usage"):
                yield "", event["usage"]
            elif event["choices"][0]["delta"].get("role") is None:
                yield event["choices"][0]["delta"]["content"], None


def ask(client: httpx.Client, console: Console, name: str, system: str, question: str) -> Measured:
    """Send one prompt, print the answer while it comes, and measure."""
    before = read_metrics(client)
    console.print(f"\n[bold]{name}[/bold]: {question}")
    start = time.monotonic()
    times: list[float] = []
    usage: dict[str, Any] = {}
    for text, counted in stream_chat(client, system, question):
        if counted is not None:
            usage = counted
            continue
        times.append(time.monotonic())
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True, style="cyan")
        console.file.flush()
    console.print()
    after = read_metrics(client)

    def grown(sample: str) -> float:
        key = (sample, "decode-0")
        return after.get(key, 0.0) - before.get(key, 0.0)

    if not usage:
        raise PdkvError("the answer broke off before its end")
    times = times or [time.monotonic()]  # an empty answer is one, too
    span = times[-1] - times[0]
    return Measured(
        name=name,
        prompt_tokens=usage["prompt_tokens"],
        reused_tokens=int(grown("vllm:prefix_cache_hits_total")),
        moved_blocks=int(grown("pdkv:kv_load_blocks_total")),
        moved_bytes=int(grown("vllm:nixl_bytes_transferred_sum")),
        transfer_s=grown("vllm:nixl_xfer_time_seconds_sum"),
        ttft_s=times[0] - start,
        tokens_per_s=(len(times) - 1) / span if span > 0 else 0.0,
    )


def requests_table(rows: list[Measured]) -> Table:
    """What each request cost."""
    table = Table(title="Requests", title_justify="left", box=box.SIMPLE_HEAVY, caption_justify="left")
    table.caption = (
        "reused on D: tokens whose KV D had in its prefix cache, from an earlier prompt; only the rest moved"
    )
    table.add_column("prompt", no_wrap=True)
    heads = (
        "prompt\ntokens",
        "reused\non D",
        "blocks\nmoved",
        "bytes\nmoved",
        "transfer\nms",
        "TTFT\nms",
        "tok\n/s",
    )
    for title in heads:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            str(row.prompt_tokens),
            str(row.reused_tokens),
            str(row.moved_blocks),
            format_bytes(row.moved_bytes),
            f"{row.transfer_s * 1000:.1f}",
            f"{row.ttft_s * 1000:.0f}",
            f"{row.tokens_per_s:.1f}",
        )
    return table


def ledger_table(instances: list[dict[str, Any]]) -> Table:
    """Most and present blocks per account: D's ledger, and P's beside it."""
    by_role = {instance["role"]: instance for instance in instances}
    decode, prefill = by_role["decode"], by_role["prefill"]
    table = Table(
        title=f"Ledger (blocks of {format_bytes(decode['bytes_per_block'])})",
        title_justify="left",
        box=box.SIMPLE_HEAVY,
    )
    table.add_column("account")
    for title in ("D: peak", "D: now", "P: peak", "P: now"):
        table.add_column(title, justify="right")
    for account in decode["accounts"]:
        cells = [str(side[kind].get(account, 0)) for side in (decode, prefill) for kind in ("peaks", "accounts")]
        if any(cell != "0" for cell in cells):
            table.add_row(account, *cells)
    table.add_section()
    table.add_row("pool", "", str(decode["num_blocks"]), "", str(prefill["num_blocks"]))
    return table


def lease_line(metrics: dict[tuple[str, str], float]) -> str:
    """Leases on P in one line."""
    granted, renewed, freed, held = (
        int(metrics.get((name, "prefill-0"), 0))
        for name in (
            "pdkv:leases_granted_total",
            "pdkv:leases_renewed_total",
            "pdkv:leases_released_total",
            "pdkv:leases_held",
        )
    )
    return f"Leases on P: {granted} granted, {renewed} renewed, {freed} freed, {held} still held"


def wait_until_freed(client: httpx.Client, timeout_s: float = 3.0) -> dict[tuple[str, str], float]:
    """The metrics once P holds no lease any more, or after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        metrics = read_metrics(client)
        if not metrics.get(("pdkv:leases_held", "prefill-0"), 0.0) or time.monotonic() > deadline:
            return metrics
        time.sleep(0.1)


def show(url: str, console: Console) -> None:
    """Send the prompts and print the tables."""
    with httpx.Client(base_url=url, timeout=httpx.Timeout(120, connect=5), trust_env=False) as client:
        rows = [ask(client, console, *prompt) for prompt in PROMPTS]
        metrics = wait_until_freed(client)
        memory = client.get("/debug/memory").raise_for_status().json()
    console.print()
    console.print(requests_table(rows))
    console.print(ledger_table(memory["instances"]))
    console.print(lease_line(metrics))


def run() -> int:
    """Run the demonstration; returns the exit code. Raises `PdkvError` for what a person can change."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    began = time.monotonic()

    def demonstrate(cluster: Cluster) -> None:
        with open_progress(sys.stderr, brief=True) as progress:
            line = cluster.start(progress)
        for warning in cluster.warnings():
            sys.stderr.write(f"pdkv: {warning}\n")
        console.print(line, highlight=False, soft_wrap=True)
        url = cluster.facts["router"]["url"]
        with cluster.interruptible():
            try:
                show(url, console)
            except (httpx.HTTPError, PdkvError) as error:
                cluster.check()  # a dead child is the better explanation
                if isinstance(error, PdkvError):
                    raise
                raise PdkvError(f"{url} does not answer as it should: {in_words(error)}") from error
        took = f"Done in {time.monotonic() - began:.0f} s."
        console.print(f"{took} Serve it yourself: pdkv serve {MODEL}", highlight=False)

    return run_cluster(options(), demonstrate, stopped_code=130)


def main() -> int:
    """`run` for ``python -m pdkv.serve.demo``: an error for people is one line, exit code 2."""
    try:
        return run()
    except PdkvError as error:
        sys.stderr.write(f"pdkv: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
