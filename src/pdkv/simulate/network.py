"""Messages between instances: lost, doubled, delayed and reordered as the weather has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from pdkv.core.ports import Reply
from pdkv.core.transfer.messages import Peer, ToConsumer, ToProducer
from pdkv.simulate.clock import VirtualTime
from pdkv.simulate.weather import MS, Weather

#: Gets a message and the port that it came from.
Receiver = Callable[[ToProducer | ToConsumer, int], None]


_APART = 0.1  # of the messages sent together: arrive by themselves, before or behind the others


class Network:
    """Carries peer messages to whoever listens at an address then, the next life of a crashed instance included."""

    def __init__(self, time: VirtualTime, rng: Random, weather: Weather, counts: Counter[str]) -> None:
        self._time, self._rng, self._weather, self._counts = time, rng, weather, counts
        self._newest: dict[tuple[int, int], int] = {}  # (from, to): when the newest message that has arrived was sent
        self._receivers: dict[int, Receiver] = {}
        self._cut_until: dict[int, int] = {}
        self._trains: dict[tuple[int, int], tuple[int, int]] = {}  # (from, to): the newest one's start, and delay

    def listen(self, port: int, receive: Receiver) -> None:
        """``receive`` gets what is sent to ``port`` from now on."""
        self._receivers[port] = receive

    def cut(self, port: int, until_ns: int) -> None:
        """Nothing arrives at ``port`` until then."""
        self._cut_until[port] = max(until_ns, self._cut_until.get(port, 0))

    def is_cut(self, port: int) -> bool:
        """Whether nothing arrives at ``port`` now."""
        return self._cut_until.get(port, 0) > self._time.now_ns

    def loses(self) -> bool:
        """Whether the next message is lost."""
        return self._rng.random() < self._weather.drop

    def delay_ns(self) -> int:
        """How long one message takes."""
        return self._rng.randrange(MS // 10, self._weather.max_delay_ms * MS)

    def send(self, sender: int, peer: Peer, message: ToProducer) -> None:
        """From port ``sender`` to ``peer``, perhaps."""
        self._carry(sender, peer.port, message)

    def reply(self, sender: int, reply: Reply) -> None:
        """To whoever listens by now where the message answered came from."""
        self._carry(sender, int(reply.origin), reply.message)

    def _carry(self, sender: int, port: int, message: ToProducer | ToConsumer) -> None:
        if self.loses():
            self._counts["message lost"] += 1
            return
        doubled = self._rng.random() < self._weather.duplicate
        self._counts["message doubled"] += doubled
        for _ in range(1 + doubled):
            delay_ns = self._delay_in_train_ns(sender, port)
            self._time.after(delay_ns, self._deliver, sender, port, message, self._time.now_ns)

    def _delay_in_train_ns(self, sender: int, port: int) -> int:
        """Messages sent at one instant over one connection mostly arrive together."""
        now_ns = self._time.now_ns
        started_ns, delay_ns = self._trains.get((sender, port), (-1, 0))
        if started_ns != now_ns or self._rng.random() < _APART:
            delay_ns = self.delay_ns()
            self._trains[sender, port] = now_ns, delay_ns
        return delay_ns

    def _deliver(self, sender: int, port: int, message: ToProducer | ToConsumer, sent_ns: int) -> None:
        if self.is_cut(port):
            self._counts["message lost"] += 1
            return
        newest_ns = self._newest.get((sender, port), 0)
        self._counts["message overtaken"] += sent_ns < newest_ns
        self._newest[sender, port] = max(newest_ns, sent_ns)
        self._receivers[port](message, sender)
