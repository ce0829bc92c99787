"""KV from a producer whose blocks are of another size: what is asked for, what is counted, what is refused."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.core.helpers import (
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
from tests.core.write_pair import PROMPT as WRITTEN
from tests.core.write_pair import Pair, decode, prefill

from pdkv.core.blocks.groups import FullGroup, Group, RingGroup, StateGroup, WindowGroup
from pdkv.core.config import VLLM
from pdkv.core.engine import Engine
from pdkv.core.events import FinishReason, LoadFailed, LoadStarted, Quarantined
from pdkv.core.ports import Abort, FromProducer, Plan, ReadEnded
from pdkv.core.transfer.messages import Announce, Awaited, Done, RemoteSource, Withdraw
from pdkv.core.transfer.pairs import unlike_blocks
from pdkv.errors import BadRequest

PROMPT = counting_prompt(21)


def with_window(size: int) -> tuple[Group, ...]:
    """Full attention, and a window."""
    return FullGroup(block_size=size), WindowGroup(block_size=size, window=5)


def loading(theirs: int, ours: int, hit_tokens: int) -> tuple[Engine, Plan, LoadStarted, list[int]]:
    """A consumer that has begun to load `PROMPT` behind a hit: the plan, its event, and the request's table."""
    engine = make_engine(block_size=ours, num_blocks=65)
    if hit_tokens:
        step(engine, 0, [new_request("before", PROMPT[: hit_tokens + 1], 1)])
    plan, events = step(engine, 1, [new_request("r", PROMPT, 2, source=source_for(21, theirs))])
    (started,) = (event for event in events if isinstance(event, LoadStarted))
    return engine, plan, started, engine.manager.blocks_of("r").tolist()


def test_larger_blocks_of_the_producer_are_read_in_parts() -> None:
    engine, plan, started, table = loading(8, 4, hit_tokens=4)
    (read,) = plan.reads
    assert read.remote_blocks.tolist() == [3, 4, 5, 6, 7]  # its blocks 1, 2, 3, of two units each, from token 4 on
    assert read.local_blocks.tolist() == table[1:]
    assert started.blocks == 5
    assert read.remote_blocks.dtype == read.local_blocks.dtype == np.int32
    step(engine, 2, [arrived(plan)])
    assert engine.memory().accounts["running"] == 6


def test_several_blocks_of_the_producer_fill_one_of_ours() -> None:
    engine, plan, started, table = loading(4, 8, hit_tokens=8)
    (read,) = plan.reads
    assert read.remote_blocks.tolist() == [3, 4, 5, 6]  # the first 8 tokens are here
    assert read.local_blocks.tolist() == [table[1] * 2, table[1] * 2 + 1, table[2] * 2, table[2] * 2 + 1]
    assert started.blocks == 2, "blocks are counted as ours"
    assert engine.memory().accounts["loading"] == 3


def test_no_unit_is_read_for_what_lies_behind_the_last_token() -> None:
    _, plan, _, table = loading(4, 16, hit_tokens=0)
    (read,) = plan.reads
    assert read.remote_blocks.tolist() == [1, 2, 3, 4, 5, 6]
    assert read.local_blocks.tolist() == [table[0] * 4 + part for part in range(4)] + [table[1] * 4, table[1] * 4 + 1]


def test_blocks_of_a_load_that_was_given_up_are_counted_as_ours() -> None:
    engine, plan, _, _ = loading(4, 8, hit_tokens=8)
    _, events = step(engine, 2, [Abort("r")])
    (quarantined,) = (event for event in events if isinstance(event, Quarantined))
    assert quarantined.blocks == 2
    assert engine.memory().accounts["quarantine"] == 2
    step(engine, 3, [ReadEnded(handle=plan.reads[0].handle, slot=None, error="cancelled")])
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("groups", "theirs", "text"),
    [
        ((FullGroup(block_size=4),), 6, "blocks of 6 tokens, here they hold 4: one must be a multiple"),
        ((FullGroup(block_size=4),), 0, "blocks of 0 tokens, here they hold 4"),
        (
            (FullGroup(block_size=4), StateGroup(block_size=4, aligned=True)),
            8,
            "here they hold 4: .* keeps a state .* --block-size",
        ),
        (
            (FullGroup(block_size=4), RingGroup(block_size=4)),
            2,
            "here they hold 4: .* keeps a state .* --block-size",
        ),
        (
            (FullGroup(block_size=6), WindowGroup(block_size=4, window=5)),
            2,
            "here they hold 6: .* other layers cannot be divided",
        ),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_by_name(groups: tuple[Group, ...], theirs: int, text: str) -> None:
    engine = make_engine(groups=groups, enable_prefix_caching=False)
    new = new_request("r", 14, 2, source=with_blocks_of(theirs))
    assert re.search(text, unlike_blocks(engine.manager, theirs) or "taken")
    engine.validate(new)  # whoever sends it has no part in it
    plan, events = step(engine, 0, [new])
    (failed,) = (event for event in events if isinstance(event, LoadFailed))
    assert failed.cause.startswith(f"the KV offered lies in blocks of {theirs} tokens, here they hold ")
    assert re.search(text, failed.cause)
    assert [type(sent.message) for sent in plan.messages] == [Done]
    assert not plan.reads
    assert plan.batch.request_ids == ("r",), "it is computed here"


def with_blocks_of(size: int) -> RemoteSource:
    source = source_for(12, 4)
    return msgspec.structs.replace(source, grant=msgspec.structs.replace(source.grant, block_size=size))


def test_under_policy_vllm_such_a_request_ends() -> None:
    engine = make_engine(transfer=VLLM)
    _, events = step(engine, 0, [new_request("r", 14, 2, source=with_blocks_of(6))])
    outcome = finished_of(events)["r"]
    assert outcome.reason is FinishReason.ERROR
    assert "blocks of 6 tokens, here they hold 4" in str(outcome.error)
    assert_all_free(engine)


def test_an_announcement_of_such_blocks_is_declined() -> None:
    engine = make_engine()
    awaited = Awaited(peer=PEER, transfer_id="t" * 16)
    step(engine, 0, [new_request("r", 14, 2, awaited=awaited)])
    announce = Announce("t" * 16, "p1", with_blocks_of(6).grant)
    plan, events = step(engine, 1, [FromProducer(announce, PEER)])
    (failed,) = (event for event in events if isinstance(event, LoadFailed))
    assert "blocks of 6 tokens, here they hold 4" in failed.cause
    assert [type(sent.message) for sent in plan.messages] == [Withdraw]


@pytest.mark.parametrize("theirs", [2, 4, 8, 12, 1])
def test_sizes_of_which_one_divides_the_other_go_together(theirs: int) -> None:
    engine = make_engine(groups=with_window(4))
    assert unlike_blocks(engine.manager, theirs) is None


def test_a_grant_must_name_as_many_blocks_as_its_own_size_says() -> None:
    engine = make_engine(block_size=4)
    engine.validate(new_request("r", PROMPT, source=source_for(21, 8)))
    source = source_for(21, 8)
    for change, text in (
        ({"block_size": 4}, "21 tokens in 3 blocks .* blocks hold 4 tokens, so 6 blocks"),
        ({"block_size": 16}, "21 tokens in 3 blocks .* blocks hold 16 tokens, so 2 blocks"),
        ({"block_ids": (1, 2, 1 << 30)}, "blocks that no pool has"),
    ):
        grant = msgspec.structs.replace(source.grant, **change)
        with pytest.raises(BadRequest, match=text):
            engine.validate(new_request("r", PROMPT, source=msgspec.structs.replace(source, grant=grant)))


# ----------------------------------------------------------------------------------------------------- WRITE push


def units(blocks: np.ndarray, each: int) -> list[int]:
    """Those that blocks consist of."""
    return [int(block) * each + part for block in blocks for part in range(each)]


def test_a_write_fills_several_smaller_blocks_behind_a_hit() -> None:
    pair = Pair(p={"block_size": 8})
    pair.step_d(new_request("before", np.append(WRITTEN[:4], [900, 901, 902, 903]), 1))
    pair.step_d(decode())
    pair.step_p(prefill())
    pair.settle(1)
    (post,) = pair.posts
    assert post.remote_blocks.tolist() == pair.d.manager.blocks_of("d")[1:].tolist()
    assert post.local_blocks.tolist() == units(pair.p.manager.blocks_of("lease:1"), 2)[1:3]
    (started,) = pair.named("WriteStarted")
    assert started.blocks == 2


def test_a_write_fills_a_part_of_a_larger_block() -> None:
    pair = Pair(d={"block_size": 8})
    post = pair.writing()
    assert post.remote_blocks.tolist() == units(pair.d.manager.blocks_of("d"), 2)[:3], "ten tokens are three units"
    assert post.local_blocks.tolist() == pair.p.manager.blocks_of("lease:1").tolist()
    pair.step_p(pair.written())
    pair.settle(3)
    assert "d" in finished_of(pair.events)
    assert_all_free(pair.d)


@pytest.mark.parametrize(
    ("p", "d", "text"),
    [
        ({"block_size": 4}, {"block_size": 6}, "the grant is of blocks of 6 tokens, here they hold 4: one must be a"),
        (
            {"groups": with_window(4)},
            {"groups": with_window(8)},
            "where a window of this model begins",
        ),
    ],
    ids=["neither divides", "windows"],
)
def test_a_grant_that_cannot_be_filled_is_answered(p: dict[str, Any], d: dict[str, Any], text: str) -> None:
    pair = Pair(p=p, d=d)
    pair.step_d(decode())
    pair.step_p(prefill())
    pair.settle(2)
    assert not pair.posts
    (failed,) = pair.named("LoadFailed")
    assert text in failed.cause
    pair.settle(3)
    assert "d" in finished_of(pair.events), "it was computed there"
    assert_all_free(pair.d)
