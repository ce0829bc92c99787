"""Messages between instances: lost, doubled, delayed and reordered as the weather has it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from pdkv.core.ports import Reply
from pdkv.core.transfer.messages import Peer, ToConsumer, ToProducer
from pdkv.simulate.clock import VirtualTime
from pdkv.simulate.weather import MS, Weather

#: Gets a message and the port that it came from.
Receiver = Callable[[ToProducer | ToConsumer, int], None]


class Network:
    """Carries peer messages to whoever listens at an address then, the next life of a crashed instance included."""

    def __init__(self, time: VirtualTime, rng: Random, weather: Weather) -> None:
        self._time, self._rng, self._weather = time, rng, weather
        self._receivers: dict[int, Receiver] = {}
        self._cut_until: dict[int, int] = {}

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
            return
        for _ in range(2 if self._rng.random() < self._weather.duplicate else 1):
            self._time.after(self.delay_ns(), self._deliver, sender, port, message)

    def _deliver(self, sender: int, port: int, message: ToProducer | ToConsumer) -> None:
        if not self.is_cut(port):
            self._receivers[port](message, sender)
