"""What comes over HTTP in any shape: `kv_transfer_params`, and the metrics texts that the router merges."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tests.serve.client import COMPLETIONS, GOOD_PARAMS, ask, post
from tests.serve.fake import FakeInstance

from pdkv.core.transfer.messages import Awaited, Peer, RemoteSource
from pdkv.errors import BadRequest
from pdkv.serve.merge import merge_metrics
from pdkv.serve.params import offers_in, parse_params, push_legs, side_channel_of

PUSH_PARAMS = push_legs(Peer("p-1", "127.0.0.1", 5600), "0123456789abcdef")[1]

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=15,
)


def peer_in_bounds(peer: Peer) -> None:
    assert all(text.isprintable() and text.isascii() and text for text in (peer.engine_id, peer.host))
    assert 0 < peer.port < 65536


def in_bounds(offer: RemoteSource | Awaited | None) -> None:
    """What the engine, the side channel and the log rely on."""
    if offer is None:
        return
    peer_in_bounds(offer.peer)
    if isinstance(offer, Awaited):
        assert 16 <= len(offer.transfer_id) <= 256
        return
    grant = offer.grant
    assert grant.block_ids
    assert all(type(block) is int and 0 < block < 2**31 for block in grant.block_ids)
    assert (len(grant.token), len(grant.proof)) == (16, 16)
    assert 0 <= grant.slot < 2**31
    assert 1 <= grant.num_tokens < 2**31
    assert max(grant.nonce, grant.lease_id) < 2**64


def parse(params: Any) -> None:
    try:
        in_bounds(parse_params(params).offer)
    except BadRequest as error:
        assert str(error).isprintable()
        assert len(str(error)) < 2000


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.sampled_from(sorted({**GOOD_PARAMS, **PUSH_PARAMS})), anything, max_size=4))
def test_params_with_odd_values_are_refused_or_in_bounds(odd: dict[str, Any]) -> None:
    for good in (GOOD_PARAMS, PUSH_PARAMS, {}):
        parse({**good, **odd})


@settings(deadline=None, max_examples=200)
@given(anything)
def test_whatever_was_offered_is_looked_through_for_grants(params: Any) -> None:
    given = params if isinstance(params, list) else [params]
    offers = offers_in([*given, GOOD_PARAMS, *given, PUSH_PARAMS])
    assert len(offers) >= 2
    for offer in offers:
        in_bounds(offer)


@settings(deadline=None, max_examples=200)
@given(anything, anything, anything)
def test_where_a_side_channel_is_said_to_be_is_refused_or_in_bounds(engine: Any, host: Any, port: Any) -> None:
    for health in (engine, {"engine_id": engine, "side_channel": host}, {"engine_id": "e", "side_channel": {}}):
        with pytest.raises(BadRequest):
            side_channel_of(health)
    try:
        peer_in_bounds(side_channel_of({"engine_id": engine, "side_channel": {"host": host, "port": port}}))
    except BadRequest:
        pass


def test_params_that_nest_deep_or_go_on_for_ever() -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    for good in (GOOD_PARAMS, PUSH_PARAMS):
        for name in good:
            for odd in (deep, "x" * 10**6, [1] * 10**5, 10**400):
                parse({**good, name: odd})


@pytest.mark.parametrize("seed", range(3))
def test_damaged_bodies_get_an_answer_and_no_server_error(seed: int) -> None:
    rng = random.Random(seed)
    whole = json.dumps(ask(kv_transfer_params=GOOD_PARAMS)).encode()
    for _ in range(40):
        body = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body))
            match rng.randrange(3):
                case 0:
                    body[at] = rng.randrange(256)
                case 1:
                    del body[at:]
                    body += b"}" * rng.randrange(3)
                case _:
                    body[at:at] = rng.choice((b"[" * 5000, b'{"a":' * 5000, b"\0", b'"', b"9" * 500, b"\xff\xfe"))
        assert post(FakeInstance(), COMPLETIONS, bytes(body)).status_code in (200, 400, 404)


METRICS = (
    "# HELP vllm:num_requests_running n\n# TYPE vllm:num_requests_running gauge\n"
    'vllm:num_requests_running{engine="0",model_name="m \\"x\\" \\\\ \\n"} 3.0\n'
    "# HELP a_total n\n# TYPE a_total counter\na_total 1e5 1700000000000\n"
    "# HELP h s\n# TYPE h histogram\n"
    'h_bucket{le="0.1"} 1\nh_bucket{le="+Inf"} 2\nh_count 2\nh_sum 0.3\n'
)


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_metrics_text_never_costs_those_of_the_others(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        text = METRICS
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            match rng.randrange(3):
                case 0:
                    text = text[:at] + rng.choice('\0\n"#,=\\{}\u0661\u2028') + text[at + 1 :]
                case 1:
                    text = text[:at] + text[at + rng.randrange(20) :]
                case _:
                    cut = rng.randrange(len(text))
                    text = text[:at] + text[cut : cut + 30] + text[at:]
        merged = merge_metrics({"bad": text, "good": METRICS}, CollectorRegistry()).decode()
        found = [
            sample
            for family in text_string_to_metric_families(merged)
            for sample in family.samples
            if sample.name == "vllm:num_requests_running" and sample.labels.get("instance") == "good"
        ]
        assert [sample.value for sample in found] == [3.0]
