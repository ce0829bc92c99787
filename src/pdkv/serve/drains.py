"""Taking an instance out of service without losing a request: it gets no new ones, and one sees when it is empty."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pdkv.serve.http import JsonResponse, error_response, read_body
from pdkv.serve.openai import ApiError
from pdkv.serve.placement import Placement, Seat
from pdkv.serve.strict_json import parse_json


class Drains:
    """``GET /admin/instances`` and ``POST /admin/drain``, for callers on the router's own host only."""

    def __init__(self, placements: Sequence[Placement]) -> None:
        self._seats = [seat for placement in placements for seat in placement.seats.values()]

    async def instances(self, request: Request) -> Response:
        """Every instance: whether it is draining, what is in flight through this router, and its own last figures."""
        if not _is_local(request):
            return _refused()
        return JsonResponse({"instances": [_facts(seat) for seat in self._seats]})

    async def drain(self, request: Request) -> Response:
        """``{"instance": "decode-0" or its URL, "drain": true}``: no new requests for it; false: it gets them again."""
        if not _is_local(request):
            return _refused()
        try:
            if not request.headers.get("content-type", "").startswith("application/json"):
                # A web page in a browser on this host could send anything else without being asked.
                raise ApiError(415, "send this as content-type: application/json")
            body = parse_json(await read_body(request))
            seat = self._find(body.get("instance"))
            wanted = body.get("drain", True)
            if not isinstance(wanted, bool):
                raise ApiError(400, f"drain is {wanted!r}; it is true or false", param="drain")
        except ApiError as error:
            return error_response(error)
        seat.draining = wanted
        return JsonResponse(_facts(seat))

    def _find(self, name: object) -> Seat:
        for seat in self._seats:
            if name in (seat.backend.label, seat.backend.url):
                return seat
        known = ", ".join(seat.backend.name for seat in self._seats)
        raise ApiError(404, f"there is no instance {name!r} behind this router; there are {known}", param="instance")


def _facts(seat: Seat) -> dict[str, Any]:
    figures = seat.figures
    return {
        "instance": seat.backend.label,
        "url": seat.backend.url,
        "draining": seat.draining,
        "in_flight": seat.in_flight,
        "resting": seat.backend.resting,
        "num_blocks": figures and figures.num_blocks,
        "free_blocks": figures and figures.free_blocks,
        "waiting": figures and figures.waiting,
    }


def _is_local(request: Request) -> bool:
    """Whether the caller is on this host, and no proxy speaks for somebody else."""
    if request.client is None or "x-forwarded-for" in request.headers or "forwarded" in request.headers:
        return False
    try:
        return ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def _refused() -> Response:
    return error_response(ApiError(403, "instances are drained from the router's own host only; call 127.0.0.1 there"))
