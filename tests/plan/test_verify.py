"""`pdkv verify` against servers that are made up here: what agrees, what differs, what they do not say."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.plan.models import planned
from typer.testing import CliRunner

from pdkv.cli.main import app
from pdkv.errors import ConfigError
from pdkv.logs.metrics_text import Metrics, parse_metrics
from pdkv.plan.kv_transfer import parse_kv_transfer
from pdkv.plan.options import PlanOptions
from pdkv.plan.planner import make_plan
from pdkv.plan.report import PlanReport
from pdkv.plan.verify import Server, Verdict, read_plan, verify
from pdkv.units import GIB


@pytest.fixture(scope="module")
def plan() -> PlanReport:
    return make_plan(planned("dense"), PlanOptions(kv_cache_memory_bytes=20 * GIB))


class Fake:
    """A server with a pool of ``blocks``; ``held`` of them are in use, more while a completion runs."""

    def __init__(self, plan: PlanReport, **labels: str) -> None:
        capacity = plan.capacity
        self.labels = {
            "num_gpu_blocks": str(capacity.num_blocks),
            "block_size": str(plan.kv.block_size),
            "kv_cache_size_tokens": str(capacity.kv_cache_size_tokens),
            "kv_cache_max_concurrency": repr(capacity.max_concurrency),
            "engine": "0",
        } | labels
        self.usable = capacity.usable_blocks
        self.length: Any = capacity.max_model_len
        self.held, self.running, self.waiting = 0, 0, 0
        self.per_request = 0
        self.engines = 1

    def text(self) -> str:
        labels = ",".join(f'{name}="{value}"' for name, value in self.labels.items() if name != "engine")
        lines = [f'vllm:cache_config_info{{engine="{index}",{labels}}} 1' for index in range(self.engines)]
        lines.append(f"vllm:kv_cache_usage_perc {self.held / self.usable}")
        lines.append(f"vllm:num_requests_running {self.running}")
        lines.append(f"vllm:num_requests_waiting {self.waiting}")
        return "\n".join(lines)

    def server(self) -> Server:
        seen = threading.Event()

        def scrape() -> Metrics:
            found = parse_metrics(self.text())
            if self.held:
                seen.set()
            return found

        def complete(prompt: int, output: int) -> None:
            del prompt, output
            self.held += self.per_request
            seen.wait(5)
            self.held -= self.per_request

        return Server("http://fake", scrape, lambda: {"data": [{"id": "m", "max_model_len": self.length}]}, complete)


def verdicts(plan: PlanReport, fake: Fake, *, probe: bool = False) -> dict[str, Verdict]:
    return {finding.what: finding.verdict for finding in verify(plan, fake.server(), probe=probe).findings}


def test_a_server_like_the_plan_agrees(plan: PlanReport) -> None:
    fake = Fake(plan)
    assert plan.usage is not None
    fake.per_request = plan.usage.blocks_low
    found = verify(plan, fake.server(), probe=True)
    assert found.agrees
    assert {finding.verdict for finding in found.findings} == {Verdict.AGREES}
    assert len(found.findings) == 8


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        ({"num_gpu_blocks": "5"}, "blocks"),
        ({"kv_cache_size_tokens": "5"}, "tokens"),
        ({"block_size": "32"}, "tokens per block"),
        ({"kv_cache_max_concurrency": "1.5"}, "requests at once"),
    ],
)
def test_each_prediction_can_differ_or_be_unknown(plan: PlanReport, labels: dict[str, str], what: str) -> None:
    found = verdicts(plan, Fake(plan, **labels))
    assert found.pop(what) is Verdict.DIFFERS
    assert set(found.values()) == {Verdict.AGREES}
    [name] = labels
    assert verdicts(plan, Fake(plan, **{name: "None"}))[what] is Verdict.NOT_SHOWN


def test_lengths_engines_and_leaks(plan: PlanReport) -> None:
    fake = Fake(plan)
    fake.length = 99
    assert verdicts(plan, fake)["longest request"] is Verdict.DIFFERS
    fake.length = None
    assert verdicts(plan, fake)["longest request"] is Verdict.NOT_SHOWN
    fake = Fake(plan)
    fake.engines = 2
    found = verdicts(plan, fake)
    assert found["engines"] is Verdict.DIFFERS
    assert found["engine 1: blocks"] is Verdict.AGREES
    fake = Fake(plan)
    fake.held = 3
    assert verdicts(plan, fake)["usage when idle"] is Verdict.DIFFERS
    fake.running = 1
    assert verdicts(plan, fake)["usage with 1 running, 0 waiting"] is Verdict.AGREES
    fake.held = fake.usable
    fake.running, fake.waiting = 0, 1
    assert verdicts(plan, fake)["usage with 0 running, 1 waiting"] is Verdict.DIFFERS


def test_behind_a_router_the_plan_of_d_is_put_to_d() -> None:
    transfer = parse_kv_transfer({"kv_connector": "NixlConnector", "kv_role": "kv_consumer"})
    plan = make_plan(planned("dense"), PlanOptions(kv_cache_memory_bytes=20 * GIB, kv_transfer=transfer))
    decode, prefill = Fake(plan, role="decode"), Fake(plan, role="prefill", num_gpu_blocks="7")
    both = Fake(plan)
    both.text = lambda: decode.text() + "\n" + prefill.text()  # type: ignore[method-assign]
    found = verify(plan, both.server())
    assert found.agrees
    assert found.engines == 1


def test_a_probe_that_holds_other_blocks(plan: PlanReport) -> None:
    assert plan.usage is not None
    name = f"usage of one request of {plan.usage.prompt_tokens} + {plan.usage.output_tokens} tokens"
    for blocks, verdict in (
        (plan.usage.blocks_high + 1, Verdict.DIFFERS),
        (plan.usage.blocks_low - 1, Verdict.DIFFERS),
    ):
        fake = Fake(plan)
        fake.per_request = blocks
        assert verdicts(plan, fake, probe=True)[name] is verdict
    busy = Fake(plan)
    busy.running = 1
    assert verdicts(plan, busy, probe=True)[name] is Verdict.NOT_SHOWN


def test_estimated_budgets_are_allowed_their_interval(plan: PlanReport) -> None:
    def estimated(low: int, high: int) -> PlanReport:
        return replace(plan, memory=replace(plan.memory, basis="estimated", low_bytes=low, high_bytes=high))

    fake = Fake(plan, num_gpu_blocks=str(plan.capacity.num_blocks - 100))
    assert verdicts(plan, fake)["blocks"] is Verdict.DIFFERS
    assert verdicts(estimated(19 * GIB, 21 * GIB), fake)["blocks"] is Verdict.AGREES
    assert verdicts(estimated(20 * GIB, 21 * GIB), fake)["blocks"] is Verdict.DIFFERS


def test_usage_facts_of_every_family() -> None:
    """The answer ends in the prompt's block; where everything is kept, the blocks are exact."""
    for name in ("dense", "windowed", "latent", "states"):
        report = make_plan(planned(name), PlanOptions(kv_cache_memory_bytes=20 * GIB))
        facts = report.usage
        assert facts is not None
        assert facts.blocks_low <= facts.blocks_high
        assert (facts.blocks_low == facts.blocks_high) is (name in ("dense", "latent"))
        largest = max(group.block_size for group in report.kv.groups)
        assert (facts.prompt_tokens - 1) // largest == (facts.prompt_tokens + facts.output_tokens) // largest
    assert make_plan(planned("dense"), PlanOptions(num_gpu_blocks_override=2)).usage is None


# -------------------------------------------------------------------------------------------------- over real HTTP


@pytest.fixture
def endpoint(plan: PlanReport) -> Iterator[tuple[str, Fake, list[Any]]]:
    fake, bodies = Fake(plan), []
    assert plan.usage is not None
    fake.per_request = plan.usage.blocks_low
    server = fake.server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = json.dumps(server.models()) if self.path == "/v1/models" else fake.text()
            if fake.held:
                server.scrape()
            self._answer(text)

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            server.complete(1, 1)
            self._answer("{}")

        def _answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}", fake, bodies
    httpd.shutdown()
    httpd.server_close()


def test_the_command(endpoint: tuple[str, Fake, list[Any]], plan: PlanReport, tmp_path: Path) -> None:
    url, fake, bodies = endpoint
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    result = CliRunner().invoke(app, ["verify", url, "--plan", str(path), "--probe", "--json"], catch_exceptions=False)
    answer = json.loads(result.output)
    assert (result.exit_code, answer["agrees"], answer["engines"]) == (0, True, 1)
    assert plan.usage is not None
    assert len(bodies[0]["prompt"]) == plan.usage.prompt_tokens
    assert (bodies[0]["max_tokens"], bodies[0]["ignore_eos"]) == (plan.usage.output_tokens, True)
    fake.labels["num_gpu_blocks"] = "7"
    result = CliRunner().invoke(app, ["verify", url, "--plan", str(path)], catch_exceptions=False)
    assert result.exit_code == 1
    assert result.output.startswith("differs with")


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot read"), ("{", "is not a plan"), ("{}", "is not a plan"), ("[1]", "is not a plan")],
)
def test_plans_that_are_none(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        read_plan(path)


def test_a_plan_survives_its_json(plan: PlanReport, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    assert read_plan(path) == plan


def test_servers_that_are_none(plan: PlanReport) -> None:
    fake = Fake(plan)
    fake.engines = 0
    with pytest.raises(ConfigError, match="shows no vllm:cache_config_info"):
        verify(plan, fake.server())
