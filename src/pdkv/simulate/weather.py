"""How bad a world is: every fault that can happen, with its rate, drawn from the world's seed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random
from typing import NamedTuple

from pdkv.units import NS_PER_S

MS = NS_PER_S // 1000
#: A killed peer makes transfers fail within about this time (measured with NIXL); a stopped one never does.
PEER_DEATH_SEEN_NS = 1000 * MS


class Fate(NamedTuple):
    """What becomes of one transfer: how long it takes, whether that is very long, how it ends if not well."""

    lasts_ns: int
    late: bool
    hangs: bool
    fails: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Shares (0..1) of what happens to messages, reads and requests; rates are per second and instance.

    A world with all of them 0 is calm: nothing is lost or late, so nothing may expire or be read twice.
    """

    drop: float = 0.0  # of the messages: lost
    duplicate: float = 0.0  # sent twice
    max_delay_ms: int = 2  # of a message; later ones may overtake
    outage: float = 0.0  # rate of windows in which an instance's messages are all lost
    read_ms: int = 20  # a READ takes up to so long
    late: float = 0.0  # of the reads: many times longer, beyond lease and deadline
    fail: float = 0.0  # end in an error, half done
    hang: float = 0.0  # never end by themselves, and still write now and then
    mover_crash: float = 0.0  # rate of movers that die by themselves
    crash: float = 0.0  # rate of instances killed (kill -9) and started again
    pause: float = 0.0  # rate of instances stopped whole (SIGSTOP) for a while
    long_step: float = 0.0  # of the steps: a forward pass longer than a lease
    drift_ppm: int = 0  # clocks run up to so much too fast or too slow
    abort: float = 0.0  # of the requests: the client leaves at a random time

    @property
    def calm(self) -> bool:
        """Whether nothing at all goes wrong."""
        return self == Weather(max_delay_ms=self.max_delay_ms, read_ms=self.read_ms, drift_ppm=self.drift_ppm)

    def fate(self, rng: Random) -> Fate:
        """What becomes of the next READ or WRITE."""
        lasts_ns = rng.randrange(1, self.read_ms + 1) * MS
        late = rng.random() < self.late
        if late:
            lasts_ns = rng.randrange(1, 15_000) * MS
        drawn = rng.random()
        hangs = drawn < self.hang
        return Fate(lasts_ns, late, hangs, not hangs and drawn < self.hang + self.fail)

    @classmethod
    def draw(cls, rng: Random) -> Weather:
        """Any weather: one in eight calm, the others with some kinds of fault at rates from rare to awful."""
        quiet = cls(
            max_delay_ms=rng.choice([2, 20, 100]), read_ms=rng.choice([5, 50, 300]),
            drift_ppm=rng.choice([0, 200, 20_000]),
        )  # fmt: skip
        if rng.random() < 0.125:
            return quiet
        worst = {
            "drop": 0.5, "duplicate": 0.5, "outage": 0.2, "late": 0.3, "fail": 0.3, "hang": 0.2, "mover_crash": 0.2,
            "crash": 0.08, "pause": 0.2, "long_step": 0.02, "abort": 0.3,
        }  # fmt: skip
        share = rng.choice([0.3, 0.6, 1.0])
        drawn = {name: most * rng.random() ** 2 if rng.random() < share else 0.0 for name, most in worst.items()}
        late_by = rng.choice([2, 50, 700])
        return cls(max_delay_ms=late_by, read_ms=quiet.read_ms, drift_ppm=quiet.drift_ppm, **drawn)

    def __str__(self) -> str:
        default = Weather()
        changed = [
            f"{field.name} {getattr(self, field.name):.3g}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return ", ".join(changed) or "calm"
