"""Child process: the P of the transfer benchmarks, a control thread and a mover without an engine.

It is a process of its own, as it is in `serve`: its control thread must not share D's interpreter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from transfer_half import Half
from workload import answer_commands

from pdkv.core.ports import FromConsumer, Reply
from pdkv.core.transfer.messages import Announce, Register

_SLOTS = 64


class Producer:
    """Finishes prefills on demand: the KV is in the pool already, so only the hand-over remains."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._half = Half("p", **config)
        self._half.fill(1)
        self._half.start()
        self._leases = 0

    def facts(self) -> dict[str, Any]:
        """Where D finds this side, and the file of its pool (for what is measured beside pdkv's transfers)."""
        return {
            "transport": self._half.control.transport,
            "peer": msgspec.to_builtins(self._half.peer),
            "pool_file": f"/proc/{os.getpid()}/fd/{self._half.pool.fd}",
        }

    def finish(self, blocks: Sequence[int], transfer_id: str | None = None) -> dict[str, Any]:
        """Grant ``blocks`` now; whoever has registered ``transfer_id`` is told (waited for before the clock starts).

        Answers with the grant and the moment (CLOCK_MONOTONIC, seconds) at which the lease began.
        """
        origin = None if transfer_id is None else self._registered(transfer_id)
        finished_s = time.perf_counter()
        self._leases += 1
        source = self._half.grant(tuple(blocks), lease_id=self._leases, slot=self._leases % _SLOTS)
        if origin is not None:
            assert transfer_id is not None
            self._half.submit(replies=(Reply(origin, Announce(transfer_id, source.request_id, source.grant)),))
        return {"finished_s": finished_s, "source": msgspec.to_builtins(source)}

    def _registered(self, transfer_id: str) -> bytes:
        """The connection on which D waits for ``transfer_id``."""
        while True:
            heard = self._half.wait(FromConsumer)
            assert isinstance(heard, FromConsumer)
            if isinstance(heard.message, Register) and heard.message.transfer_id == transfer_id:
                return heard.origin

    def close(self) -> None:
        """End the mover."""
        self._half.close()


def _start(config: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    producer = Producer(config)
    return {name: getattr(producer, name) for name in ("facts", "finish", "close")}


if __name__ == "__main__":
    answer_commands(_start)
