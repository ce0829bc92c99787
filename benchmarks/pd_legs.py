"""The disaggregated half: a P and a D server of each engine over HTTP, and what a 512-token prompt costs on a leg."""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from children import PYTHONPATH, Group, wait_until
from measure import MAX_BATCHED_TOKENS, peer_environment, shared_environment
from workload import make_prompt, paired_ratio, summary

PROMPT_TOKENS = 512
ANSWER_TOKENS = 8
_START_S = 300.0
_REQUEST_S = 120.0
_TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Say = Callable[[str], None]


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server(Group):
    """One HTTP server with the OpenAI completions API."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], log_dir: Path, port: int) -> None:
        super().__init__(name, argv, env, log_dir, pipes=False)
        self.port = port
        self.model = ""

    def wait_ready(self) -> None:
        """Until it answers. Raises `ChildFailed` with its log when it does not."""
        wait_until(self._healthy, self, "its HTTP port", _START_S)
        connection = self._connect()
        connection.request("GET", "/v1/models")
        self.model = json.loads(connection.getresponse().read())["data"][0]["id"]
        connection.close()

    def _healthy(self) -> bool:
        try:
            connection = self._connect()
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=_REQUEST_S)

    def complete(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        """One whole answer."""
        connection = self._post(prompt, stream=False, **fields)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        if response.status != 200:
            raise self.failure(f"HTTP {response.status}: {body[:400]!r}")
        answer: dict[str, Any] = json.loads(body)
        return answer

    def chunks(self, prompt: list[int], **fields: Any) -> Iterator[float]:
        """The times (perf_counter) at which pieces of a streamed answer came in.

        Raises `ChildFailed` with the server's log when the answer has no text: an error in the stream, or nothing.
        """
        connection = self._post(prompt, stream=True, ignore_eos=True, **fields)
        response = connection.getresponse()
        if response.status != 200:
            raise self.failure(f"HTTP {response.status}: {response.read()[:400]!r}")
        pieces, last = 0, b""
        for line in response:
            if line.startswith(b"data: {"):
                last = line
                choices = json.loads(line[6:]).get("choices")
                if choices and choices[0].get("text"):
                    pieces += 1
                    yield time.perf_counter()
        connection.close()
        if not pieces:
            raise self.failure(f"its answer has no text; the last event: {last[:400]!r}")

    def _post(self, prompt: list[int], **fields: Any) -> http.client.HTTPConnection:
        connection = self._connect()
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **fields}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection


class Pair:
    """A prefill and a decode server of one engine."""

    def __init__(self, name: str, prefill: Server, decode: Server) -> None:
        self.name, self.prefill, self.decode = name, prefill, decode

    def measure(self, word_ids: list[int], seed: int) -> dict[str, float]:
        """One fresh prompt through both legs, and another fresh one computed on D alone. Wall seconds."""
        self.resume()
        try:
            prompt = make_prompt(word_ids, PROMPT_TOKENS, seed)
            began = time.perf_counter()
            answer = self.prefill.complete(prompt, max_tokens=1, kv_transfer_params=_TO_PREFILL)
            p_leg_s = time.perf_counter() - began
            params = answer["kv_transfer_params"]
            began = time.perf_counter()
            times = list(self.decode.chunks(prompt, max_tokens=ANSWER_TOKENS, kv_transfer_params=params))
            d_leg_s = times[0] - began
            tpot_s = (times[-1] - times[0]) / (len(times) - 1)
            other = make_prompt(word_ids, PROMPT_TOKENS, seed + 500_000)
            began = time.perf_counter()
            times_local = list(self.decode.chunks(other, max_tokens=ANSWER_TOKENS))  # whole: none is left computing
            local_s = times_local[0] - began
        finally:
            self.pause()
        return {
            "p_leg_s": p_leg_s,
            "d_leg_s": d_leg_s,
            "local_s": local_s,
            "ttft_s": p_leg_s + d_leg_s,
            "tpot_s": tpot_s,
        }

    def pause(self) -> None:
        """Both stand still."""
        self.prefill.pause()
        self.decode.pause()

    def resume(self) -> None:
        """Both run."""
        self.prefill.resume()
        self.decode.resume()


def pdkv_pair(stack: ExitStack, model: str, transport: str, threads: int, log_dir: Path) -> Pair:
    """`pdkv serve prefill` and `decode`, as a person starts them."""
    servers = []
    for role in ("prefill", "decode"):
        port = free_port()
        argv = [sys.executable, "-m", "pdkv", "serve", role, model, "--port", str(port)]
        argv += ["--transport", transport, "--threads", str(threads), "--kv-cache-memory-bytes", "1GiB"]
        argv += ["--max-num-batched-tokens", str(MAX_BATCHED_TOKENS)]
        env = {**shared_environment(threads), "PYTHONPATH": PYTHONPATH}
        servers.append(_enter(stack, Server(f"pdkv_{role}", argv, env, log_dir, port)))
    return _ready("pdkv", servers)


def peer_pair(stack: ExitStack, python: str, model_dir: str, threads: int, log_dir: Path, *, eager: bool) -> Pair:
    """Two vLLM servers with the NixlConnector on CPU."""
    servers = []
    for role in ("producer", "consumer"):
        port = free_port()
        transfer = {"kv_connector": "NixlConnector", "kv_role": f"kv_{role}", "kv_buffer_device": "cpu"}
        argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model_dir, "--dtype", "float32"]
        argv += ["--port", str(port), "--max-model-len", "4096"]
        argv += ["--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--kv-transfer-config", json.dumps(transfer)]
        argv += ["--enforce-eager"] if eager else []
        env = {
            **peer_environment(threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "UCX_NET_DEVICES": "lo",
        }
        servers.append(_enter(stack, Server(f"vllm_{role}", argv, env, log_dir, port)))
    return _ready("vllm", servers)


def _enter(stack: ExitStack, server: Server) -> Server:
    stack.callback(server.close)
    return server


def _ready(name: str, servers: list[Server]) -> Pair:
    for server in servers:
        server.wait_ready()
    pair = Pair(name, *servers)
    pair.pause()
    return pair


def measure_pairs(pairs: list[Pair], word_ids: list[int], rounds: int, say: Say) -> dict[str, list[dict[str, float]]]:
    """``rounds`` legs of every pair, in turn, after two that are not counted (handshake, first touch)."""
    for pair in pairs:
        for warm_up in range(2):
            pair.measure(word_ids, 90_000 + warm_up)
    runs: dict[str, list[dict[str, float]]] = {pair.name: [] for pair in pairs}
    for turn in range(rounds):
        for pair in pairs if turn % 2 == 0 else pairs[::-1]:
            runs[pair.name].append(pair.measure(word_ids, 91_000 + turn))
        legs = "; ".join(f"{name} {1e3 * of[-1]['d_leg_s']:.0f} ms" for name, of in runs.items())
        say(f"D leg, round {turn + 1} of {rounds}: {legs}")
    return runs


def report(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians and extremes of every leg, per engine."""
    return {name: {key: summary([run[key] for run in of]) for key in of[0]} for name, of in runs.items()}


def ratios(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """d_leg_vs_local (local prefill / D leg) and, with a peer, d_leg_vs_peer (its D leg / ours)."""
    ours = runs["pdkv"]
    result = {"d_leg_vs_local": paired_ratio([run["local_s"] for run in ours], [run["d_leg_s"] for run in ours])}
    if "vllm" in runs:
        theirs = [run["d_leg_s"] for run in runs["vllm"]]
        result["d_leg_vs_peer"] = paired_ratio(theirs, [run["d_leg_s"] for run in ours])
    return result


def median_s(runs: list[dict[str, float]], key: str) -> float:
    """Median of one leg."""
    return statistics.median(run[key] for run in runs)
