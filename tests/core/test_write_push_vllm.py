"""WRITE push under policy ``vllm``: the reference's strandings, reproduced (spec pd-transfer 9)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.helpers import NS, assert_all_free, counting_prompt, finished_of, new_request
from tests.core.write_pair import LEASE_NS, PROMPT, P, Pair, accounts, decode, prefill, registrations

from pdkv.core.config import VLLM
from pdkv.core.ports import Abort, PeerLost
from pdkv.core.transfer.messages import (
    RegisterWrite,
)

# ------------------------------------------------------------------------------------------- the reference's strandings


def vllm(**more: Any) -> Pair:
    return Pair(transfer=VLLM, **more)


def assert_hangs(pair: Pair, account: str = "loading") -> None:
    """For an hour nothing moves: D's blocks are held, nobody is told, and there is no deadline to see."""
    for _ in range(60):
        pair.now += 60 * NS
        pair.settle(1)
    assert accounts(pair.d) == {account: 3}
    (held,) = pair.d.memory().holders
    assert held.deadline_ns is None


def test_vllm_registers_once_and_with_its_memory_only() -> None:
    pair = vllm()
    pair.step_d(decode())
    (message,) = pair.to_p
    assert isinstance(message, RegisterWrite)
    assert message.grant is not None
    pair.to_p.clear()
    assert_hangs(pair)
    assert len(pair.named("LoadOverdue")) == 1, "the watchdog warns, once, and does nothing"


@pytest.mark.parametrize("how", ["prefill aborted", "lease over", "write failed", "peer lost", "another prompt"])
def test_vllm_hangs_where_strict_is_told(how: str) -> None:
    pair = vllm()
    match how:
        case "prefill aborted":
            pair.step_d(decode())
            pair.step_p(prefill(prompt=counting_prompt(100)))
            pair.step_p(Abort("p"))
        case "lease over":
            pair.step_p(prefill())
            pair.now = LEASE_NS
            pair.step_p()
            pair.step_d(decode())
            pair.step_p()
            assert len(pair.p.producer.announcements._registered) == 1, "parked for good"
        case "write failed":
            pair.writing()
            pair.step_p(pair.written("the network broke"))
            assert accounts(pair.p) == {"retained": 3}, "P: by lease"
        case "peer lost":
            pair.writing()
            pair.step_d(PeerLost(P, "nobody listens there"))
        case _:
            pair.step_d(decode())
            pair.step_p(prefill(prompt=counting_prompt(10, 1)))
    assert_hangs(pair)
    assert accounts(pair.p) == ({"deferred": 3} if how == "peer lost" else {}), "a WRITE that does not end"


def test_vllm_fails_where_it_cannot_register() -> None:
    pair = vllm()
    pair.step_d(decode())
    pair.to_p.clear()
    pair.step_d(PeerLost(P, "nobody listens there"))
    assert finished_of(pair.events)["d"].error == "KV transfer failed: nobody listens there"


@pytest.mark.parametrize("ends", [False, True])
def test_vllm_gives_aborted_blocks_back_when_it_is_written_and_never_else(ends: bool) -> None:
    pair = vllm()
    pair.writing()
    pair.step_d(Abort("d"))
    assert pair.to_p == [], "nobody tells P"
    if ends:
        pair.step_p(pair.written())
        pair.step_d()
        assert_all_free(pair.d)
    else:
        pair.step_p(pair.written("the network broke"))
        assert_hangs(pair, "quarantine")


def test_vllm_does_not_renew_what_it_does_not_know() -> None:
    """Router and D cannot name P's request while both legs begin: P keeps a full local hit until its lease ends."""
    pair = vllm()
    pair.step_d(new_request("before", PROMPT, 1))
    pair.step_p(prefill())
    pair.step_d(decode())
    granted = registrations(pair.to_p)
    assert len(granted) == 1, "two blocks are there, the third is asked for"
    pair.to_p.clear()
    pair.now = LEASE_NS - 1
    pair.step_p()
    assert accounts(pair.p) == {"retained": 3}


def test_vllm_frees_what_a_failed_write_of_an_ended_lease_had() -> None:
    pair = vllm()
    pair.writing()
    pair.now = LEASE_NS
    pair.step_p()
    assert accounts(pair.p) == {"deferred": 3}
    pair.step_p(pair.written("the transfer broke"))
    assert_all_free(pair.p)
