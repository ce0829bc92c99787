"""Child process: a producer's half of a transfer, that can be stopped and killed whole. Lives until its stdin closes.

python -m tests.transfer.producer NAME TRANSPORT NUM_BLOCKS BLOCK_BYTES
"""

from __future__ import annotations

import json
import sys

from benchmarks.transfer_half import Half


def main(name: str, transport: str, num_blocks: int, block_bytes: int) -> None:
    """Start, say who and where, and wait."""
    half = Half(name, transport=transport, mover="process", num_blocks=num_blocks, bytes_per_block=block_bytes)
    half.start()
    identity = half.identity
    facts = {
        "port": half.control.port,
        "nonce": identity.nonce,
        "secret": identity.secret.hex(),
        "pool_fd": half.pool.fd,
        "slots_fd": half.slots.fd,
    }
    print(json.dumps(facts), flush=True)
    sys.stdin.read()
    half.close()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))  # type: ignore[arg-type]
