"""Turns of a conversation in bidirectional mode: what a D keeps of one, and the prefill leg of the next."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.core.helpers import NS, PEER, counting_prompt, finished_of, make_engine, new_request, step

from pdkv.core.engine import Engine
from pdkv.core.events import Event, LeaseReleased
from pdkv.core.ports import Int32Array, NewRequest, Plan
from pdkv.core.transfer.messages import Done, Grant, RemoteSource

SECRET = b"s" * 32  # of `make_engine`


def answer(engine: Engine, name: str = "r", length: int = 10, tokens: int = 7, now_ns: int = 0, **more: Any) -> Grant:
    """An answer of ``tokens`` tokens that ends at ``now_ns``, on D; every token of it is 5."""
    found = try_answer(engine, name, length, tokens, now_ns, **more)
    assert found is not None
    return found


def try_answer(engine: Engine, name: str, length: int, tokens: int, now_ns: int = 0, **more: Any) -> Grant | None:
    prompt = more.pop("prompt", length)
    inbox = [new_request(name, prompt, tokens, keep_turn=True, **more)]
    for _ in range(200):
        _, events = step(engine, now_ns, inbox)
        inbox = []
        if name in (ended := finished_of(events)):
            return ended[name].lease
    raise AssertionError(f"{name} does not end")


def released(events: tuple[Event, ...]) -> list[LeaseReleased]:
    return [event for event in events if isinstance(event, LeaseReleased)]


def offer(grant: Grant, expires_ns: int = 480 * NS) -> RemoteSource:
    return RemoteSource(peer=PEER, request_id="before", grant=grant, expires_ns=expires_ns)


def turn(name: str, prompt: Int32Array, grant: Grant, expires_ns: int = 480 * NS, **more: Any) -> NewRequest:
    """The prefill leg of a next turn."""
    return new_request(name, prompt, 1, produce=True, source=offer(grant, expires_ns), **more)


def conversation(length: int = 100) -> tuple[Grant, Int32Array]:
    """What a D kept of a turn of ``length`` tokens in all, and these tokens."""
    engine = make_engine(num_blocks=65, max_model_len=256, engine_id="P")
    tokens = counting_prompt(length - 1)
    grant = answer(engine, prompt=tokens, tokens=2)
    return grant, np.append(tokens, np.int32(5))


def dones(plan: Plan) -> list[bytes]:
    return [m.message.token for m in plan.messages if isinstance(m.message, Done)]
