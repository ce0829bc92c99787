"""Bidirectional mode: the next turn's prefill reads what it lacks of what D has kept."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from tests.core.helpers import (
    NS,
    PEER,
    Cache,
    arrived,
    assert_all_free,
    counting_prompt,
    failed,
    finished_of,
    make_engine,
    new_request,
    reference_output,
    step,
)
from tests.core.turns import answer, conversation, dones, turn

from pdkv.core.blocks.groups import FullGroup, WindowGroup
from pdkv.core.config import STRICT, VLLM
from pdkv.core.events import Admitted, Event, LoadFailed, TurnDeclined
from pdkv.core.ports import FromConsumer, NewRequest, PeerLost, PeerMet, ReadEnded
from pdkv.core.transfer.messages import Done, Grant, RemoteSource
from pdkv.core.transfer.proof import digest_marks


def test_p_reads_what_it_lacks_once_it_knows_the_clock() -> None:
    grant, before = conversation()
    engine = make_engine(num_blocks=65, max_model_len=256)
    prompt = np.append(before, counting_prompt(20, 700))
    plan, _ = step(engine, NS, [turn("t", prompt, grant)])
    assert plan.reads == ()
    assert [(k.peer, k.tokens, k.awaited) for k in plan.keepalives] == [(PEER, (), True)]
    assert "keeps the turn before" in engine.requests["t"].wait_cause
    assert engine.manager.num_blocks_of("t") == 0
    plan, events = step(engine, NS, [PeerMet(PEER, 0)])
    assert plan.reads[0].remote_blocks.tolist() == list(grant.block_ids)
    assert plan.reads[0].source.prompt_digest == digest_marks(grant)
    admitted = next(event for event in events if isinstance(event, Admitted))
    assert (admitted.local_tokens, admitted.external_tokens) == (0, 100)
    happened: list[Event] = []
    plan, events = step(engine, NS, [arrived(plan)])
    assert dones(plan) == [grant.token]
    assert plan.batch.num_computed.tolist() == [100]
    assert plan.batch.num_scheduled.tolist() == [20]
    happened += events
    assert plan.keepalives == ()
    lease = finished_of(happened)["t"].lease
    assert lease is not None
    assert (lease.num_tokens, lease.marks) == (120, b"")
    assert finished_of(happened)["t"].cached_tokens == 100


def test_a_local_hit_is_not_read_again() -> None:
    grant, before = conversation()
    engine = make_engine(num_blocks=65, max_model_len=256)
    step(engine, 0, [new_request("old", before[:20], 1), PeerMet(PEER, 0)])
    plan, events = step(engine, 0, [turn("t", np.append(before, counting_prompt(9, 700)), grant)])
    assert plan.reads[0].remote_blocks.tolist() == list(grant.block_ids)[5:]
    admitted = next(event for event in events if isinstance(event, Admitted))
    assert (admitted.local_tokens, admitted.external_tokens) == (20, 80)


@pytest.mark.parametrize(("local", "reads"), [(36, True), (40, False)])
def test_below_the_threshold_p_computes(local: int, reads: bool) -> None:
    """100 tokens are kept: 64 are worth a READ, 60 are not."""
    grant, before = conversation()
    engine = make_engine(num_blocks=65, max_model_len=256)
    step(engine, 0, [new_request("old", before[:local], 1), PeerMet(PEER, 0)])
    while engine.requests:
        step(engine, 0)
    plan, _ = step(engine, 0, [turn("t", np.append(before, counting_prompt(9, 700)), grant)])
    assert bool(plan.reads) is reads
    assert dones(plan) == ([] if reads else [grant.token])  # nobody will read it any more
    assert bool(plan.batch.request_ids) is not reads


@pytest.mark.parametrize("offset_s", [-1000, 0, 70, 100_000])
@pytest.mark.parametrize(("left_ns", "reads"), [(5 * NS + 1, True), (5 * NS, False), (-NS, False)])
def test_what_expires_within_5_s_of_d_s_clock_is_not_read(offset_s: int, left_ns: int, reads: bool) -> None:
    grant, before = conversation()
    engine = make_engine(num_blocks=65, max_model_len=256)
    now_ns = 2000 * NS
    expires_ns = now_ns + offset_s * NS + left_ns
    prompt = np.append(before, counting_prompt(9, 700))
    inbox = [PeerMet(PEER, offset_s * NS), turn("t", prompt, grant, expires_ns)]
    plan, events = step(engine, now_ns, inbox)
    assert bool(plan.reads) is reads
    assert sum(isinstance(event, TurnDeclined) for event in events) == (not reads)
    assert not any(isinstance(event, LoadFailed) for event in events)
    assert dones(plan) == ([] if reads else [grant.token])
    assert bool(plan.batch.request_ids) is not reads


@pytest.mark.parametrize("policy", [STRICT, VLLM])
def test_a_failed_load_is_computed_whatever_the_policy_and_not_tried_again(policy: Any) -> None:
    grant, before = conversation()
    engine = make_engine(num_blocks=65, max_model_len=256, transfer=policy, max_num_batched_tokens=256)
    prompt = np.append(before, counting_prompt(9, 700))
    plan, _ = step(engine, 0, [PeerMet(PEER, 0), turn("t", prompt, grant)])
    plan, events = step(engine, 0, [failed(plan.reads[0].handle)])
    assert any(isinstance(event, LoadFailed) for event in events)
    assert plan.reads == ()
    assert plan.batch.num_scheduled.tolist() == [109]
    assert finished_of(events)["t"].lease is not None


def test_kv_that_gave_way_during_the_read_is_not_used() -> None:
    grant, before = conversation()
    engine = make_engine(num_blocks=65, max_model_len=256)
    prompt = np.append(before, counting_prompt(9, 700))
    plan, _ = step(engine, 0, [PeerMet(PEER, 0), turn("t", prompt, grant)])
    plan, events = step(engine, 0, [ReadEnded(handle=plan.reads[0].handle, slot=(grant.nonce, 0))])
    failure = next(event for event in events if isinstance(event, LoadFailed))
    assert "let go" in failure.cause
    assert plan.batch.num_computed.tolist() == [0]


@pytest.mark.parametrize("lost", [True, False])
def test_without_a_handshake_p_computes(lost: bool) -> None:
    grant, before = conversation()
    engine = make_engine(num_blocks=65, max_model_len=256)
    plan, _ = step(engine, 0, [turn("t", np.append(before, counting_prompt(9, 700)), grant)])
    assert plan.next_deadline_ns == 60 * NS
    news = [PeerLost(PEER, "nobody listens there")] if lost else []
    plan, events = step(engine, NS if lost else 60 * NS, news)
    assert plan.batch.request_ids == ("t",)
    assert any(isinstance(event, LoadFailed) for event in events)
    assert dones(plan) == [grant.token]


def test_others_pass_a_turn_that_waits_for_its_handshake() -> None:
    grant, before = conversation()
    engine = make_engine(num_blocks=65, max_model_len=256)
    prompt = np.append(before, counting_prompt(9, 700))
    plan, _ = step(engine, 0, [turn("t", prompt, grant), new_request("p", 8, 1, produce=True)])
    assert plan.batch.request_ids == ("p",)


def test_turns_that_load_count_towards_the_share_of_leases() -> None:
    grant, before = conversation()
    engine = make_engine(num_blocks=61, max_model_len=256, max_leased_fraction=0.5)  # 30 of 60 blocks
    prompt = np.append(before, counting_prompt(9, 700))
    plan, _ = step(engine, 0, [PeerMet(PEER, 0), turn("t", prompt, grant), new_request("p", 16, 1, produce=True)])
    assert len(plan.reads) == 1
    assert plan.batch.request_ids == ()


@pytest.mark.parametrize(("differs_at", "usable"), [(0, 0), (39, 36), (80, 80), (99, 96), (100, 100)])
def test_where_the_tokens_part_only_what_is_in_front_is_used(differs_at: int, usable: int) -> None:
    grant, before = conversation()
    prompt = np.append(before, counting_prompt(9, 700))
    prompt[differs_at] = 999
    engine = make_engine(num_blocks=65, max_model_len=256, kv_recompute_threshold=0)
    plan, _ = step(engine, 0, [PeerMet(PEER, 0), turn("t", prompt, grant)])
    read = [len(read.remote_blocks) for read in plan.reads]
    assert read == ([-(-usable // 4)] if usable else [])
    if usable:
        plan, _ = step(engine, 0, [arrived(plan)])
        assert plan.batch.num_computed.tolist() == [usable]


def test_a_shorter_prompt_uses_the_part_it_has() -> None:
    """The client took its last turn back."""
    grant, before = conversation()
    engine = make_engine(num_blocks=65, max_model_len=256)
    plan, _ = step(engine, 0, [PeerMet(PEER, 0), turn("t", before[:90], grant)])
    assert plan.reads[0].remote_blocks.tolist() == list(grant.block_ids)[:22]


@pytest.mark.parametrize("change", [{"mark_tokens": 0}, {"mark_tokens": 8}, {"marks": b"x" * 16}, {"block_ids": (1,)}])
def test_malformed_offers_are_of_no_use_and_no_harm(change: dict[str, Any]) -> None:
    grant, before = conversation()
    engine = make_engine(num_blocks=65, max_model_len=256)
    prompt = np.append(before, counting_prompt(9, 700))
    plan, _ = step(engine, 0, [PeerMet(PEER, 0), turn("t", prompt, msgspec.structs.replace(grant, **change))])
    assert plan.reads == ()
    assert plan.batch.request_ids == ("t",)


def test_windows_take_all_or_nothing() -> None:
    groups = (FullGroup(block_size=4), WindowGroup(block_size=4, window=8))
    for changed in (False, True):
        d = make_engine(num_blocks=90, max_model_len=256, groups=groups)
        grant = answer(d, prompt=counting_prompt(99), tokens=2)
        prompt = np.append(np.append(counting_prompt(99), np.int32(5)), counting_prompt(9, 700))
        prompt[98] = 999 if changed else prompt[98]
        engine = make_engine(num_blocks=90, max_model_len=256, groups=groups)
        plan, _ = step(engine, 0, [PeerMet(PEER, 0), turn("t", prompt, grant)])
        assert bool(plan.reads) is not changed
        if not changed:
            plan, _ = step(engine, 0, [arrived(plan)])
            assert plan.batch.num_computed.tolist() == [100]


def test_two_turns_with_one_prefix_share_the_read() -> None:
    grant, before = conversation()
    engine = make_engine(num_blocks=65, max_model_len=256)
    prompts = [np.append(before, counting_prompt(9, start)) for start in (700, 800)]
    inbox = [PeerMet(PEER, 0), *(turn(f"t{i}", prompt, grant) for i, prompt in enumerate(prompts))]
    plan, _ = step(engine, 0, inbox)
    assert len(plan.reads) == 1


# -------------------------------------------------------------------------------------------- whole conversations


@pytest.mark.parametrize("retokenised", [False, True])
def test_three_turns_between_two_engines_have_the_right_tokens(retokenised: bool) -> None:
    """KV is followed by content: P, then D, each turn; P's later turns are read from D, D's from P."""
    size = 4
    config = {"num_blocks": 129, "max_model_len": 400, "max_num_batched_tokens": 400, "kv_recompute_threshold": 8}
    engines = {name: make_engine(engine_id=name, nonce=i + 1, **config) for i, name in enumerate("PD")}
    caches = {name: Cache(129, size) for name in engines}
    peers = {name: msgspec.structs.replace(PEER, engine_id=name) for name in engines}
    read = {"P": 0, "D": 0}

    def run(name: str, new: NewRequest, other: str) -> Grant:
        engine, cache, inbox = engines[name], caches[name], [PeerMet(peers[other], 0), new]
        cache.add(new)
        for _ in range(300):
            plan = engine.schedule(0, inbox)
            inbox = []
            for post in plan.reads:
                caches[name].tags[post.local_blocks] = caches[other].tags[post.remote_blocks]
                slot = engines[other].producer._slots._slots[post.source.grant.slot]
                inbox.append(ReadEnded(handle=post.handle, slot=(int(slot[0]), int(slot[1]))))
                read[name] += len(post.local_blocks)
            for message in plan.messages:
                if isinstance(message.message, Done):
                    step(engines[other], 0, [FromConsumer(message.message, 0)])
            events = (*plan.events, *engine.complete(plan.step_id, cache.run(plan.batch), 0))
            engine.check()
            if new.request_id in (ended := finished_of(events)):
                lease = ended[new.request_id].lease
                assert lease is not None
                return lease
        raise AssertionError("does not end")

    prompt, kept = counting_prompt(21), None
    for number in range(3):
        source = None
        if kept is not None:
            source = RemoteSource(peer=peers["D"], request_id="x", grant=kept, expires_ns=480 * NS)
        lease = run("P", new_request(f"p{number}", prompt, 1, produce=True, source=source), "D")
        leg = RemoteSource(peer=peers["P"], request_id=f"p{number}", grant=lease)
        new = new_request(f"d{number}", prompt, 30, source=leg, keep_turn=True)
        kept = run("D", new, "P")
        output = caches["D"].known[f"d{number}"][len(prompt) :]
        assert output == reference_output(new, 400)
        if retokenised:
            output[17] = 998  # the client's text has other tokens from here on
        prompt = np.append(prompt, np.asarray([*output, *range(500, 509)], dtype=np.int32))
    assert read["P"] == (2 * 4 if retokenised else 2 * 8)
    for engine in engines.values():
        step(engine, 1000 * NS)
        assert_all_free(engine)
