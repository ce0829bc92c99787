"""What a mover leaves behind that dies in the middle of a WRITE: over TCP it lies in sockets, and arrives all the same.

P's kernel goes on sending what P's mover had posted, and D's own mover writes it into D's memory when it gets to it. It
ends with D's mover, whose sockets they are; nothing that P can do or say ends it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from pdkv.simulate.weather import MS

if TYPE_CHECKING:
    from pdkv.simulate.device import Device
    from pdkv.simulate.instance import Life
    from pdkv.simulate.writer import Write

_SLOWEST_MS = (5, 200, 10_000)  # a socket's buffer is read soon; what was lost on the way is sent again much later


class Sockets:
    """Of one world, which draws from lots of its own, so that it goes on as before where nothing comes late."""

    def __init__(self, seed: int, counts: Counter[str], *, used: bool) -> None:
        self._rng, self._counts, self.used = Random(f"{seed} sockets"), counts, used

    def keep(self, write: Write, source: Device) -> None:
        """``write`` is over, or its mover is: of its parts under way some still arrive, as they left ``source``."""
        target, rng = write.target, self._rng
        if not self.used or target is None:
            return
        for remote, local in sorted(write.under_way):
            if rng.random() < 0.5:
                content = source.unit(local, target.device)
                delay_ns = rng.randrange(rng.choice(_SLOWEST_MS) * MS)
                target.later(delay_ns, self._arrive, target, write.post.epoch, remote, content)

    def _arrive(self, target: Life, epoch: int, remote: int, content: array[int]) -> None:
        if target.fences.epoch == epoch:
            target.device.fill(remote, content)
            self._counts["WRITE after its mover"] += 1
