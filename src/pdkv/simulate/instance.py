"""One instance in virtual time: the real engine between a simulated device, mover and control thread."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pdkv.core.audit import Audit
from pdkv.core.config import EngineConfig
from pdkv.core.engine import Engine, Identity
from pdkv.core.events import Event, Finished
from pdkv.core.ports import (
    Abort,
    FromConsumer,
    FromProducer,
    InboxItem,
    Int32Array,
    Keepalive,
    NewRequest,
    Plan,
    SendMessage,
)
from pdkv.core.transfer.messages import Heartbeat, OfGrant, Peer, Register, RegisterWrite, ToConsumer, ToProducer
from pdkv.simulate.clock import Action
from pdkv.simulate.device import Device
from pdkv.simulate.handshakes import Handshakes
from pdkv.simulate.mover import Mover
from pdkv.simulate.weather import MS
from pdkv.simulate.writer import Fences, Writer

if TYPE_CHECKING:
    from pdkv.simulate.router import Leg
    from pdkv.simulate.world import World

_NUM_SLOTS = 64
_TICK_NS = 1000 * MS  # an idle engine looks again after so long at the latest, as in `runtime.instance`
_FENCE_SLACK_NS = 500 * MS  # from the step that orders a new mover to its being there
_KEEPALIVE_NS = 60_000 * MS  # beats go on for so long after the engine's last step


class Life:
    """One start of an instance, until it is killed. Its clock is its own: offset, and faster or slower than others."""

    def __init__(self, world: World, name: str, port: int, config: EngineConfig) -> None:
        self.world, self.name, self.alive = world, name, True
        self.peer = Peer(name, "simulated", port)
        rng, drift = world.rng, world.weather.drift_ppm
        self._drift_ppm = rng.randrange(-drift, drift + 1) if drift else 0
        self._offset_ns = rng.randrange(0, 10**15)
        self._stopped_until = 0
        self.slots = np.zeros((_NUM_SLOTS, 2), dtype=np.uint64)
        identity = Identity(engine_id=name, nonce=rng.randrange(1, 2**60), secret=rng.randbytes(32))
        self.engine = Engine(config, identity, self.slots)
        self.device = Device(config.num_blocks, config.groups)
        self.mover, self.writer, self.fences = Mover(self), Writer(self), Fences(self)
        self.handshakes = Handshakes(self)
        self.engine.accept_writes(self.peer)
        self.legs: dict[str, Leg] = {}
        self._ended: list[str] = []  # requests that an outstanding step may still compute
        self._inbox: list[InboxItem] = []
        self._queue: deque[Plan] = deque()
        self._keepalives: tuple[Keepalive, ...] = ()
        self._busy = False
        self._audit = Audit(self.engine)
        self._asked: dict[str | int, Peer] = {}  # by transfer id, and by grant: whom it was registered with
        self._alarm = 0
        self._overdue: dict[tuple[str, int], int] = {}  # quarantined owners past their deadline: since when seen so
        self._last_step_ns = world.time.now_ns
        self.later(config.lease_ns // 6, self._beat)

    # ---------------------------------------------------------------------------------------------------- its time

    @property
    def now_ns(self) -> int:
        """Its own clock."""
        now = self.world.time.now_ns
        return self._offset_ns + now + now * self._drift_ppm // 1_000_000

    @property
    def stopped_for_ns(self) -> int:
        """How long it will stand still (SIGSTOP); 0 when it runs."""
        return max(self._stopped_until - self.world.time.now_ns, 0)

    def stop_for(self, duration_ns: int) -> None:
        """Everything of it, threads and mover included, stands still."""
        self._stopped_until = max(self._stopped_until, self.world.time.now_ns + duration_ns)
        self._overdue.clear()

    def later(self, delay_ns: int, action: Action, *args: Any) -> None:
        """An action of this life: never played after its death, held back while it is stopped."""
        self.world.time.after(delay_ns, self._fire, action, args)

    def _fire(self, action: Action, args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.stopped_for_ns:
            self.world.time.after(self.stopped_for_ns, self._fire, action, args)
        else:
            action(*args)

    # ------------------------------------------------------------------------------------------ what comes from outside

    def submit(self, leg: Leg) -> None:
        """A request over HTTP; raises `PdkvError` when it can never be served."""
        self.engine.validate(leg.new)
        assert leg.new.request_id not in self.legs
        self.legs[leg.new.request_id] = leg
        self.deliver(leg.new)

    def abort(self, leg: Leg) -> None:
        """The connection of a leg was closed."""
        self.later(0, self.deliver, Abort(leg.new.request_id))

    def receive(self, message: ToProducer | ToConsumer, sender: int) -> None:
        """A peer's message, stamped by the control thread when it arrives."""
        self.later(0, self._received, message, sender)

    def _received(self, message: ToProducer | ToConsumer, sender: int) -> None:
        if isinstance(message, ToProducer):
            self.deliver(FromConsumer(message, self.now_ns, str(sender).encode()))
            return
        asked = message.grant_id if isinstance(message, OfGrant) else message.transfer_id
        peer = self._asked.get(asked)  # a connection is to one life of a producer
        if peer is not None and peer.port == sender:
            self.deliver(FromProducer(message, peer))

    def deliver(self, item: InboxItem) -> None:
        """Into the engine's inbox."""
        self._inbox.append(item)
        self._wake()

    # -------------------------------------------------------------------------------------------------- engine's thread

    def _wake(self) -> None:
        if not self._busy:
            self._busy = True
            self.later(0, self._begin)

    def _begin(self) -> None:
        inbox, self._inbox = self._inbox, []
        for item in inbox:
            if isinstance(item, NewRequest):
                self.device.add(item.request_id, self._computed(item))
        self._last_step_ns = self.world.time.now_ns
        plan = self.engine.schedule(self.now_ns, inbox)
        self._check()
        self._check_deadlines()
        self._queue.append(plan)
        self._do(plan)
        rng, weather = self.world.rng, self.world.weather
        lasts_ns = rng.randrange(1, 20 * MS) if len(plan.batch) else rng.randrange(MS // 10, MS)
        if weather.long_step and len(plan.batch) and rng.random() < weather.long_step:
            lasts_ns = rng.randrange(100, 5000) * MS
            self.world.counts["long step"] += 1
        self.later(lasts_ns, self._end, plan)

    def _computed(self, new: NewRequest) -> Int32Array:
        """Of the prompt what is computed here: P may have to leave the last token to D."""
        leaves = new.produce and self.engine.manager.leaves_last_token and len(new.prompt) > 1
        return new.prompt[:-1] if leaves else new.prompt

    def _do(self, plan: Plan) -> None:
        if plan.restart_mover:
            self.mover.kill()
        for post in plan.reads:
            self.mover.post(post)
        for write in plan.writes:
            self.writer.post(write)
        for handle in plan.cancels:
            self.mover.cancel(handle)
            self.writer.cancel(handle)
        self.fences.take(plan)
        for message in plan.messages:
            self._send(message)
        for reply in plan.replies:
            self.world.network.reply(self.peer.port, reply)
        self._keepalives = plan.keepalives
        self.handshakes.keep(plan.keepalives)
        self._tell(plan.events)

    def _send(self, message: SendMessage) -> None:
        said = message.message
        if isinstance(said, Register | RegisterWrite):
            self._asked[said.transfer_id] = message.peer
        if isinstance(said, RegisterWrite):
            said = msgspec.structs.replace(said, epoch=self.fences.epoch)  # as `runtime.control` does
            if said.grant is not None:
                self._asked[said.grant.grant_id] = message.peer
        self.world.network.send(self.peer.port, message.peer, said)

    def _end(self, plan: Plan) -> None:
        depth, worked = self.engine.config.max_outstanding_plans, False
        while self._queue and (len(self._queue) >= depth or len(plan.batch) == 0):
            oldest = self._queue.popleft()
            events = self.engine.complete(oldest.step_id, self.device.run(oldest.batch), self.now_ns)
            if len(oldest.batch):
                worked = True  # some request may have ended, and made room
                self._check()
            self._tell(events)
        if not self._queue:
            self.device.forget(self._ended)
            self._ended.clear()
        self._busy = False
        if self._inbox or worked or self._queue:
            self._wake()
        else:
            self._sleep(plan.next_deadline_ns)

    def _sleep(self, deadline_ns: int | None) -> None:
        """Nothing runs, and nothing has come in: as `runtime.instance`, until something does, or time is up."""
        self._alarm += 1
        waits = [] if deadline_ns is None else [self._world_delay(deadline_ns)]
        if self.engine.requests:
            waits.append(_TICK_NS)
        if waits:
            self.later(min(waits), self._ring, self._alarm)

    def _world_delay(self, deadline_ns: int) -> int:
        """How long until its own clock shows ``deadline_ns``."""
        return max(deadline_ns - self.now_ns, 0) * 1_000_000 // (1_000_000 + self._drift_ppm) + 1000

    def _ring(self, alarm: int) -> None:
        if alarm == self._alarm:
            self._wake()

    def _tell(self, events: tuple[Event, ...]) -> None:
        self.world.took(self, events)
        for event in events:
            leg = self.legs.get(event.request_id)
            if leg is None:
                continue
            if isinstance(event, Finished):
                del self.legs[event.request_id]
                self._ended.append(event.request_id)
            self.world.router.heard(leg, event)

    # ------------------------------------------------------------------------------------------------- control thread

    def _beat(self) -> None:
        """Heartbeats do not wait for steps."""
        if self.world.time.now_ns - self._last_step_ns < _KEEPALIVE_NS:
            for keepalive in self._keepalives:
                if not keepalive.tokens:
                    continue
                self.world.network.send(self.peer.port, keepalive.peer, Heartbeat(keepalive.tokens))
        if self.world.open:
            self.later(self.engine.config.lease_ns // 6, self._beat)

    # -------------------------------------------------------------------------------------------------------- judging

    def _check(self) -> None:
        """What the event has changed is recounted, everything now and then."""
        self._audit.check()

    def _check_deadlines(self) -> None:
        """Every owner of memory that names a deadline has let go soon after it."""
        seen, self._overdue = self._overdue, {}
        for holder in self.engine.manager.overdue():
            key = holder.request_id, holder.since_ns
            self._overdue[key] = seen.get(key, self.now_ns)
            slack_ns = _FENCE_SLACK_NS if holder.account == "quarantine" else 0
            assert self.now_ns - self._overdue[key] < slack_ns, f"{self.name}: {holder} is overdue"

    def held(self) -> list[str]:
        """Every owner of blocks, in words; empty when all memory is free."""
        return [
            f"{self.name}: {holder.request_id} holds {holder.blocks} blocks as {holder.account} ({holder.cause})"
            for holder in self.engine.memory().holders
        ]


class Instance:
    """A place where lives of one engine follow each other: ``life`` is the present one, ``None`` while it is down.

    All have the same ``config``.
    """

    def __init__(self, world: World, name: str, port: int, config: EngineConfig) -> None:
        self._world, self._name, self._port, self.config = world, name, port, config
        self._starts = 0
        self.life: Life | None = None
        world.network.listen(port, self._receive)
        self.start()

    def start(self) -> None:
        """A new life with empty memory and a new engine id."""
        self._starts += 1
        self.life = Life(self._world, f"{self._name}.{self._starts}", self._port, self.config)

    def kill(self) -> None:
        """kill -9: engine, control thread and mover are gone at once; connections break."""
        life, self.life = self.life, None
        if life is None:
            return
        life.alive = False
        life.writer.fence()  # the locks of a process end with it
        self._world.note(life.name, "killed")
        for leg in life.legs.values():
            self._world.time.after(self._world.network.delay_ns(), self._world.router.lost, leg)
        for other in self._world.lives():
            other.mover.peer_died(life)
            other.writer.peer_died(life)
            other.handshakes.broke(life.peer)

    def _receive(self, message: ToProducer | ToConsumer, sender: int) -> None:
        if self.life is not None:
            self.life.receive(message, sender)
