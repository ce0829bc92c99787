"""Bidirectional mode with real processes: D keeps an answer's KV, and the next turn's prefill on P reads it."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.processes import INSTANCE, Part, tokens_of, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TTL_S, SHORT_TTL_S = 300, 6
OPTIONS = (
    *("--kv-cache-memory-bytes", "150MiB", "--max-num-batched-tokens", "256", "--max-num-seqs", "16", *INSTANCE),
    *("--bidirectional-kv-xfer", "--kv-recompute-threshold", "16", "--kv-lease-duration", "6"),
)
NEW_TOKENS = 34  # more than the threshold: P lacks at least the answer


@dataclass
class Cluster:
    """P, two D and the router; ``brief`` keeps its answers for `SHORT_TTL_S` only, and drains at first."""

    p: Part
    d: Part
    brief: Part
    router: Part

    @property
    def loaded_blocks(self) -> float:
        """That P has read so far."""
        return self.p.counter("pdkv:kv_load_blocks_total")


@pytest.fixture(scope="module")
def cluster(stand_in: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    logs, parts = tmp_path_factory.mktemp("logs"), list[Part]()

    def start(name: str, *arguments: str) -> Part:
        parts.append(Part(Path(logs) / f"{name}.log", *arguments))
        return parts[-1]

    try:
        p = start("p", "prefill", stand_in, *OPTIONS)
        d = start("d", "decode", stand_in, *OPTIONS, "--decoder-kv-blocks-ttl", str(TTL_S))
        brief = start("brief", "decode", stand_in, *OPTIONS, "--decoder-kv-blocks-ttl", str(SHORT_TTL_S))
        for part in parts:
            part.ready()
        urls = ("--prefill", p.url, "--decode", d.url, "--decode", brief.url)
        router = start("router", "router", "--port", "0", "--bidirectional-kv-xfer", *urls).ready()
        drain(router, brief, True)
        yield Cluster(p, d, brief, router)
    finally:
        for part in parts:
            part.end()


def drain(router: Part, d: Part, wanted: bool) -> None:
    """No new requests for ``d``, or again."""
    httpx.post(f"{router.url}/admin/drain", json={"instance": d.url, "drain": wanted}, timeout=60).raise_for_status()


def chat(
    part: Part, messages: list[dict[str, str]], *, stream: bool = False, **more: Any
) -> tuple[str, httpx.Response]:
    """The answer's text, and all that was sent."""
    body = {"messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
    answer = httpx.post(f"{part.url}/v1/chat/completions", json={**body, **more}, timeout=120)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()["choices"][0]["message"]["content"], answer
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events), answer


def prompt(length: int = 100) -> list[int]:
    """A prompt that nobody has seen."""
    return [1000 + secrets.randbelow(30000) for _ in range(length)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_three_turns_are_those_of_a_single_instance_and_p_reads_two_of_them(cluster: Cluster, stream: bool) -> None:
    messages = [{"role": "user", "content": f"Tell me about the number {secrets.randbelow(10**6)}, in many words."}]
    for number in range(3):
        before = cluster.loaded_blocks
        text, answer = chat(cluster.router, messages, stream=stream)
        expected, _ = chat(cluster.brief, messages, cache_salt="alone")
        assert text == expected
        assert "pdkv_token" not in answer.text
        assert answer.headers["x-pdkv-prefill"] == "remote"
        assert answer.headers.get("x-pdkv-turn") == (None if number == 0 else "loaded")
        read = cluster.loaded_blocks - before
        assert read == 0 if number == 0 else read >= NEW_TOKENS // 16 - 1
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {number}?"}]
    kept = cluster.d.memory()["holders"]
    assert {(one["account"], one["cause"]) for one in kept} == {("retained", "kept for the conversation's next turn")}
    assert all(0 < one["deadline_s"] <= TTL_S for one in kept)


def test_everything_is_free_when_the_time_is_up(cluster: Cluster) -> None:
    kept_turn(cluster, cluster.brief)
    assert not cluster.brief.idle()
    until(cluster.brief.idle, SHORT_TTL_S + 20)
    until(cluster.p.idle)
    assert cluster.brief.counter("pdkv:turns_held") == 0
    assert cluster.brief.counter("pdkv:turns_kept_total") == cluster.brief.counter("pdkv:turns_released_total") == 1
    assert cluster.brief.counter("vllm:nixl_num_kv_expired_reqs_total") == 0


def kept_turn(cluster: Cluster, d: Part) -> tuple[list[int], dict[str, Any]]:
    """Tokens of a turn that ``d`` has answered, and what it says that it keeps."""
    tokens = prompt()
    answer = d.ask(tokens, NEW_TOKENS, kv_transfer_params=cluster.p.prefill(tokens))
    params = answer.json()["kv_transfer_params"]
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert params["remote_num_tokens"] == len(tokens) + NEW_TOKENS - 1
    return tokens + tokens_of(answer), params


def second_turn(cluster: Cluster, tokens: list[int], params: dict[str, Any]) -> str:
    """What P makes of it; its token must be that of an instance alone."""
    answer = cluster.p.ask(tokens, 1, kv_transfer_params=params)
    assert tokens_of(answer) == tokens_of(cluster.p.ask(tokens, 1, cache_salt="alone"))
    assert answer.json()["kv_transfer_params"]["do_remote_prefill"] is True
    return answer.headers.get("x-pdkv-kv", "")


def test_p_reads_a_turn_once_and_d_lets_it_go(cluster: Cluster) -> None:
    d = cluster.d
    tokens, params = kept_turn(cluster, d)
    released = d.counter("pdkv:turns_released_total")
    assert second_turn(cluster, tokens + prompt(20), params) == "loaded"
    until(lambda: d.counter("pdkv:turns_released_total") > released)
    tokens = [*tokens[:10], 999, *tokens[10:]]  # nobody has this one in a cache
    assert second_turn(cluster, tokens, params) in ("recomputed", "cached")


def test_of_another_text_the_common_beginning_is_read(cluster: Cluster) -> None:
    tokens, params = kept_turn(cluster, cluster.d)
    before = cluster.loaded_blocks
    tokens[120] ^= 1  # in the answer, its 21st token
    assert second_turn(cluster, tokens + prompt(20), params) == "loaded"
    assert cluster.loaded_blocks - before == 1  # of tokens 96 to 112; P had computed the first 100


def test_a_forged_deadline_or_token_gives_no_wrong_answer(cluster: Cluster) -> None:
    tokens, params = kept_turn(cluster, cluster.d)
    forged = {**params, "pdkv_proof": "0" * 32}
    assert second_turn(cluster, tokens + prompt(20), forged) == "recomputed"
    tokens, params = kept_turn(cluster, cluster.d)
    expired = cluster.p.counter("vllm:nixl_num_kv_expired_reqs_total")
    over = {**params, "remote_blocks_expiry_time": params["remote_blocks_expiry_time"] - TTL_S}
    assert second_turn(cluster, tokens + prompt(20), over) == "recomputed"
    assert cluster.p.counter("vllm:nixl_num_kv_expired_reqs_total") >= expired + 1  # its leases may expire meanwhile


def test_a_turn_that_is_refused_is_given_back(cluster: Cluster) -> None:
    tokens, params = kept_turn(cluster, cluster.d)
    released = cluster.d.counter("pdkv:turns_released_total")
    assert cluster.p.ask(tokens, 10**6, kv_transfer_params=params).status_code == 400
    until(lambda: cluster.d.counter("pdkv:turns_released_total") > released)


def test_d_killed_between_the_turns(cluster: Cluster) -> None:
    """The last test: one D is gone then."""
    tokens, params = kept_turn(cluster, cluster.d)
    messages = [{"role": "user", "content": "What do you think of mountains and of the sea?"}]
    text, _ = chat(cluster.router, messages)
    cluster.d.signal(signal.SIGKILL)
    until(lambda: not cluster.d.process.alive())
    assert second_turn(cluster, tokens + prompt(20), params) == "recomputed"
    drain(cluster.router, cluster.brief, False)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And of rivers?"}]
    answer, _ = chat(cluster.router, messages)
    assert answer == chat(cluster.brief, messages, cache_salt="alone")[0]
    until(lambda: cluster.p.idle() and cluster.brief.idle(), 60)
