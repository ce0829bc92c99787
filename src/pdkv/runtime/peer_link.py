"""The asking side: one DEALER socket to one peer, and what that peer has told so far."""

from __future__ import annotations

import enum
import ipaddress
import logging

import zmq
from zmq.utils.monitor import parse_monitor_message

from pdkv.core.transfer.messages import Heartbeat, Peer
from pdkv.runtime.peer_auth import Line, PlainLine
from pdkv.runtime.shown import readable
from pdkv.runtime.wire import MAX_FRAME_BYTES, SEAL_BYTES, Answer, BadFrame, HelloReply, Question

log = logging.getLogger("pdkv.control")

MAX_TOKENS_PER_BEAT = 50_000
_QUEUED_MESSAGES = 256  # towards a peer that does not take them
_LONGEST_RECONNECT_MS = 1000


class Handshake(enum.Enum):
    """Where the handshake with a peer stands."""

    NONE = "none"
    ASKED = "asked"
    DONE = "done"
    REFUSED = "refused"


class PeerLink:
    """A connection to ``peer``. Sending never blocks: what does not fit is lost, and what must not be lost times out.

    ``peer.host`` is an address: ZMQ would look a name up on the thread that carries every heartbeat (`serve` does it
    before). ``line`` says in which frames messages travel; a plain one goes no further than this host. Raises
    ``zmq.ZMQError`` or ``ValueError`` when it cannot be connected to.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], peer: Peer, line: Line, now_ns: int) -> None:
        self.peer = peer
        self.line = line
        self.handshake = Handshake.NONE
        self.hello_seq = 0
        self.hello_sent_ns = 0
        self.hello_deadline_ns = 0
        self.reply: HelloReply | None = None
        self.clock_offset_ns = 0  # what the peer's clock shows more than ours; known with the first reply
        self._round_trip_ns: int | None = None  # of the question that told
        self.tokens: tuple[bytes, ...] = ()
        self.awaited = False  # something is to be announced here
        self.ask_again_ns = now_ns
        self.next_beat_ns = now_ns
        self.last_beat_ns = now_ns - 10**9  # none yet: the first may go at once
        self.last_used_ns = now_ns
        self._context = context
        self._shown = readable(peer.engine_id)
        self.socket, self.monitor = self._open()

    def _open(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A connection, and the socket that tells what becomes of it."""
        address = ipaddress.ip_address(self.peer.host)
        if isinstance(self.line, PlainLine) and not address.is_loopback:
            raise ValueError("beyond this host peers must prove a secret, start both with --transfer-secret-file")
        opened: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        opened.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + SEAL_BYTES)
        opened.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
        opened.setsockopt(zmq.IPV6, int(address.version == 6))
        opened.setsockopt(zmq.LINGER, 200)  # a DONE sent just before closing still goes out
        opened.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS)
        # Tells of a connection that broke or was refused, so that nobody waits for an answer from a dead peer.
        monitor = opened.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        try:
            opened.connect(endpoint(self.peer.host, self.peer.port))
        except (zmq.ZMQError, OverflowError, ValueError):
            opened.disable_monitor()
            opened.close(linger=0)
            raise
        return opened, monitor

    def connection_lost(self) -> bool:
        """Whether the connection broke, or could not be made, since the last call."""
        lost = False
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                break
            lost = lost or event["event"] in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED)
        if lost:
            self.line.reset()
        return lost

    def compare_clocks(self, received_ns: int, clock_ns: int) -> None:
        """The peer's clock showed ``clock_ns`` when it answered our question: about the middle of the round trip.

        Of all answers the one with the shortest round trip says it best, and is kept (spec pd-transfer 4).
        """
        round_trip_ns = received_ns - self.hello_sent_ns
        if self._round_trip_ns is None or round_trip_ns < self._round_trip_ns:
            self._round_trip_ns = round_trip_ns
            self.clock_offset_ns = clock_ns - (self.hello_sent_ns + received_ns) // 2

    def reopen(self) -> None:
        """Connect anew, without what had queued up. When it cannot: ``zmq.ZMQError``, and nothing has changed."""
        old = self.socket
        self.socket, self.monitor = self._open()
        old.disable_monitor()
        old.close(linger=0)
        self.line.reset()

    def send(self, message: Question) -> bool:
        """Whether the socket took it, or it waits for the connection to open."""
        try:
            self._send(self.line.send(message))
        except (zmq.ZMQError, BadFrame, ValueError) as error:  # ValueError: text that is no UTF-8
            log.debug("to %s: %s not sent: %s", self._shown, type(message).__name__, readable(str(error)))
            return False
        return True

    def _send(self, frames: list[bytes]) -> None:
        for frame in frames:
            self.socket.send(frame, zmq.DONTWAIT)

    def beat(self) -> int:
        """Send the heartbeat of all tokens; how many messages went out."""
        chunks = range(0, len(self.tokens), MAX_TOKENS_PER_BEAT)
        return sum(self.send(Heartbeat(self.tokens[at : at + MAX_TOKENS_PER_BEAT])) for at in chunks)

    def receive(self, limit: int) -> tuple[list[Answer], int]:
        """(answers that have arrived, frames that were dropped as nonsense); at most ``limit`` frames are taken."""
        answers: list[Answer] = []
        dropped = 0
        for _ in range(limit):
            try:
                parts = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            try:
                if len(parts) != 1:
                    raise BadFrame("more than one part")
                told, frames = self.line.receive(parts[0])
            except BadFrame as error:
                dropped += 1
                log.debug("from %s: dropped: %s", self._shown, error)
                continue
            answers += told
            try:
                self._send(frames)
            except zmq.ZMQError as error:
                log.debug("to %s: not sent: %s", self._shown, error)
        return answers, dropped

    def close(self) -> None:
        """Close the socket; queued hints get a moment to leave."""
        self.socket.disable_monitor()
        self.socket.close()


def name_of(peer: Peer) -> str:
    """``peer`` for logs and errors; what it is called is a stranger's choice."""
    return f"{readable(peer.engine_id)} at {readable(peer.host)}:{peer.port}"


def endpoint(host: str, port: int | str) -> str:
    """The ZMQ address of a TCP port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
