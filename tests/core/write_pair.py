"""A producer and a consumer that push by WRITE, joined by a wire that the test holds in its hands."""

from __future__ import annotations

from typing import Any

from tests.core.helpers import NS, counting_prompt, make_engine, step

from pdkv.core.engine import Engine
from pdkv.core.events import Event
from pdkv.core.ports import FromConsumer, FromProducer, InboxItem, NewRequest, Plan, PostWrite, WriteEnded
from pdkv.core.transfer.messages import Awaited, Peer, RegisterWrite, ToConsumer, ToProducer

P = Peer("P", "127.0.0.1", 5600)
D = Peer("D", "127.0.0.1", 5601)
ID = "transfer-1"
PROMPT = counting_prompt(10)
LEASE_NS = 6 * NS


def prefill(**more: Any) -> NewRequest:
    """P's leg."""
    values: dict[str, Any] = {"request_id": "p", "prompt": PROMPT, "transfer_id": ID} | more
    return NewRequest(max_tokens=1, produce=True, **values)


def decode(**more: Any) -> NewRequest:
    """D's leg."""
    transfer_id = more.pop("transfer_id", ID)
    values: dict[str, Any] = {"request_id": "d", "prompt": PROMPT, "max_tokens": 2} | more
    return NewRequest(awaited=Awaited(peer=P, transfer_id=transfer_id, write=True), **values)


class Pair:
    """``to_p`` and ``to_d`` are what is on its way: a step takes it in, unless the test has taken it away."""

    def __init__(self, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None, **both: Any) -> None:
        common = {"lease_ns": LEASE_NS, "push_registration_timeout_ns": 60 * NS, "kv_load_timeout_ns": 20 * NS} | both
        self.p = make_engine(engine_id="P", nonce=7, **common | (p or {}))
        self.d = make_engine(engine_id="D", nonce=8, **common | (d or {}))
        self.d.accept_writes(D)
        self.now = 0
        self.to_p: list[ToProducer] = []
        self.to_d: list[ToConsumer] = []
        self.posts: list[PostWrite] = []
        self.events: list[Event] = []

    def step_p(self, *inbox: InboxItem) -> Plan:
        """One step of P, with all that is on its way to it."""
        heard = [FromConsumer(message, self.now, b"D") for message in self.to_p]
        self.to_p.clear()
        plan, events = step(self.p, self.now, [*inbox, *heard])
        self.to_d += [reply.message for reply in plan.replies]
        self.posts += plan.writes
        self.events += events
        return plan

    def step_d(self, *inbox: InboxItem) -> Plan:
        """One step of D, with all that is on its way to it."""
        heard = [FromProducer(message, P) for message in self.to_d]
        self.to_d.clear()
        plan, events = step(self.d, self.now, [*inbox, *heard])
        assert all(message.peer == P for message in plan.messages)
        self.to_p += [message.message for message in plan.messages]
        self.events += events
        return plan

    def settle(self, rounds: int = 4) -> None:
        """Let messages go to and fro."""
        for _ in range(rounds):
            self.step_d()
            self.step_p()

    def writing(self) -> PostWrite:
        """Both legs begun, registered, prefilled, and the WRITE under way."""
        self.step_d(decode())
        self.step_p(prefill())
        self.settle()
        (post,) = self.posts
        return post

    def written(self, error: str | None = None) -> WriteEnded:
        """The newest WRITE is over."""
        return WriteEnded(handle=self.posts[-1].handle, moved_bytes=1, seconds=0.1, error=error)

    def named(self, name: str) -> list[Event]:
        """Events of that kind so far."""
        return [event for event in self.events if type(event).__name__ == name]


def registrations(messages: list[ToProducer]) -> list[RegisterWrite]:
    """Those among ``messages``."""
    return [message for message in messages if isinstance(message, RegisterWrite)]


def accounts(engine: Engine) -> dict[str, int]:
    """Blocks by account that somebody holds."""
    every = engine.memory().accounts
    return {name: count for name, count in every.items() if count and name not in ("free", "cached", "null")}
