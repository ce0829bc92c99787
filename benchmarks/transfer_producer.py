"""Child process: the P of the transfer benchmarks, a control thread and a mover without an engine.

It is a process of its own, as it is in `serve`: its control thread must not share D's interpreter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from transfer_half import Half
from workload import answer_commands

from pdkv.core.ports import FromConsumer, PostWrite, Reply, WriteEnded
from pdkv.core.transfer.messages import Announce, Register, RegisterWrite, Written

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
        """The prefill into ``blocks`` is over: hand them over as whoever has registered ``transfer_id`` asked for, by
        an announcement or a WRITE (the registration is waited for before the clock starts); without an id just grant.

        Answers with the moment (CLOCK_MONOTONIC, seconds) at which that began, and the grant if there is one.
        """
        heard = None if transfer_id is None else self._registered(transfer_id)
        finished_s = time.perf_counter()
        if heard is not None and isinstance(heard.message, RegisterWrite):
            self._write(blocks, heard.message, heard.origin)
            return {"finished_s": finished_s}
        self._leases += 1
        source = self._half.grant(tuple(blocks), lease_id=self._leases, slot=self._leases % _SLOTS)
        if heard is not None:
            assert transfer_id is not None
            self._half.submit(replies=(Reply(heard.origin, Announce(transfer_id, source.request_id, source.grant)),))
        return {"finished_s": finished_s, "source": msgspec.to_builtins(source)}

    def _write(self, blocks: Sequence[int], asked: RegisterWrite, origin: bytes) -> None:
        """Into the consumer's memory, and tell it when all is there. Raises `RuntimeError` when it does not work."""
        grant = asked.grant
        assert grant is not None
        self._half.handles += 1
        remote, local = np.asarray(grant.block_ids, np.int32), np.asarray(blocks, np.int32)
        write = PostWrite(self._half.handles, asked.consumer, grant, remote, local, asked.epoch)
        self._half.submit(writes=(write,))
        ended = self._half.wait(WriteEnded)
        assert isinstance(ended, WriteEnded)
        if ended.error is not None:
            raise RuntimeError(ended.error)
        self._half.submit(replies=(Reply(origin, Written(grant.nonce, grant.grant_id, ended.moved_bytes)),))

    def _registered(self, transfer_id: str) -> FromConsumer:
        """The registration of ``transfer_id``."""
        while True:
            heard = self._half.wait(FromConsumer)
            assert isinstance(heard, FromConsumer)
            if isinstance(heard.message, Register | RegisterWrite) and heard.message.transfer_id == transfer_id:
                return heard

    def close(self) -> None:
        """End the mover."""
        self._half.close()


def _start(config: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    producer = Producer(config)
    return {name: getattr(producer, name) for name in ("facts", "finish", "close")}


if __name__ == "__main__":
    answer_commands(_start)
