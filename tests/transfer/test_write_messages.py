"""What P answers to those who grant it memory, and when: the real core over a simulated mover, shared memory and NIXL.

D is played by the test, which says what an engine would (or should not), and sees its memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.core.write_pair import accounts
from tests.nixl_here import needs_nixl
from tests.transfer.pairs import simulated_kinds
from tests.transfer.sides import BLOCKS
from tests.transfer.talk import LEASE_NS, Talk, real, simulated

from pdkv.core.events import LeaseReleased, WriteFinished
from pdkv.core.ports import FromProducer
from pdkv.core.transfer.messages import Fenced, Noted, NotWritten, Written

TRIES = 20
KINDS = [
    *simulated_kinds(simulated),
    pytest.param(lambda: real("shm"), id="shm"),
    pytest.param(lambda: real("nixl"), id="nixl", marks=needs_nixl),
]


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Iterator[Talk]:
    with request.param() as talk:
        yield talk


@pytest.fixture
def talk(shared: Talk) -> Iterator[Talk]:
    """Of all tests; D's memory is empty. Afterwards P holds nothing and has nothing more to say."""
    shared.d.blocks[:] = 0
    shared.p.writes.clear()
    shared.p.events.clear()
    yield shared
    shared.until(shared.free)
    told = [*shared.heard, *(one.message for one in shared.d.pending() if isinstance(one, FromProducer))]
    assert all(isinstance(one, Noted | Fenced) for one in told)
    shared.heard.clear()


@pytest.mark.parametrize("first", ["prefill", "registration"])
def test_prefill_and_registration_in_either_order(talk: Talk, first: str) -> None:
    prompt, name = talk.prompt(20), secrets.token_hex(16)
    grant = talk.grant(prompt)
    if first == "prefill":
        talk.prefill(prompt, name)
        talk.until(lambda: accounts(talk.p.engine) == {"retained": 20})
        talk.register(grant, name)
    else:
        talk.register(grant, name)
        assert talk.hear(Noted) == Noted(grant.nonce, grant.grant_id, False)
        talk.prefill(prompt, name)
    assert talk.hear(Noted) == Noted(grant.nonce, grant.grant_id, True)
    assert talk.hear(Written) == Written(grant.nonce, grant.grant_id, 20 * talk.d.block_bytes)
    (post,) = talk.p.writes
    talk.check_arrived(post)


def test_a_grant_is_served_once_and_every_late_word_is_answered(talk: Talk) -> None:
    """Registrations and cancellations that come late, and twice: nothing is written again, and what was, still is."""
    prompt, name = talk.prompt(3), secrets.token_hex(16)
    grant = talk.grant(prompt)
    talk.prefill(prompt, name)
    talk.register(grant, name)
    written = talk.hear(Written)
    talk.d.blocks[:] = 0
    for _ in range(2):
        talk.register(grant, name)
        assert talk.hear(Written) == written
    for _ in range(2):
        talk.cancel(grant, name)
        assert talk.hear(Written) == written
    talk.register(grant, name)
    talk.hear(Written)
    assert len(talk.p.writes) == 1
    talk.check_untouched()


def test_a_grant_that_was_cancelled_before_it_was_known_is_never_served(talk: Talk) -> None:
    """The registration is overtaken by its cancellation; another grant under the same id is served."""
    prompt, name = talk.prompt(3), secrets.token_hex(16)
    grant = talk.grant(prompt)
    talk.cancel(grant, name)
    assert talk.hear(Fenced) == Fenced(grant.nonce, grant.grant_id)
    talk.register(grant, name)
    talk.hear(Fenced)
    talk.prefill(prompt, name)
    talk.until(lambda: accounts(talk.p.engine) == {"retained": 3})
    talk.register(grant, name)
    talk.hear(Fenced)
    assert talk.p.writes == []
    assert not talk.d.blocks.any()
    talk.register(talk.grant(prompt, slot=6), name)
    talk.hear(Written)


def test_a_cancelled_write_is_fenced_when_not_a_byte_comes_any_more(talk: Talk) -> None:
    """D uses the memory for something else at once. The KV itself is still wanted: its lease goes on."""
    for _ in range(TRIES):
        prompt, name = talk.prompt(BLOCKS - 10), secrets.token_hex(16)
        grant = talk.grant(prompt)
        talk.prefill(prompt, name)
        talk.register(grant, name)
        talk.until(talk.d.arrived)
        talk.cancel(grant, name)
        cut_off = isinstance(talk.hear(Written, Fenced), Fenced)  # either says that nothing is under way
        arrived, reused = talk.d.arrived(), talk.d.blocks.copy()
        talk.p.pump()
        assert np.array_equal(talk.d.blocks, reused)
        expired = any(isinstance(event, LeaseReleased) and event.expired for event in talk.p.events)
        if cut_off and not expired:
            assert accounts(talk.p.engine) == {"retained": BLOCKS - 10}
        talk.p.skip(LEASE_NS)
        talk.until(talk.free)
        talk.check_untouched()
        if cut_off:
            assert 0 < arrived < BLOCKS - 10
            return
    raise AssertionError("every WRITE was quicker")


def test_of_a_write_whose_mover_died_it_is_said_that_it_was_cut_off(talk: Talk) -> None:
    """What had left P may still be on its way into D's memory: that is for D to fence. (A copy through shared memory
    ends with who makes it.)"""
    if not talk.p.side.has_process:
        pytest.skip("a thread does not die alone")
    for _ in range(TRIES):
        prompt, name = talk.prompt(BLOCKS - 10), secrets.token_hex(16)
        grant = talk.grant(prompt)
        talk.prefill(prompt, name)
        talk.register(grant, name)
        talk.until(talk.d.arrived)
        talk.p.side.kill_mover()
        talk.cancel(grant, name)
        answer = talk.hear(Written, Fenced)
        talk.p.skip(LEASE_NS)
        talk.until(talk.free)
        if isinstance(answer, Fenced):
            assert answer.cut_off == talk.d.fenced_by_restart
            return
    raise AssertionError("every WRITE was quicker")


def test_a_lease_that_ends_before_the_registration_is_told(talk: Talk) -> None:
    prompt, name = talk.prompt(3), secrets.token_hex(16)
    talk.prefill(prompt, name)
    talk.until(lambda: accounts(talk.p.engine) == {"retained": 3})
    talk.p.skip(LEASE_NS)
    talk.until(talk.free)
    talk.register(talk.grant(prompt), name)
    answer = talk.hear(NotWritten)
    assert isinstance(answer, NotWritten)
    assert "expired" in answer.reason
    assert talk.p.writes == []
    assert not talk.d.blocks.any()


def test_a_lease_that_ends_in_the_middle_keeps_the_sources_until_the_write_has_ended(talk: Talk) -> None:
    for _ in range(TRIES):
        prompt, name = talk.prompt(BLOCKS - 10), secrets.token_hex(16)
        grant = talk.grant(prompt)
        talk.d.blocks[:] = 0
        talk.prefill(prompt, name)
        talk.register(grant, name)
        talk.until(talk.d.arrived)
        talk.p.skip(LEASE_NS)
        talk.p.pump()
        deferred = accounts(talk.p.engine) == {"deferred": BLOCKS - 10}
        talk.hear(Written)
        talk.check_arrived(talk.p.writes.pop())
        talk.until(talk.free)
        if deferred:
            names = [type(event) for event in talk.p.events if isinstance(event, LeaseReleased | WriteFinished)]
            assert names[-2:] == [LeaseReleased, WriteFinished]
            return
    raise AssertionError("every WRITE was quicker")


@pytest.mark.parametrize(
    "change",
    [{"prompt_digest": b"x" * 16}, {"num_tokens": 1}, {"first_token": 1 << 20}, {"block_ids": (1, 2)}],
    ids=["another prompt", "another length", "a beginning beyond the end", "too few blocks"],
)
def test_a_grant_that_does_not_fit_is_refused_and_pins_nothing(talk: Talk, change: dict[str, Any]) -> None:
    prompt, name = talk.prompt(3), secrets.token_hex(16)
    grant = msgspec.structs.replace(talk.grant(prompt), **change)
    talk.prefill(prompt, name)
    talk.until(lambda: accounts(talk.p.engine) == {"retained": 3})
    for _ in range(2):
        talk.register(grant, name)
        talk.hear(NotWritten)
    talk.until(talk.free)
    assert talk.p.writes == []
    assert not talk.d.blocks.any()
