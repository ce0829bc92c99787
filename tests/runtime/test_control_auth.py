"""Two control threads that share a secret, do not, or meet somebody who has none: over real sockets."""

from __future__ import annotations

import importlib.util
import ipaddress
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
import zmq
from benchmarks.transfer_half import FACTS, Half

from pdkv.core.ports import FromConsumer, FromProducer, Reply, SendMessage
from pdkv.core.transfer.messages import Done, Gone, Heartbeat, Peer, Register
from pdkv.runtime.peer_auth import SECRETS_DIFFER
from pdkv.runtime.wire import WIRE_VERSION, Hello, Open, Opened, Refused, decode_answer, encode

SECRET, OTHER = b"s" * 32, b"o" * 32


@pytest.fixture
def pair() -> Iterator[tuple[Half, Half]]:
    """(producer, consumer) with one secret."""
    producer = Half("producer", transport="shm", mover="thread", secret=SECRET).start()
    consumer = Half("consumer", transport="shm", mover="thread", secret=SECRET, lease_ns=600_000_000).start()
    yield producer, consumer
    consumer.close()
    producer.close()


def until(what: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def heard(half: Half) -> object:
    item = half.wait(FromConsumer)
    assert isinstance(item, FromConsumer)
    return item.message


def test_a_read_heartbeats_and_answers_pass_the_seal(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    producer.fill(1)
    assert consumer.read(producer.grant((5, 6)), (1, 2)).error is None
    assert np.array_equal(consumer.blocks[1:3], producer.blocks[5:7])
    consumer.keep(producer.peer, b"k" * 16)
    while heard(producer) != Heartbeat((b"k" * 16,)):
        pass
    consumer.submit(messages=(SendMessage(producer.peer, Register("t", "producer")),))
    while (item := producer.wait(FromConsumer)).message != Register("t", "producer"):  # type: ignore[attr-defined]
        pass
    producer.submit(replies=(Reply(item.origin, Gone("t", "over")),))  # type: ignore[attr-defined]
    told = consumer.wait(FromProducer)
    assert told == FromProducer(Gone("t", "over"), producer.peer)
    assert producer.control.stats().dropped_frames == consumer.control.stats().dropped_frames == 0


def test_a_first_hint_opens_the_connection_by_itself(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    consumer.submit(messages=(SendMessage(producer.peer, Done(b"d" * 16, "consumer")),))
    assert heard(producer) == Done(b"d" * 16, "consumer")
    assert consumer.control.stats().lost_messages == 0


def test_a_restarted_producer_is_opened_anew(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    assert consumer.read(producer.grant((1,)), (1,)).error is None
    port = producer.control.port
    producer.control.close()
    again = Half("producer", transport="shm", mover="thread", secret=SECRET, port=port).start()
    try:
        until(lambda: consumer.read(again.grant((1,)), (1,)).error is None)
        consumer.keep(again.peer, b"k" * 16)
        while heard(again) != Heartbeat((b"k" * 16,)):
            pass
    finally:
        again.close()


@pytest.mark.parametrize(
    ("asking", "answering", "says"),
    [(SECRET, OTHER, SECRETS_DIFFER), (None, SECRET, "prove a secret"), (SECRET, None, "has no secret")],
    ids=["different", "only P has one", "only D has one"],
)
def test_reads_fail_in_words_where_the_secrets_are_not_the_same(
    asking: bytes | None, answering: bytes | None, says: str
) -> None:
    producer = Half("producer", transport="shm", mover="thread", secret=answering).start()
    consumer = Half("consumer", transport="shm", mover="thread", secret=asking).start()
    try:
        before = consumer.blocks.copy()
        producer.fill(1)
        ended = consumer.read(producer.grant((1,)), (1,))
        assert ended.slot is None
        assert ended.error is not None
        assert says in ended.error
        assert "--transfer-secret-file" in ended.error
        assert np.array_equal(consumer.blocks, before)
        consumer.submit(messages=(SendMessage(producer.peer, Done(b"d" * 16, "consumer")),))
        if asking is not None and answering is not None:
            until(lambda: consumer.control.stats().lost_messages == 1)
        assert not [item for item in iter_inbox(producer) if isinstance(item, FromConsumer)] or answering is None
    finally:
        consumer.close()
        producer.close()


def iter_inbox(half: Half) -> list[object]:
    items = []
    while not half.inbox.empty():
        items.append(half.inbox.get())
    return items


def test_a_stranger_gets_nothing_and_is_not_heard(pair: tuple[Half, Half]) -> None:
    """He knows the facts, has recorded a true connection, and lacks the secret only."""
    producer, consumer = pair
    consumer.submit(messages=(SendMessage(producer.peer, Done(b"d" * 16, "consumer")),))
    assert heard(producer) == Done(b"d" * 16, "consumer")
    facts = {**FACTS, "wire": WIRE_VERSION, "transport": "shm"}
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.setsockopt(zmq.RCVTIMEO, 20_000)
        stranger.connect(f"tcp://127.0.0.1:{producer.control.port}")
        stranger.send(encode(Hello(seq=1, engine_id="consumer", target="producer", facts=facts)))
        refusal = decode_answer(stranger.recv())
        assert isinstance(refusal, Refused)
        for message in (Heartbeat((b"k" * 16,)), Done(b"k" * 16, "consumer"), Register("t", "producer")):
            stranger.send(encode(message))
        stranger.send(encode(Open(seq=2, wire=WIRE_VERSION, engine_id="consumer", nonce=b"n" * 32)))
        assert isinstance(decode_answer(stranger.recv()), Opened)
        for number in range(50):
            stranger.send(b"\xc1" + number.to_bytes(8, "little") + b"m" * 16 + encode(Done(b"k" * 16, "consumer")))
        until(lambda: producer.control.stats().dropped_frames >= 53)
        assert not stranger.poll(100)
    assert not [item for item in iter_inbox(producer) if isinstance(item, FromConsumer)]
    assert producer.control.stats().internal_errors == 0
    assert consumer.read(producer.grant((1,)), (1,)).error is None


def test_without_a_secret_only_peers_on_this_host_are_asked() -> None:
    consumer = Half("consumer", transport="shm", mover="thread").start()
    try:
        source = consumer.grant((1,))
        for host in ("192.0.2.1", "2001:db8::1"):
            far = type(source)(peer=Peer("far", host, 5), request_id="r", grant=source.grant)
            ended = consumer.read(far, (1,))
            assert ended.error is not None
            assert "beyond this host peers must prove a secret" in ended.error
    finally:
        consumer.close()


def test_unless_told_otherwise_nothing_listens_beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX included, which listens on every interface by itself."""
    if not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13", "nixl")):
        pytest.skip("no NIXL wheel is installed")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    half = Half("producer", transport="nixl", mover="process").start()
    try:
        assert half.control.mover_pid is not None
        of_ucx, ours = (
            [one.laddr for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
            for process in (psutil.Process(half.control.mover_pid), psutil.Process())
        )
        assert of_ucx
        assert half.control.port in [address.port for address in ours]
        assert all(ipaddress.ip_address(address.ip).is_loopback for address in of_ucx + ours)
    finally:
        half.close()
