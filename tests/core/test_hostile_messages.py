"""Messages of somebody who knows no token and no transfer id: nothing of what others hold changes.

The engine behind a side channel without a secret, where every process of the host is heard.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.core.helpers import (
    NS,
    PEER,
    arrived,
    assert_all_free,
    counting_prompt,
    finished_of,
    make_engine,
    new_request,
    source_for,
    step,
)

from pdkv.core.engine import Engine
from pdkv.core.ports import FromConsumer, FromProducer, NewRequest, Reply
from pdkv.core.transfer.messages import (
    Announce,
    Awaited,
    CancelGrant,
    Done,
    Fenced,
    Gone,
    Grant,
    Heartbeat,
    Noted,
    NotWritten,
    OfGrant,
    Peer,
    Register,
    RegisterWrite,
    ToProducer,
    Withdraw,
    WriteGrant,
    Written,
)

IDS = ("a1b2c3d4", "f00dfeed")


def producer() -> tuple[Engine, list[bytes]]:
    """P with four leases of three blocks, two of them kept under transfer ids; and their tokens."""
    engine = make_engine(engine_id="P", num_blocks=65, lease_ns=30 * NS)
    requests = [new_request(f"p{at}", 10, 1, produce=True) for at in range(2)]
    requests += [new_request(f"t{at}", 10, 1, produce=True, transfer_id=IDS[at]) for at in range(2)]
    for request in requests:
        step(engine, 0, [request])
    tokens = list(engine.producer._by_token)
    assert len(tokens) == 4
    return engine, tokens


def held(engine: Engine) -> Any:
    """All that somebody else could lose: the ledger with holders and deadlines, the lease slots, the requests."""
    memory = engine.memory()
    slots = engine.producer._slots._slots.tobytes()
    waits = {name: (request.status, request.awaited, request.source) for name, request in engine.requests.items()}
    return memory.accounts, memory.holders, slots, engine.next_deadline_ns(), waits


def near(rng: random.Random, true: bytes) -> bytes:
    """Not ``true``, but close to it, or nothing like it."""
    match rng.randrange(4):
        case 0:
            at = rng.randrange(len(true))
            return true[:at] + bytes([true[at] ^ 1 << rng.randrange(8)]) + true[at + 1 :]
        case 1:
            return true[: rng.randrange(len(true))]
        case 2:
            return true + true[:1]
        case _:
            return rng.randbytes(len(true))


def odd_write_grant(rng: random.Random) -> WriteGrant:
    """What a peer could grant that msgpack can carry and `runtime.wire` lets through."""
    number = lambda: rng.choice((-(2**63), -1, 0, 1, 5, 10, 2**31, 2**63 - 1, 2**64 - 1))  # noqa: E731
    return WriteGrant(
        nonce=rng.getrandbits(64),
        grant_id=rng.randrange(1, 1 << 64),
        slot=rng.randrange(1 << 31),
        block_ids=tuple(number() for _ in range(rng.randrange(6))),
        block_size=number(),
        num_tokens=number(),
        first_token=number(),
        prompt_digest=rng.randbytes(16),
        group_blocks=tuple(number() for _ in range(rng.randrange(3))),
    )


def forged(rng: random.Random, tokens: list[bytes]) -> ToProducer:
    name = near(rng, rng.choice(IDS).encode()).decode("latin-1")
    match rng.randrange(8):
        case 5:
            grant = odd_write_grant(rng) if rng.random() < 0.7 else None
            producer = rng.choice(("P", "P before"))
            return RegisterWrite(transfer_id=name, producer=producer, consumer=PEER, grant=grant)
        case 6:
            return RegisterWrite(
                transfer_id=rng.choice(IDS), producer="P before", consumer=PEER, grant=odd_write_grant(rng)
            )
        case 7:
            producer = rng.choice(("P", "P before"))
            return CancelGrant(rng.choice((name, *IDS)), producer, rng.getrandbits(64), rng.randrange(1, 1 << 64))
        case 0:
            return Heartbeat(tuple(near(rng, rng.choice(tokens)) for _ in range(rng.randrange(6))))
        case 1:
            return Done(near(rng, rng.choice(tokens)), rng.choice(("D", "", "x" * 500)))
        case 2:
            return Register(name, rng.choice(("P", "P before", "")))
        case 3:
            return Register(rng.choice(IDS), "another engine")
        case _:
            return Withdraw(name)


@pytest.mark.parametrize("seed", range(10))
def test_forged_messages_free_renew_and_expose_nothing_of_p(seed: int) -> None:
    rng = random.Random(seed)
    engine, tokens = producer()
    step(engine, 1)
    before = held(engine)
    for _ in range(60):
        inbox = [FromConsumer(forged(rng, tokens), 10 * NS, b"stranger") for _ in range(10)]
        plan, events = step(engine, 1, inbox)
        assert events == ()
        harmless = Gone | Noted | NotWritten | Fenced
        assert all(isinstance(reply.message, harmless) for reply in plan.replies), "a grant was told to a stranger"
        assert plan.writes == (), "KV was written to a stranger"
        assert held(engine) == before
    assert engine.memory().accounts["retained"] == 12
    step(engine, 30 * NS)
    assert_all_free(engine)


def test_replayed_messages_do_nothing_to_the_next_holder_of_the_same_slot_and_blocks() -> None:
    engine = make_engine(engine_id="P", num_blocks=5, slots=1)
    old = finished_of(step(engine, 0, [new_request("first", 10, 1, produce=True)])[1])["first"].lease
    assert old is not None
    replay = [
        FromConsumer(message, 20 * NS, b"D")
        for message in (Done(old.token, "D"), Heartbeat((old.token,)), Done(old.token, "D"))
    ]
    step(engine, 1, replay[:1])
    assert_all_free(engine)
    new = finished_of(step(engine, 2, [new_request("second", 10, 1, produce=True)])[1])["second"].lease
    assert new is not None
    assert new.slot == old.slot
    assert new.token != old.token
    before = held(engine)
    for _ in range(3):
        _, events = step(engine, 3, replay)
        assert events == ()
        assert held(engine) == before


def test_who_registers_is_told_only_the_id_that_it_named_and_by_its_own_connection() -> None:
    engine, _ = producer()
    step(engine, 1)
    plan, _ = step(engine, 1, [FromConsumer(Register(IDS[0], "P"), 1, b"D")])
    (reply,) = plan.replies
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Announce)
    assert (reply.origin, reply.message.transfer_id) == (b"D", IDS[0])


def test_a_flood_of_registrations_is_bounded_and_a_true_one_is_answered_after_it() -> None:
    engine, _ = producer()
    flood = [FromConsumer(Register(f"guess {at}", "P"), 1, b"stranger") for at in range(6000)]
    step(engine, 1, flood)
    assert len(engine.producer.announcements._registered) <= 4096
    plan, _ = step(engine, 1, [FromConsumer(Register(IDS[1], "P"), 1, b"D")])
    assert [type(reply.message) for reply in plan.replies] == [Announce]


# ------------------------------------------------------------------------------------------------------------------ D


def consumer(*, granted: bool = False) -> Engine:
    """D with a load in flight, a request that waits for an announcement, and perhaps one that waits for a WRITE."""
    engine = make_engine(engine_id="D", num_blocks=65)
    waiting = NewRequest(
        request_id="w", prompt=counting_prompt(10), max_tokens=2, awaited=Awaited(peer=PEER, transfer_id=IDS[0])
    )
    plan, _ = step(engine, 0, [new_request("l", 12, 4, source=source_for(12, 4)), waiting])
    assert len(plan.reads) == 1
    if not granted:
        return engine
    engine.accept_writes(Peer("D", "127.0.0.1", 5601))
    promised = Awaited(peer=PEER, transfer_id=IDS[1], write=True)
    step(engine, 0, [NewRequest(request_id="g", prompt=counting_prompt(10, 300), max_tokens=2, awaited=promised)])
    assert len(engine.consumer.grants._promises) == 1
    return engine


def odd_grant(rng: random.Random) -> Grant:
    """What a peer could say that msgpack can carry."""
    number = lambda: rng.choice((-(2**63), -1, 0, 1, 5, 10, 2**31, 2**63 - 1, 2**64 - 1))  # noqa: E731
    return Grant(
        block_ids=tuple(number() for _ in range(rng.randrange(6))),
        block_size=number(),
        num_tokens=number(),
        slot=number(),
        nonce=number(),
        lease_id=number(),
        token=rng.randbytes(16),
        proof=rng.randbytes(16),
        cached_tokens=number(),
        group_blocks=tuple(number() for _ in range(rng.randrange(3))),
    )


def of_a_grant(rng: random.Random, peer: Peer) -> OfGrant:
    """From a stranger about the grant there is, from its producer about others."""
    nonce, grant_id = (7, 1) if peer != PEER else rng.choice(((7, 2), (8, 1), (7, 2**63), (0, 1), (2**64 - 1, 1)))
    return rng.choice(
        (
            Noted(nonce, grant_id, rng.random() < 0.5),
            Written(nonce, grant_id, 1),
            NotWritten(nonce, grant_id, "x"),
            Fenced(nonce, grant_id),
        )
    )


@pytest.mark.parametrize("seed", range(10))
def test_answers_of_strangers_and_to_unknown_ids_change_nothing_of_d(seed: int) -> None:
    rng = random.Random(seed)
    engine = consumer(granted=True)
    before = held(engine)
    strangers = (Peer("Q", PEER.host, PEER.port), Peer("", "127.0.0.1", 1))
    for _ in range(200):
        known = rng.random() < 0.5
        peer = rng.choice(strangers) if known else rng.choice((*strangers, PEER))
        name = IDS[0] if known else near(rng, IDS[0].encode()).decode("latin-1")
        message = rng.choice((Gone(name, "x"), Announce(name, "r", odd_grant(rng)), of_a_grant(rng, peer)))
        _, events = step(engine, 0, [FromProducer(message, peer)])
        assert events == ()
        assert held(engine) == before


@pytest.mark.parametrize("seed", range(40))
def test_the_asked_peer_can_hurt_only_what_waits_for_it(seed: int) -> None:
    """A grant of any numbers ends in a load from that peer, or in the prompt computed here; the other load stands."""
    rng = random.Random(seed)
    engine = consumer()
    grant = odd_grant(rng)
    if seed % 2:  # plausible but for one field
        sound = msgspec.structs.replace(source_for(10, 4).grant, token=b"u" * 16, proof=b"p" * 16)
        name = rng.choice(("block_ids", "num_tokens", "slot", "nonce", "lease_id", "cached_tokens", "group_blocks"))
        grant = msgspec.structs.replace(sound, **{name: getattr(grant, name)})
    step(engine, 0, [FromProducer(Announce(IDS[0], "r", grant), PEER)])
    (load,) = [view for view in engine.memory().holders if view.request_id == "l"]
    assert (load.account, load.blocks) == ("loading", 3)
    for now in range(1, 200):
        step(engine, now * NS)
    assert not {name for name in engine.requests if engine.requests[name].awaited is not None}
    assert_all_free(engine) if not engine.memory().accounts["quarantine"] else None


def test_reports_of_handles_that_do_not_exist_change_nothing() -> None:
    engine = consumer()
    before = held(engine)
    plan, _ = step(make_engine(), 0, [new_request("x", 12, source=source_for(12, 4))])
    stray = replace(arrived(plan), handle=4711)
    _, events = step(engine, 0, [stray])
    assert events == ()
    assert held(engine) == before
