"""What one READ of a 2,048-token prompt costs between instances of other block sizes or numbers of ranks, as JSON.

30 layers, 4 KV heads of 64 float32 (smollm2 has 3, which no two ranks can share): 120 MiB. Each case is the best of
``--rounds`` READs by real movers on this host, beside equal pools in the same run.

    python -m benchmarks.unlike_peers --json
"""

from __future__ import annotations

import argparse
import json

import msgspec
import numpy as np
from benchmarks.transfer_half import Half

from pdkv.runtime.geometry import Geometry
from pdkv.runtime.transports.segments import Mapping

_TOKENS = 2048
_EQUAL = Geometry(ranks=1, num_blocks=_TOKENS // 16, layers=30, vectors=2, block_size=16, heads=4, head_bytes=256)


def _pool(ranks: int = 1, block_size: int = 16) -> Geometry:
    return msgspec.structs.replace(_EQUAL, ranks=ranks, block_size=block_size, num_blocks=_TOKENS // block_size)


CASES = {
    "equal": (_pool(), _pool()),
    "TP 2 to 2": (_pool(2), _pool(2)),
    "TP 1 to 2": (_pool(), _pool(2)),
    "TP 2 to 1": (_pool(2), _pool()),
    "blocks of 32 to 16": (_pool(block_size=32), _pool()),
    "blocks of 16 to 32": (_pool(), _pool(block_size=32)),
    "TP 1 to 2, blocks of 32 to 16": (_pool(block_size=32), _pool(2)),
}


def measure(transport: str, theirs: Geometry, ours: Geometry, rounds: int) -> dict[str, float | int]:
    """Seconds of the fastest READ, its rate, and the copies it is made of."""
    count = _TOKENS // min(theirs.block_size, ours.block_size)
    units = np.random.default_rng(1).permutation(count).astype(np.int32)
    slices = list(Mapping(theirs, ours).slices(units, units[::-1]))
    producer = Half("producer", transport=transport, geometry=theirs).start()
    consumer = Half("consumer", transport=transport, geometry=ours).start()
    try:
        producer.fill(1)
        source = producer.grant((1,))
        ended = [
            consumer.read(source, tuple(units[::-1].tolist()), tuple(units.tolist())) for _ in range(rounds + 1)
        ]  # the first one touches the pages
    finally:
        consumer.close()
        producer.close()
    assert all(one.error is None for one in ended), ended
    seconds = min(one.seconds for one in ended[1:])
    return {
        "ms": round(seconds * 1e3, 2),
        "GB/s": round(ended[0].moved_bytes / seconds / 1e9, 2),
        "slices": len(slices),
        "copies": sum(part.copies for part in slices),
    }


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", default="shm,nixl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object (the default is a table)")
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float | int]]] = {}
    for transport in options.transports.split(","):
        for name, pools in CASES.items():
            figures = results.setdefault(transport, {})[name] = measure(transport, *pools, options.rounds)
            if not options.json:
                shown = "  ".join(f"{key} {value:>8}" for key, value in figures.items())
                print(f"{transport:5} {name:32} {shown}", flush=True)
    if options.json:
        print(json.dumps({"prompt_tokens": _TOKENS, "results": results}))


if __name__ == "__main__":
    main()
