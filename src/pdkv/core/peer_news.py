"""What peers, the control thread and the mover report, and what time alone does to transfers: who is to act on it."""

from __future__ import annotations

from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.ports import (
    Decline,
    FromConsumer,
    FromMover,
    FromProducer,
    GrantsFenced,
    MoverRestarted,
    PeerLost,
    PeerMet,
    ReadEnded,
    WriteEnded,
)
from pdkv.core.scheduler.request import Request
from pdkv.core.scheduler.scheduler import Scheduler
from pdkv.core.transfer.consumer import Consumer
from pdkv.core.transfer.messages import (
    Awaited,
    CancelGrant,
    Done,
    Gone,
    Heartbeat,
    OfGrant,
    Register,
    RegisterWrite,
    RemoteSource,
    Withdraw,
)
from pdkv.core.transfer.producer import Producer
from pdkv.core.transfer.proof import bind
from pdkv.core.transfer.quarantine import LastFence
from pdkv.core.validation import check_source
from pdkv.errors import BadRequest
from pdkv.units import NS_PER_S

_GAVE_WAY = "its grant gave way to a request that waits for memory"


class PeerNews:
    """Brings it to the producer, the consumer and the scheduler of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        producer: Producer,
        consumer: Consumer,
        scheduler: Scheduler,
        last_fence: LastFence,
    ) -> None:
        self._config, self._manager = config, manager
        self._producer, self._consumer, self._scheduler = producer, consumer, scheduler
        self._last_fence = last_fence

    def take_in(self, item: Decline | FromConsumer | FromProducer | PeerMet | PeerLost | FromMover) -> None:
        """One piece of news."""
        match item:
            case Decline(offer=Awaited() as awaited):
                self._consumer.waits.decline(awaited)
            case Decline(offer=RemoteSource() as source):
                self._consumer.decline(source)
            case FromConsumer():
                self._on_consumer(item)
            case FromProducer():
                self._on_producer(item)
            case PeerLost():
                self._on_peer_lost(item)
            case PeerMet():
                self._consumer.turns.met(item.peer, item.clock_offset_ns)
            case ReadEnded():
                self._load_ended(self._consumer.on_read_ended(item))
            case WriteEnded():
                self._producer.on_write_ended(item)
            case GrantsFenced():
                self._consumer.grants.withdrawn.on_fenced(item.grant_ids)
            case MoverRestarted():
                self._last_fence.restarted()
                self._consumer.on_mover_restarted(item.handles)
                self._producer.on_mover_restarted(item)

    def run_timers(self) -> None:
        """Leases and loads whose time is up. The inbox has been drained, so a beat that came in time counts."""
        self._producer.sweep()
        for request, cause in self._consumer.overdue():
            self._give_up_load(request, cause)
        for request in self._consumer.waits.overdue():
            seconds = self._config.push_registration_timeout_ns // NS_PER_S
            self._scheduler.offer_failed(request, f"not announced within {seconds} s of its arrival")
        for request in self._consumer.turns.overdue():
            seconds = self._config.kv_load_timeout_ns // NS_PER_S
            self._scheduler.offer_failed(request, f"no handshake within {seconds} s with the engine that keeps it")
        self._scheduler.give_back_overdue()
        self._scheduler.give_up_grammars()
        for promise in self._consumer.grants.unanswered():
            self._consumer.put_off(promise, _GAVE_WAY)
            self._scheduler.put_off(promise.request, _GAVE_WAY)
        self._consumer.sweep()

    def make_way(self) -> None:
        """The step is planned: memory granted for a prefill that does not begin goes to those who wait for some."""
        if self._scheduler.short_of_memory:
            self._consumer.make_way()

    def _on_consumer(self, item: FromConsumer) -> None:
        match item.message:
            case Heartbeat():
                self._producer.on_heartbeat(item.message, item.received_ns)
            case Done():
                self._producer.on_done(item.message)
            case Register():
                self._producer.on_register(item.message, item.origin, item.received_ns)
            case RegisterWrite():
                self._producer.on_register_write(item.message, item.origin, item.received_ns)
            case CancelGrant():
                self._producer.on_cancel(item.message, item.origin)
            case Withdraw():
                self._producer.on_withdraw(item.message)

    def _on_peer_lost(self, item: PeerLost) -> None:
        for request in self._consumer.waits.at(item.peer):
            self._scheduler.offer_failed(request, item.cause)
        for request in self._consumer.turns.waiting_at(item.peer):
            self._scheduler.offer_failed(request, item.cause)
        for request in self._consumer.grants.lost(item.peer):
            self._give_up_load(request, item.cause)

    def _give_up_load(self, request: Request, cause: str) -> None:
        """It will not come any more, or too late; it may still be moving."""
        self._consumer.abandon(request, cause)
        self._scheduler.load_ended(request, cause)

    def _load_ended(self, ended: tuple[Request, str | None] | None) -> None:
        if ended is not None:
            self._scheduler.load_ended(*ended)

    def _on_producer(self, item: FromProducer) -> None:
        if isinstance(item.message, OfGrant):
            given_back = self._consumer.grants.given_back(item.message, item.peer)
            if given_back is None:
                self._load_ended(self._consumer.on_grant(item.message, item.peer))
            else:
                self._consumer.read_later(given_back)
                self._scheduler.put_off(given_back.request, _GAVE_WAY)
            return
        request = self._consumer.waits.find(item.message.transfer_id, item.peer.engine_id)
        if isinstance(item.message, Gone):
            if request is not None:
                self._consumer.waits.drop(request, tell=False)
                self._scheduler.offer_failed(request, item.message.reason)
            return
        announced = RemoteSource(peer=item.peer, request_id=item.message.request_id, grant=item.message.grant)
        if request is None:  # it has been announced before, has ended, or was never asked for
            self._consumer.press(announced)
            return
        source = bind(announced, request.new.prompt)
        try:
            check_source(request.new, source, self._config, self._manager)
        except BadRequest as error:
            self._scheduler.offer_failed(request, str(error))
            return
        self._consumer.announced(request, source)
        self._scheduler.announced(request)
