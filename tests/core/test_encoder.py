"""Items that an encoder turns into embeddings: its budget, its cache, and the prompts that wait for it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tests.core.helpers import assert_all_free, counting_prompt, finished_of, make_engine, new_request, step

from pdkv.core.blocks.extra_keys import MultimodalItem
from pdkv.core.blocks.groups import CrossGroup, FullGroup
from pdkv.core.config import STRICT, VLLM, TransferPolicy
from pdkv.core.engine import Engine
from pdkv.core.events import FinishReason, Preempted
from pdkv.core.multimodal import EncoderLimits
from pdkv.core.ports import Abort, NewRequest, Outputs, Plan
from pdkv.core.scheduler.encoder import EncoderWork
from pdkv.core.scheduler.request import Request
from pdkv.core.speculation import Speculation
from pdkv.errors import BadRequest, ConfigError


def engine_of(step_embeddings: int = 10, cache: int = 20, *, whole: bool = False, **more: Any) -> Engine:
    limits = EncoderLimits(step_embeddings=step_embeddings, cache_embeddings=cache, whole_items=whole)
    return make_engine(encoder=limits, **({"max_num_batched_tokens": 64, "num_blocks": 65} | more))


def seen(name: str, length: int, *items: tuple[str, int, int], **more: Any) -> NewRequest:
    """A request of ``length`` tokens with these items."""
    return new_request(name, length, items=tuple(MultimodalItem(*item) for item in items), **more)


def shares(plan: Plan) -> dict[str, int]:
    return dict(zip(plan.batch.request_ids, plan.batch.num_scheduled.tolist(), strict=True))


def reading_ahead(tokens: int) -> Speculation:
    """A drafter that reads so many prompt tokens behind those computed."""
    return Speculation(num_tokens=max(tokens, 1), prefill_lookahead_tokens=tokens)


def draftless_step(engine: Engine, inbox: Any = ()) -> tuple[Plan, tuple[Any, ...]]:
    """As `step`, for an engine with a drafter whose drafts are all refused."""
    plan = engine.schedule(0, list(inbox))
    rows = len(plan.batch)
    more = (np.empty(0, dtype=np.int32),) * rows
    events = engine.complete(plan.step_id, Outputs(tokens=np.full(rows, 5, dtype=np.int32), more=more), 0)
    engine.check()
    return plan, (*plan.events, *events)


def test_a_prompt_is_cut_in_front_of_what_the_encoder_cannot_do_yet() -> None:
    engine = engine_of(step_embeddings=10)
    plan, _ = step(engine, 0, [seen("a", 30, ("x", 2, 8), ("y", 14, 6), ("z", 21, 4))])
    assert (plan.batch.encode, shares(plan)) == ((("a", 0),), {"a": 14})
    plan, _ = step(engine)
    assert (plan.batch.encode, shares(plan)) == ((("a", 1), ("a", 2)), {"a": 16})


def test_two_prompts_share_the_step_and_the_second_waits_for_its_first_item() -> None:
    engine = engine_of(step_embeddings=10)
    plan, _ = step(engine, 0, [seen("a", 20, ("x", 0, 8)), seen("b", 20, ("y", 0, 8)), new_request("c", 4)])
    assert shares(plan) == {"a": 20}, "b cannot begin, and nobody passes it"
    assert not engine.scheduler.short_of_memory
    plan, _ = step(engine)
    assert plan.batch.encode == (("b", 0),)
    assert shares(plan) == {"a": 1, "b": 20, "c": 4}


def test_an_output_is_kept_for_others_and_goes_the_oldest_first() -> None:
    engine = engine_of(step_embeddings=20, cache=20)
    for number, name in enumerate("xyz"):
        step(engine, 0, [seen(f"r{number}", 12, (name, 1, 8), max_tokens=1)])
    plan, _ = step(engine, 0, [seen("again", 13, ("z", 1, 8), max_tokens=1)])
    assert plan.batch.encode == ()
    plan, _ = step(engine, 0, [seen("new", 13, ("w", 1, 8), max_tokens=1), seen("twin", 13, ("w", 1, 8), max_tokens=1)])
    assert (plan.batch.encode, plan.batch.dropped) == ((("new", 0),), ("y",)), "x went for z already"
    assert_all_free(engine)


def test_what_is_needed_is_never_dropped_and_becomes_free_once_passed() -> None:
    engine = engine_of(step_embeddings=20, cache=20, max_num_batched_tokens=8)
    cache = engine.scheduler.encoder
    assert cache is not None
    free = []
    step(engine, 0, [seen("a", 40, ("x", 0, 12), ("y", 12, 7), ("z", 19, 6))])
    for _ in range(4):
        step(engine)
        free.append(cache.cache.num_reclaimable)
    assert free == [13, 14, 20, 20], "x is held until token 12 is computed, y until 19, and z waits for room"


def test_whole_items_end_a_chunk_before_what_would_not_fit() -> None:
    items = (("x", 6, 8), ("y", 20, 8))
    cut = step(engine_of(max_num_batched_tokens=12, step_embeddings=30), 0, [seen("a", 30, *items)])[0]
    whole_engine = engine_of(max_num_batched_tokens=12, step_embeddings=30, whole=True)
    plans = [step(whole_engine, 0, [seen("a", 30, *items)])[0], *(step(whole_engine)[0] for _ in range(2))]
    assert shares(cut) == {"a": 12}
    assert [shares(plan) for plan in plans] == [{"a": 6}, {"a": 12}, {"a": 12}]


def test_only_embedded_tokens_count() -> None:
    item = MultimodalItem("x", 4, 10, ((0, 3), (4, 7)))
    assert (item.embeddings, item.embeddings_in(2, 5), item.embeddings_in(7, 10)) == (6, 2, 0)
    engine = engine_of(step_embeddings=6, cache=6, max_num_batched_tokens=8)
    plan, _ = step(engine, 0, [new_request("a", 20, items=(item,))])
    assert plan.batch.encode == (("a", 0),)


def test_one_name_for_two_contents_ends_the_second_request() -> None:
    engine = engine_of()
    step(engine, 0, [seen("a", 12, ("x", 1, 8))])
    _, events = step(engine, 0, [seen("b", 12, ("x", 1, 6))])
    finished = finished_of(events)
    assert finished.keys() == {"b"}
    assert finished["b"].reason is FinishReason.ERROR
    assert "item 0 has 6 embeddings, but 'x' names a content of 8" in (finished["b"].error or "")
    assert len(engine.scheduler.running) == 1


def test_one_name_for_two_contents_ends_who_runs_already_and_who_would_be_the_first_to() -> None:
    engine = engine_of(max_num_batched_tokens=8)
    step(engine, 0, [seen("a", 8, ("x", 0, 4), max_tokens=1)])
    plan, events = step(engine, 0, [seen("alone", 12, ("x", 0, 6))])
    assert len(plan.batch) == 0
    assert finished_of(events)["alone"].reason is FinishReason.ERROR
    plan, events = step(engine, 0, [seen("b", 20, ("y", 0, 4), ("x", 10, 6))])
    assert shares(plan) == {"b": 8}
    assert not finished_of(events)
    plan, events = step(engine)
    assert len(plan.batch) == 0, "not even what lies in front of the item"
    assert "item 1 has 6 embeddings, but 'x' names a content of 4" in (finished_of(events)["b"].error or "")
    assert_all_free(engine)


def test_who_has_left_before_its_confusion_is_told_ends_once() -> None:
    engine = engine_of(max_outstanding_plans=3)
    plans = [engine.schedule(0, inbox) for inbox in ([seen("a", 12, ("x", 1, 8))], [seen("b", 12, ("x", 1, 6))])]
    plans.append(engine.schedule(0, [Abort("b")]))
    events = list(plans[2].events)
    for plan in plans:
        events += engine.complete(plan.step_id, Outputs(tokens=np.full(len(plan.batch), 5, dtype=np.int32)), 0)
    assert {key: one.reason for key, one in finished_of(events).items()} == {"b": FinishReason.ABORT}


def test_preemption_lets_go_of_items_that_stay_for_the_next_try() -> None:
    engine = engine_of(
        step_embeddings=20, cache=30, num_blocks=10, max_num_batched_tokens=8, full_sequence_must_fit=False,
        enable_prefix_caching=False,
    )  # fmt: skip
    encoder = engine.scheduler.encoder
    assert encoder is not None
    plans = [step(engine, 0, [new_request("a", 8, max_tokens=20)])[0]]
    encoded, events = [], list[Any]()
    new: list[Any] = [seen("v", 30, ("x", 2, 4), ("y", 20, 6))]
    while not any(isinstance(event, Preempted) for event in events):
        plan, events = step(engine, 0, new)  # type: ignore[assignment]
        new, encoded = [], [*encoded, *plan.batch.encode]
        plans.append(plan)
        assert len(plans) < 12, "nobody was preempted"
    assert encoded == [("v", 0), ("v", 1)]
    assert (encoder.cache.num_free, encoder.cache.num_reclaimable) == (20, 30)
    step(engine, 0, [Abort("a")])
    plans = [step(engine)[0] for _ in range(4)]
    assert sum(shares(plan).get("v", 0) for plan in plans) >= 22, "v is computed again"
    assert not any(plan.batch.encode for plan in plans), "and its items are still there"


@pytest.mark.parametrize("shared", [False, True])
def test_who_loses_its_place_in_the_step_takes_its_items_back_unless_another_counts_on_them(shared: bool) -> None:
    """(vLLM leaves an output that nobody computes in its cache, and takes one from under a second request.)"""
    limits = EncoderLimits(step_embeddings=10, cache_embeddings=20)
    work = EncoderWork(limits, lookahead=0)
    victim, other = (
        Request(seen(name, 12, ("x", 1, 8)), arrival_ns=0, sequence=0, hash_tokens=4) for name in ("victim", "other")
    )
    work.new_step()
    work.take(victim, work.share(victim, 0, 12))
    if shared:
        share = work.share(other, 0, 12)
        assert (share.tokens, share.encode) == (12, [])
        work.take(other, share)
    work.release(victim)
    work.cache.check()
    assert work.take_inputs() == ((("victim", 0),) if shared else ())
    assert work.cache.num_free == (12 if shared else 20)
    assert work.room_for(10) is not shared


def test_an_abort_lets_go_and_a_reset_has_everything_made_anew() -> None:
    engine = engine_of(max_num_batched_tokens=8)
    encoder = engine.scheduler.encoder
    assert encoder is not None
    step(engine, 0, [seen("a", 30, ("x", 2, 10))])
    assert encoder.cache.num_reclaimable == 10
    step(engine, 0, [Abort("a")])
    assert encoder.cache.num_reclaimable == 20
    step(engine, 0, [seen("b", 30, ("x", 2, 10))])
    engine.reset_encoder_cache()
    plan, _ = step(engine)
    assert plan.batch.encode == (("b", 0),)


def test_after_a_reset_whoever_keeps_the_outputs_drops_all_that_are_not_made_anew() -> None:
    engine = engine_of(step_embeddings=20, cache=20, max_num_batched_tokens=8)
    step(engine, 0, [seen("gone", 8, ("w", 1, 2), max_tokens=1)])
    step(engine, 0, [seen("a", 30, ("x", 0, 6), ("y", 6, 12))])
    engine.reset_encoder_cache()
    plan, _ = step(engine)
    assert plan.batch.encode == (("a", 1),)
    assert set(plan.batch.dropped) == {"w", "x"}
    evicting = engine_of(step_embeddings=20, cache=8)
    for number, name in enumerate("xy"):
        evicting.schedule(0, [seen(f"r{number}", 12, (name, 1, 8), max_tokens=1)])
        if name == "x":
            evicting.complete(0, Outputs(tokens=np.asarray([5], dtype=np.int32)), 0)
    evicting.complete(1, Outputs(tokens=np.asarray([5], dtype=np.int32)), 0)
    evicting.reset_encoder_cache()
    assert evicting.schedule(0).batch.dropped == ("y",), "what a plan has named already is not named again"


def test_who_does_not_come_in_holds_nothing() -> None:
    engine = engine_of(step_embeddings=6, cache=20, speculation=reading_ahead(1))
    encoder = engine.scheduler.encoder
    assert encoder is not None
    draftless_step(engine, [seen("a", 12, ("x", 0, 1), max_tokens=1)])
    inbox = [seen("b", 12, ("y", 0, 6), max_tokens=9), seen("c", 12, ("x", 0, 1), ("z", 1, 6))]
    plan, _ = draftless_step(engine, inbox)
    assert shares(plan) == {"b": 12}
    assert not encoder.cache.holds(engine.requests["c"])


def test_what_is_said_of_a_chunk_too_small_for_the_drafter_is_not_that_the_encoder_is_busy() -> None:
    engine = engine_of(speculation=reading_ahead(3), max_num_batched_tokens=8, long_prefill_token_threshold=0)
    plan, _ = draftless_step(engine, [new_request("a", 6, max_tokens=9), seen("b", 3, ("x", 0, 1), max_tokens=1)])
    assert shares(plan) == {"a": 6}
    assert "in front of what a drafter reads, beyond this step's tokens" in engine.requests["b"].wait_cause
    assert shares(draftless_step(engine)[0])["b"] == 3


@pytest.mark.parametrize("gap", [0, 1])
def test_items_that_a_drafter_needs_together_must_fit_the_cache_together(gap: int) -> None:
    """Each is held until the drafter is through with it, and the second is read ahead before: no chunk could end."""
    engine = engine_of(cache=10, speculation=reading_ahead(1))
    with pytest.raises(BadRequest, match=r"item 1 is needed before .* 20 embeddings, .* keeps 10 at a time"):
        engine.validate(seen("a", 30, ("x", 0, 10), ("y", 10 + gap, 10)))
    engine.validate(seen("same", 30, ("x", 0, 10), ("x", 10 + gap, 10)))
    engine_of(cache=10).validate(seen("a", 30, ("x", 0, 10), ("y", 10, 10)))
    draftless_step(engine, [seen("a", 30, ("x", 0, 10), ("y", 12, 10), max_tokens=1)])
    for _ in range(4):
        draftless_step(engine)
    assert not engine.requests


@pytest.mark.parametrize(("policy", "chunks"), [(STRICT, [5, 1, 12, 2]), (VLLM, [5, 0, 0, 0])])
def test_a_whole_item_that_fits_no_step_with_what_is_read_ahead_is_begun_by_itself(
    policy: TransferPolicy, chunks: list[int]
) -> None:
    engine = engine_of(
        step_embeddings=30, whole=True, max_num_batched_tokens=12, speculation=reading_ahead(1), transfer=policy
    )
    plans = [draftless_step(engine, [seen("a", 20, ("x", 6, 12), max_tokens=9)])[0]]
    plans += [draftless_step(engine)[0] for _ in range(3)]
    assert [shares(plan).get("a", 0) for plan in plans] == chunks
    if policy is STRICT:
        assert plans[1].batch.encode == (("a", 0),), "the drafter reads its first token"


@pytest.mark.parametrize("policy", [STRICT, VLLM])
def test_two_that_wait_for_each_others_items_are_not_stuck(policy: TransferPolicy) -> None:
    """(In vLLM they are.)"""
    engine = engine_of(
        step_embeddings=20, cache=10, speculation=reading_ahead(1), long_prefill_token_threshold=4, transfer=policy
    )
    inbox = [
        seen("a", 20, ("x", 0, 5), ("y", 5, 5), max_tokens=2),
        seen("b", 20, ("z", 0, 5), ("w", 5, 5), max_tokens=2),
    ]
    events = list(draftless_step(engine, inbox)[1])
    assert len(engine.scheduler.running) == 2
    for _ in range(30):
        events += draftless_step(engine)[1]
    assert finished_of(events).keys() == (set("ab") if policy is STRICT else set())


def test_cross_attention_waits_for_the_encoders_step() -> None:
    engine = engine_of(
        step_embeddings=10, groups=(FullGroup(block_size=4), CrossGroup(block_size=4, encoder_tokens=8)),
        enable_prefix_caching=False, enable_chunked_prefill=False, max_model_len=64,
    )  # fmt: skip
    plan, _ = step(engine, 0, [new_request(name, 4, encoder_tokens=6) for name in "ab"])
    assert plan.batch.request_ids == ("a",)
    assert step(engine)[0].batch.request_ids == ("a", "b")


def test_more_of_an_encoder_than_any_step_makes_is_refused() -> None:
    engine = engine_of(
        step_embeddings=4, groups=(FullGroup(block_size=4), CrossGroup(block_size=4, encoder_tokens=8)),
        enable_prefix_caching=False, enable_chunked_prefill=False, max_model_len=64,
    )  # fmt: skip
    with pytest.raises(BadRequest, match="6 tokens of an encoder, which are made in one step; .* makes 4 at most"):
        engine.validate(new_request("a", 4, encoder_tokens=6))
    engine.validate(new_request("a", 4, encoder_tokens=4))


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ((("x", 20, 20),), "tokens 20 to 40 of a prompt of 30"),
        ((("x", 5, 5), ("y", 9, 5)), "behind one that ends at 10"),
        ((("x", 5, 12),), "has 12 embeddings; this instance's encoder makes 10 at most"),
    ],
)
def test_items_that_cannot_be_are_refused(items: tuple[tuple[str, int, int], ...], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        engine_of().validate(seen("a", 30, *items))


def test_limits_follow_the_step_and_the_longest_item() -> None:
    assert EncoderLimits.of(64, 100) == EncoderLimits(step_embeddings=100, cache_embeddings=100)
    assert EncoderLimits.of(64, 10).step_embeddings == 64
    with pytest.raises(ConfigError, match="an item of 100 tokens must be computed in one step"):
        EncoderLimits.of(64, 100, whole_items=True)
    with pytest.raises(ConfigError, match="step_embeddings is 0"):
        EncoderLimits(step_embeddings=0, cache_embeddings=1)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_lives_encode_everything_that_is_used(seed: int, ahead: int) -> None:
    """An executor that keeps outputs as the plans say has every one that a chunk, or its drafter, looks at."""
    rng = random.Random(seed)
    engine = engine_of(
        step_embeddings=12, cache=rng.choice([12, 24]), num_blocks=rng.choice([14, 30]), max_num_seqs=4,
        max_num_batched_tokens=rng.choice([12, 32]), whole=rng.random() < 0.3, priority_scheduling=rng.random() < 0.5,
        max_model_len=48, full_sequence_must_fit=False, speculation=reading_ahead(ahead) if ahead else None,
        long_prefill_token_threshold=rng.choice([0, 5]) if ahead else 0,
    )  # fmt: skip
    outputs: set[str] = set()
    asked: dict[str, NewRequest] = {}
    for number in range(150):
        inbox: list[Any] = []
        if number < 100 and rng.random() < 0.3:
            at, items = rng.randrange(4), []
            while at < 20 and len(items) < 4:
                size = 2 + rng.randrange(8)
                items.append((f"i{size}", at, size))
                at += size + rng.randrange(3)
            new = new_request(
                f"r{number}", counting_prompt(at + 1 + rng.randrange(9), 100 * number), max_tokens=1 + rng.randrange(6),
                priority=rng.randrange(3), items=tuple(MultimodalItem(*item) for item in items),
            )  # fmt: skip
            try:
                engine.validate(new)
            except BadRequest:
                assert ahead
            else:
                asked[new.request_id] = new
                inbox.append(new)
        if asked and rng.random() < 0.05:
            inbox.append(Abort(rng.choice(list(asked))))
        plan, _ = draftless_step(engine, inbox)
        batch = plan.batch
        outputs -= set(batch.dropped)
        outputs |= {asked[one.request_id].items[one.item].identifier for one in batch.encode}
        for row, name in enumerate(batch.request_ids):
            start = int(batch.num_computed[row])
            end = start + int(batch.num_scheduled[row])
            for item in asked[name].items:
                used = item.offset < end + ahead and item.offset + item.length > start
                assert not used or item.identifier in outputs, f"step {number}: {name} has no {item.identifier}"
    for _ in range(2000):
        draftless_step(engine)
        if not engine.requests:
            break
    assert_all_free(engine)
