"""Replay block pool traces (../shared/oracle/README.md, part B) against pdkv's `KVCacheManager`."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.conformance.rows import Row, Unreadable, drafting_of, expect, group_of

from pdkv.core.blocks.extra_keys import LoraAdapter, MultimodalItem
from pdkv.core.blocks.groups import Granularity, Group, granularity
from pdkv.core.blocks.hashing import raw_sha256
from pdkv.core.blocks.holders import Hit
from pdkv.core.blocks.kv_events import AllBlocksCleared, BlockRemoved, KvEvent
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.ledger import Account
from pdkv.core.ports import NewRequest
from pdkv.core.scheduler.request import Request, Status


def sizes_of(config: Row, groups: tuple[Group, ...]) -> Granularity:
    """The recorded sizes; whether hits end inside blocks follows from the groups."""
    sizes = granularity(groups, hash_tokens=config["hash_block_size"], enable_caching=config["enable_caching"])
    expect("scheduler block", sizes.scheduler_tokens, config["scheduler_block_size"])
    return sizes


def event_of(event: KvEvent) -> list[Any]:
    """Our event in the recorder's form."""
    if isinstance(event, AllBlocksCleared):
        return ["cleared"]
    if isinstance(event, BlockRemoved):
        return ["removed", event.group, event.key]
    extra = [[key[1] if key[0] != "mm" else list(key[1:]) for key in keys] or None for keys in event.extra_keys]
    tokens = event.tokens.tolist()
    hashes = list(event.hashes)
    return ["stored", event.group, hashes, event.parent, tokens, event.block_size, extra or None, event.lora_name]


class PoolReplay:
    """Drives a `KVCacheManager` by the operations of one blockpool_traces row."""

    def __init__(self, config: Row) -> None:
        groups = tuple(group_of(group) for group in config["groups"])
        self.sizes = sizes_of(config, groups)
        self.manager = KVCacheManager(
            num_blocks=config["num_blocks"],
            groups=groups,
            sizes=self.sizes,
            max_model_len=config["max_model_len"],
            watermark=config["watermark"],
            enable_caching=config["enable_caching"],
            max_in_flight_tokens=config["max_in_flight_tokens"],
            retention_interval=config.get("prefix_cache_retention_interval"),
            drafting=drafting_of(config),
        )
        self.requests: dict[str, Request] = {}
        self.hits: dict[str, Hit] = {}
        self.sequence = 0
        self.hashes: dict[Any, bytes | None] = {}  # theirs -> ours, as met in KV events

    def apply(self, step: Row, where: str) -> None:
        """One operation and the state after it."""
        self.manager.pool.events = []
        if step["op"] not in OPERATIONS:
            raise Unreadable(f"{where}: an unknown operation")
        getattr(self, step["op"])(step, where)
        if "events" in step:
            self.compare_events(step["events"], where)
        pool = self.manager.pool
        after = step["after"]
        expect(f"{where} free blocks", pool.num_free, after["free_blocks"])
        expect(f"{where} usage", round(pool.usage, 9), after["usage"])
        expect(f"{where} cached blocks", pool.ledger.num_hashed, after["cached_blocks"])
        self.manager.check()

    def new_request(self, step: Row, where: str) -> None:
        """Hashes of the prompt's full blocks."""
        new = NewRequest(
            request_id=step["req"],
            prompt=np.asarray(step["tokens"], dtype=np.int32),
            max_tokens=1 << 20,
            cache_salt=step.get("cache_salt"),
            lora=LoraAdapter(*step["lora"]) if step.get("lora") else None,
            items=tuple(MultimodalItem(*item) for item in step.get("items", ())),
            encoder_tokens=step.get("encoder_tokens", 0),
            report_hits=step.get("report_mode") == "full",
        )
        request = Request(new, arrival_ns=0, sequence=self.sequence, hash_tokens=self.sizes.hash_tokens)
        self.sequence += 1
        if self.manager.pool.enable_caching:
            request.extend_hashes(raw_sha256)
        self.requests[step["req"]] = request
        self.hits.pop(step["req"], None)
        theirs = step["result"] if isinstance(step["result"], int) else step["result"]["num_hashes"]
        expect(f"{where} hashes", len(request.hashes), theirs)

    def get_computed_blocks(self, step: Row, where: str) -> None:
        """A lookup."""
        hit = self.manager.lookup(self.requests[step["req"]])
        self.hits[step["req"]] = hit
        expect(f"{where} hit tokens", hit.tokens, step["result"]["hit_tokens"])
        expect(f"{where} hit blocks", [blocks.tolist() for blocks in hit.blocks], step["result"]["block_ids"])
        boundary = step["result"].get("shared_prefix_boundary", hit.boundary)
        expect(f"{where} shared prefix", hit.boundary, boundary)
        if step.get("remember"):  # as the scheduler does; the recordings in ../shared do not
            self.requests[step["req"]].shared_boundary = hit.boundary

    def allocate_slots(self, step: Row, where: str) -> None:
        """An allocation, then the recorder's own bookkeeping."""
        request = self.requests[step["req"]]
        hit = self.hits.pop(step["req"], None)
        computed = hit.tokens if hit else 0
        new = self.manager.allocate_slots(
            request,
            step["num_new_tokens"],
            hit=hit,
            lookahead_tokens=step.get("num_lookahead_tokens", 0),
            full_sequence_must_fit=step.get("full_sequence_must_fit", False),
            reserved_blocks=step.get("reserved_blocks", 0),
            has_scheduled=step.get("has_scheduled_reqs", False),
        )
        result = step["result"]
        if result is None or new is None:
            expect(f"{where} fits", new is not None, result is not None)
            return
        expect(f"{where} new blocks", [blocks.tolist() for blocks in new], result["new_block_ids"])
        for group, theirs in enumerate(result["table"]):
            expect(f"{where} table of group {group}", self.manager.blocks_of(step["req"], group).tolist(), theirs)
        copies, owners = self.manager.take_copies()
        expect(f"{where} copies", copies.tolist(), result.get("copies", []))
        for owner in owners:
            self.manager.release(owner)
        request.num_computed += computed + step["num_new_tokens"]
        expect(f"{where} computed", request.num_computed, result.get("num_computed_tokens_after", request.num_computed))
        if request.status is not Status.RUNNING:
            request.move_to(Status.RUNNING)

    def compare_events(self, theirs: list[Any], where: str) -> None:
        """KV events in order; hashes differ in value, so ours must stand where theirs do (one each for good)."""
        ours = [event_of(event) for event in self.manager.pool.events or ()]
        expect(f"{where} kinds of events", [event[0] for event in ours], [event[0] for event in theirs])
        for mine, other in zip(ours, theirs, strict=True):
            if mine[0] == "stored":
                expect(f"{where} stored", [mine[1], *mine[4:]], [other[1], *other[4:]])
                expect(f"{where} stored hashes", len(mine[2]), len(other[2]))
                for key, hashed in zip([*mine[2], mine[3]], [*other[2], other[3]], strict=True):
                    expect(f"{where} the hash", self.hashes.setdefault(hashed, key), key)
        gone = [[(e[1], e[2]) for e in side if e[0] == "removed"] for side in (ours, theirs)]
        gone[1] = [(group, self.hashes.get(hashed)) for group, hashed in gone[1]]
        expect(f"{where} removed", sorted(gone[0]), sorted(gone[1]))

    def new_step(self, step: Row, where: str) -> None:
        """What was registered before has been computed."""
        self.manager.new_step()

    def append_output(self, step: Row, where: str) -> None:
        """Sampled tokens."""
        request = self.requests[step["req"]]
        request.append(np.asarray(step["tokens"], dtype=np.int32))
        if self.manager.pool.enable_caching:
            request.extend_hashes(raw_sha256)

    def free(self, step: Row, where: str) -> None:
        """The request is over."""
        self.manager.release(step["req"])
        self.requests.pop(step["req"])

    def preempt(self, step: Row, where: str) -> None:
        """The request loses its blocks."""
        self.manager.release(step["req"])
        request = self.requests[step["req"]]
        request.num_computed = 0
        request.move_to(Status.PREEMPTED)

    def reset_prefix_cache(self, step: Row, where: str) -> None:
        """All cached content forgotten, if nothing is in use."""
        result = step["result"]
        expect(f"{where} reset", self.manager.pool.reset_prefix_cache(), result)


OPERATIONS = frozenset(
    {
        "new_request",
        "get_computed_blocks",
        "allocate_slots",
        "append_output",
        "free",
        "preempt",
        "reset_prefix_cache",
        "new_step",
    }
)


def replay_pool(row: Row) -> None:
    """One row of blockpool_traces."""
    replay = PoolReplay(row["config"])
    for number, step in enumerate(row["steps"]):
        replay.apply(step, f"step {number} {step['op']}({step.get('req', '')})")
    expect("final free queue", replay.manager.pool.free_order().tolist(), row["final"]["free_queue_block_ids"])
    assert replay.manager.pool.ledger.counts[Account.NULL] == 1
