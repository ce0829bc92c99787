"""Bidirectional mode at the API and in the router: what D says that it keeps finds its way to the next turn's P."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from tests.serve.asgi import client_of, sse_events
from tests.serve.client import app_of
from tests.serve.fake import GRANT, FakeInstance
from tests.serve.network import PARAMS, Backend, as_json, decode, post, prefill, router

from pdkv.core.transfer.messages import RemoteSource
from pdkv.errors import ConfigError
from pdkv.serve import turns as turns_module
from pdkv.serve.options import InstanceOptions, RouterOptions, ServeOptions
from pdkv.serve.params import PREFILL_LEG, grant_to_params, offers_in, parse_params
from pdkv.serve.turns import Listener, TurnMemory, answered, turn_keys

MARKED = msgspec.structs.replace(GRANT, marks=bytes(48), mark_tokens=16)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def kept_params(**changes: Any) -> dict[str, Any]:
    """As they come out of D's answer."""
    made = grant_to_params(
        MARKED,
        engine_id="d-1",
        request_id="r",
        host="127.0.0.1",
        port=5600,
        tp_size=1,
        kept_until_ns=12_345_678_901_234,
    )
    return json.loads(json.dumps(made)) | changes


def ordinary_params() -> dict[str, Any]:
    """As they come out of P's answer."""
    return grant_to_params(GRANT, engine_id="p-1", request_id="r", host="127.0.0.1", port=5600, tp_size=1)


# ------------------------------------------------------------------------------------------------------------- params


def test_what_d_keeps_is_what_p_is_asked_for() -> None:
    params = kept_params()
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert params["remote_blocks_expiry_time"] == pytest.approx(12_345.678901234)
    asked = parse_params(params)
    assert asked.produce
    assert asked.source is not None
    assert asked.source.grant == MARKED
    assert abs((asked.source.expires_ns or 0) - 12_345_678_901_234) < 1000
    assert offers_in(params) == [asked.source]


@pytest.mark.parametrize(
    "change",
    [
        {"pdkv_marks": None}, {"pdkv_marks": "0" * 33}, {"pdkv_marks": "G" * 32}, {"pdkv_marks": "0" * 32 * 1025},
        {"pdkv_mark_tokens": 0}, {"pdkv_mark_tokens": "16"}, {"remote_blocks_expiry_time": None},
        {"remote_blocks_expiry_time": True}, {"remote_blocks_expiry_time": 1e300}, {"pdkv_token": None},
        {"remote_port": 0}, {"remote_block_ids": [[1], [2]]}, {"remote_block_ids": None},
    ],
)  # fmt: skip
def test_what_cannot_be_proved_is_not_read_but_no_reason_to_refuse(change: dict[str, Any]) -> None:
    asked = parse_params(kept_params(**change))
    assert asked.produce
    assert asked.source is None


# ---------------------------------------------------------------------------------------------------------------- API


def ask(**more: Any) -> dict[str, Any]:
    return {"prompt": "say something", **more}


def api_post(instance: FakeInstance, body: dict[str, Any]) -> httpx.Response:
    async def go() -> httpx.Response:
        async with client_of(app_of(instance)) as client:
            return await client.post(COMPLETIONS, json=body)

    return asyncio.run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_d_s_answer_says_what_is_kept(stream: bool) -> None:
    instance = FakeInstance(bidirectional=True)
    answer = api_post(instance, ask(stream=stream, kv_transfer_params=ordinary_params()))
    assert instance.requests[0].keep_turn
    bodies = [event for event in sse_events(answer.content) if isinstance(event, dict)] if stream else [answer.json()]
    said = [body["kv_transfer_params"] for body in bodies if body.get("kv_transfer_params")]
    assert len(said) == 1
    assert (said[0]["do_remote_decode"], said[0]["remote_engine_id"]) == (True, "engine-1")
    assert said[0]["remote_blocks_expiry_time"] == 480
    assert bodies[-1]["choices"][0]["finish_reason"] is not None


@pytest.mark.parametrize(
    ("bidirectional", "params"), [(False, ordinary_params()), (True, None), (True, PREFILL_LEG)], ids=["off", "no", "p"]
)
def test_only_the_decode_leg_of_a_pull_is_kept(bidirectional: bool, params: Any) -> None:
    instance = FakeInstance(bidirectional=bidirectional)
    assert api_post(instance, ask(kv_transfer_params=params, max_tokens=1)).status_code == 200
    assert not instance.requests[0].keep_turn


def test_of_several_choices_the_first_is_kept() -> None:
    instance = FakeInstance(bidirectional=True)
    answer = api_post(instance, ask(n=2, kv_transfer_params=ordinary_params()))
    assert [request.keep_turn for request in instance.requests] == [True, False]
    assert isinstance(answer.json()["kv_transfer_params"], dict)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_next_turn_s_prefill_is_offered_it(bidirectional: bool) -> None:
    """An instance without the option gives it back."""
    instance = FakeInstance(role="prefill", bidirectional=bidirectional)
    answer = api_post(instance, ask(max_tokens=1, kv_transfer_params=kept_params()))
    assert answer.json()["kv_transfer_params"]["do_remote_prefill"] is True
    (request,) = instance.requests
    assert request.produce
    assert (request.source is not None) is bidirectional
    assert len(instance.released) == (not bidirectional)


def test_a_refused_turn_gives_it_back() -> None:
    instance = FakeInstance(role="prefill", bidirectional=True, max_model_len=8)
    assert api_post(instance, ask(prompt="far too long", kv_transfer_params=kept_params())).status_code == 400
    (given,) = instance.released
    assert isinstance(given, RemoteSource)
    assert given.grant.token == MARKED.token


# --------------------------------------------------------------------------------------------------- what is remembered


def conversation(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def memory(**options: Any) -> TurnMemory:
    return TurnMemory(options.pop("ttl_s", 480), options.pop("usable", lambda label: True), **options)


def test_a_conversation_goes_on_from_its_answer() -> None:
    turns = memory()
    turns.remember(conversation("hello"), "hi", "d0", kept_params())
    assert turns.take(conversation("hello")) is None
    assert turns.take(conversation("hello", "ho", "and?")) is None
    assert turns.take(conversation("hello", "hi", "and?") | {"cache_salt": "other"}) is None
    assert turns.take({"messages": [{"content": "hello", "role": "user"}, {"content": "hi", "role": "assistant"}]})
    assert turns.take(conversation("hello", "hi", "and?")) is None  # once


def test_the_latest_turn_counts() -> None:
    turns = memory()
    turns.remember(conversation("a"), "b", "d0", kept_params(remote_request_id="first"))
    turns.remember(conversation("a", "b", "c"), "d", "d0", kept_params(remote_request_id="second"))
    assert turns.take(conversation("a", "b", "c", "d", "e"))["remote_request_id"] == "second"
    assert turns.take(conversation("a", "b", "other"))["remote_request_id"] == "first"


def test_two_answers_to_one_prompt_are_two_conversations() -> None:
    turns = memory()
    for text in ("one", "two"):
        turns.remember(conversation("a"), text, "d0", kept_params(remote_request_id=text))
    assert turns.take(conversation("a", "one", "c"))["remote_request_id"] == "one"
    assert turns.take(conversation("a", "two", "c"))["remote_request_id"] == "two"


@pytest.mark.parametrize("prompt", ["x" * 700, list(range(700))], ids=["text", "ids"])
def test_completions_go_on_from_what_they_begin_with(prompt: Any) -> None:
    turns = memory()
    turns.remember({"prompt": prompt}, "y" * 300, "d0", kept_params())
    longer = prompt + "y" * 300 + "z" if isinstance(prompt, str) else [*prompt, 1, 2, 3]
    assert turns.take({"prompt": "w" + "x" * 700}) is None
    assert turns.take({"prompt": longer}) is not None


def test_keys_grow_with_the_conversation() -> None:
    short, long = conversation("a", "b"), conversation("a", "b", "c")
    assert turn_keys(long)[:2] == turn_keys(short)
    assert turn_keys(answered(conversation("a"), "b")) == turn_keys(short)
    assert turn_keys({}) == []


def test_what_is_out_of_date_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(turns_module.time, "monotonic", lambda: now[0])
    turns = memory(ttl_s=10)
    turns.remember(conversation("a"), "b", "d0", kept_params())
    now[0] += 10
    assert turns.take(conversation("a", "b", "c")) is None
    turns.remember(conversation("d"), "e", "d0", kept_params())
    now[0] += 10
    turns.remember(conversation("f"), "g", "d0", kept_params())
    assert len(turns) == 1


def test_memory_is_bounded_in_bytes() -> None:
    size = len(msgspec.json.encode(kept_params()))
    turns = memory(most_bytes=3 * size)
    for number in range(10):
        turns.remember(conversation(str(number)), "b", "d0", kept_params())
    assert len(turns) == 3
    assert turns.take(conversation("0", "b", "c")) is None
    assert turns.take(conversation("9", "b", "c")) is not None
    tiny = memory(most_bytes=10)
    tiny.remember(conversation("a"), "b", "d0", kept_params())
    assert len(tiny) == 0


def test_an_instance_that_lost_its_memory_is_forgotten() -> None:
    turns, draining = memory(usable=lambda label: label != "d2"), conversation("d2", "b", "c")
    for label in ("d0", "d1", "d2"):
        turns.remember(conversation(label), "b", label, kept_params(remote_engine_id=label))
    turns.forget("d0")
    assert turns.take(conversation("d0", "b", "c")) is None
    assert turns.take(draining) is None
    turns.remember(conversation("more"), "b", "d1", kept_params(remote_engine_id="another life of it"))
    assert turns.take(conversation("d1", "b", "c")) is None
    assert turns.take(conversation("more", "b", "c")) is not None


# -------------------------------------------------------------------------------------------------------- the router


def kept_answer(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "kv_transfer_params": kept_params()}


def stream_of(text: str) -> bytes:
    """As `api` sends it: the last chunk has the params."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        *({"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in text),
        {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}],
         "kv_transfer_params": kept_params()},
        {"choices": [], "usage": {"total_tokens": 5}},
    ]  # fmt: skip
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def keeping(text: str) -> Backend:
    """A decode instance that keeps its answers."""
    whole = json.dumps(kept_answer(text)).encode()
    return Backend(
        lambda body: (200, stream_of(text), "text/event-stream") if body.get("stream") else
        (200, whole, "application/json")
    )  # fmt: skip


def talk(app: Any, *bodies: dict[str, Any]) -> list[httpx.Response]:
    async def go() -> list[httpx.Response]:
        async with client_of(app) as client:
            return [await client.post(CHAT, json=body) for body in bodies]

    return asyncio.run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_s_p_is_given_what_d_keeps_and_the_client_sees_nothing(stream: bool) -> None:
    p, d = prefill(), keeping("hi")
    app = router([p], [d], bidirectional_kv_xfer=True)
    first, second = conversation("hello"), conversation("hello", "hi", "and?")
    answers = talk(app, first | {"stream": stream}, second, second)
    assert [leg["kv_transfer_params"] for leg in p.seen] == [PREFILL_LEG, kept_params(), PREFILL_LEG]
    assert [leg["kv_transfer_params"] for leg in d.seen] == [PARAMS] * 3
    for answer in answers:
        assert "pdkv_" not in answer.text
    if stream:
        events = sse_events(answers[0].content)
        assert events[-1] == "[DONE]"
        assert "".join(e["choices"][0]["delta"]["content"] for e in events[:-1] if e["choices"]) == "hi"
        assert events[-2]["usage"] == {"total_tokens": 5}
    else:
        assert answers[0].json() == kept_answer("hi") | {"kv_transfer_params": None}


def test_without_the_option_nothing_is_read() -> None:
    p, d = prefill(), keeping("hi")
    answers = talk(router([p], [d]), conversation("hello"), conversation("hello", "hi", "and?"))
    assert [leg["kv_transfer_params"] for leg in p.seen] == [PREFILL_LEG] * 2
    assert answers[0].json() == kept_answer("hi")


def test_what_p_did_about_it_is_told() -> None:
    p, d = prefill(), keeping("hi")
    p.says = {"x-pdkv-kv": "loaded"}
    answers = talk(router([p], [d], bidirectional_kv_xfer=True), conversation("hello"))
    assert answers[0].headers["x-pdkv-turn"] == "loaded"


def test_a_p_that_fails_leaves_it_to_the_next_one() -> None:
    ps, d = [prefill(), prefill()], keeping("hi")
    app = router(ps, [d], bidirectional_kv_xfer=True)
    talk(app, conversation("hello"))
    for p in ps:
        p.seen.clear()
    dead = ps[0]
    dead.down = True
    talk(app, conversation("hello", "hi", "and?"))
    assert [leg["kv_transfer_params"] for leg in ps[1].seen] == [kept_params()]


def test_of_a_draining_d_nothing_is_read() -> None:
    p, d = prefill(), keeping("hi")
    app = router([p], [d], bidirectional_kv_xfer=True)

    async def go() -> None:
        async with client_of(app) as client:
            await client.post(CHAT, json=conversation("hello"))
            drained = await client.post("/admin/drain", json={"instance": "decode-0"})
            assert drained.status_code == 200
            await client.post(CHAT, json=conversation("hello", "hi", "and?"))

    asyncio.run(go())
    assert p.seen[-1]["kv_transfer_params"] == PREFILL_LEG


def test_answers_that_are_none_pass_unread() -> None:
    p = prefill()
    for reply in (as_json({"error": {"message": "no"}}, 400), as_json([1]), lambda _b: (200, b"{", "application/json")):
        app = router([p], [Backend(reply)], bidirectional_kv_xfer=True)
        plain = router([p], [Backend(reply)])
        assert talk(app, conversation("a"))[0].content == talk(plain, conversation("a"))[0].content
    response = post(router([p], [decode()], bidirectional_kv_xfer=True), {"prompt": "x", "stream": True})
    assert response.content == post(router([p], [decode()]), {"prompt": "x", "stream": True}).content


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_read_wherever_they_are_torn(size: int) -> None:
    turns = memory()
    data = stream_of("Zürich\n\n")

    async def go() -> bytes:
        async def chunks() -> Any:
            for at in range(0, len(data), size):
                yield data[at : at + size]

        listener = Listener(turns, conversation("hello"), "d0")
        return b"".join([chunk async for chunk in listener.streamed(chunks())])

    sent = asyncio.run(go())
    assert b"pdkv_" not in sent
    assert turns.take(conversation("hello", "Zürich\n\n", "and?")) is not None


def test_text_that_talks_of_params_is_text() -> None:
    turns, text = memory(), 'set "kv_transfer_params": {} and go'

    async def go() -> bytes:
        async def chunks() -> Any:
            yield json.dumps({"choices": [{"index": 0, "text": text}]}).encode()

        return b"".join([chunk async for chunk in Listener(turns, {"prompt": "x"}, "d0").whole(chunks())])

    assert json.loads(asyncio.run(go()))["choices"][0]["text"] == text
    assert len(turns) == 0


# -------------------------------------------------------------------------------------------------------------- options


def test_push_has_no_kept_turns() -> None:
    with pytest.raises(ConfigError, match="bidirectional-kv-xfer with --transfer-mode push"):
        RouterOptions(prefill=("http://p",), decode=("http://d",), transfer_mode="push", bidirectional_kv_xfer=True)
    p, d = (InstanceOptions(role=role, model="m", bidirectional_kv_xfer=True) for role in ("prefill", "decode"))
    with pytest.raises(ConfigError, match="leave one of the two options out"):
        ServeOptions(prefill=p, decode=d, transfer_mode="push")


@pytest.mark.parametrize(
    "change", [{"decoder_kv_blocks_ttl_s": 5}, {"kv_recompute_threshold": -1}, {"max_kept_fraction": 0.0}]
)
def test_options_that_make_no_sense_are_named(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--decoder-kv-blocks-ttl|--kv-recompute-threshold|--max-kept-fraction"):
        InstanceOptions(role="decode", model="m", **change)
