"""The transfer halves of two instances on loopback, with real movers: what is promised to the core."""

from __future__ import annotations

import importlib.util
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zmq
from benchmarks.plain_pool import plain
from benchmarks.transfer_half import FACTS, Half
from tests.nixl_here import HAS_NIXL, needs_nixl

from pdkv.core.ports import FromConsumer, Keepalive, SendMessage
from pdkv.core.transfer.messages import Done, Heartbeat, Peer, RemoteSource
from pdkv.core.transfer.proof import proof_key
from pdkv.errors import ConfigError
from pdkv.runtime import peers as peers_module
from pdkv.runtime.control import available_transport
from pdkv.runtime.wire import WIRE_VERSION, Hello, HelloReply, NixlOffer, PeerMemory, Refused, decode_question, encode

MOVERS = [
    ("shm", "process"),
    ("shm", "thread"),
    pytest.param(("nixl", "process"), marks=needs_nixl),
    pytest.param(("nixl", "thread"), marks=needs_nixl),
]


@pytest.fixture(scope="module", params=MOVERS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Half, Half]]:
    """(producer, consumer), shared by the tests that break neither."""
    transport, mover = request.param
    producer = Half("producer", transport=transport, mover=mover).start()
    consumer = Half("consumer", transport=transport, mover=mover).start()
    yield producer, consumer
    consumer.close()
    producer.close()


def forge(source: RemoteSource, **changes: object) -> RemoteSource:
    """The grant with other facts under the old proof."""
    return msgspec.structs.replace(source, grant=msgspec.structs.replace(source.grant, **changes))


def test_a_grant_of_another_life_is_refused_after_asking_once(pair: tuple[Half, Half]) -> None:
    """Of this engine by name, but with a nonce that its key is not for: the peer is asked anew, then it is final."""
    producer, consumer = pair
    source = producer.grant((1, 2))
    assert consumer.read(source, (4, 5)).error is None
    (link,) = (link for link in consumer.control._peers.links() if link.peer == producer.peer)
    asked = link.hello_seq
    before = consumer.blocks.copy()
    ended = consumer.read(forge(source, nonce=source.grant.nonce ^ 1), (7, 8))
    assert "another life" in ended.error
    assert np.array_equal(consumer.blocks, before)
    assert link.hello_seq == asked + 1
    assert consumer.read(source, (4, 5)).error is None
    assert link.hello_seq == asked + 1


def test_a_read_tells_the_producer_that_it_begins(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    source = producer.grant((1, 2), lease_id=77, slot=11)
    assert consumer.read(source, (4, 5)).error is None
    while producer.wait(FromConsumer).message != Heartbeat((source.grant.token,)):
        pass


def test_done_reaches_the_producer(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    done = Done(b"d" * 16, "consumer")
    consumer.submit(messages=(SendMessage(producer.peer, done),))
    while (item := producer.wait(FromConsumer)).message != done:
        pass
    assert abs(time.monotonic_ns() - item.received_ns) < 30 * 10**9


def test_another_engine_at_the_address_is_named(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    source = producer.grant((1,))
    old = Peer("producer-before", producer.peer.host, producer.peer.port)
    ended = consumer.read(msgspec.structs.replace(source, peer=old), (1,))
    assert "'producer-before' is gone" in ended.error
    assert "'producer' answers there now" in ended.error


def test_an_address_that_is_none_fails_the_read(pair: tuple[Half, Half], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_ANSWER_TIMEOUT_NS", 300_000_000)
    producer, consumer = pair
    no_address = "is no address to connect to"
    for bad, cause in (
        (Peer("x", "no such host!", 5), no_address),
        (Peer("x", "localhost", 5), no_address),  # ZMQ would look it up on the thread that carries the heartbeats
        (Peer("x", "127.0.0.1", 70_000), "nobody listens there"),
    ):
        ended = consumer.read(msgspec.structs.replace(producer.grant((1,)), peer=bad), (1,))
        assert ended.slot is None
        assert cause in ended.error


def test_hostile_frames_kill_nothing(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    dropped = producer.control.stats().dropped_frames
    context = zmq.Context()
    rng = np.random.default_rng(0)
    try:
        attacker = context.socket(zmq.DEALER)
        attacker.setsockopt(zmq.LINGER, 1000)
        attacker.connect(f"tcp://127.0.0.1:{producer.control.port}")
        for size in (0, 1, 7, 300, 70_000):
            attacker.send(rng.bytes(size))
        attacker.send_multipart([b"", b"a", b"b"])
        attacker.send(msgspec.msgpack.encode({"type": "hello", "seq": -1, "facts": {"peer": [1, 2, 3]}}))
        attacker.send(msgspec.msgpack.encode({"type": "heartbeat", "tokens": [b"x"] * 10}))
        attacker.send(b"\x91" * 50_000)
        attacker.send(b"x" * (5 << 20))  # above the limit: the connection is closed, nothing else
        with socket.create_connection(("127.0.0.1", producer.control.port)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + rng.bytes(1000))
        attacker.close()
    finally:
        context.term()
    assert consumer.read(producer.grant((1,)), (1,)).error is None
    until = time.monotonic() + 20
    while producer.control.stats().dropped_frames < dropped + 8 and time.monotonic() < until:
        time.sleep(0.01)
    assert producer.control.stats().dropped_frames >= dropped + 8
    assert producer.control.stats().internal_errors == 0


def test_what_happened_is_counted(pair: tuple[Half, Half]) -> None:
    producer, consumer = pair
    before = consumer.control.stats()
    consumer.read(producer.grant((1, 2)), (1, 2))
    consumer.read(forge(producer.grant((1, 2)), proof=b"f" * 16), (1, 2))
    after = consumer.control.stats()
    assert after.transfers == before.transfers + 1
    assert after.moved_bytes == before.moved_bytes + 2 * 4096
    assert sum(after.seconds_counts) == after.transfers
    assert after.failed_transfers == before.failed_transfers + 1
    assert after.failed_handshakes == before.failed_handshakes
    assert after.refusals == before.refusals + 1


# ----------------------------------------------------------------------------------------------------- heartbeats


def _beating_pair(age_s: float = 0.0) -> tuple[Half, Half]:
    lease_ns = 300_000_000  # a beat every 50 ms
    producer = Half("producer", transport="shm", lease_ns=lease_ns).start()
    consumer = Half("consumer", transport="shm", lease_ns=lease_ns, engine_age_s=lambda: age_s).start()
    return producer, consumer


def test_heartbeats_arrive_while_the_engine_computes_and_until_the_set_is_empty() -> None:
    producer, consumer = _beating_pair()
    try:
        stop = threading.Event()
        busy = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])  # a step that never ends
        busy.start()
        tokens = (b"a" * 16, b"b" * 16)
        consumer.keep(producer.peer, *tokens)
        beats = [producer.wait(FromConsumer) for _ in range(4)]
        assert all(beat.message == Heartbeat(tokens) for beat in beats)
        assert beats[-1].received_ns > beats[0].received_ns
        stop.set()
        busy.join()
        assert consumer.control.stats().heartbeats_sent >= 4
        consumer.keep(producer.peer)
        consumer.submit(messages=(SendMessage(producer.peer, Done(b"e" * 16, "c")),))
        while producer.wait(FromConsumer).message != Done(b"e" * 16, "c"):
            pass
        sent = consumer.control.stats().heartbeats_sent
        time.sleep(0.3)
        assert consumer.control.stats().heartbeats_sent == sent
    finally:
        stop.set()
        consumer.close()
        producer.close()


def test_only_the_peers_of_the_last_set_get_heartbeats() -> None:
    producer, consumer = _beating_pair()
    other = Half("other", transport="shm").start()
    try:
        tokens = (b"a" * 16,)
        consumer.submit(keepalives=(Keepalive(producer.peer, tokens), Keepalive(other.peer, tokens)))
        producer.wait(FromConsumer)
        other.wait(FromConsumer)
        consumer.keep(other.peer, b"b" * 16)
        while other.wait(FromConsumer).message != Heartbeat((b"b" * 16,)):
            pass
        while not producer.inbox.empty():
            producer.inbox.get()
        for _ in range(3):
            other.wait(FromConsumer)
        assert producer.inbox.empty()
    finally:
        consumer.close()
        producer.close()
        other.close()


def test_an_engine_that_stands_still_renews_nothing() -> None:
    producer, consumer = _beating_pair(age_s=61)
    try:
        consumer.keep(producer.peer, b"a" * 16)
        time.sleep(0.3)
        assert producer.inbox.empty()
        assert consumer.control.stats().heartbeats_sent == 0
    finally:
        consumer.close()
        producer.close()


# ------------------------------------------------------------------------------------------ peers that do not fit


def test_different_facts_are_refused_with_both_values() -> None:
    producer = Half("producer", transport="shm").start()
    consumer = Half("consumer", transport="shm", facts={**FACTS, "dtype": "bfloat16"}).start()
    try:
        ended = consumer.read(producer.grant((1,)), (1,))
        assert ended.slot is None
        for text in ("dtype", "'bfloat16'", "'float32'", "same"):
            assert text in ended.error
        stats = consumer.control.stats()
        assert stats.refused_ns is not None
        assert "dtype" in stats.refused_because
    finally:
        consumer.close()
        producer.close()


@needs_nixl
def test_different_transports_are_refused_with_both_names() -> None:
    producer = Half("producer", transport="nixl").start()
    consumer = Half("consumer", transport="shm").start()
    try:
        ended = consumer.read(producer.grant((1,)), (1,))
        assert "transport: producer has 'nixl', consumer has 'shm'" in ended.error
    finally:
        consumer.close()
        producer.close()


class FakePeer:
    """A peer that answers every question with what ``reply`` makes of it (None: with nothing)."""

    def __init__(self, reply) -> None:  # type: ignore[no-untyped-def]
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._reply = reply
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            if self._router.poll(50):
                sender, frame = self._router.recv_multipart()
                answer = self._reply(decode_question(frame))
                if answer is not None:
                    self._router.send_multipart([sender, answer])

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (lambda q: None, "did not answer"),
        (lambda q: b"\xc1 nonsense", "did not answer"),
        (lambda q: encode(Refused(seq=q.seq + 1000, reason="?")), "did not answer"),
        (lambda q: encode(Refused(seq=q.seq, reason="not today")), "not today"),
    ],
    ids=["silence", "nonsense", "another question's answer", "refusal"],
)
def test_bad_answers_fail_the_read_in_time(monkeypatch: pytest.MonkeyPatch, reply: object, expected: str) -> None:
    monkeypatch.setattr(peers_module, "_ANSWER_TIMEOUT_NS", 300_000_000)
    fake = FakePeer(reply)
    consumer = Half("consumer", transport="shm").start()
    try:
        source = msgspec.structs.replace(consumer.grant((1,)), peer=Peer("fake", "127.0.0.1", fake.port))
        ended = consumer.read(source, (1,))
        assert ended.slot is None
        assert expected in ended.error
        assert consumer.control.stats().failed_handshakes == 1
    finally:
        consumer.close()
        fake.close()


@needs_nixl
def test_agent_metadata_that_is_none_fails_the_read_only() -> None:
    facts = {**FACTS, "wire": WIRE_VERSION, "transport": "nixl"}
    offer = NixlOffer(
        agent="a",
        metadata=b"not a NIXL agent" * 9,
        pool_kind="DRAM",
        pool_device=0,
        pool_address=4096,
        slots_address=8192,
    )
    memory = PeerMemory(geometry=plain(64, 4096), num_slots=64, nixl=offer)
    consumer = Half("consumer", transport="nixl").start()
    of_fake = consumer.grant((1,))  # proved with the consumer's own key, which the fake peer tells as its own
    told = {"nonce": of_fake.grant.nonce, "grant_key": proof_key(consumer.identity.secret)}
    fake = FakePeer(
        lambda q: (
            encode(
                HelloReply(
                    seq=q.seq, engine_id="fake", epoch=1, lease_ns=10**9, clock_ns=1, facts=facts, memory=memory, **told
                )
            )
            if isinstance(q, Hello)
            else None
        )
    )
    producer = Half("producer", transport="nixl").start()
    try:
        mover = consumer.control.mover_pid
        source = msgspec.structs.replace(of_fake, peer=Peer("fake", "127.0.0.1", fake.port))
        ended = consumer.read(source, (1,))
        assert ended.slot is None
        assert "agent" in ended.error
        assert consumer.read(producer.grant((2,)), (1,)).error is None
        assert consumer.control.mover_pid == mover
    finally:
        consumer.close()
        producer.close()
        fake.close()


# --------------------------------------------------------------------------------------------------- start and end


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        half = Half("p", transport="shm", port=port)
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--side-channel-port"):
            half.start()
        half.close()


def test_an_unknown_transport_is_named() -> None:
    with pytest.raises(ConfigError, match="auto, nixl, shm"):
        available_transport("rdma")


def test_nixl_without_a_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert available_transport("auto") == "shm"
    with pytest.raises(ConfigError, match="pip install"):
        available_transport("nixl")
    with pytest.raises(ConfigError, match="GPU pools are moved by NIXL.*pip install"):
        available_transport("auto", "VRAM")


def test_shared_memory_is_refused_for_gpu_pools() -> None:
    with pytest.raises(ConfigError, match="CPU pools only; use --transport nixl"):
        available_transport("shm", "VRAM")


def test_auto_falls_back_when_nixl_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_NIXL:
        pytest.skip("no NIXL wheel is installed")
    monkeypatch.setenv("UCX_NET_DEVICES", "no-such-device")
    monkeypatch.setenv("UCX_TLS", "tcp")
    half = Half("p", transport="auto").start()
    try:
        assert half.control.transport == "shm"
        assert "UCX" in (half.control.without_nixl or "")
    finally:
        half.close()


def test_close_can_be_called_twice_and_before_start() -> None:
    half = Half("p", transport="shm")
    half.control.close()
    half.close()
