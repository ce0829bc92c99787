"""Bidirectional mode: D keeps an answer's KV for a while, and the next turn's prefill reads what it lacks of it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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

from pdkv.core.blocks.groups import FullGroup, WindowGroup
from pdkv.core.config import STRICT, VLLM
from pdkv.core.engine import Engine
from pdkv.core.events import (
    Admitted,
    Event,
    FinishReason,
    LeaseGranted,
    LeaseReleased,
    LoadFailed,
    Preempted,
    TurnDeclined,
)
from pdkv.core.ports import Abort, FromConsumer, Int32Array, NewRequest, PeerLost, PeerMet, Plan, ReadEnded
from pdkv.core.transfer.messages import Done, Grant, Heartbeat, RemoteSource
from pdkv.core.transfer.proof import (
    MARK_BYTES,
    MOST_MARKS,
    bind,
    digest_marks,
    digest_tokens,
    is_proved,
    mark_prefixes,
    marked_tokens,
    proof_key,
)

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


# --------------------------------------------------------------------------------------------------- what D keeps


def test_an_ended_answer_is_kept_with_all_but_its_last_token() -> None:
    engine = make_engine()
    grant = answer(engine, length=10, tokens=7, now_ns=3 * NS)
    assert (grant.num_tokens, len(grant.block_ids)) == (16, 4)
    holder = next(iter(engine.memory().holders))
    assert (holder.account, holder.blocks, holder.deadline_ns) == ("retained", 4, 483 * NS)
    assert "next turn" in holder.cause
    tokens = np.append(new_request("r", 10).prompt, np.full(6, 5, dtype=np.int32))
    assert digest_tokens(tokens) == grant.marks[-MARK_BYTES:]
    assert is_proved(proof_key(SECRET), grant, digest_marks(grant))


def test_only_who_asks_for_it_is_kept() -> None:
    engine = make_engine()
    inbox, ended = [new_request("r", 10, 3)], {}
    while not ended:
        ended = finished_of(step(engine, 0, inbox)[1])
        inbox = []
    assert ended["r"].lease is None
    assert_all_free(engine)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_abnormal_end_keeps_nothing(reason: FinishReason) -> None:
    engine = make_engine()
    step(engine, 0, [new_request("r", 10, 9, keep_turn=True)])
    _, events = step(engine, 0, [Abort("r", reason)])
    assert finished_of(events)["r"].lease is None
    assert_all_free(engine)


def test_a_stop_string_is_a_normal_end() -> None:
    engine = make_engine()
    step(engine, 0, [new_request("r", 10, 9, keep_turn=True)])
    step(engine, 0)
    _, events = step(engine, 0, [Abort("r", FinishReason.STOP)])
    lease = finished_of(events)["r"].lease
    assert lease is not None
    assert lease.num_tokens == 11


def test_it_stands_for_its_time_and_nothing_renews_it() -> None:
    engine = make_engine(kept_ttl_ns=60 * NS)
    grant = answer(engine)
    for at in (10, 50, 59):
        _, events = step(engine, at * NS, [FromConsumer(Heartbeat((grant.token,)), at * NS)])
        assert not released(events)
    assert engine.next_deadline_ns() == 60 * NS
    _, events = step(engine, 60 * NS)
    gone = released(events)
    assert [(event.expired, event.next_turn, event.gave_way) for event in gone] == [(True, True, False)]
    assert_all_free(engine)


def test_who_has_read_it_lets_it_go() -> None:
    engine = make_engine()
    grant = answer(engine)
    done = FromConsumer(Done(grant.token, "P"), NS)
    _, events = step(engine, NS, [done, done])
    assert [event.expired for event in released(events)] == [False]
    assert_all_free(engine)


def test_a_client_that_left_before_the_answer_keeps_nothing() -> None:
    engine = make_engine()
    answer(engine)
    step(engine, 0, [Abort("r")])
    assert_all_free(engine)


# -------------------------------------------------------------------------------------------------------- giving way


def test_kept_turns_give_way_to_an_admission_the_oldest_first() -> None:
    engine = make_engine(num_blocks=21, max_kept_fraction=1.0)
    grants = [answer(engine, name, 17, 4, at * NS) for at, name in enumerate("abc")]  # 5 blocks each
    slots = engine.producer._slots._slots
    plan, events = step(engine, 5 * NS, [new_request("long", 36, 4)])
    assert plan.batch.request_ids == ("long",)
    assert [(event.request_id, event.gave_way) for event in released(events)] == [("a", True)]
    assert [int(slots[grant.slot, 1]) for grant in grants] == [0, grants[1].lease_id, grants[2].lease_id]


def test_the_slot_is_cleared_before_the_blocks_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(num_blocks=9)
    grant = answer(engine)
    real, seen = engine.manager.release, []

    def release(key: str, **more: Any) -> int:
        if key.startswith("lease:"):
            seen.append(int(engine.producer._slots._slots[grant.slot, 1]))
        return real(key, **more)

    monkeypatch.setattr(engine.manager, "release", release)
    step(engine, 0, [new_request("long", 25, 4)])
    assert seen == [0]


def test_kept_turns_give_way_to_growth_before_anybody_is_preempted() -> None:
    engine = make_engine(num_blocks=9, max_kept_fraction=1.0)
    answer(engine, "a", 10, 2)
    happened: list[Event] = []
    inbox = [new_request("r", 18, 14)]
    while not happened or engine.requests:
        _, events = step(engine, 0, inbox)
        happened += events
        inbox = []
    assert [event.request_id for event in happened if isinstance(event, LeaseReleased)] == ["a"]
    assert not any(isinstance(event, Preempted) for event in happened)


def test_policy_vllm_keeps_them_pinned() -> None:
    engine = make_engine(num_blocks=21, max_kept_fraction=1.0, transfer=VLLM)
    for name in "abc":
        answer(engine, name, 17, 4)
    plan, events = step(engine, NS, [new_request("long", 36, 4)])
    assert plan.batch.request_ids == ()
    assert not released(events)
    plan, _ = step(engine, 480 * NS)
    assert plan.batch.request_ids == ("long",)


def test_they_take_their_share_of_the_pool_and_no_more() -> None:
    engine = make_engine(num_blocks=33, max_kept_fraction=0.5)  # 16 of 32 blocks
    for name in "abc":
        answer(engine, name, 17, 4)
    assert engine.memory().accounts["retained"] == 15
    answer(engine, "d", 17, 4)
    assert [holder.request_id for holder in engine.memory().holders] == ["b", "c", "d"]
    assert try_answer(engine, "too long", 80, 4) is None  # running, it takes memory; ended, it would take the share
    assert [holder.request_id for holder in engine.memory().holders] == ["c", "d"]


def test_under_policy_vllm_a_full_share_keeps_the_old_ones() -> None:
    engine = make_engine(num_blocks=33, max_kept_fraction=0.5, transfer=VLLM)
    for name in "abc":
        answer(engine, name, 17, 4)
    assert try_answer(engine, "d", 17, 4) is None
    assert [holder.request_id for holder in engine.memory().holders] == ["a", "b", "c"]


def test_the_last_slot_goes_to_the_newest() -> None:
    engine = make_engine(slots=1)
    answer(engine, "a", 10, 2)
    answer(engine, "b", 10, 2)
    assert [holder.request_id for holder in engine.memory().holders] == ["b"]
    _, events = step(engine, 0, [new_request("p", 8, 1, produce=True)])  # a prefill for a peer needs it more
    assert finished_of(events)["p"].lease is not None


def test_kept_turns_do_not_fill_the_share_of_leases() -> None:
    engine = make_engine(num_blocks=21, max_kept_fraction=1.0, max_leased_fraction=0.5)
    answer(engine, "a", 36, 4)
    plan, _ = step(engine, 0, [new_request("p", 16, 1, produce=True)])
    assert plan.batch.request_ids == ("p",)


def test_new_weights_let_them_go() -> None:
    engine = make_engine()
    answer(engine)
    assert engine.reset_prefix_cache(NS) is False
    assert engine.reset_prefix_cache(NS, reset_running_requests=True) is True
    assert_all_free(engine)


# --------------------------------------------------------------------------------------------- what P makes of it


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


# ---------------------------------------------------------------------------------------------------------- marks


tokens_lists = st.lists(st.integers(0, 3), max_size=40)


@given(tokens_lists.filter(bool), tokens_lists, st.integers(1, 9))
def test_marks_find_the_common_prefix(kept: list[int], own: list[int], unit: int) -> None:
    tokens, prompt = np.asarray(kept, dtype=np.int32), np.asarray(own, dtype=np.int32)
    marks, spacing = mark_prefixes(tokens, unit)
    assert spacing == unit
    grant = Grant(block_ids=(), num_tokens=len(kept), slot=0, nonce=1, lease_id=1, token=b"", proof=b"", block_size=4,
                  marks=marks, mark_tokens=spacing)  # fmt: skip
    common = next((i for i, (a, b) in enumerate(zip(kept, own, strict=False)) if a != b), min(len(kept), len(own)))
    expected = len(kept) if common == len(kept) else common // unit * unit
    assert marked_tokens(grant, prompt) == expected
    assert bind(RemoteSource(peer=PEER, request_id="r", grant=grant), prompt).usable_tokens == expected


def test_there_are_never_more_marks_than_a_peer_takes() -> None:
    marks, spacing = mark_prefixes(np.zeros(100_000, dtype=np.int32), 16)
    assert spacing == 128
    assert len(marks) == -(-100_000 // 128) * MARK_BYTES <= MOST_MARKS * MARK_BYTES


def test_marks_are_part_of_the_proof() -> None:
    grant, _ = conversation()
    key = proof_key(SECRET)
    assert is_proved(key, grant, digest_marks(grant))
    for change in ({"mark_tokens": 8}, {"marks": grant.marks[:-1] + b"\0"}, {"marks": b""}):
        forged = msgspec.structs.replace(grant, **change)
        assert not is_proved(key, forged, digest_marks(forged))


def test_granting_is_told() -> None:
    engine = make_engine()
    inbox, happened = [new_request("r", 10, 2, keep_turn=True)], []
    for _ in range(2):
        happened += step(engine, 0, inbox)[1]
        inbox = []
    granted = [event for event in happened if isinstance(event, LeaseGranted)]
    assert [(event.next_turn, event.blocks, event.deadline_ns) for event in granted] == [(True, 3, 480 * NS)]
