from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from pdkv.errors import PdkvError
from pdkv.serve import demo, supervisor
from pdkv.serve.progress import Progress
from pdkv.serve.supervisor import Cluster

ROOT = Path(__file__).resolve().parents[2]


def printed(table: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_tables_show_what_was_measured() -> None:
    row = demo.Measured("first", 200, 96, 7, 7 * 737280, 0.0123, 1.5, 12.34)
    text = printed(demo.requests_table([row]))
    for cell in ("first", "200", "96", "7", "4.92 MiB", "12.3", "1500", "12.3"):
        assert cell in text
    ledger = {"bytes_per_block": 737280, "num_blocks": 10, "accounts": {"free": 9, "null": 1, "draft": 0}}
    instances = [{**ledger, "role": role, "peaks": {"free": 9, "null": 1}} for role in ("prefill", "decode")]
    text = printed(demo.ledger_table(instances))
    assert "free" in text
    assert "draft" not in text
    leases = {("pdkv:leases_granted_total", "prefill-0"): 3.0, ("pdkv:leases_released_total", "prefill-0"): 3.0}
    assert demo.lease_line(leases) == "Leases on P: 3 granted, 0 renewed, 3 freed, 0 still held"


def answering(*events: object) -> httpx.Client:
    """A client of a server that streams ``events`` as its answer."""
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text="" if request.url.path == "/metrics" else stream)

    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://test")


def test_an_empty_answer_is_measured_too() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 7}}
    measured = demo.ask(answering(usage), Console(file=io.StringIO()), "empty", "s", "q")
    assert measured.prompt_tokens == 7
    assert measured.tokens_per_s == 0
    with pytest.raises(PdkvError, match="broke off"):
        demo.ask(answering(), Console(file=io.StringIO()), "cut", "s", "q")


@pytest.mark.parametrize("answer", [httpx.Response(500), httpx.ReadError("gone")])
def test_a_server_that_does_not_answer_is_one_line(
    answer: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ready(Cluster):
        def prepare(self) -> None:
            self.facts["router"] = {"url": "http://127.0.0.1:9"}

        def start(self, progress: Progress | None = None) -> str:
            return "pdkv ready"

    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, httpx.Response):
            return answer
        assert isinstance(answer, Exception)
        raise answer

    client = httpx.Client
    monkeypatch.setattr(supervisor, "Cluster", Ready)
    monkeypatch.setattr(
        httpx, "Client", lambda **options: client(transport=httpx.MockTransport(handle), base_url=options["base_url"])
    )
    assert demo.main() == 2
    assert "pdkv: http://127.0.0.1:9 does not answer as it should: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_as_a_user_pipes_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdkv.serve.demo"], cwd=ROOT, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pdkv ready: http://127.0.0.1:" in done.stdout
    assert "1584" in done.stdout
    assert "\x1b[" not in done.stdout
    rows = [
        line.split() for line in done.stdout.splitlines() if line.strip().startswith(("long text  ", "same text  "))
    ]
    (first_tokens, first_reused), (_, second_reused) = ((int(row[2]), int(row[3])) for row in rows)
    assert first_reused == 0
    assert first_tokens > second_reused >= 6 * 16
    assert "Leases on P: 3 granted, 0 renewed, 3 freed, 0 still held" in done.stdout
