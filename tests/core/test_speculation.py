"""Speculative decoding: refused drafts leave no trace, lookahead has its account, and what cannot be is refused."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
from tests.core.helpers import make_engine, new_request, next_token, prefix_tags, prompt_of, reference_output, tokens_of

from pdkv.core.blocks.groups import ChunkedGroup, FullGroup, Group, RingGroup, StateGroup, WindowGroup
from pdkv.core.config import EngineConfig
from pdkv.core.engine import Engine
from pdkv.core.events import Event, Finished, Preempted
from pdkv.core.ports import Batch, NewRequest, Outputs, Plan
from pdkv.core.speculation import Speculation
from pdkv.errors import ConfigError

EAGLE = Speculation(num_tokens=3, lookahead_tokens=3, drop_groups=(), prefill_lookahead_tokens=1)
MTP = Speculation(num_tokens=3, lookahead_tokens=3, drop_groups=(0,), prefill_lookahead_tokens=3)
NGRAM = Speculation(num_tokens=2)
DRAFT_MODEL = Speculation(num_tokens=2, lookahead_tokens=2, drafting_slots=1)


class DraftingDevice:
    """A device that drafts, rightly or not: full and window groups keep a tag per slot, as `helpers.Cache` does."""

    def __init__(self, engine: Engine, seed: int) -> None:
        groups = engine.config.groups
        self.attention = [(n, g) for n, g in enumerate(groups) if isinstance(g, FullGroup | WindowGroup)]
        self.slots = np.full((engine.config.num_blocks, max(group.block_size for group in groups)), -1, dtype=np.int64)
        self.speculation = engine.config.speculation
        self.rng = random.Random(seed)
        self.known: dict[str, list[int]] = {}
        self.proposed: dict[str, list[int]] = {}
        self.refused = self.accepted = 0

    def run(self, batch: Batch) -> Outputs:
        """Sampled and drafted tokens of all rows."""
        tokens = np.zeros(len(batch), dtype=np.int32)
        more, drafts, at = [], [], 0
        for row, name in enumerate(batch.request_ids):
            given = batch.tokens[at : at + batch.num_scheduled[row]].tolist()
            at += len(given)
            sampled = self._row(batch, row, name, given)
            tokens[row] = sampled[0] if sampled else 0
            more.append(prompt_of(*sampled[1:]))
            drafts.append(prompt_of(*self.proposed[name]) if sampled else prompt_of())
        return Outputs(tokens=tokens, more=tuple(more), drafts=tuple(drafts))

    def _row(self, batch: Batch, row: int, name: str, given: list[int]) -> list[int]:
        start, checked = int(batch.num_computed[row]), int(batch.num_drafts[row])
        known = self.known[name]
        certain = len(given) - checked
        if batch.pending[row] or (checked and given[-1] == -1):  # the executor knows what the core does not
            start = len(known) - certain  # drafts of outstanding plans have been refused since
            given[:certain] = known[start : start + certain]
            padding = given[certain:] == [-1] * checked
            given[certain:] = self.proposed.get(name, [-1] * checked)[:checked] if padding else given[certain:]
        assert given[:certain] == known[start : start + certain], f"{name}: wrong input tokens at {start}"
        sampled: list[int] = []
        if batch.samples[row]:
            assert start + certain == len(known), f"{name}: samples before its last token"
            sampled.append(next_token(known))
            for draft in given[certain:]:
                if draft != sampled[-1]:
                    break
                sampled.append(next_token([*known, *sampled]))
            self.accepted += len(sampled) - 1
            self.refused += checked - (len(sampled) - 1)
        self._touch_kv(batch, row, start, given, certain + max(len(sampled) - 1, 0))
        known += sampled
        self.proposed[name] = self._propose(known) if sampled else []
        return sampled

    def _touch_kv(self, batch: Batch, row: int, start: int, given: list[int], good: int) -> None:
        before = self.known[batch.request_ids[row]][:start]
        tags = prefix_tags([*before, *given], None)
        for number, group in self.attention:
            table, size = batch.group_tables[number][row], group.block_size
            for position in range(start, start + len(given)):
                assert table[position // size], f"token {position} has no block in {group}"
                self.slots[table[position // size], position % size] = tags[position]
            first = max(0, start + 1 - group.window) if isinstance(group, WindowGroup) else 0
            for position in range(first, start + good):
                assert self.slots[table[position // size], position % size] == tags[position], "foreign KV"

    def _propose(self, known: list[int]) -> list[int]:
        assert self.speculation is not None
        drafts: list[int] = []
        for _ in range(self.speculation.num_tokens):
            right = next_token([*known, *drafts])
            drafts.append(right if self.rng.random() < 0.7 else (right + 1) % 1000)
        return drafts


def serve(engine: Engine, requests: list[NewRequest], device: DraftingDevice, arrivals: int = 3) -> list[Event]:
    """All events of serving ``requests``, ``arrivals`` a step."""
    waiting, plans = deque(requests), deque[Plan]()
    events: list[Event] = []
    left, now = len(requests), 0
    while left:
        inbox = [waiting.popleft() for _ in range(min(arrivals, len(waiting)))]
        for new in inbox:
            device.known[new.request_id] = new.prompt.tolist()
        plans.append(engine.schedule(now, inbox))
        events += plans[-1].events
        engine.check()
        if len(plans) == engine.config.max_outstanding_plans:
            plan = plans.popleft()
            done = engine.complete(plan.step_id, device.run(plan.batch), now)
            events += done
            engine.check()
            left -= sum(isinstance(event, Finished) for event in done)
        now += 1
        assert now < 3000, "no end in sight"
    while plans:
        plan = plans.popleft()
        events += engine.complete(plan.step_id, device.run(plan.batch), now)
    return events


@pytest.mark.parametrize("outstanding", [1, 2])
@pytest.mark.parametrize(
    ("speculation", "groups"),
    [
        (EAGLE, (FullGroup(block_size=4),)),
        (MTP, (FullGroup(block_size=4), WindowGroup(block_size=4, window=9))),
        (NGRAM, (FullGroup(block_size=4), WindowGroup(block_size=4, window=6), RingGroup(block_size=4))),
        (DRAFT_MODEL, (FullGroup(block_size=4), FullGroup(block_size=4))),
    ],
)
def test_outputs_are_those_without_drafts(
    speculation: Speculation, groups: tuple[Group, ...], outstanding: int
) -> None:
    for seed in range(4):
        engine = make_engine(
            groups=groups, speculation=speculation, num_blocks=30 + 14 * len(groups), max_num_batched_tokens=40,
            max_outstanding_plans=outstanding, max_model_len=64,
        )  # fmt: skip
        rng = random.Random(seed)
        stem = [rng.randrange(1000) for _ in range(24)]
        requests = []
        for number in range(12):
            prompt = prompt_of(*stem[: rng.randrange(1, 24)], *(rng.randrange(1000) for _ in range(rng.randrange(9))))
            requests.append(new_request(f"r{number}", prompt, max_tokens=rng.randrange(1, 45)))
        device = DraftingDevice(engine, seed)
        events = serve(engine, requests, device)
        assert device.refused > 20
        assert device.accepted > 20
        for new in requests:
            assert tokens_of(events)[new.request_id] == reference_output(new, 64)
        accounts = engine.memory().accounts
        assert accounts["running"] == accounts["draft"] == accounts["deferred"] == 0
        assert engine.memory().peaks["draft"] > 0 or not speculation.lookahead_tokens


def test_lookahead_blocks_stand_in_the_account_of_drafts() -> None:
    engine = make_engine(speculation=EAGLE, groups=(FullGroup(block_size=4), RingGroup(block_size=4)))
    engine.schedule(0, [new_request("r", 7)])
    accounts = engine.memory().accounts
    assert (accounts["running"], accounts["draft"]) == (3, 1)  # 7 tokens and the ring; 3 slots more reach a third block
    (holder,) = engine.memory().holders
    assert holder.blocks == 4


def test_a_preempted_request_gives_its_drafts_back_too() -> None:
    engine = make_engine(speculation=EAGLE, num_blocks=9, max_model_len=32)
    device = DraftingDevice(engine, 3)
    requests = [new_request(name, 9, max_tokens=12) for name in "ab"]
    events = serve(engine, requests, device, arrivals=2)
    assert any(isinstance(event, Preempted) for event in events)
    assert engine.manager.pool.num_free == 8


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"lookahead_tokens": -1}, "lookahead_tokens is -1"),
        ({"drop_groups": (2,)}, "group 2; there are 1 groups"),
        ({"drop_groups": (0,), "prefill_lookahead_tokens": 5}, "5 draft modules .* the 4 tokens"),
    ],
)
def test_speculation_that_cannot_be_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(speculation=Speculation(**{"num_tokens": 2, **more}))


def test_drafters_do_not_go_with_every_group() -> None:
    for group in (ChunkedGroup(block_size=4, chunk=8),):
        with pytest.raises(ConfigError, match="chunked local attention"):
            EngineConfig(num_blocks=9, block_size=4, max_model_len=64, groups=(group,), speculation=EAGLE)
    states = (FullGroup(block_size=4), StateGroup(block_size=4, aligned=True, speculative_blocks=3))
    EngineConfig(num_blocks=9, block_size=4, max_model_len=64, groups=states, speculation=EAGLE)
