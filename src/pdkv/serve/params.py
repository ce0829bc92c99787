"""`kv_transfer_params`: the JSON in which a lease travels from P's answer through a router to D (pd-transfer.md §2).

The fields are vLLM's, so existing routers work unchanged; ``pdkv_slot``, ``pdkv_nonce``, ``pdkv_lease_id``,
``pdkv_token``, ``pdkv_proof`` and ``pdkv_block_size`` are ours (64-bit words as hex strings: JSON numbers lose bits
above 2**53).

In bidirectional mode D's answer has such params, too, of the KV that it keeps for the conversation's next turn, with
``do_remote_decode``: a router gives them to that turn's P as they are. ``remote_blocks_expiry_time`` is then D's
deadline in seconds of D's monotonic clock, ``pdkv_marks`` and ``pdkv_mark_tokens`` name the prefixes that P may use.

In push mode both legs begin at once, so D is not given a lease but told who will announce one: P's side channel, and
the ``transfer_id`` that P was given too. Whoever knows that id can fetch the KV, so routers draw it at random. In mode
``write`` P writes the KV into D's memory; without a ``transfer_id`` the two are matched by their request ids, as vLLM's
push does (spec pd-transfer 6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import msgspec

from pdkv.core.transfer.messages import Awaited, Grant, Peer, RemoteSource, TransferMode
from pdkv.core.transfer.proof import MARK_BYTES, MOST_MARKS
from pdkv.errors import BadRequest
from pdkv.runtime.shown import readable
from pdkv.units import NS_PER_S

_NAME = re.compile(r"[!-~]{1,512}")  # an id or a host; it will stand in logs
_TRANSFER_ID = re.compile(r"[!-~]{16,256}")  # long enough for one that cannot be guessed

KV_HEADER = "x-pdkv-kv"
"""In which D says what became of the KV it was offered: ``loaded``, ``cached`` (not needed) or ``recomputed``."""

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


def push_legs(peer: Peer, transfer_id: str, *, mode: str = "push") -> tuple[dict[str, Any], dict[str, Any]]:
    """What a router sends to P and to D when both begin at once; ``peer`` is P's side channel.

    ``mode``: ``push`` has P announce what D then reads, ``write`` has P write it into D's memory.
    """
    prefill = {**PREFILL_LEG, "transfer_mode": mode, "transfer_id": transfer_id}
    decode = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_mode": mode,
        "transfer_id": transfer_id,
        "remote_engine_id": peer.engine_id,
        "remote_host": peer.host,
        "remote_port": peer.port,
    }
    return prefill, decode


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """What the params of one prompt ask for: keep its KV (``produce``), load it, both (the turn before) or neither.

    It is loaded from where it is (``source``), or from where it will be announced, or written by (``awaited``).
    ``transfer_id``, with ``produce``: under which that happens. Mode ``write`` may leave the id out, here and in
    ``awaited``: then it is ``""``, and the request's own id takes its place (`named`).
    """

    produce: bool = False
    transfer_id: str | None = None
    source: RemoteSource | None = None
    awaited: Awaited | None = None

    @property
    def offer(self) -> RemoteSource | Awaited | None:
        """Where the KV comes from, if not from here."""
        return self.source or self.awaited


ORDINARY = TransferRequest()


def side_channel_of(health: Any) -> Peer:
    """Who a prefill instance is and where its side channel is, from its ``/health``. Raises `BadRequest` without."""
    said = health if isinstance(health, dict) else {}
    where = said.get("side_channel")
    where = where if isinstance(where, dict) else {}
    given = _Fields(
        {
            "remote_engine_id": said.get("engine_id"),
            "remote_host": where.get("host"),
            "remote_port": where.get("port"),
        }
    )
    peer = given.peer()
    if given.problems:
        raise BadRequest("it is no pdkv instance that can push; use --transfer-mode pull")
    return peer


def grant_to_params(
    grant: Grant,
    *,
    engine_id: str,
    request_id: str,
    host: str,
    port: int,
    tp_size: int,
    kept_until_ns: int | None = None,
) -> dict[str, Any]:
    """P's answer: every key of vLLM's, plus pdkv's six. ``host``/``port`` are P's side channel, ``tp_size`` its ranks
    (for who reads vLLM's params: the other side learns of them by the handshake).

    With ``kept_until_ns`` D's answer: what it keeps for the next turn, and until when.
    """
    kept = kept_until_ns is not None
    marks = {"pdkv_marks": grant.marks.hex(), "pdkv_mark_tokens": grant.mark_tokens} if kept else {}
    return {
        "do_remote_prefill": not kept,
        "do_remote_decode": kept,
        "remote_block_ids": [list(grant.block_ids)],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": tp_size,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": grant.num_tokens,
        "remote_blocks_expiry_time": None if kept_until_ns is None else kept_until_ns / NS_PER_S,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": grant.cached_tokens,
        "pdkv_slot": grant.slot,
        "pdkv_nonce": f"{grant.nonce:016x}",
        "pdkv_lease_id": f"{grant.lease_id:016x}",
        "pdkv_token": grant.token.hex(),
        "pdkv_proof": grant.proof.hex(),
        "pdkv_block_size": grant.block_size,
        **marks,
    }


def check_form(params: object) -> None:
    """Raises `BadRequest` unless ``params`` are null, an object, or a list of these: for who strips them unread."""
    if not all(item is None or isinstance(item, dict) for item in (params if isinstance(params, list) else [params])):
        raise BadRequest(
            f"kv_transfer_params: an object, or a list of one for each prompt, got {readable(repr(params))}"
        )


def parse_params(params: Mapping[str, Any] | None) -> TransferRequest:
    """What ``params`` ask for; null, or neither flag set, is an ordinary request; unknown keys are ignored.

    Raises `BadRequest` when both flags are set, or ``do_remote_prefill`` comes without everything that proves the
    grant (in push mode: that says who will announce one): what is missing or ill-typed is named.
    """
    if not params:
        return ORDINARY
    decode, prefill = (_flag(params, name) for name in ("do_remote_decode", "do_remote_prefill"))
    if decode and prefill:
        raise BadRequest(
            "kv_transfer_params: do_remote_decode and do_remote_prefill are both true; "
            "the first belongs to the prefill instance's request, the second to the decode instance's"
        )
    if not decode and not prefill:
        return ORDINARY
    mode = _mode(params)
    if decode:
        transfer_id = None if mode == "pull" else _transfer_id(params, mode)
        source = _kept(params) if mode == "pull" else None
        return TransferRequest(produce=True, transfer_id=transfer_id, source=source)
    return (
        TransferRequest(source=_source(params)) if mode == "pull" else TransferRequest(awaited=_awaited(params, mode))
    )


def named(transfer: TransferRequest, request_id: str) -> TransferRequest:
    """``transfer`` with the id under which its KV is written; ``request_id`` is without the suffix that each side adds.

    The same on both sides when the router sends both legs with one ``x-request-id``.
    """
    if transfer.transfer_id == "":
        return replace(transfer, transfer_id=request_id)
    if transfer.awaited is not None and transfer.awaited.transfer_id == "":
        return replace(transfer, awaited=msgspec.structs.replace(transfer.awaited, transfer_id=request_id))
    return transfer


def offers_in(params: Any) -> list[RemoteSource | Awaited]:
    """The grants, given or promised, in ``params`` of whatever form: to give back when their request is refused."""
    offers = []
    for item in params if isinstance(params, list) else [params]:
        try:
            offer = parse_params(item).offer if isinstance(item, dict) else None
        except BadRequest:  # not a grant
            continue
        if offer is not None and not (isinstance(offer, Awaited) and offer.transfer_id == ""):
            offers.append(offer)
    return offers


def _mode(params: Mapping[str, Any]) -> str:
    mode = params.get("transfer_mode")
    if mode not in (None, *get_args(TransferMode)):
        raise BadRequest(f"kv_transfer_params.transfer_mode: pull, push or write, got {readable(repr(mode))}")
    return mode or "pull"


def _transfer_id(params: Mapping[str, Any], mode: str) -> str:
    value = params.get("transfer_id")
    if value is None and mode == "write":
        return ""
    if not isinstance(value, str) or _TRANSFER_ID.fullmatch(value) is None:
        raise BadRequest(
            f"kv_transfer_params.transfer_id: {mode} needs one of 16 to 256 printable ASCII characters, the same for "
            f"both instances, new and not to be guessed; got {readable(repr(value))}"
        )
    return value


def _awaited(params: Mapping[str, Any], mode: str) -> Awaited:
    transfer_id, given = _transfer_id(params, mode), _Fields(params)
    peer = given.peer()
    if params.get("remote_block_ids") is not None:
        given.problems.append("remote_block_ids (none: they come with the announcement)")
    if given.problems:
        raise BadRequest(
            f"kv_transfer_params: in {mode} mode the decode instance must be told whom to wait for. Missing or "
            f"malformed: {', '.join(given.problems)}. They are the prefill instance's engine_id and "
            "side_channel in its /health"
        )
    return Awaited(peer=peer, transfer_id=transfer_id, write=mode == "write")


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BadRequest(f"kv_transfer_params.{name}: must be true or false, got {readable(repr(value))}")


class _Fields:
    """Typed reading of ``params``; what is missing or malformed is noted in ``problems`` and stands for nothing."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params
        self.problems: list[str] = []

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self._params.get(name, default)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.problems.append(f"{name} (an integer from {low} to {high})")
            return low
        return value

    def text(self, name: str) -> str:
        value = self._params.get(name)
        if not isinstance(value, str) or _NAME.fullmatch(value) is None:
            self.problems.append(f"{name} (1 to 512 printable ASCII characters without spaces)")
            return ""
        return value

    def hexadecimal(self, name: str, digits: int) -> str:
        value = self._params.get(name)
        if not isinstance(value, str) or len(value) != digits or any(c not in "0123456789abcdef" for c in value):
            self.problems.append(f"{name} ({digits} hex digits)")
            return "0" * digits
        return value

    def marks(self, name: str) -> bytes:
        value = self._params.get(name)
        digits = len(value) if isinstance(value, str) else 0
        if not 0 < digits <= 2 * MARK_BYTES * MOST_MARKS or digits % (2 * MARK_BYTES):
            self.problems.append(f"{name} ({2 * MARK_BYTES} hex digits for each)")
            return b""
        return bytes.fromhex(self.hexadecimal(name, digits))

    def seconds(self, name: str) -> float:
        """At most 2**53 of them: what a clock can show."""
        value = self._params.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -(2**53) <= value <= 2**53:
            self.problems.append(f"{name} (seconds)")
            return 0.0
        return float(value)

    def peer(self) -> Peer:
        engine_id, host = self.text("remote_engine_id"), self.text("remote_host")
        return Peer(engine_id=engine_id, host=host, port=self.integer("remote_port", 1, 65535))


def _kept(params: Mapping[str, Any]) -> RemoteSource | None:
    """What D has kept of the turn before. ``None`` where nothing is said of it, or nothing that can be proved.

    It only saves time, so it is no reason to refuse a request.
    """
    if params.get("remote_block_ids") is None:
        return None
    given = _Fields(params)
    seconds = given.seconds("remote_blocks_expiry_time")
    marks, mark_tokens = given.marks("pdkv_marks"), given.integer("pdkv_mark_tokens", 1, 2**31 - 1)
    if given.problems:
        return None
    try:
        source = _source(params)
    except BadRequest:
        return None
    grant = msgspec.structs.replace(source.grant, marks=marks, mark_tokens=mark_tokens)
    return msgspec.structs.replace(source, grant=grant, expires_ns=round(seconds * NS_PER_S))


def _source(params: Mapping[str, Any]) -> RemoteSource:
    given = _Fields(params)
    blocks = _block_ids(params.get("remote_block_ids"))
    if blocks is None:
        given.problems.append("remote_block_ids ([[block ids]], one list)")
    source = RemoteSource(
        peer=given.peer(),
        request_id=given.text("remote_request_id"),
        grant=Grant(
            block_ids=blocks or (),
            block_size=given.integer("pdkv_block_size", 1, 2**31 - 1),
            num_tokens=given.integer("remote_num_tokens", 1, 2**31 - 1),
            slot=given.integer("pdkv_slot", 0, 2**31 - 1),
            nonce=int(given.hexadecimal("pdkv_nonce", 16), 16),
            lease_id=int(given.hexadecimal("pdkv_lease_id", 16), 16),
            token=bytes.fromhex(given.hexadecimal("pdkv_token", 32)),
            proof=bytes.fromhex(given.hexadecimal("pdkv_proof", 32)),
            cached_tokens=given.integer("remote_prefill_cached_tokens", 0, 2**31 - 1, default=0),
        ),
    )
    if given.problems:
        raise BadRequest(
            "kv_transfer_params: block ids are never trusted without token and proof. Missing or malformed: "
            f"{', '.join(given.problems)}. Pass on what a pdkv prefill instance answered, unchanged, or leave "
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
