"""KV of models with groups of every kind goes from P to D: what arrives is what is needed to go on."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.core.group_cache import GroupCache
from tests.core.helpers import PEER, make_engine, new_request, prompt_of, reference_output, tokens_of

from pdkv.core.blocks.groups import (
    ChunkedGroup,
    CrossGroup,
    FullGroup,
    Group,
    ReferenceWindowGroup,
    RingGroup,
    StateGroup,
    WindowGroup,
)
from pdkv.core.config import STRICT, VLLM, TransferPolicy
from pdkv.core.engine import Engine
from pdkv.core.events import Event, Finished, LoadFinished
from pdkv.core.ports import Abort, FromConsumer, InboxItem, NewRequest, Plan, ReadEnded
from pdkv.core.scheduler.request import Status
from pdkv.core.transfer.messages import Grant, RemoteSource
from pdkv.errors import BadRequest

FULL = FullGroup(block_size=4)
MODELS: list[tuple[tuple[Group, ...], dict[str, Any]]] = [
    ((FULL, WindowGroup(block_size=4, window=9)), {}),
    ((FULL, WindowGroup(block_size=8, window=5), WindowGroup(block_size=4, window=4)), {}),
    ((FULL, ChunkedGroup(block_size=4, chunk=12)), {}),
    ((FULL, StateGroup(block_size=4, aligned=True)), {}),
    ((FullGroup(block_size=8), StateGroup(block_size=8, aligned=True)), {"prefix_match_unit": 2}),
    ((WindowGroup(block_size=4, window=6), StateGroup(block_size=4, aligned=True)), {"prefix_match_unit": 4}),
    ((FULL, StateGroup(block_size=64, aligned=False)), {"enable_prefix_caching": False}),
    ((FULL, ReferenceWindowGroup(block_size=4, window=6)), {"enable_prefix_caching": False}),
    ((FULL, FULL), {}),
]


class Side:
    """One engine, its device and its lease slots."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cache = GroupCache(engine.config.num_blocks, engine.config.groups)
        self.events: list[Event] = []

    def step(self, now: int, inbox: list[InboxItem]) -> Plan:
        """One plan, run at once."""
        for item in inbox:
            if isinstance(item, NewRequest):
                self.cache.add(item)
        plan = self.engine.schedule(now, inbox)
        self.engine.check()
        done = self.engine.complete(plan.step_id, self.cache.run(plan.batch), now)
        self.engine.check()
        self.events += (*plan.events, *done)
        return plan


def sides(
    groups: tuple[Group, ...],
    transfer: TransferPolicy,
    more: dict[str, Any],
    consumer_groups: tuple[Group, ...] | None = None,
) -> tuple[Side, Side, np.ndarray]:
    """Producer, consumer, and the producer's slots."""
    config = {"max_model_len": 64, "max_num_batched_tokens": 24, "transfer": transfer, **more}
    producer = make_engine(groups=groups, num_blocks=90, engine_id="P", **config)
    consumer = make_engine(groups=consumer_groups or groups, num_blocks=70, engine_id="D", nonce=8, **config)
    return Side(producer), Side(consumer), producer.producer._slots._slots


def prefill(side: Side, new: NewRequest, now: int) -> Grant | None:
    """Compute a prompt for a peer; the grant, if there is one."""
    leg = dataclasses.replace(
        new, request_id=f"p-{new.request_id}", max_tokens=1, stop_token_ids=frozenset(), produce=True
    )
    if side.engine.manager.leaves_last_token and len(leg.prompt) > 1:
        side.cache.add(dataclasses.replace(leg, prompt=leg.prompt[:-1]))
    inbox: list[InboxItem] = [leg]
    while True:
        start = len(side.events)
        plan = side.engine.schedule(now, inbox)
        if inbox and leg.request_id not in side.cache.known:
            side.cache.add(leg)
        done = side.engine.complete(plan.step_id, side.cache.run(plan.batch), now)
        side.engine.check()
        side.events += (*plan.events, *done)
        inbox = []
        for event in side.events[start:]:
            if isinstance(event, Finished) and event.request_id == leg.request_id:
                return event.lease


def move(plan: Plan, source: Side, target: Side, slots: np.ndarray) -> list[ReadEnded]:
    """Carry out the READs of a plan: whole blocks, whatever group they belong to, or what is a block on one side."""
    reports = []
    ledger = target.engine.manager.pool.ledger
    theirs, ours = (side.engine.manager.paged_block_size for side in (source, target))
    parts, own_parts = max(theirs // ours, 1), max(ours // theirs, 1)
    slots_here = target.cache.slots.reshape(-1, target.cache.slots.shape[1] // own_parts)
    slots_there = source.cache.slots.reshape(-1, source.cache.slots.shape[1] // parts)
    for read in plan.reads:
        assert not ledger.hashed(read.local_blocks // own_parts).any(), "a READ over content that can be hit"
        for remote, local in zip(read.remote_blocks.tolist(), read.local_blocks.tolist(), strict=True):
            assert remote >= parts
            assert local >= own_parts
            slots_here[local] = slots_there[remote]
            target.cache.states[local // own_parts] = source.cache.states[remote // parts]
        nonce, lease_id = slots[read.source.grant.slot].tolist()
        reports.append(ReadEnded(handle=read.handle, slot=(nonce, lease_id), moved_bytes=1, seconds=0.1))
    return reports


@pytest.mark.parametrize("transfer", [STRICT, VLLM], ids=lambda policy: policy.name)
@pytest.mark.parametrize(("groups", "more"), MODELS)
def test_a_consumer_goes_on_where_the_producer_stopped(
    groups: tuple[Group, ...], more: dict[str, Any], transfer: TransferPolicy
) -> None:
    assert carry_on(groups, groups, transfer, more) > 8


UNLIKE: list[tuple[Callable[[int], tuple[Group, ...]], tuple[int, int]]] = [
    (lambda size: (FullGroup(block_size=size),), (4, 8)),
    (lambda size: (FullGroup(block_size=size),), (8, 4)),
    (lambda size: (FullGroup(block_size=size),), (2, 8)),
    (lambda size: (FullGroup(block_size=size), WindowGroup(block_size=size, window=9)), (4, 8)),
    (lambda size: (FullGroup(block_size=size), WindowGroup(block_size=size, window=9)), (8, 4)),
    (lambda size: (FullGroup(block_size=size), WindowGroup(block_size=size, window=9)), (2, 8)),
    (lambda size: (WindowGroup(block_size=size, window=5), FullGroup(block_size=size)), (12, 4)),
    (lambda size: (FullGroup(block_size=size), ChunkedGroup(block_size=size, chunk=16)), (4, 8)),
    (lambda size: (FullGroup(block_size=size), ChunkedGroup(block_size=size, chunk=16)), (8, 4)),
]


@pytest.mark.parametrize("transfer", [STRICT, VLLM], ids=lambda policy: policy.name)
@pytest.mark.parametrize(("groups", "sizes"), UNLIKE)
def test_so_does_one_with_blocks_of_another_size(
    groups: Callable[[int], tuple[Group, ...]], sizes: tuple[int, int], transfer: TransferPolicy
) -> None:
    theirs, ours = sizes
    assert carry_on(groups(theirs), groups(ours), transfer, {}) > 8


def carry_on(
    groups: tuple[Group, ...], consumer_groups: tuple[Group, ...], transfer: TransferPolicy, more: dict[str, Any]
) -> int:
    """Requests with common beginnings through P and D: all tokens are right, all memory comes back. How many loads."""
    loads = 0
    for seed in range(3):
        rng = random.Random(seed)
        producer, consumer, slots = sides(groups, transfer, more, consumer_groups)
        stem = [rng.randrange(1000) for _ in range(40)]
        inbox: list[InboxItem] = []
        requests: list[NewRequest] = []
        aborted: set[str] = set()
        for now in range(400):
            if now < 30 and rng.random() < 0.4:
                tokens = stem[: rng.randrange(41)] + [rng.randrange(1000) for _ in range(rng.randrange(1, 12))]
                new = new_request(f"r{now}", prompt_of(*tokens), max_tokens=rng.randrange(1, 12))
                grant = prefill(producer, new, now)
                if grant is not None:
                    new = dataclasses.replace(new, source=RemoteSource(peer=PEER, request_id="p", grant=grant))
                requests.append(new)
                inbox.append(new)
            loading = [key for key, request in consumer.engine.requests.items() if request.status is Status.LOADING]
            if loading and rng.random() < 0.1:
                aborted.add(loading[0])
                inbox.append(Abort(loading[0]))
            plan = consumer.step(now, inbox)
            for message in plan.messages:
                producer.step(now, [FromConsumer(message.message, now)])
            inbox = list(move(plan, producer, consumer, slots))
            if now > 30 and not consumer.engine.requests and not inbox:
                break
        for new in requests:
            if new.request_id not in aborted:
                assert tokens_of(consumer.events)[new.request_id] == reference_output(new, 64)
        assert consumer.engine.manager.pool.num_free == 69
        assert not producer.engine.producer._by_token, "a lease that nobody gave back"
        loads += sum(isinstance(event, LoadFinished) for event in consumer.events)
    return loads


def test_only_what_is_needed_is_kept_and_moved() -> None:
    groups: tuple[Group, ...] = (FULL, WindowGroup(block_size=4, window=9), StateGroup(block_size=4, aligned=True))
    producer, consumer, _ = sides(groups, STRICT, {"prefix_match_unit": 4})
    new = new_request("r", 42)
    grant = prefill(producer, new, 0)
    assert grant is not None
    assert (grant.num_tokens, grant.group_blocks) == (41, (11, 3, 1))  # the last token is the consumer's
    assert producer.engine.memory().accounts["retained"] == 15
    new = dataclasses.replace(new, source=RemoteSource(peer=PEER, request_id="p", grant=grant))
    plan = consumer.engine.schedule(0, [new])
    (read,) = plan.reads
    assert read.remote_blocks.tolist() == list(grant.block_ids)
    tables = [consumer.engine.manager.blocks_of("r", group) for group in range(3)]
    assert [len(table) for table in tables] == [11, 11, 11]
    assert read.local_blocks.tolist() == [block for table in tables for block in table.tolist() if block]
    assert [int((table != 0).sum()) for table in tables] == [11, 3, 1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"group_blocks": (11, 2)}, "11/2 blocks"),
        ({"group_blocks": ()}, "14 blocks"),
        ({"num_tokens": 42}, "42 tokens in 11/3 blocks for a prompt of 42 tokens; .* at most 41"),
        ({"block_ids": (1, 2)}, "so 11/3 blocks"),
    ],
)
def test_a_grant_of_other_groups_is_refused(change: dict[str, Any], text: str) -> None:
    groups: tuple[Group, ...] = (FULL, WindowGroup(block_size=4, window=9))
    producer, consumer, _ = sides(groups, STRICT, {})
    new = new_request("r", 42)
    grant = prefill(producer, new, 0)
    assert grant is not None
    source = RemoteSource(peer=PEER, request_id="p", grant=grant)
    consumer.engine.validate(dataclasses.replace(new, source=source))
    wrong = msgspec.structs.replace(source, grant=msgspec.structs.replace(grant, **change))
    with pytest.raises(BadRequest, match=text):
        consumer.engine.validate(dataclasses.replace(new, source=wrong))


def test_the_last_token_is_left_to_the_consumer_unless_every_block_is_kept() -> None:
    """A ring, a window and a state have moved on once the last token is computed, and it is computed again."""
    for group, left in ((FULL, False), (RingGroup(block_size=4), True), (WindowGroup(block_size=4, window=9), True)):
        assert make_engine(groups=(FULL, group)).manager.leaves_last_token is left


def test_what_an_encoder_put_out_is_not_moved() -> None:
    groups: tuple[Group, ...] = (FULL, CrossGroup(block_size=4, encoder_tokens=8))
    engine = make_engine(groups=groups, enable_prefix_caching=False)
    with pytest.raises(BadRequest, match="encoder"):
        engine.validate(new_request("r", 5, encoder_tokens=8, produce=True))
