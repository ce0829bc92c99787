from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from tests.serve.asgi import Exchange, client_of, eventually, sse_events
from tests.serve.client import CHAT, COMPLETIONS, GOOD_PARAMS, app_of, ask, get, post
from tests.serve.fake import EOS, GRANT, FakeInstance

from pdkv.core.events import FinishReason
from pdkv.core.transfer.messages import Awaited, Peer
from pdkv.errors import DoesNotFit
from pdkv.serve.params import PREFILL_LEG, push_legs, side_channel_of

# ---------------------------------------------------------------------------------------------------------- answers


def test_completion() -> None:
    response = post(FakeInstance(), COMPLETIONS, ask(), headers={"x-request-id": "abc-1"})
    body = response.json()
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "abc-1"
    assert body["id"] == "cmpl-abc-1"
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "Hello world"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 11,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["kv_transfer_params"] is None


def test_completion_defaults_to_sixteen_tokens_and_knows_eos() -> None:
    instance = FakeInstance(lambda request: [72, 73, EOS, 74])
    body = post(instance, COMPLETIONS, {"prompt": [1, 2, 3]}).json()
    assert instance.requests[0].max_tokens == 16
    assert instance.requests[0].prompt.tolist() == [1, 2, 3]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] is None
    assert body["usage"]["completion_tokens"] == 3


def test_ignore_eos_and_stop_token_ids() -> None:
    instance = FakeInstance(lambda request: [72, EOS, 73, 74])
    body = post(instance, COMPLETIONS, ask(ignore_eos=True, stop_token_ids=[73])).json()
    assert instance.requests[0].stop_token_ids == {73}
    assert body["choices"][0]["stop_reason"] == 73
    assert body["choices"][0]["text"] == instance.model.tokenizer.decode([72])


def test_stop_string_ends_the_request_in_the_instance() -> None:
    instance = FakeInstance("one two three")
    instance.gate, instance.gate_at = threading.Event(), 8
    body = post(instance, COMPLETIONS, ask(stop="two", max_tokens=50)).json()
    assert body["choices"][0]["text"] == "one "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == "two"
    assert body["usage"]["completion_tokens"] == 7
    assert instance.aborts == [(instance.requests[0].request_id, FinishReason.STOP)]


def test_several_prompts_and_choices() -> None:
    instance = FakeInstance(lambda request: request.prompt.tolist()[::-1])
    body = post(instance, COMPLETIONS, ask(prompt=["abc", "xy"], n=2, seed=5)).json()
    assert [c["text"] for c in body["choices"]] == ["cba", "cba", "yx", "yx"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 5
    assert sorted(s.seed or 0 for s in instance.samplings) == [5, 5, 6, 6]
    assert len({r.request_id for r in instance.requests}) == 4


def test_token_ids_on_request() -> None:
    """vLLM's `return_token_ids`: per choice in completions, the prompt's once in a chat; never unasked."""
    instance = FakeInstance(lambda request: [72, EOS])
    (one,) = post(instance, COMPLETIONS, ask(prompt=[5, 6], return_token_ids=True)).json()["choices"]
    assert (one["prompt_token_ids"], one["token_ids"], one["text"]) == ([5, 6], [72, EOS], "i")
    assert "token_ids" not in post(instance, COMPLETIONS, ask()).json()["choices"][0]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "return_token_ids": True}
    body = post(instance, CHAT, chat).json()
    assert body["choices"][0]["token_ids"] == [72, EOS]
    assert body["prompt_token_ids"] == instance.tokens("<user>Hi<assistant>")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streamed_token_ids(path: str) -> None:
    instance = FakeInstance("Hello")
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "n": 2}
    response = post(instance, path, body | {"stream": True, "return_token_ids": True})
    events = [event for event in sse_events(response.text) if event != "[DONE]"]
    prompts = [event for event in events if "prompt_token_ids" in (event if path == CHAT else event["choices"][0])]
    choices = [event["choices"][0] for event in events]
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert [token for choice in mine for token in choice.get("token_ids", ())] == instance.tokens("Hello")
    assert len(prompts) == (1 if path == CHAT else 2)
    assert prompts[0] is events[0]


def test_sampling_settings_reach_the_instance() -> None:
    instance = FakeInstance()
    post(
        instance,
        COMPLETIONS,
        ask(temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=7, presence_penalty=1, frequency_penalty=-1,
            repetition_penalty=1.5, priority=0, cache_salt="s", min_tokens=2, unknown_field={"a": 1}, user="me"),
    )  # fmt: skip
    sampling, request = instance.samplings[0], instance.requests[0]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (request.cache_salt, request.min_tokens) == ("s", 2)


def test_chat() -> None:
    instance = FakeInstance()
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    body = post(instance, CHAT, {"messages": messages, "max_completion_tokens": 5}).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello"}
    assert (
        instance.model.tokenizer.decode(instance.requests[0].prompt.tolist()) == "<system>Be brief<user>Hi<assistant>"
    )


def test_chat_without_max_tokens_may_fill_the_context() -> None:
    instance = FakeInstance(max_model_len=100)
    post(instance, CHAT, {"messages": [{"role": "user", "content": "Hi"}]})
    request = instance.requests[0]
    assert request.max_tokens == 100 - len(request.prompt)


def test_logprobs_in_both_shapes() -> None:
    body = post(FakeInstance("ab"), COMPLETIONS, ask(logprobs=2)).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b"]
    assert logprobs["token_logprobs"] == [-0.25, -0.25]
    assert logprobs["text_offset"] == [0, 1]
    assert len(logprobs["top_logprobs"][0]) == 3
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    content = post(FakeInstance("ab"), CHAT, chat).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b"]
    assert content[0]["bytes"] == [97]
    assert len(content[0]["top_logprobs"]) == 1


# ---------------------------------------------------------------------------------------------------------- streams


def test_completion_stream() -> None:
    response = post(FakeInstance("Zürich"), COMPLETIONS, ask(stream=True, stream_options={"include_usage": True}))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    *chunks, usage, done = sse_events(response.content)
    assert done == "[DONE]"
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Zürich"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 7


def test_chat_stream_begins_with_the_role() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stream": True, "n": 2}
    *chunks, done = sse_events(post(FakeInstance(), CHAT, body).content)
    assert done == "[DONE]"
    assert [c["choices"][0]["delta"] for c in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks[2:] if c["choices"][0]["index"] == index]
        assert "".join(c["delta"]["content"] for c in own) == "Hello"
    assert all("usage" not in c for c in chunks)


def test_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = sse_events(post(FakeInstance("abc"), COMPLETIONS, ask(stream=True, stream_options=options)).content)
    assert [e["usage"]["completion_tokens"] for e in events[:-1]] == [1, 2, 3, 3]


def test_an_error_before_the_first_token_has_a_status_and_after_it_is_an_event() -> None:
    instance = FakeInstance()
    instance.error = "the KV never came"
    response = post(instance, COMPLETIONS, ask(stream=True))
    assert response.status_code == 500
    assert "the KV never came" in response.json()["error"]["message"]
    instance = FakeInstance()
    instance.error, instance.gate_at = "lost", 3
    events = sse_events(post(instance, COMPLETIONS, ask(stream=True)).content)
    assert events[-2]["error"]["message"] == "lost"
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [(DoesNotFit("too late for it"), "invalid_request_error"), (RuntimeError("bug"), "server_error")],
)
def test_a_sibling_that_is_refused_later_is_an_event_of_the_stream(refusal: Exception, kind: str) -> None:
    instance = FakeInstance()
    instance.gate = threading.Event()

    async def go() -> list[Any]:
        body = ask(n=2, stream=True, kv_transfer_params=GOOD_PARAMS)
        exchange = Exchange(app_of(instance), COMPLETIONS, body).start()
        await eventually(lambda: instance.requests)
        instance.refuse = refusal
        assert instance.gate is not None
        instance.gate.set()
        assert exchange.task is not None
        await asyncio.wait_for(exchange.task, 10)
        return sse_events(b"".join(exchange.chunks))

    *_, error, done = asyncio.run(go())
    assert (error["error"]["type"], done) == (kind, "[DONE]")
    assert str(refusal) in error["error"]["message"]


# --------------------------------------------------------------------------------------------------------- transfers


def test_the_prefill_leg_answers_with_params() -> None:
    instance = FakeInstance(role="prefill")
    body = post(instance, COMPLETIONS, ask(max_tokens=1, kv_transfer_params=PREFILL_LEG)).json()
    assert instance.requests[0].produce
    assert body["choices"][0]["finish_reason"] == "length"
    params = body["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["remote_block_ids"] == [[3, 1, 7]]
    assert params["remote_request_id"] == instance.requests[0].request_id
    assert (params["remote_engine_id"], params["remote_host"], params["remote_port"]) == ("engine-1", "127.0.0.1", 5600)


def test_the_prefill_leg_of_several_prompts_answers_with_a_list() -> None:
    instance = FakeInstance(role="prefill")
    body = post(instance, COMPLETIONS, ask(prompt=["a", "b"], n=2, max_tokens=1, kv_transfer_params=PREFILL_LEG)).json()
    assert len(body["kv_transfer_params"]) == 2
    assert sum(request.produce for request in instance.requests) == 2


def test_the_decode_leg_loads_and_reports_cached_tokens() -> None:
    instance = FakeInstance()
    body = post(instance, COMPLETIONS, ask(kv_transfer_params=GOOD_PARAMS)).json()
    assert instance.requests[0].source is not None
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_siblings_of_a_loading_choice_wait_for_it_and_do_not_read_the_lease_again() -> None:
    instance = FakeInstance()
    instance.gate = threading.Event()

    async def go() -> None:
        exchange = Exchange(app_of(instance), COMPLETIONS, ask(n=3, kv_transfer_params=GOOD_PARAMS)).start()
        await eventually(lambda: len(instance.requests) == 1)
        await asyncio.sleep(0.05)
        assert len(instance.requests) == 1
        assert instance.gate is not None
        instance.gate.set()
        assert exchange.task is not None
        await exchange.task
        assert exchange.status == 200

    asyncio.run(go())
    assert [r.source is not None for r in instance.requests] == [True, False, False]


def test_a_list_of_params_belongs_to_the_prompts_in_order() -> None:
    instance = FakeInstance()
    post(instance, COMPLETIONS, ask(prompt=["a", "b"], kv_transfer_params=[None, GOOD_PARAMS]))
    by_prompt = {bytes(r.prompt.tolist()): r.source for r in instance.requests}
    assert [source is None for source in by_prompt.values()] == [True, False]


def test_a_refused_request_gives_its_grant_back() -> None:
    too_long = FakeInstance(max_model_len=8)
    assert post(too_long, COMPLETIONS, ask(prompt="far too long", kv_transfer_params=GOOD_PARAMS)).status_code == 400
    assert [source.grant.slot for source in too_long.released] == [GRANT.slot]
    refusing = FakeInstance()
    refusing.refuse = DoesNotFit("needs 9 blocks, there are 4")
    response = post(refusing, COMPLETIONS, ask(kv_transfer_params=GOOD_PARAMS))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "does_not_fit"
    assert len(refusing.released) == 1
    for bad in ({"top_p": 7}, {"max_tokens": 0}, {"model": "other"}, {"prompt": [None]}, {"stop": 5}):
        instance = FakeInstance()
        assert post(instance, COMPLETIONS, ask(kv_transfer_params=GOOD_PARAMS) | bad).status_code in (400, 404)
        assert len(instance.released) == 1


PROMISED = push_legs(Peer("engine-p", "127.0.0.1", 5600), "0123456789abcdef")[1]


def test_promised_kv_is_waited_for_by_the_first_choice() -> None:
    instance = FakeInstance()
    post(instance, COMPLETIONS, ask(n=2, kv_transfer_params=PROMISED))
    first, second = instance.requests
    assert first.awaited == Awaited(peer=Peer("engine-p", "127.0.0.1", 5600), transfer_id="0123456789abcdef")
    assert (first.source, second.awaited) == (None, None)


def test_a_refused_request_withdraws_what_it_was_promised() -> None:
    for bad in ({"top_p": 7}, {"prompt": "x" * 600}, {"model": "other"}, {"prompt": ["a", "b"]}):
        instance = FakeInstance()
        assert post(instance, COMPLETIONS, ask(kv_transfer_params=PROMISED) | bad).status_code in (400, 404)
        (offer,) = instance.released
        assert isinstance(offer, Awaited)


def test_a_prefill_to_be_announced_keeps_its_id() -> None:
    instance = FakeInstance()
    leg = push_legs(Peer("engine-1", "127.0.0.1", 5600), "0123456789abcdef")[0]
    assert post(instance, COMPLETIONS, ask(kv_transfer_params=leg)).status_code == 200
    (request,) = instance.requests
    assert (request.produce, request.transfer_id, request.awaited) == (True, "0123456789abcdef", None)
    two = post(instance, COMPLETIONS, ask(prompt=["a", "b"], kv_transfer_params=leg))
    assert "a list with one object" in two.json()["error"]["message"]


# -------------------------------------------------------------------------------------------------------- other paths


def test_models_and_health() -> None:
    model = get(FakeInstance(), "/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("tiny", 512)
    health = get(FakeInstance(), "/health").json()
    assert health["status"] == "ok"
    assert side_channel_of(health) == Peer("engine-1", "127.0.0.1", 5600)


def test_health_is_degraded_for_a_while_after_a_refused_handshake() -> None:
    instance = FakeInstance()
    instance.transfer.refused_because = "p-1 at 127.0.0.1:5600 refused: dtype float16 there, bfloat16 here"
    instance.transfer.refused_ns = time.monotonic_ns()
    response = get(instance, "/health")
    assert response.status_code == 200
    assert response.json()["status"] == "degraded"
    assert response.json()["reason"] == instance.transfer.refused_because
    instance.transfer.refused_ns -= 120 * 10**9
    assert get(instance, "/health").json()["status"] == "ok"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_what_became_of_its_kv(stream: bool) -> None:
    def header(body: dict[str, Any], failure: str | None = None) -> str | None:
        instance = FakeInstance()
        instance.load_failure = failure
        return post(instance, COMPLETIONS, body).headers.get("x-pdkv-kv")

    assert header(ask(stream=stream)) is None
    assert header(ask(stream=stream, kv_transfer_params=GOOD_PARAMS)) == "cached"  # the fake loads nothing
    assert header(ask(stream=stream, kv_transfer_params=GOOD_PARAMS, n=2), "the dtypes differ") == "recomputed"


def test_debug_memory_follows_the_contract() -> None:
    entry = get(FakeInstance(), "/debug/memory").json()["instances"][0]
    assert entry["role"] == "decode"
    assert sum(entry["accounts"].values()) == entry["num_blocks"]
    holder = entry["holders"][0]
    assert set(holder) == {"request_id", "account", "blocks", "cause", "since_s", "deadline_s"}
    assert 1 <= holder["since_s"] < 3
    assert 0 < holder["deadline_s"] <= 2
    assert entry["awaiting"] == []


def test_metrics_count_what_was_served() -> None:
    instance = FakeInstance()

    async def go() -> str:
        async with client_of(app_of(instance)) as client:
            await client.post(COMPLETIONS, json=ask())
            return (await client.get("/metrics")).text

    text = asyncio.run(go())
    labels = 'engine="0",model_name="tiny"'
    assert f"vllm:generation_tokens_total{{{labels}}} 11.0" in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0' in text
    assert f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0" in text
