"""Late push over the side channel of two instances: registrations, answers to them, and peers that cannot answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from benchmarks.transfer_half import FACTS, Half

from pdkv.core.ports import FromConsumer, FromProducer, Keepalive, PeerLost, PeerMet, Reply, SendMessage
from pdkv.core.transfer.messages import Announce, Gone, Peer, Register, ToProducer, Withdraw
from pdkv.runtime.peer_link import Handshake

ID = "0123456789abcdef"


def start(name: str, **options: object) -> Half:
    return Half(name, transport="shm", mover="thread", **options).start()  # type: ignore[arg-type]


@pytest.fixture(params=[None, b"k" * 32], ids=["plain", "sealed"])
def secret(request: pytest.FixtureRequest) -> bytes | None:
    """What all peers prove to each other, if anything."""
    key: bytes | None = request.param
    return key


@pytest.fixture
def pair(secret: bytes | None) -> Iterator[tuple[Half, Half]]:
    producer, consumer = (start(name, secret=secret) for name in ("producer", "consumer"))
    yield producer, consumer
    consumer.close()
    producer.close()


def tell(consumer: Half, peer: Peer, message: ToProducer) -> None:
    """As the engine does: whoever sends something about a transfer waits there."""
    consumer.submit(messages=(SendMessage(peer, message),), keepalives=(Keepalive(peer, (), awaited=True),))


def registered(producer: Half, consumer: Half) -> bytes:
    """The connection on which ``consumer`` now waits."""
    tell(consumer, producer.peer, Register(ID, producer.peer.engine_id))
    heard = producer.wait(FromConsumer)
    assert isinstance(heard, FromConsumer)
    assert heard.message == Register(ID, producer.peer.engine_id)
    return heard.origin


def shaken_hands(consumer: Half, peer: Peer) -> bool:
    """Whether ``consumer`` knows the grant key of ``peer``."""
    links = {link.peer: link for link in consumer.control._peers.links()}
    return peer in links and links[peer].handshake is Handshake.DONE


def eventually(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_who_registered_is_told_and_reads_by_what_it_was_told(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    producer.fill(1)
    origin = registered(producer, consumer)
    source = producer.grant((5, 6))
    producer.submit(replies=(Reply(origin, Announce(ID, "r", source.grant)),))
    told = consumer.wait(FromProducer)
    assert told == FromProducer(Announce(ID, "r", source.grant), producer.peer)
    ended = consumer.read(source, (1, 2))
    assert ended.error is None
    assert np.array_equal(consumer.blocks[1:3], producer.blocks[5:7])
    sent, received = producer.control.stats(), consumer.control.stats()
    assert (sent.registrations_received, sent.announcements_sent, sent.gone_sent) == (1, 1, 0)
    assert (received.registrations_sent, received.announcements_received, received.gone_received) == (1, 1, 0)


def test_an_answer_goes_to_the_connection_that_registered_last(pair: tuple[Half, Half], secret: bytes | None) -> None:
    """Whoever repeats a registration by a new connection is answered there; one that is gone costs nothing."""
    producer, consumer = pair
    first = registered(producer, consumer)
    other = start("other", secret=secret)
    try:
        second = registered(producer, other)
        assert first != second
        producer.submit(replies=(Reply(second, Gone(ID, "over")), Reply(b"nobody", Gone(ID, "over"))))
        assert other.wait(FromProducer) == FromProducer(Gone(ID, "over"), producer.peer)
        while not consumer.inbox.empty():
            assert isinstance(consumer.inbox.get(), PeerMet)
    finally:
        other.close()
    registered(producer, consumer)  # the answer to nobody has harmed nothing


def test_a_reason_is_made_fit_for_logs(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    origin = registered(producer, consumer)
    producer.submit(replies=(Reply(origin, Gone(ID, "first\nsecond \x1b[2J" + "x" * 100_000)),))
    told = consumer.wait(FromProducer)
    assert isinstance(told, FromProducer)
    assert isinstance(told.message, Gone)
    assert told.message.reason.isprintable()
    assert len(told.message.reason) < 10_000


def test_a_withdrawal_arrives(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    origin = registered(producer, consumer)
    tell(consumer, producer.peer, Withdraw(ID))
    heard = producer.wait(FromConsumer)
    assert isinstance(heard, FromConsumer)
    assert (heard.message, heard.origin) == (Withdraw(ID), origin)


def test_the_handshake_is_made_while_it_waits_and_the_connection_stays(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    consumer.control._peers.engine_ttl_ns = 50_000_000
    consumer.submit(keepalives=(Keepalive(producer.peer, (), awaited=True),))
    eventually(lambda: shaken_hands(consumer, producer.peer))
    origin = registered(producer, consumer)
    time.sleep(1.2)  # the thread looks at least once a second
    producer.submit(replies=(Reply(origin, Gone(ID, "over")),))
    assert consumer.wait(FromProducer) == FromProducer(Gone(ID, "over"), producer.peer)
    consumer.submit()  # nothing is awaited any more
    eventually(lambda: consumer.control._peers.links() == ())


def lost(consumer: Half, peer: Peer) -> str:
    """Why nothing can be read from ``peer``, for which somebody waits."""
    consumer.submit(keepalives=(Keepalive(peer, (), awaited=True),))
    while True:
        told = consumer.wait(PeerLost)
        assert isinstance(told, PeerLost)
        if told.peer == peer:
            return told.cause


def test_who_waits_for_a_peer_that_is_not_there_is_told(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    ended = start("ended")
    nobody = ended.peer
    ended.close()
    assert "nobody listens" in lost(consumer, nobody)
    before = Peer("producer-before", producer.peer.host, producer.peer.port)
    assert "'producer' answers there now" in lost(consumer, before)
    assert "is no address to connect to" in lost(consumer, Peer("p", "no address", 1))


def test_who_waits_for_an_unlike_peer_is_told_each_time(pair: tuple[Half, Half], secret: bytes | None) -> None:
    """The refusal stands, and somebody else may come to wait for the same peer."""
    _, consumer = pair
    unlike = start("unlike", secret=secret, facts={**FACTS, "dtype": "bfloat16"})
    try:
        assert "dtype" in lost(consumer, unlike.peer)
        consumer.submit()
        assert "dtype" in lost(consumer, unlike.peer)
    finally:
        unlike.close()


def test_who_waits_for_a_peer_that_dies_is_told(pair: tuple[Half, Half], secret: bytes | None) -> None:
    _, consumer = pair
    dies = start("dies", secret=secret)
    consumer.submit(keepalives=(Keepalive(dies.peer, (), awaited=True),))
    eventually(lambda: shaken_hands(consumer, dies.peer))
    dies.close()
    told = consumer.wait(PeerLost)
    assert isinstance(told, PeerLost)
    assert told.peer == dies.peer


@pytest.mark.parametrize("ahead_s", [-1000, 0, 1000])
def test_the_handshake_tells_how_the_peers_clock_goes(ahead_s: int) -> None:
    """Also to who asks when the handshake has long been made."""
    producer = start("producer", now_ns=lambda: time.monotonic_ns() + ahead_s * 10**9)
    consumer = start("consumer")
    try:
        for _ in range(2):
            consumer.submit(keepalives=(Keepalive(producer.peer, (), awaited=True),))
            met = consumer.wait(PeerMet)
            assert isinstance(met, PeerMet)
            assert met.peer == producer.peer
            assert abs(met.clock_offset_ns - ahead_s * 10**9) < 5 * 10**9
            consumer.submit()
    finally:
        consumer.close()
        producer.close()
