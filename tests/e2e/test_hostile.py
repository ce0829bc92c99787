"""P and D as processes under traffic, while somebody throws 10,000 frames at their side channels.

With a secret he has everything else: all frames that ever passed (D reaches P through a recorder) and the tokens of
live leases. Without one he knows what any process of the host could: frames of requests that are over.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from tests.e2e.processes import Part, tokens_of, until
from tests.runtime.tiny import save_tiny

from pdkv.core.transfer.messages import Done, Heartbeat, Register, Withdraw
from pdkv.runtime.wire import MAX_FRAME_BYTES, BadFrame, Hello, Open, decode_question, encode
from pdkv.serve.params import push_legs, side_channel_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FRAMES = 10_000
BATCH = 250
DROPPED = "pdkv:transfer_dropped_frames_total"
PROMPT = [(7 * at) % 90 + 5 for at in range(100)]
NEW_TOKENS = 8


class Recorder:
    """A side channel in front of P's: passes everything on, both ways, and remembers every frame."""

    def __init__(self, port: int) -> None:
        self.frames: list[bytes] = []
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self.port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self._target = f"tcp://127.0.0.1:{port}"
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._front.poll(5):
                sender, frame = self._front.recv_multipart()
                if sender not in self._backs:
                    self._backs[sender] = self._context.socket(zmq.DEALER)
                    self._backs[sender].connect(self._target)
                self.frames.append(frame)
                self._backs[sender].send(frame)
            for sender, back in self._backs.items():
                while back.poll(0):
                    self.frames.append(back.recv())
                    self._front.send_multipart([sender, self.frames[-1]])

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)


class Pair:
    """P and D, D reaching P through the recorder; ``truth`` is what D alone answers."""

    def __init__(self, directory: Path, *, secret: bool) -> None:
        model = str(save_tiny("llama", directory / "model").directory)
        options = ["--port", "0", "--threads", "1", "--debug", "--kv-cache-memory-bytes", "16MiB", "--transport", "shm"]
        if secret:
            path = directory / "secret"
            path.touch(0o600)
            path.write_text(secrets.token_hex(32))
            options += ["--transfer-secret-file", str(path)]
        self.secret = secret
        self.tokens: list[bytes] = []
        self.parts = [Part(directory / f"{role}.log", role, model, *options) for role in ("prefill", "decode")]
        self.recorder: Recorder | None = None
        try:
            self.p, self.d = (part.ready() for part in self.parts)
            self.recorder = Recorder(self.port_of(self.p))
        except BaseException:
            self.close()
            raise

    @staticmethod
    def port_of(part: Part) -> int:
        """Where its side channel listens."""
        return int(part.ready_line.strip().rpartition("side_channel=127.0.0.1:")[2])

    def one(self, salt: str) -> list[int]:
        """The answer to a prompt whose KV P computed and D loaded."""
        assert self.recorder is not None
        params = self.p.prefill(PROMPT, cache_salt=salt)
        self.tokens.append(bytes.fromhex(params["pdkv_token"]))
        params["remote_port"] = self.recorder.port
        return tokens_of(self.d.ask(PROMPT, NEW_TOKENS, kv_transfer_params=params, cache_salt=salt))

    def pushed(self, salt: str) -> list[int]:
        """The same with late push: both legs at once, P announces its grant over the side channel."""
        assert self.recorder is not None
        health = httpx.get(f"{self.p.url}/health", timeout=30).json()
        peer = msgspec.structs.replace(side_channel_of(health), port=self.recorder.port)
        to_p, to_d = push_legs(peer, secrets.token_hex(16))
        with ThreadPoolExecutor(1) as pool:
            prefill = pool.submit(self.p.ask, PROMPT, 1, kv_transfer_params=to_p, cache_salt=salt)
            tokens = tokens_of(self.d.ask(PROMPT, NEW_TOKENS, kv_transfer_params=to_d, cache_salt=salt))
            assert prefill.result().status_code == 200
        return tokens

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
        for part in self.parts:
            part.end()


@pytest.fixture(params=["secret", "plain"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    pytest.importorskip("torch")
    running = Pair(tmp_path, secret=request.param == "secret")
    yield running
    running.close()


def hostile(rng: random.Random, recorded: list[bytes], tokens: list[bytes]) -> bytes:
    """Random, recorded, damaged, or made up with what is known."""
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randrange(300))
        case 1:
            return rng.choice(recorded)
        case 2:
            frame = bytearray(rng.choice(recorded))
            for _ in range(rng.randint(1, 4)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            return bytes(frame[: rng.randint(1, len(frame))]) if rng.random() < 0.3 else bytes(frame)
    token = rng.choice(tokens)
    name = f"{rng.getrandbits(128):032x}"
    return encode(rng.choice((Heartbeat((token,)), Done(token, "D"), Register(name, "P"), Withdraw(name))))


def is_dropped(frame: bytes, *, secret: bool) -> bool:
    """Whether an instance must drop ``frame`` (of a stranger's connection); the rest is refused, or a hint at most."""
    try:
        question = decode_question(frame)
    except BadFrame:
        return True
    return secret and not isinstance(question, Hello | Open)


def test_ten_thousand_hostile_frames_under_traffic_change_nothing(pair: Pair) -> None:
    truth = tokens_of(pair.d.ask(PROMPT, NEW_TOKENS, cache_salt="alone"))
    assert pair.one("before, pulled") == pair.pushed("before, pushed") == truth  # and something is recorded
    until(lambda: pair.p.idle() and pair.d.idle())
    assert pair.recorder is not None
    over, known = list(pair.recorder.frames), list(pair.tokens)
    assert len(over) >= 4
    rng = random.Random(5)
    attacked = [pair.p, pair.d]
    before = [part.counter(DROPPED) for part in attacked]
    expected = [0, 0]
    stop = threading.Event()

    def traffic(ask: Callable[[str], list[int]]) -> list[list[int]]:
        answers: list[list[int]] = []
        while len(answers) < 3 or not stop.is_set():
            answers.append(ask(f"{ask.__name__} {len(answers)}"))
        return answers

    with zmq.Context() as context, ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(traffic, ask) for ask in (pair.one, pair.pushed)]
        sockets: list[Any] = []
        for part in attacked:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 20_000)
            socket.connect(f"tcp://127.0.0.1:{pair.port_of(part)}")
            sockets.append(socket)
        try:
            for _ in range(FRAMES // BATCH):
                recorded = list(pair.recorder.frames) if pair.secret else over
                tokens = list(pair.tokens) if pair.secret else known
                for at, socket in enumerate(sockets):
                    for _ in range(BATCH):
                        frame = hostile(rng, recorded, tokens)
                        expected[at] += is_dropped(frame, secret=pair.secret)
                        socket.send(frame)
                stop.wait(0.05)
            for part in attacked:  # beyond the limit: that connection is closed, no other
                with context.socket(zmq.DEALER) as big:
                    big.setsockopt(zmq.LINGER, 2000)
                    big.connect(f"tcp://127.0.0.1:{pair.port_of(part)}")
                    big.send(b"x" * (MAX_FRAME_BYTES + 1000))
        finally:
            stop.set()
        answers = [answer for one in asking for answer in one.result()]
        until(lambda: [p.counter(DROPPED) - b for p, b in zip(attacked, before, strict=True)] >= expected)
        for socket in sockets:
            socket.close(linger=0)
    assert len(answers) >= 6
    assert all(answer == truth for answer in answers)
    assert [p.counter(DROPPED) - b for p, b in zip(attacked, before, strict=True)] == expected
    assert min(expected) > FRAMES // 4
    assert pair.d.counter("vllm:nixl_num_failed_transfers_total") == 0
    assert pair.d.counter("vllm:nixl_bytes_transferred_count") == len(answers) + 2, "computed on D, not loaded"
    assert pair.p.counter("vllm:nixl_num_kv_expired_reqs_total") == 0
    until(lambda: pair.p.idle() and pair.d.idle())
    assert pair.one("afterwards, pulled") == pair.pushed("afterwards, pushed") == truth
    for part in pair.parts:
        assert part.process.alive()
        assert "Traceback" not in part.log.read_text()
