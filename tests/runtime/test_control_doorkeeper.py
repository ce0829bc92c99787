"""Who may read from an instance: equal facts, and only with a grant that stands."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdkv.core.engine import Identity
from pdkv.core.ports import Done, Heartbeat, Peer, RemoteSource
from pdkv.core.transfer.lease import lease_token
from pdkv.runtime.doorkeeper import Doorkeeper, PeerIdentity, TransferMemory, differing_facts
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.wire import Claim, ClaimReply, Hello, HelloReply, PeerMemory, Refused

FACTS = {"model": "smol@ab12", "dtype": "float32"}
IDENTITY = Identity(engine_id="p", nonce=2**63 + 11, secret=b"s" * 32)
LEASE_NS = 1000


@pytest.fixture
def door() -> Iterator[Doorkeeper]:
    pool, slots = SharedMemory(16 * 64), SharedMemory(8 * 16)
    slots.array(np.uint64, (8, 2))[2] = (IDENTITY.nonce, 5)
    memory = TransferMemory(pool, 64, 16, slots, 8)
    described = PeerMemory(bytes_per_block=64, num_blocks=16, num_slots=8)
    yield Doorkeeper(PeerIdentity(IDENTITY, FACTS), FACTS, memory, LEASE_NS, lambda: (described, 4))
    pool.close()
    slots.close()


def grant(**changes: object) -> RemoteSource:
    """A true grant, then changed without making the token anew."""
    token = lease_token(IDENTITY.secret, lease_id=5, slot=2, block_ids=(3, 9), num_tokens=30, prompt_digest=b"")
    source = RemoteSource(
        peer=Peer("p", "h", 1),
        request_id="r",
        block_ids=(3, 9),
        num_tokens=30,
        slot=2,
        nonce=IDENTITY.nonce,
        lease_id=5,
        token=token,
    )
    return msgspec.structs.replace(source, **changes)


def ask(door: Doorkeeper, source: RemoteSource) -> ClaimReply | Refused:
    reply = door.answer(Claim(seq=1, consumer="d", source=source), now_ns=0)
    assert isinstance(reply, (ClaimReply, Refused))
    return reply


def test_hello_with_equal_facts_is_welcome(door: Doorkeeper) -> None:
    reply = door.answer(Hello(seq=9, engine_id="d", target="p", facts=FACTS), 0)
    assert isinstance(reply, HelloReply)
    assert (reply.seq, reply.epoch, reply.nonce) == (9, 4, IDENTITY.nonce)


def test_every_differing_fact_is_named_with_both_values(door: Doorkeeper) -> None:
    theirs = {"model": "llama@ff00", "dtype": "bfloat16", "extra": "1"}
    reply = door.answer(Hello(seq=9, engine_id="d", target="p", facts=theirs), 0)
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
    hello = door.answer(Hello(seq=1, engine_id="d", target="old", facts=FACTS), 0)
    claim = ask(door, grant(peer=Peer("old", "h", 1)))
    for reply in (hello, claim):
        assert isinstance(reply, Refused)
        assert "'old' is gone" in reply.reason
        assert "'p' answers there now" in reply.reason


def test_a_true_grant_is_accepted(door: Doorkeeper) -> None:
    assert ask(door, grant()) == ClaimReply(seq=1, epoch=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_ids": (3, 10)},
        {"block_ids": (9, 3)},
        {"block_ids": (3, 9, 9)},
        {"block_ids": (3,)},
        {"block_ids": ()},
        {"block_ids": (3, 16)},
        {"block_ids": (-1, 9)},
        {"num_tokens": 31},
        {"num_tokens": 0},
        {"slot": 1},
        {"slot": 8},
        {"slot": -1},
        {"lease_id": 6},
        {"lease_id": 2**63},
        {"nonce": 1},
        {"token": b"f" * 16},
        {"token": b""},
    ],
    ids=str,
)
def test_changed_grants_are_refused(door: Doorkeeper, changes: dict[str, object]) -> None:
    assert isinstance(ask(door, grant(**changes)), Refused)
    assert door.refusals == 1
    assert door.readers_until_ns(0) is None


def test_a_released_lease_is_refused(door: Doorkeeper) -> None:
    door.memory.slots.array(np.uint64, (8, 2))[2] = 0
    reply = ask(door, grant())
    assert isinstance(reply, Refused)
    assert "ended" in reply.reason


ints = st.integers(-(2**63), 2**64 - 1)


@given(
    block_ids=st.lists(ints, max_size=5).map(tuple),
    slot=ints,
    lease_id=ints,
    num_tokens=ints,
    token=st.binary(max_size=20),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_made_up_grant_is_accepted(door: Doorkeeper, **fields: object) -> None:
    assert isinstance(ask(door, grant(**fields)), Refused)


def test_readers_are_known_from_claim_to_done(door: Doorkeeper) -> None:
    source = grant()
    door.answer(Heartbeat((source.token,)), 0)
    assert door.readers_until_ns(0) is None  # a heartbeat alone proves nothing
    ask(door, source)
    assert door.readers_until_ns(0) == LEASE_NS
    door.answer(Heartbeat((source.token, b"u" * 16)), 400)
    assert door.readers_until_ns(400) == 400 + LEASE_NS
    door.answer(Done(source.token, "d"), 500)
    assert door.readers_until_ns(500) is None
    ask(door, source)
    assert door.readers_until_ns(LEASE_NS) is None  # a lost done costs a lease, not for ever
