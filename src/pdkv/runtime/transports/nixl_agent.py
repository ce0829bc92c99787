"""The NIXL agent of one mover: one life after the other, each of which can be ended for certain."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from typing import Any

from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import TransferMemory, TransportError
from pdkv.runtime.transports.nixl_api import import_nixl, text
from pdkv.runtime.wire import NixlOffer

log = logging.getLogger("pdkv.mover")


class NixlAgent:
    """``api`` is NIXL's agent of now, the only reference to it; ``offer`` is what peers need to reach it.

    Raises `TransportError` when NIXL is missing or its agent cannot be made.
    """

    def __init__(self, name: str, memory: TransferMemory, own: Sequence[SharedMemory]) -> None:
        """Pool and slots are what peers may reach; ``own`` is registered because NIXL moves out of it and into it, but
        only when what peers are told has been written: its keys are not in it."""
        self._nixl = import_nixl()
        self._name, self._memory, self._own = name, memory, own
        self._lives = 0
        self._loaded: dict[str, set[str]] = {}  # remote agents of this life, with the peers that use each
        self._doomed: list[weakref.ref[Any]] = []  # agents that were dropped and must be gone
        self.api: Any = None
        self.offer: NixlOffer
        self.renew()

    def renew(self) -> None:
        """Make an agent, in place of one that was dropped. Raises `TransportError`."""
        name = f"{self._name}-{self._lives}"
        self._lives += 1
        pool, slots = self._memory.pool, self._memory.slots
        try:
            config = self._nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            api = self._nixl.nixl_agent(name, config)
            api.register_memory([(pool.address, pool.nbytes, pool.device, "")], pool.kind)
            api.register_memory([(slots.address, slots.nbytes, slots.device, "")], "DRAM")
            metadata = api.get_agent_metadata()
            api.register_memory([(own.address, own.nbytes, own.device, "") for own in self._own], "DRAM")
        except Exception as error:  # NIXL's exceptions share no base class of their own
            raise TransportError(f"NIXL cannot make its UCX agent for {pool.kind} memory ({error})") from error
        self.api = api
        self.offer = NixlOffer(
            agent=name,
            metadata=metadata,
            pool_kind=pool.kind,
            pool_device=pool.device,
            pool_address=pool.address,
            slots_address=slots.address,
        )

    def drop(self) -> None:
        """Destroy the agent: UCX's workers go, and with them everything under way. No request of it may be kept.

        Raises `RuntimeError` when it, or one before it, lives on: then nothing is promised.
        """
        if self.api is not None:
            self._doomed.append(weakref.ref(self.api.agent))
        self._loaded.clear()
        self.api = None  # the last reference
        if self._any_alive():
            gc.collect()  # unless it is part of a cycle
            if self._any_alive():
                raise RuntimeError("NIXL's agent lives on, something still refers to it: its reads may go on")

    def _any_alive(self) -> bool:
        self._doomed = [agent for agent in self._doomed if agent() is not None]
        return bool(self._doomed)

    def load(self, peer: str, offer: NixlOffer) -> None:
        """Make the agent that ``peer`` offers known to ours. Raises `TransportError`."""
        users = self._loaded.get(offer.agent)
        if users is None:
            try:
                name = self.api.add_remote_agent(offer.metadata)
            except Exception as error:
                raise TransportError(f"{peer}: NIXL does not take its agent ({error})") from error
            if text(name) != offer.agent:
                raise TransportError(f"{peer}: its metadata is that of agent {text(name)!r}, not {offer.agent!r}")
            users = self._loaded[offer.agent] = set()
        users.add(peer)

    def unload(self, peer: str, offer: NixlOffer) -> None:
        """Forget that agent, when no other peer is reached through it."""
        users = self._loaded.get(offer.agent, set())
        users.discard(peer)
        if not users and self._loaded.pop(offer.agent, None) is not None:
            try:
                self.api.remove_remote_agent(offer.agent)
            except Exception as error:
                log.warning("%s: NIXL did not let go of its agent: %s", peer, str(error))
