"""Bidirectional mode: D keeps an answer's KV for a while; it gives way to whoever needs the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.core.helpers import NS, assert_all_free, finished_of, make_engine, new_request, step
from tests.core.turns import SECRET, answer, released, try_answer

from pdkv.core.config import VLLM
from pdkv.core.events import Event, FinishReason, LeaseReleased, Preempted
from pdkv.core.ports import Abort, FromConsumer
from pdkv.core.transfer.messages import Done, Heartbeat
from pdkv.core.transfer.proof import MARK_BYTES, digest_marks, digest_tokens, is_proved, proof_key


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
