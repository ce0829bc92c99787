"""`kv_transfer_params`: the JSON in which a lease travels from P's answer through a router to D (pd-transfer.md §2).

The fields are vLLM's, so existing routers work unchanged; ``pdkv_slot``, ``pdkv_nonce``, ``pdkv_lease_id``,
``pdkv_token`` and ``pdkv_proof`` are ours (64-bit words as hex strings: JSON numbers lose bits above 2**53).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdkv.core.ports import Grant, Peer, RemoteSource
from pdkv.errors import BadRequest
from pdkv.runtime.shown import readable

_NAME = re.compile(r"[!-~]{1,512}")  # an id or a host; it will stand in logs

PREFILL_LEG: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_request_id": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router sends to P."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """What the params of one prompt ask for: keep its KV (``produce``), or load it (``source``), or neither."""

    produce: bool = False
    source: RemoteSource | None = None


ORDINARY = TransferRequest()


def grant_to_params(grant: Grant, *, engine_id: str, request_id: str, host: str, port: int) -> dict[str, Any]:
    """P's answer: every key of vLLM's, plus pdkv's five. ``host``/``port`` are P's side channel."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(grant.block_ids)],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": grant.num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": grant.cached_tokens,
        "pdkv_slot": grant.slot,
        "pdkv_nonce": f"{grant.nonce:016x}",
        "pdkv_lease_id": f"{grant.lease_id:016x}",
        "pdkv_token": grant.token.hex(),
        "pdkv_proof": grant.proof.hex(),
    }


def parse_params(params: Mapping[str, Any] | None) -> TransferRequest:
    """What ``params`` ask for; null, or neither flag set, is an ordinary request; unknown keys are ignored.

    Raises `BadRequest` when both flags are set, or ``do_remote_prefill`` comes without everything that proves the
    grant: what is missing or ill-typed is named.
    """
    if not params:
        return ORDINARY
    decode, prefill = (_flag(params, name) for name in ("do_remote_decode", "do_remote_prefill"))
    if decode and prefill:
        raise BadRequest(
            "kv_transfer_params: do_remote_decode and do_remote_prefill are both true; "
            "the first belongs to the prefill instance's request, the second to the decode instance's"
        )
    if decode:
        return TransferRequest(produce=True)
    if prefill:
        return TransferRequest(source=_source(params))
    return ORDINARY


def offered_sources(params: Any) -> list[RemoteSource]:
    """The grants in ``params`` of whatever form, for giving them back when the request around them is refused."""
    sources = []
    for item in params if isinstance(params, list) else [params]:
        try:
            source = parse_params(item).source if isinstance(item, dict) else None
        except BadRequest:  # not a grant
            continue
        if source is not None:
            sources.append(source)
    return sources


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BadRequest(f"kv_transfer_params.{name}: must be true or false, got {readable(repr(value))}")


def _source(params: Mapping[str, Any]) -> RemoteSource:
    problems: list[str] = []

    def integer(name: str, low: int, high: int, default: int | None = None) -> int:
        value = params.get(name, default)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            problems.append(f"{name} (an integer from {low} to {high})")
            return low
        return value

    def text(name: str) -> str:
        value = params.get(name)
        if not isinstance(value, str) or _NAME.fullmatch(value) is None:
            problems.append(f"{name} (1 to 512 printable ASCII characters without spaces)")
            return ""
        return value

    def hexadecimal(name: str, digits: int) -> str:
        value = params.get(name)
        if not isinstance(value, str) or len(value) != digits or any(c not in "0123456789abcdef" for c in value):
            problems.append(f"{name} ({digits} hex digits)")
            return "0" * digits
        return value

    blocks = _block_ids(params.get("remote_block_ids"))
    if blocks is None:
        problems.append("remote_block_ids ([[block ids]], one list)")
    source = RemoteSource(
        peer=Peer(engine_id=text("remote_engine_id"), host=text("remote_host"), port=integer("remote_port", 1, 65535)),
        request_id=text("remote_request_id"),
        grant=Grant(
            block_ids=blocks or (),
            num_tokens=integer("remote_num_tokens", 1, 2**31 - 1),
            slot=integer("pdkv_slot", 0, 2**31 - 1),
            nonce=int(hexadecimal("pdkv_nonce", 16), 16),
            lease_id=int(hexadecimal("pdkv_lease_id", 16), 16),
            token=bytes.fromhex(hexadecimal("pdkv_token", 32)),
            proof=bytes.fromhex(hexadecimal("pdkv_proof", 32)),
            cached_tokens=integer("remote_prefill_cached_tokens", 0, 2**31 - 1, default=0),
        ),
    )
    if problems:
        raise BadRequest(
            "kv_transfer_params: block ids are never trusted without token and proof. Missing or malformed: "
            f"{', '.join(problems)}. Pass on what a pdkv prefill instance answered, unchanged, or leave "
            "kv_transfer_params out and the prompt is computed here"
        )
    return source


def _block_ids(value: object) -> tuple[int, ...] | None:
    """The one group's block ids; ``[1, 2]`` is accepted beside vLLM's ``[[1, 2]]``. ``None`` when neither."""
    if not isinstance(value, list) or not value:
        return None
    if isinstance(value[0], list):
        if len(value) != 1:
            return None
        value = value[0]
    if not value or not all(isinstance(b, int) and not isinstance(b, bool) and 0 < b < 2**31 for b in value):
        return None
    return tuple(value)
