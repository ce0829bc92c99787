"""`pdkv serve prefill|decode|router`, each a process of its own, as on several hosts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.forks import fork_server

from pdkv.serve.params import PREFILL_LEG

INSTANCE = ("--port", "0", "--threads", "1", "--max-model-len", "2048", "--debug")


class Part:
    """One of the three, in a process group of its own (its mover included)."""

    def __init__(self, log: Path, *arguments: str, **environment: str) -> None:
        self.log = log
        self._ended = False
        self.process = fork_server().start(("serve", *arguments), environment, log)

    def ready(self) -> Part:
        """Waits for the ready line."""
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"no ready line: {line!r}; log:\n{self.log.read_text()[-3000:]}"
        self.ready_line, self.url = line, found[0]
        return self

    def ask(
        self,
        prompt: str | list[int],
        max_tokens: int,
        *,
        timeout_s: float | httpx.Timeout = 120,
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> httpx.Response:
        """A greedy completion of exactly so many tokens, with their ids."""
        body = completion_of(prompt, max_tokens, **more)
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=timeout_s)

    def send(self, prompt: str | list[int], max_tokens: int, **more: Any) -> HTTPConnection:
        """As `ask`, but only sent: `answer_to` it is waited for later, or the client leaves by ``close()``."""
        url = httpx.URL(self.url)
        connection = HTTPConnection(url.host, url.port, timeout=120)
        body = json.dumps(completion_of(prompt, max_tokens, **more))
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        return connection

    def prefill(self, prompt: str | list[int], **more: Any) -> dict[str, Any]:
        """P's leg, as a router would ask for it: the ``kv_transfer_params`` for D."""
        answer = self.ask(prompt, 1, kv_transfer_params=PREFILL_LEG, **more)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["kv_transfer_params"])

    def memory(self) -> dict[str, Any]:
        """An instance's ledger."""
        (one,) = httpx.get(f"{self.url}/debug/memory", timeout=30).json()["instances"]
        return dict(one)

    def idle(self) -> bool:
        """Every block of an instance is free or cached."""
        one = self.memory()
        return bool(one["accounts"]["free"] + one["accounts"]["cached"] == one["num_blocks"] - 1)

    def counter(self, name: str) -> float:
        """A metric of an instance, summed over all labels but the name."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=30).text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def mover(self) -> psutil.Process:
        """The process that alone may transfer."""
        movers = [one for one in psutil.Process(self.process.pid).children() if "pdkv.runtime.mover" in one.cmdline()]
        (mover,) = movers
        return mover

    def signal(self, number: int) -> None:
        """To all of its group."""
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Nothing of the group is left."""
        if self._ended:
            return
        self._ended = True
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.close()


def completion_of(prompt: str | list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """What asks for a greedy completion of exactly so many tokens, with their ids."""
    fixed = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"return_token_ids": True, **fixed, **more}


def answer_to(sent: HTTPConnection) -> httpx.Response:
    """Waits for it."""
    answer = sent.getresponse()
    body = answer.read()
    sent.close()
    return httpx.Response(answer.status, headers=answer.getheaders(), content=body)


def free_port() -> int:
    """A port of this host on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def tokens_of(answer: httpx.Response) -> list[int]:
    """Ids of the sampled tokens; the answer must be one."""
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def until(what: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for ``what``; fails after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
