"""The digest marks of a kept turn: where its tokens and another prompt's part."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.core.helpers import NS, PEER, make_engine, new_request, step
from tests.core.turns import SECRET, conversation

from pdkv.core.events import LeaseGranted
from pdkv.core.transfer.messages import Grant, RemoteSource
from pdkv.core.transfer.proof import (
    MARK_BYTES,
    MOST_MARKS,
    bind,
    digest_marks,
    is_proved,
    mark_prefixes,
    marked_tokens,
    proof_key,
)

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
