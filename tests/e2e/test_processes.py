"""P, D and router as separate processes, started one by one as on several hosts, and what happens when one stops."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdkv.serve.params import PREFILL_LEG

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LEASE_S = 6
SILENCE_S = 8
INSTANCE = (
    *("--port", "0", "--threads", "1", "--kv-cache-memory-bytes", "256MiB", "--max-model-len", "2048", "--debug"),
    *("--kv-lease-duration", str(LEASE_S), "--kv-load-timeout", "5"),
)
STORY = "The lighthouse keeper wrote the weather down every evening, because his father had done so. "
PROMPTS = [
    "Hi",
    "The capital of France is",
    STORY * 3,
    STORY * 3 + "One evening",
    STORY * 12 + "The ship",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
    "Zürich liegt in der Schweiz. 🧪 " * 6,
]
NEW_TOKENS = 8


class Part:
    """One `pdkv serve prefill|decode|router`, in a process group of its own (its mover included)."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdkv", "serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def ready(self) -> Part:
        """Waits for the ready line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"no ready line: {line!r}; log:\n{self.log.read_text()[-3000:]}"
        self.url = found[0]
        return self

    def signal(self, number: int) -> None:
        """To all of its group."""
        os.killpg(self.process.pid, number)

    def memory(self) -> dict[str, Any]:
        """Its own ledger."""
        (one,) = httpx.get(f"{self.url}/debug/memory", timeout=30).json()["instances"]
        return dict(one)

    def idle(self) -> bool:
        """Every block is free or cached."""
        one = self.memory()
        return bool(one["accounts"]["free"] + one["accounts"]["cached"] == one["num_blocks"] - 1)

    def end(self) -> None:
        """Nothing of the group is left."""
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Trio:
    """P, D and the router; each can be put in place of a dead one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.parts: list[Part] = []
        instances = [self.start(role) for role in ("prefill", "decode")]  # both load at once
        self.p, self.d = (part.ready() for part in instances)
        self.router = self.start_router()

    def start(self, role: str) -> Part:
        part = Part(self.directory / f"{role}.log", role, "smollm2", *INSTANCE)
        self.parts.append(part)
        return part

    def start_router(self) -> Part:
        urls = ("--prefill", self.p.url, "--decode", self.d.url)
        part = Part(self.directory / "router.log", "router", "--port", "0", "--instance-timeout", str(SILENCE_S), *urls)
        self.parts.append(part)
        return part.ready()

    def ask(self, prompt: str, url: str | None = None, **more: Any) -> httpx.Response:
        """A greedy completion, through the router unless another URL is given."""
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **more}
        return httpx.post(f"{url or self.router.url}/v1/completions", json=body, timeout=120)

    def close(self) -> None:
        for part in self.parts:
            part.end()


def until(what: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for ``what``; fails after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def trio(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    parts = Trio(tmp_path_factory.mktemp("logs"))
    yield parts
    parts.close()


@pytest.fixture(scope="module")
def truth(smollm2: str) -> dict[str, str]:
    """transformers' own continuations, each with what the tokenizer says of it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    texts = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(
            **ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        texts[prompt] = str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_prompts_continue_as_transformers_does_one_by_one_and_all_at_once(trio: Trio, truth: dict[str, str]) -> None:
    for prompt in PROMPTS:
        answer = trio.ask(prompt)
        assert answer.headers["x-pdkv-prefill"] == "remote"
        assert text_of(answer) == truth[prompt]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert [text_of(answer) for answer in pool.map(trio.ask, PROMPTS)] == [truth[prompt] for prompt in PROMPTS]
    until(lambda: trio.p.idle() and trio.d.idle())


def test_p_stopped_for_longer_than_its_lease_during_traffic(trio: Trio, truth: dict[str, str]) -> None:
    prompts = [f"{i} {STORY * 4}" for i in range(4)]
    expected = {prompt: text_of(trio.ask(prompt, trio.d.url)) for prompt in prompts}
    with ThreadPoolExecutor(8) as pool:
        under_way = [pool.submit(trio.ask, prompt, cache_salt=f"under way {prompt}") for prompt in prompts]
        time.sleep(0.3)
        trio.p.signal(signal.SIGSTOP)
        try:
            later = [pool.submit(trio.ask, prompt, cache_salt=f"later {prompt}") for prompt in prompts]
            time.sleep(max(LEASE_S, SILENCE_S) + 3)
        finally:
            trio.p.signal(signal.SIGCONT)
        answers = [one.result() for one in under_way + later]
    assert [text_of(answer) for answer in answers] == [expected[prompt] for prompt in prompts * 2]
    assert "local" in {answer.headers["x-pdkv-prefill"] for answer in answers[4:]}, "nobody waited for a stopped P"
    until(lambda: trio.p.idle() and trio.d.idle())
    until(lambda: trio.ask(PROMPTS[0]).headers["x-pdkv-prefill"] == "remote")
    assert text_of(trio.ask(PROMPTS[3], cache_salt="afterwards")) == truth[PROMPTS[3]]


def test_d_killed_while_p_holds_its_lease(trio: Trio, truth: dict[str, str]) -> None:
    prompt = PROMPTS[4]
    trio.d.signal(signal.SIGSTOP)  # so that it cannot read and give the lease back
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trio.ask, prompt, cache_salt="never read")
        until(lambda: trio.p.memory()["accounts"]["retained"] > 0)
        trio.d.end()
        answer = waiting.result(60)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "decode_unavailable"
    assert trio.d.url in answer.json()["error"]["message"]
    assert trio.p.memory()["accounts"]["retained"] > 0, "P cannot know: only time ends this lease"
    until(trio.p.idle, timeout_s=3 * LEASE_S)
    trio.d = trio.start("decode").ready()
    trio.router = trio.start_router()
    assert text_of(trio.ask(prompt)) == truth[prompt]
    until(lambda: trio.p.idle() and trio.d.idle())


def test_p_killed_before_d_reads(trio: Trio, truth: dict[str, str]) -> None:
    prompt = PROMPTS[4]
    salted = {"cache_salt": "p dies"}
    leg = trio.ask(prompt, trio.p.url, max_tokens=1, kv_transfer_params=PREFILL_LEG, **salted).json()
    trio.p.end()
    answer = trio.ask(prompt, trio.d.url, kv_transfer_params=leg["kv_transfer_params"], **salted)
    assert text_of(answer) == truth[prompt]
    through_router = trio.ask(PROMPTS[2], cache_salt="p is dead")
    assert text_of(through_router) == truth[PROMPTS[2]]
    assert through_router.headers["x-pdkv-prefill"] == "local"
    until(trio.d.idle)
    metrics = httpx.get(f"{trio.d.url}/metrics", timeout=30).text
    assert re.search(r"vllm:nixl_num_failed_transfers_total\{[^}]*\} [1-9]", metrics)
    assert "KV did not arrive" in trio.d.log.read_text()
