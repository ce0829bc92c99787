"""Links to peers when the process has run out of what a connection needs."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
import zmq
from benchmarks.plain_pool import plain
from tests.core.helpers import PEER

from pdkv.runtime.peer_link import Handshake, PeerLink
from pdkv.runtime.peers import Peers
from pdkv.runtime.transfer_stats import TransferStats

SILENT_NS = 5 * 10**9


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
