"""Links to peers: their clocks, how long they stay, and when the process has run out of what a connection needs."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
import zmq
from benchmarks.plain_pool import plain
from tests.core.helpers import PEER

from pdkv.core.ports import Keepalive
from pdkv.core.transfer.messages import Peer
from pdkv.runtime import peers as peers_module
from pdkv.runtime.peer_link import Handshake, PeerLink
from pdkv.runtime.peers import Peers
from pdkv.runtime.transfer_stats import TransferStats
from pdkv.runtime.wire import HelloReply, PeerMemory

SILENT_NS = 5 * 10**9
S = 10**9


class NoMoreSockets:
    """A ZMQ context that has given out the last socket it could."""

    def socket(self, kind: int) -> None:
        raise zmq.ZMQError(errno.EMFILE)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_a_link_that_cannot_be_opened_anew_keeps_its_old_connection(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Its handshake fails; heartbeats to everybody else must go on."""
    peers = Peers(context, "D", {}, plain(4, 64), TransferStats(), beat_ns=10**9)
    link = peers.link(PEER, 0)
    assert isinstance(link, PeerLink)
    peers.ask(link, 0)
    link._context = NoMoreSockets()  # type: ignore[assignment]
    peers.tick(SILENT_NS, engine_alive=True)
    assert link.handshake is Handshake.NONE
    ((failed, problem),) = peers.take_settled()
    assert failed is link
    assert "did not answer" in str(problem)
    assert not link.socket.closed
    assert not link.monitor.closed
    link.close()


def answered(peers: Peers, link: PeerLink, sent_ns: int, received_ns: int, clock_ns: int) -> None:
    """A handshake that was asked for and answered at these times, as the wire brings them."""
    link.handshake = Handshake.NONE
    peers.ask(link, sent_ns)
    reply = HelloReply(
        seq=link.hello_seq, engine_id=link.peer.engine_id, nonce=1, grant_key=b"k" * 32, epoch=1, lease_ns=30 * S,
        clock_ns=clock_ns, facts={}, memory=PeerMemory(geometry=plain(4, 64), num_slots=8),
    )  # fmt: skip
    link.receive = lambda limit: ([reply], 0)  # type: ignore[method-assign]
    assert peers.hear(link, 1, received_ns) == []
    assert link.handshake is Handshake.DONE


def test_the_clock_offset_is_that_of_the_shortest_round_trip(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    peers = Peers(context, "P", {}, plain(4, 64), TransferStats(), beat_ns=S)
    link = peers.link(PEER, 0)
    assert isinstance(link, PeerLink)
    for sent_ns, received_ns, clock_ns, offset_ns in (
        (100 * S, 104 * S, 53 * S, -49 * S),  # 102 here when it answered, as far as one can tell
        (200 * S, 210 * S, 155 * S, -49 * S),  # a longer one says less
        (300 * S, 302 * S, 251 * S, -50 * S),
        (400 * S, 402 * S, 352 * S, -50 * S),  # as long as the best: that one stays
        (500 * S, 500 * S, 500 * S, 0),
    ):
        answered(peers, link, sent_ns, received_ns, clock_ns)
        assert link.clock_offset_ns == offset_ns
    link.close()


@pytest.mark.parametrize(
    ("ttl_ns", "shaken", "gone_after_s"), [(100 * S, True, 100), (None, True, None), (100 * S, False, 60)]
)
def test_a_peer_that_nothing_is_wanted_of_is_forgotten(
    context: zmq.Context[zmq.Socket[bytes]], ttl_ns: int | None, shaken: bool, gone_after_s: int | None
) -> None:
    peers = Peers(context, "P", {}, plain(4, 64), TransferStats(), beat_ns=S, engine_ttl_ns=ttl_ns)
    peers.keep_alive((Keepalive(PEER, (b"t" * 16,)),), 0)
    (link,) = peers.links()
    if shaken:
        answered(peers, link, 0, 0, 0)
    else:
        link.handshake = Handshake.REFUSED
    peers.tick(10_000 * S, engine_alive=False)
    assert peers.links() == (link,)  # a lease is wanted there
    peers.keep_alive((), 10_000 * S)
    link.last_used_ns = 10_000 * S
    if gone_after_s is not None:
        peers.tick((10_000 + gone_after_s) * S, engine_alive=True)
        assert peers.links() == (link,)
    peers.tick((10_000 + (gone_after_s or 10**6)) * S + 1, engine_alive=True)
    assert peers.links() == ((link,) if gone_after_s is None else ())
    if gone_after_s is None:
        link.close()


def test_at_the_limit_the_idlest_peer_makes_room(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_MAX_LINKS", 2)
    peers = Peers(context, "P", {}, plain(4, 64), TransferStats(), beat_ns=S)
    three = [Peer(f"D{i}", "127.0.0.1", 5601 + i) for i in range(3)]
    for at, peer in enumerate(three):
        assert isinstance(peers.link(peer, at), PeerLink)
    assert [link.peer for link in peers.links()] == three[1:]
    for link in peers.links():
        peers.ask(link, 3)
    assert "all are needed" in str(peers.link(three[0], 4)), "each is asked for a handshake"
    peers.keep_alive(tuple(Keepalive(peer, (b"t" * 16,)) for peer in three[1:]), 5)
    assert "all are needed" in str(peers.link(three[0], 6))
    for link in peers.links():
        link.close()
