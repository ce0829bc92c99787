"""Small engines, a fake model and hand-made transfers for the tests of the core."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pdkv.core.config import EngineConfig
from pdkv.core.engine import Engine, Identity
from pdkv.core.events import Event, Finished, TokenSampled
from pdkv.core.ports import Batch, InboxItem, Int32Array, NewRequest, Outputs, Plan, ReadEnded
from pdkv.core.transfer.messages import Grant, Peer, RemoteSource

NS = 1_000_000_000
PEER = Peer("P", "127.0.0.1", 5600)
VOCABULARY = 1000


def make_engine(*, slots: int = 64, engine_id: str = "E", nonce: int = 7, **config: Any) -> Engine:
    """An engine with an `EngineConfig` of small defaults."""
    values: dict[str, Any] = {
        "num_blocks": 33, "block_size": 4, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 32,
    } | config  # fmt: skip
    identity = Identity(engine_id=engine_id, nonce=nonce, secret=b"s" * 32)
    return Engine(EngineConfig(**values), identity, np.zeros((slots, 2), dtype=np.uint64))


def prompt_of(*tokens: int) -> Int32Array:
    """A prompt of the given tokens."""
    return np.asarray(tokens, dtype=np.int32)


def counting_prompt(length: int, start: int = 0) -> Int32Array:
    """start, start + 1, ...: two prompts with distant starts share nothing."""
    return np.arange(start, start + length, dtype=np.int32)


def new_request(request_id: str, prompt: Int32Array | int, max_tokens: int = 4, **more: Any) -> NewRequest:
    """A request; an int prompt is a length, with content that only this id has."""
    if isinstance(prompt, int):
        seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:4], "little")
        prompt = np.random.default_rng(seed).integers(0, VOCABULARY, prompt, dtype=np.int32)
    return NewRequest(request_id=request_id, prompt=prompt, max_tokens=max_tokens, **more)


def source_for(tokens: int, block_size: int, *, lease_id: int = 1, first_block: int = 1) -> RemoteSource:
    """A grant of a producer that exists only on paper."""
    blocks = -(-tokens // block_size)
    grant = Grant(
        block_ids=tuple(range(first_block, first_block + blocks)),
        block_size=block_size,
        num_tokens=tokens,
        slot=0,
        nonce=99,
        lease_id=lease_id,
        token=lease_id.to_bytes(16, "little"),
        proof=b"",
    )
    return RemoteSource(peer=PEER, request_id=f"p{lease_id}", grant=grant)


def arrived(plan: Plan, index: int = 0) -> ReadEnded:
    """The plan's READ has ended well."""
    read = plan.reads[index]
    return ReadEnded(
        handle=read.handle, slot=(read.source.grant.nonce, read.source.grant.lease_id), moved_bytes=1, seconds=0.1
    )


def failed(handle: int, error: str = "the network broke") -> ReadEnded:
    """A READ that ended badly."""
    return ReadEnded(handle=handle, slot=None, error=error)


def next_token(known: Iterable[int]) -> int:
    """The fake model: the next token is a function of all known ones, and of nothing else."""
    data = np.asarray(known, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % VOCABULARY


def reference_output(new: NewRequest, max_model_len: int) -> list[int]:
    """What the request must produce, computed without any engine."""
    known = new.prompt.tolist()
    for position in range(1, new.max_tokens + 1):
        known.append(next_token(known))
        if position >= new.min_tokens and known[-1] in new.stop_token_ids:
            break
        if len(known) >= max_model_len:
            break
    return known[len(new.prompt) :]


class Cache:
    """A KV pool whose content can be judged: each slot keeps a tag of *all* tokens up to the one it stands for.

    `run` executes a batch as a device would (writes of all rows first, then their reads, as attention does layer by
    layer) and asserts that every slot a row attends to holds what that row's own tokens say.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.tags = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.block_size = block_size
        self.known: dict[str, list[int]] = {}
        self._tags: dict[str, list[int]] = {}

    def add(self, new: NewRequest) -> None:
        """The executor's own record of a request's tokens."""
        self.known[new.request_id] = new.prompt.tolist()
        self._tags[new.request_id] = []

    def tags_of(self, request_id: str) -> list[int]:
        """One tag per known token of the request: what KV at that position stands for."""
        tags, known = self._tags[request_id], self.known[request_id]
        tags += prefix_tags(known[len(tags) :], tags[-1] if tags else None)
        return tags

    def run(self, batch: Batch) -> Outputs:
        """Sampled tokens of the batch; raises ``AssertionError`` when a row attends to foreign content."""
        spans: list[tuple[str, int, int, list[int]]] = []
        at = 0
        for row, request_id in enumerate(batch.request_ids):
            start, count = int(batch.num_computed[row]), int(batch.num_scheduled[row])
            given = batch.tokens[at : at + count].tolist()
            at += count
            known = self.known[request_id]
            if batch.pending[row]:
                given[-1] = known[start + count - 1]
            assert given == known[start : start + count], f"{request_id}: wrong input tokens at {start}"
            spans.append((request_id, start, start + count, batch.block_tables[row].tolist()))
        assert at == len(batch.tokens)
        written: set[tuple[int, int]] = set()
        for request_id, start, end, table in spans:
            tags = self.tags_of(request_id)
            for position in range(start, end):
                place = (table[position // self.block_size], position % self.block_size)
                assert place[0] != 0, f"{request_id}: writes to the null block"
                assert place not in written, f"{request_id}: {place} written twice in one plan"
                written.add(place)
                self.tags[place] = tags[position]
        tokens = np.zeros(len(batch), dtype=np.int32)
        for row, (request_id, _, end, table) in enumerate(spans):
            blocks = np.asarray(table[: -(-end // self.block_size)])
            seen = self.tags[blocks].reshape(-1)[:end]
            expected = np.asarray(self.tags_of(request_id)[:end])
            wrong = np.flatnonzero(seen != expected)
            assert len(wrong) == 0, f"{request_id}: position {wrong[0]} (block {blocks[wrong[0] // self.block_size]})"
            if batch.samples[row]:
                assert end == len(self.known[request_id]), f"{request_id}: samples before its last token"
                token = next_token(self.known[request_id])
                self.known[request_id].append(token)
                tokens[row] = token
        return Outputs(tokens=tokens)


def prefix_tags(tokens: list[int], parent: int | None = None) -> list[int]:
    """62-bit tags of all prefixes (behind ``parent``): equal exactly when the prefixes are."""
    tags, value = [], 1469598103934665603 if parent is None else parent
    for token in tokens:
        value = ((value ^ (token + 1)) * 1099511628211 + 12345) & ((1 << 62) - 1)
        tags.append(value)
    return tags


def tokens_of(events: Iterable[Event]) -> dict[str, list[int]]:
    """Sampled tokens by request."""
    found: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, TokenSampled):
            found.setdefault(event.request_id, []).append(event.token)
    return found


def finished_of(events: Iterable[Event]) -> dict[str, Finished]:
    """Outcomes by request; a second one is an error."""
    found: dict[str, Finished] = {}
    for event in events:
        if isinstance(event, Finished):
            assert event.request_id not in found, f"{event.request_id} finished twice"
            found[event.request_id] = event
    return found


def step(
    engine: Engine, now_ns: int = 0, inbox: Iterable[InboxItem] = (), token: Callable[[str], int] = lambda _: 5
) -> tuple[Plan, tuple[Event, ...]]:
    """One schedule and one complete, every sample being ``token(request_id)``; returns the plan and all events."""
    plan = engine.schedule(now_ns, list(inbox))
    engine.check()
    outputs = Outputs(tokens=np.asarray([token(i) for i in plan.batch.request_ids], dtype=np.int32))
    events = engine.complete(plan.step_id, outputs, now_ns)
    engine.check()
    return plan, (*plan.events, *events)


def assert_all_free(engine: Engine) -> None:
    """Nobody holds anything."""
    accounts = engine.manager.pool.ledger.as_dict()
    held = {name: count for name, count in accounts.items() if count and name not in ("free", "cached", "null")}
    assert not held, f"still held: {held} by {list(engine.manager.holders())}"
    assert accounts["null"] == 1
    assert engine.manager.pool.num_free == engine.config.num_blocks - 1
