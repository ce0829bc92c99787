from __future__ import annotations

import json
from typing import Any

import pytest

from pdkv.serve.openai import ApiError
from pdkv.serve.strict_json import MAX_DEPTH, parse_json


def refusal(body: str | bytes) -> str:
    with pytest.raises(ApiError) as caught:
        parse_json(body if isinstance(body, bytes) else body.encode())
    assert caught.value.status == 400
    assert caught.value.code == "invalid_json"
    json.dumps(caught.value.body(), ensure_ascii=False).encode()
    return caught.value.message


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return {"x": value}


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": [1, -1, 0.5, 1e300, -(2**63), 2**64 - 1, True, None, "Zürich 🧪"], "b": {"c": "12345678901234567890123"}},
        {"emoji": "\U0001f9ea as a pair"},
        nested(MAX_DEPTH - 1),
    ],
)
def test_what_json_is(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_are_no_json(name: str) -> None:
    assert (
        refusal(f'{{"temperature": {name}}}')
        == f"temperature: JSON has no {name}; give a number, or leave the field out"
    )


@pytest.mark.parametrize("digits", ["1e999", "-1e999", "9" * 400 + ".5"])
def test_numbers_that_are_infinite_as_doubles(digits: str) -> None:
    assert refusal(f'{{"a": [{{"top_p": {digits}}}]}}').startswith(f"a.0.top_p: {digits[:40]} is beyond")


@pytest.mark.parametrize("digits", [str(10**30), str(2**64), str(-(2**63) - 1), "9" * 5000, "-" + "9" * 5000])
def test_integers_that_are_too_long(digits: str) -> None:
    message = refusal(f'{{"seed": {digits}}}')
    assert message.startswith("seed: ")
    assert "64 bits" in message
    assert len(message) < 120


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (r'{"cache_salt": "\ud800"}', r"cache_salt: \ud800 at character 0"),
        (r'{"stop": ["ok", "x\uDC00y"]}', r"stop.1: \udc00 at character 1"),
        (r'{"kv_transfer_params": {"remote_host": "\udfff"}}', "kv_transfer_params.remote_host"),
        (r'{"\ud800": 1}', "a key"),
        (r'{"\ud800": "\ud801"}', "half of a surrogate pair"),
    ],
)
def test_halves_of_surrogate_pairs(body: str, says: str) -> None:
    assert says in refusal(body)


def test_surrogates_as_raw_bytes_are_no_utf8() -> None:
    assert "not UTF-8" in refusal(b'{"prompt": "\xed\xa0\x80"}')
    assert "not UTF-8" in refusal('{"prompt": "x"}'.encode("utf-16"))


@pytest.mark.parametrize("depth", [MAX_DEPTH, 500, 100_000])
def test_depth_is_bounded(depth: int) -> None:
    assert "nested" in refusal('{"x":' + "[" * depth + "]" * depth + "}")
