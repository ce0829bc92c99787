"""A bare NIXL agent over one registered buffer. As a process: the target of the bare READ, until its stdin closes.

Its buffer is pdkv's own pool, mapped once more: two buffers of the same size were seen to differ by half in speed, from
one start to the next, by where the host had put their pages.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence

import numpy as np

from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.nixl_api import Descriptors, descriptors, import_nixl

_MEMORY = "DRAM"


class NixlEnd:
    """An agent and its buffer. No progress thread, as in pdkv's own use of it."""

    def __init__(self, name: str, memory: SharedMemory) -> None:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        api = import_nixl()
        self.memory = memory
        self.agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.agent.register_memory([(memory.address, memory.nbytes, 0, "")], _MEMORY)

    def connect(self, metadata: bytes, address: int) -> None:
        """Learn of the target whose buffer lies at ``address``."""
        self._target = self.agent.add_remote_agent(metadata)
        self._target_address = address

    def read(self, remote: Sequence[int], local: Sequence[int], block_bytes: int) -> None:
        """One READ of whole blocks, one descriptor each; returns when all bytes are here."""
        handle = self.agent.initialize_xfer(
            "READ",
            self.agent.get_xfer_descs(_blocks(self.memory.address, local, block_bytes), _MEMORY),
            self.agent.get_xfer_descs(_blocks(self._target_address, remote, block_bytes), _MEMORY),
            self._target,
        )
        status = self.agent.transfer(handle)
        while status == "PROC":
            status = self.agent.check_xfer_state(handle)
        if status != "DONE":
            raise RuntimeError(f"the bare READ ended with {status}")
        handle.release()


def _blocks(base: int, ids: Sequence[int], block_bytes: int) -> Descriptors:
    return descriptors(np.asarray(ids, dtype=np.int64) * block_bytes + base, block_bytes)


def main() -> None:
    """Register, say where and who, and keep UCX going until stdin closes."""
    path, nbytes = sys.argv[1], int(sys.argv[2])
    end = NixlEnd("bench-target", SharedMemory.attach(os.open(path, os.O_RDWR), nbytes))
    print(end.memory.address, end.agent.get_agent_metadata().hex(), flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        end.agent.get_new_notifs()


if __name__ == "__main__":
    main()
