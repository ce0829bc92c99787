"""Host names in ``kv_transfer_params`` to addresses, before anything of the instance has to wait for a name server.

ZMQ looks names up on the one thread that also carries every heartbeat, so the side channel takes addresses only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from pdkv.core.transfer.messages import Awaited, RemoteSource
from pdkv.runtime.addresses import address_of

_TIMEOUT_S = 5.0
_KEEP_S = 30.0
_MAX_NAMES = 1024
_THREADS = 4

Offer = TypeVar("Offer", bound=RemoteSource | Awaited)


class PeerNames:
    """Looks names up on threads of its own, each once for all who ask, and keeps what it found for 30 s."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pdkv-names")
        self._found: dict[str, tuple[float, asyncio.Future[str]]] = {}

    def close(self) -> None:
        """Wait for no name any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def resolve(self, offer: Offer) -> Offer:
        """``offer`` with an address for a name. A name that has none within 5 s stays, and then its read fails."""
        if is_address(offer.peer.host):
            return offer
        address = await self._address(offer.peer.host)
        return msgspec.structs.replace(offer, peer=msgspec.structs.replace(offer.peer, host=address))

    async def _address(self, name: str) -> str:
        now = time.monotonic()
        asked_at, look_up = self._found.get(name, (0.0, None))
        if look_up is None or (look_up.done() and now - asked_at > _KEEP_S):
            if len(self._found) >= _MAX_NAMES:
                self._found.clear()
            look_up = asyncio.get_running_loop().run_in_executor(self._threads, _look_up, name)
            self._found[name] = (now, look_up)
        try:
            return await asyncio.wait_for(asyncio.shield(look_up), _TIMEOUT_S)
        except TimeoutError:
            return name


def is_address(host: str) -> bool:
    """Whether ``host`` is an IPv4 or IPv6 address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _look_up(name: str) -> str:
    """An address of ``name``; the name itself when it has none."""
    return address_of(name) or name
