from __future__ import annotations

import asyncio
import inspect
import re
import threading
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from tests.serve.asgi import Exchange, eventually
from tests.serve.client import CHAT, COMPLETIONS, GOOD_PARAMS, app_of, ask, get, post
from tests.serve.fake import ByteTokenizer, FakeInstance
from tokenizers import Regex, normalizers

from pdkv.errors import BadRequest
from pdkv.serve.http import read_body
from pdkv.serve.openai import RESERVED_TEMPLATE_KWARGS, ApiError
from pdkv.serve.params import PREFILL_LEG

BAD_COMPLETIONS: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ""}, 400, "no tokens"),
    ({"prompt": ["a", 1]}, 400, "prompt"),
    ({"prompt": [[1], []]}, 400, "prompt"),
    ({"prompt": [1, 99999]}, 400, "99999"),
    ({"prompt": [-1]}, 400, "-1"),
    ({"prompt": "x" * 600}, 400, "600 tokens.*512"),
    ({"prompt": "x" * 500, "max_tokens": 100}, 400, "at most 12"),
    ({"model": "other"}, 404, "'other' is not served.*'tiny'"),
    ({"model": 5}, 400, "model"),
    ({"max_tokens": 0}, 400, "max_tokens: 0"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"min_tokens": 99}, 400, "min_tokens"),
    ({"n": 0}, 400, "n: 0"),
    ({"n": 1000}, 400, "n: 1000"),
    ({"prompt": ["x"] * 65, "n": 2}, 400, "prompt: 65 prompts with n = 2 ask for 130 answers, .* may ask for 128"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids: -1 is outside"),
    ({"stop_token_ids": [10**12]}, 400, "stop_token_ids: 1000000000000 is outside"),
    ({"stop_token_ids": [5] * 2000}, 400, "stop_token_ids: 2000 tokens"),
    ({"model": "\n" + "x" * 10**6}, 404, r"model '\\nx"),
    ({"kv_transfer_params": {"do_remote_decode": "\0" * 10**6}}, 400, r"got '\\x00"),
    ({"kv_transfer_params": {**GOOD_PARAMS, "remote_host": "h\0st"}}, 400, "remote_host .*printable"),
    ({"kv_transfer_params": {**GOOD_PARAMS, "remote_engine_id": "a\nb"}}, 400, "remote_engine_id .*printable"),
    ({"prompt": [1] * 600}, 400, "has 600 tokens"),
    ({"prompt": "x" * 3_000_000}, 400, "has at least 600000 tokens"),
    ({"best_of": 3}, 400, "best_of"),
    ({"echo": True}, 400, "echo"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"logit_bias": {"5": 1.0}}, 400, "logit_bias"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"prompt_logprobs": 1}, 400, "prompt_logprobs"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_k": -5}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"presence_penalty": 9}, 400, "presence_penalty"),
    ({"seed": 2**70}, 400, "seed"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": ["a"] * 99}, 400, "stop"),
    ({"stop": 5}, 400, "stop"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"cache_salt": ""}, 400, "cache_salt"),
    ({"stream": True, "kv_transfer_params": PREFILL_LEG}, 400, "stream"),
    ({"kv_transfer_params": "x"}, 400, "kv_transfer_params"),
    ({"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1]]}}, 400, "never trusted without"),
    ({"prompt": ["a", "b"], "kv_transfer_params": GOOD_PARAMS}, 400, "one object"),
    ({"prompt": ["a", "b"], "kv_transfer_params": [GOOD_PARAMS]}, 400, "1 objects for 2"),
]


@pytest.mark.parametrize(("changes", "status", "says"), BAD_COMPLETIONS, ids=[str(b[0])[:50] for b in BAD_COMPLETIONS])
def test_bad_completions(changes: dict[str, Any], status: int, says: str) -> None:
    instance = FakeInstance()
    response = post(instance, COMPLETIONS, ask(**changes))
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.search(says, error["message"]), error["message"]
    assert error["message"].isprintable()
    assert len(error["message"]) <= 2001
    assert not instance.requests


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"temperature": -0.1}, "temperature"),
        ({"prompt": "x" * 500, "max_tokens": 100}, "max_tokens"),
        ({"prompt": [1, 99999]}, "prompt"),
        ({"kv_transfer_params": {"do_remote_decode": "yes"}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}, "kv_transfer_params"),
    ],
)
def test_an_error_names_its_field(changes: dict[str, Any], param: str) -> None:
    assert post(FakeInstance(), COMPLETIONS, ask(**changes)).json()["error"]["param"] == param


def test_a_grant_that_comes_back_to_its_giver_says_so() -> None:
    giver = FakeInstance(engine_id=GOOD_PARAMS["remote_engine_id"])
    response = post(giver, COMPLETIONS, ask(kv_transfer_params=GOOD_PARAMS))
    assert response.status_code == 400
    assert "this grant is my own" in response.json()["error"]["message"]
    assert not giver.requests


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
def test_text_of_any_length_for_few_tokens_is_refused_untokenised(path: str, field: str) -> None:
    """A tokenizer that makes one token of any run of unknown characters, as SentencePiece's do: there is no bound."""
    instance = FakeInstance()
    assert instance.model.tokenizer is not None
    instance.model.tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("漢+"), "?")
    called: list[int] = []
    instance.model.tokenizer.on_call = lambda text: called.append(len(text))
    for length, status in ((200_000, 200), (300_000, 400)):
        text = "漢" * length
        response = post(instance, path, {field: text if path == COMPLETIONS else [{"role": "user", "content": text}]})
        assert response.status_code == status, response.text
    assert (
        "characters; with a context of 512 tokens at most 262144 are tokenised" in response.json()["error"]["message"]
    )
    assert max(called) < 262_144


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt": "x",,}', "line 1 column 16"),
        (b"", "not JSON"),
        (b"[1]", "object, not a list"),
        (b"\xff\xfe{}", "not"),
        (b"[" * 100_000, "nested"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature: JSON has no NaN"),
        (b'{"prompt": "x", "top_k": 1' + b"0" * 400 + b"}", "top_k: 1000"),
        (b'{"prompt": "\\ud800"}', "prompt: \\ud800"),
    ],
)
def test_malformed_json(body: bytes, says: str) -> None:
    response = post(FakeInstance(), COMPLETIONS, body)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a string named text"),
        ({"messages": [{"role": "unknown", "content": "x"}]}, "roles must alternate"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        *(
            ({"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs: {name}")
            for name in sorted(RESERVED_TEMPLATE_KWARGS)
        ),
    ],
)
def test_bad_chats(changes: dict[str, Any], says: str) -> None:
    response = post(FakeInstance(), CHAT, {"messages": [{"role": "user", "content": "x"}], **changes})
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def test_every_argument_of_the_tokenizer_s_method_is_reserved() -> None:
    transformers = pytest.importorskip("transformers")
    method = inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template)
    named = {p.name for p in method.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    assert named - {"self"} <= RESERVED_TEMPLATE_KWARGS


def test_other_template_kwargs_reach_the_template() -> None:
    instance = FakeInstance()
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinking": False}}
    assert post(instance, CHAT, body).status_code == 200
    assert instance.model.tokenizer is not None
    assert instance.model.tokenizer.template_options["enable_thinking"] is False


def test_a_model_without_chat_template_says_so() -> None:
    instance = FakeInstance()
    instance.model.tokenizer = ByteTokenizer(chat=False)
    response = post(instance, CHAT, {"messages": [{"role": "user", "content": "x"}]})
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


def test_a_model_without_tokenizer_takes_token_ids_only() -> None:
    instance = FakeInstance(lambda request: [1, 2])
    instance.model.tokenizer = None
    assert post(instance, COMPLETIONS, ask()).status_code == 400
    body = post(instance, COMPLETIONS, ask(prompt=[1, 2])).json()
    assert body["usage"]["completion_tokens"] == 2
    assert "give stop_token_ids" in post(instance, COMPLETIONS, ask(prompt=[1, 2], stop="x")).text


def test_a_body_that_is_announced_too_large_is_refused_before_it_comes() -> None:
    async def go() -> None:
        async def never() -> dict[str, Any]:
            return await asyncio.sleep(3600)  # type: ignore[func-returns-value]

        scope = {"type": "http", "headers": [(b"content-length", b"99999999999999")]}
        with pytest.raises(ApiError) as refused:
            await asyncio.wait_for(read_body(Request(scope, never)), 5)
        assert refused.value.status == 413

    asyncio.run(go())


def test_a_body_that_stops_in_the_middle_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkv.serve.http._BODY_STALL_S", 0.05)

    async def go() -> None:
        parts = iter([b'{"prompt"', b': "x', None])

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.03)
            part = next(parts)
            if part is None:
                await asyncio.sleep(3600)
            return {"type": "http.request", "body": part, "more_body": True}

        with pytest.raises(ApiError, match="for 0.05 s, after 13 bytes") as refused:
            await asyncio.wait_for(read_body(Request({"type": "http", "headers": []}, receive)), 5)
        assert refused.value.status == 408

    asyncio.run(go())


@pytest.mark.parametrize("given", ["a,b", "a b", "x" * 200, "é"])
def test_request_ids_that_cannot_travel_are_refused(given: str) -> None:
    response = post(FakeInstance(), COMPLETIONS, ask(), headers={"x-request-id": given.encode()})
    assert response.status_code == 400
    assert "x-request-id" in response.json()["error"]["message"]


def test_unknown_paths_and_methods_are_error_objects() -> None:
    unknown = get(FakeInstance(), "/v2")
    assert unknown.status_code == 404
    assert "GET /v2: there is no such path here; there is POST /v1/completions" in unknown.json()["error"]["message"]
    wrong = get(FakeInstance(), COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "GET /v1/completions: this path takes POST"


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
def test_no_page_that_would_load_from_elsewhere(path: str) -> None:
    assert get(FakeInstance(), path).status_code == 404


def test_the_instances_own_refusal_is_a_400() -> None:
    instance = FakeInstance()
    instance.refuse = BadRequest("no")
    assert post(instance, COMPLETIONS, ask(prompt=["a", "b"])).status_code == 400


def test_our_own_fault_is_a_500_error_object() -> None:
    instance = FakeInstance()
    instance.refuse = RuntimeError("a bug")

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app_of(instance), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(COMPLETIONS, json=ask())

    response = asyncio.run(go())
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert response.headers["connection"] == "close"


def test_a_failed_instance_answers_503_with_the_reason() -> None:
    instance = FakeInstance()
    instance.failed = RuntimeError("the engine fell over")
    for response in (post(instance, COMPLETIONS, ask()), get(instance, "/health")):
        assert response.status_code == 503
        assert "the engine fell over" in response.text


def test_a_failure_while_a_request_waits_ends_it() -> None:
    instance = FakeInstance()
    instance.gate = threading.Event()

    async def go() -> None:
        exchange = Exchange(app_of(instance), COMPLETIONS, ask()).start()
        await eventually(lambda: instance.requests)
        instance.failed = RuntimeError("gone")
        assert exchange.task is not None
        await asyncio.wait_for(exchange.task, 10)
        assert exchange.status == 503

    asyncio.run(go())
