"""WRITE push of models with groups of every kind: what arrives is what is needed to go on."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from tests.core.helpers import NS, new_request, prompt_of, reference_output, tokens_of
from tests.core.test_group_transfers import MODELS, Side, prefill, sides

from pdkv.core.blocks.groups import FullGroup, Group, StateGroup, WindowGroup
from pdkv.core.config import STRICT
from pdkv.core.events import LoadFinished
from pdkv.core.ports import Abort, FromConsumer, FromProducer, InboxItem, NewRequest, Plan, WriteEnded
from pdkv.core.scheduler.request import Status
from pdkv.core.transfer.messages import Awaited, Peer

P, D = Peer("P", "127.0.0.1", 5600), Peer("D", "127.0.0.1", 5601)


def write(plan: Plan, source: Side, target: Side) -> list[InboxItem]:
    """Carry out the WRITEs of a plan: whole blocks, whatever group they belong to."""
    ledger = target.engine.manager.pool.ledger
    for post in plan.writes:
        assert not ledger.hashed(post.remote_blocks).any(), "a WRITE over content that can be hit"
        for remote, local in zip(post.remote_blocks.tolist(), post.local_blocks.tolist(), strict=True):
            assert remote > 0
            assert local > 0
            target.cache.slots[remote] = source.cache.slots[local]
            target.cache.states[remote] = source.cache.states[local]
    return [WriteEnded(handle=post.handle, moved_bytes=1, seconds=0.1) for post in plan.writes]


# A prompt of which a block or less is missing is computed: of one with a block of 64 tokens nothing would be written.
SMALL_BLOCKS = [(groups, more) for groups, more in MODELS if max(group.block_size for group in groups) < 64]


@pytest.mark.parametrize(("groups", "more"), SMALL_BLOCKS)
def test_a_consumer_goes_on_where_the_producer_stopped(groups: tuple[Group, ...], more: dict[str, Any]) -> None:
    loads = 0
    for seed in range(2):
        rng = random.Random(seed)
        producer, consumer, _ = sides(groups, STRICT, {**more, "lease_ns": 60 * NS})
        consumer.engine.accept_writes(D)
        stem = [rng.randrange(1000) for _ in range(40)]
        to_d: list[InboxItem] = []
        to_p: list[InboxItem] = []
        requests: list[NewRequest] = []
        legs: list[NewRequest] = []
        aborted: set[str] = set()
        for now in range(400):
            if now < 30 and rng.random() < 0.4:
                tokens = stem[: rng.randrange(41)] + [rng.randrange(1000) for _ in range(rng.randrange(1, 12))]
                new = new_request(f"r{now}", prompt_of(*tokens), max_tokens=rng.randrange(1, 12))
                legs.append(dataclasses.replace(new, transfer_id=f"t{now}"))
                awaited = Awaited(peer=P, transfer_id=f"t{now}", write=True)
                requests.append(dataclasses.replace(new, awaited=awaited))
                to_d.append(requests[-1])
            if legs and rng.random() < 0.5:  # either side may come first
                prefill(producer, legs.pop(0), now)
            loading = [key for key, request in consumer.engine.requests.items() if request.status is Status.LOADING]
            if loading and rng.random() < 0.05:
                aborted.add(loading[0])
                to_d.append(Abort(loading[0]))
            plan = consumer.step(now, to_d)
            to_p += [FromConsumer(message.message, now, b"D") for message in plan.messages]
            done = producer.step(now, to_p)
            to_p = write(done, producer, consumer)
            to_d = [FromProducer(reply.message, P) for reply in done.replies]
            if now > 30 and not legs and not consumer.engine.requests and not to_d and not to_p:
                break
        for new in requests:
            if new.request_id not in aborted:
                assert tokens_of(consumer.events)[new.request_id] == reference_output(new, 64)
        assert consumer.engine.manager.pool.num_free == 69
        assert not producer.engine.producer._by_token, "a lease that nobody gave back"
        loads += sum(isinstance(event, LoadFinished) for event in consumer.events)
    assert loads > 5


def test_windows_and_states_move_only_what_is_looked_at() -> None:
    full = FullGroup(block_size=4)
    groups: tuple[Group, ...] = (full, WindowGroup(block_size=4, window=9), StateGroup(block_size=4, aligned=True))
    producer, consumer, _ = sides(groups, STRICT, {"prefix_match_unit": 4})
    consumer.engine.accept_writes(D)
    new = dataclasses.replace(new_request("r", 42), awaited=Awaited(peer=P, transfer_id="t", write=True))
    plan = consumer.engine.schedule(0, [new])
    prefill(producer, dataclasses.replace(new_request("r", 42), transfer_id="t"), 0)
    (post,) = producer.engine.schedule(0, [FromConsumer(message.message, 0) for message in plan.messages]).writes
    assert post.grant.group_blocks == (11, 3, 1)
    tables = [consumer.engine.manager.blocks_of("r", group) for group in range(3)]
    assert post.remote_blocks.tolist() == [block for table in tables for block in table.tolist() if block]
