from __future__ import annotations

import json
from typing import Any

import pytest
from tests.serve.fake import GRANT

from pdkv.core.transfer.messages import Awaited, Peer
from pdkv.errors import BadRequest
from pdkv.serve.params import (
    ORDINARY,
    PREFILL_LEG,
    grant_to_params,
    named,
    offers_in,
    parse_params,
    push_legs,
    side_channel_of,
)

VLLM_KEYS = {
    "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host",
    "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode",
    "remote_prefill_cached_tokens",
}  # fmt: skip


def params() -> dict[str, Any]:
    made = grant_to_params(GRANT, engine_id="p-1", request_id="r", host="127.0.0.1", port=5600, tp_size=2)
    return json.loads(json.dumps(made))


def test_every_key_of_vllm_is_present() -> None:
    assert set(params()) >= VLLM_KEYS
    assert params()["tp_size"] == 2


def test_a_grant_survives_the_journey_through_json() -> None:
    source = parse_params(params()).source
    assert source is not None
    assert source.grant == GRANT
    assert (source.peer.engine_id, source.peer.port) == ("p-1", 5600)


@pytest.mark.parametrize("value", [None, {}, {"do_remote_prefill": False}, {"do_remote_prefill": None, "other": 1}])
def test_no_flags_are_an_ordinary_request(value: Any) -> None:
    assert parse_params(value) == ORDINARY


def test_the_prefill_leg_asks_to_produce() -> None:
    assert parse_params(PREFILL_LEG | {"unknown": [1]}).produce


def test_unknown_keys_are_ignored() -> None:
    assert parse_params(params() | {"max_load_tokens": 5, "_p_side_truncated": True}).source is not None


@pytest.mark.parametrize(
    "key",
    ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_num_tokens",
     "pdkv_slot", "pdkv_nonce", "pdkv_lease_id", "pdkv_token", "pdkv_proof", "pdkv_block_size"],
)  # fmt: skip
@pytest.mark.parametrize("bad", ["missing", None, -1, "", [], True, 2**70, [["a"]], {}])
def test_what_is_missing_or_ill_typed_is_named(key: str, bad: Any) -> None:
    given = params()
    if bad == "missing":
        del given[key]
    else:
        given[key] = bad
    with pytest.raises(BadRequest, match=f"never trusted without token and proof.*{key}"):
        parse_params(given)


@pytest.mark.parametrize("blocks", [[[1, 2], [3]], [0], [[0, 1]], [[]], [1, "2"], [[1.5]]])
def test_block_ids_must_be_one_list_of_real_blocks(blocks: Any) -> None:
    with pytest.raises(BadRequest, match="remote_block_ids"):
        parse_params(params() | {"remote_block_ids": blocks})


def test_flat_block_ids_are_accepted() -> None:
    source = parse_params(params() | {"remote_block_ids": [4, 5]}).source
    assert source is not None
    assert source.grant.block_ids == (4, 5)


def test_both_flags_contradict_each_other() -> None:
    with pytest.raises(BadRequest, match="both true"):
        parse_params({"do_remote_prefill": True, "do_remote_decode": True})


def test_a_flag_must_be_a_boolean() -> None:
    with pytest.raises(BadRequest, match="do_remote_decode"):
        parse_params({"do_remote_decode": "yes"})


# --------------------------------------------------------------------------------------------------------------- push

PEER = Peer("p-1", "host-of-p", 5600)
ID = "0123456789abcdef"


def test_the_two_legs_of_a_push() -> None:
    to_prefill, to_decode = json.loads(json.dumps(push_legs(PEER, ID)))
    asked = parse_params(to_prefill)
    assert (asked.produce, asked.transfer_id, asked.offer) == (True, ID, None)
    asked = parse_params(to_decode)
    assert (asked.produce, asked.source, asked.awaited) == (False, None, Awaited(peer=PEER, transfer_id=ID))


@pytest.mark.parametrize("mode", [None, "pull"])
def test_a_transfer_id_means_nothing_without_push(mode: str | None) -> None:
    asked = parse_params({**PREFILL_LEG, "transfer_id": ID, "transfer_mode": mode})
    assert (asked.produce, asked.transfer_id) == (True, None)


@pytest.mark.parametrize("leg", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    "value", [None, "", "short", "x" * 257, "0123456789abcde\n", "with spaces in it", 7, ["a" * 32]]
)
def test_a_transfer_id_must_be_one(leg: int, value: Any) -> None:
    with pytest.raises(BadRequest, match="transfer_id"):
        parse_params({**push_legs(PEER, ID)[leg], "transfer_id": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("remote_engine_id", value) for value in (None, "", 7, "a b", "x" * 513)),
        *(("remote_host", value) for value in (None, ["h"])),
        *(("remote_port", value) for value in (None, 0, 65536, "5600", True)),
        ("remote_block_ids", [[1, 2]]),
        ("remote_block_ids", []),
    ],
)
def test_what_d_must_be_told(name: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=name):
        parse_params({**push_legs(PEER, ID)[1], name: value})


def test_the_two_legs_of_a_write() -> None:
    to_prefill, to_decode = json.loads(json.dumps(push_legs(PEER, ID, mode="write")))
    assert parse_params(to_prefill).transfer_id == ID
    asked = parse_params(to_decode)
    assert asked.awaited == Awaited(peer=PEER, transfer_id=ID, write=True)
    assert named(asked, "cmpl-x-0") == asked


def test_a_write_without_a_transfer_id_goes_by_the_request_id() -> None:
    to_prefill, to_decode = push_legs(PEER, ID, mode="write")
    for leg in (to_prefill, to_decode):
        del leg["transfer_id"]
    assert named(parse_params(to_prefill), "cmpl-x-0").transfer_id == "cmpl-x-0"
    awaited = named(parse_params(to_decode), "cmpl-x-0").awaited
    assert awaited == Awaited(peer=PEER, transfer_id="cmpl-x-0", write=True)
    assert offers_in(to_decode) == [], "it has no name yet, so nobody can have been told of it"
    assert named(parse_params(None), "cmpl-x-0") == parse_params(None)


@pytest.mark.parametrize("mode", ["WRITE", "", 1, True, ["push"]])
@pytest.mark.parametrize("flag", ["do_remote_decode", "do_remote_prefill"])
def test_other_modes_are_refused(flag: str, mode: Any) -> None:
    with pytest.raises(BadRequest, match="transfer_mode"):
        parse_params({flag: True, "transfer_mode": mode})


def test_offers_are_found_whatever_is_around_them() -> None:
    to_prefill, to_decode = push_legs(PEER, ID)
    found = offers_in([params(), None, to_decode, {"do_remote_prefill": "?"}, to_prefill, 7])
    assert [offer.peer.engine_id for offer in found] == ["p-1", "p-1"]
    assert found[1] == Awaited(peer=PEER, transfer_id=ID)


def test_where_a_prefill_instance_is() -> None:
    said = {"status": "ok", "engine_id": "p-1", "side_channel": {"host": "host-of-p", "port": 5600}}
    assert side_channel_of(said) == PEER
    for bad in ({"status": "ok"}, {**said, "side_channel": "host-of-p:5600"}, {**said, "engine_id": 1}, [], None):
        with pytest.raises(BadRequest, match="pull"):
            side_channel_of(bad)
