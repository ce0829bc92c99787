"""Who is told how to read from an instance (equal facts), and when somebody may be reading."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from benchmarks.plain_pool import plain

from pdkv.core.engine import Identity
from pdkv.core.transfer.messages import Done, Heartbeat
from pdkv.core.transfer.proof import proof_key
from pdkv.runtime.doorkeeper import Doorkeeper, PeerIdentity, differing_facts
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import TransferMemory
from pdkv.runtime.wire import Hello, HelloReply, PeerMemory, Refused, encode

FACTS = {"model": "smol@ab12", "dtype": "float32"}
IDENTITY = Identity(engine_id="p", nonce=2**63 + 11, secret=b"s" * 32)
LEASE_NS = 1000


@pytest.fixture
def door() -> Iterator[Doorkeeper]:
    pool, slots = SharedMemory(16 * 64), SharedMemory(8 * 16)
    slots.array(np.uint64, (8, 2))[2] = (IDENTITY.nonce, 5)
    memory = TransferMemory(pool, slots, plain(16, 64), 8)
    described = PeerMemory(geometry=plain(16, 64), num_slots=8)
    yield Doorkeeper(PeerIdentity(IDENTITY, FACTS), FACTS, memory, LEASE_NS, lambda: (described, 4))
    pool.close()
    slots.close()


def test_hello_with_equal_facts_is_welcome(door: Doorkeeper) -> None:
    reply = door.answer(Hello(seq=9, engine_id="d", target="p", facts=FACTS))
    assert isinstance(reply, HelloReply)
    assert (reply.seq, reply.epoch, reply.nonce) == (9, 4, IDENTITY.nonce)
    assert reply.grant_key == proof_key(IDENTITY.secret)
    assert IDENTITY.secret not in encode(reply)


def test_every_differing_fact_is_named_with_both_values(door: Doorkeeper) -> None:
    theirs = {"model": "llama@ff00", "dtype": "bfloat16", "extra": "1"}
    reply = door.answer(Hello(seq=9, engine_id="d", target="p", facts=theirs))
    assert isinstance(reply, Refused)
    for text in (
        "model",
        "'llama@ff00'",
        "'smol@ab12'",
        "dtype",
        "'bfloat16'",
        "'float32'",
        "extra",
        "not set",
        "same",
    ):
        assert text in reply.reason
    assert "dtype: p has 'float32', d has 'bfloat16'" in reply.reason  # whoever reads it


def test_a_strangers_values_are_shown_short() -> None:
    reason = differing_facts("p", {"model": "m"}, "d" * 100_000, {"model": "x" * 100_000})
    assert reason is not None
    assert len(reason) < 600


def test_the_earlier_life_of_an_engine_is_named(door: Doorkeeper) -> None:
    reply = door.answer(Hello(seq=1, engine_id="d", target="old", facts=FACTS))
    assert isinstance(reply, Refused)
    assert "'old' is gone" in reply.reason
    assert "'p' answers there now" in reply.reason


SECOND = 10**9


def test_readers_are_expected_while_a_lease_stands(door: Doorkeeper) -> None:
    words = door.memory.slots.array(np.uint64, (8, 2))
    until_ns = door.readers_until_ns(0)
    assert until_ns is not None
    assert until_ns > SECOND  # whoever asks every second never finds it run out
    words[2, 1] = 0
    assert door.readers_until_ns(SECOND) is None
    words[7] = (IDENTITY.nonce, 6)
    assert door.readers_until_ns(SECOND + 1) is None  # the slots are looked at once a second
    assert door.readers_until_ns(2 * SECOND) == 2 * SECOND + until_ns


def test_a_heartbeat_makes_the_slots_be_looked_at_at_once(door: Doorkeeper) -> None:
    words = door.memory.slots.array(np.uint64, (8, 2))
    words[:] = 0
    assert door.readers_until_ns(0) is None
    beat = Heartbeat((b"t" * 16,))
    assert door.answer(beat) is beat
    assert door.readers_until_ns(1) is None  # a heartbeat alone proves nothing
    words[2] = (IDENTITY.nonce, 5)
    door.answer(beat)
    assert door.readers_until_ns(2) is not None


def test_hints_are_passed_on(door: Doorkeeper) -> None:
    done = Done(b"t" * 16, "d")
    assert door.answer(done) is done
