"""Replay recordings of the reference (row formats of ../shared/oracle/README.md) against pdkv's core.

``python tests/conformance/replay.py FILE...`` prints one line per failing row with the first difference, then
``N passed, M failed`` (rows of kinds that are not built yet are counted as skipped), and exits 1 on failure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pdkv.core.blocks.extra_keys import LoraAdapter, MultimodalItem
from pdkv.core.blocks.groups import ChunkedGroup, FullGroup, Granularity, Group, StateGroup, WindowGroup, granularity
from pdkv.core.blocks.hashing import raw_sha256
from pdkv.core.blocks.holders import Hit
from pdkv.core.blocks.kv_events import AllBlocksCleared, BlockRemoved, KvEvent
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import VLLM, EngineConfig
from pdkv.core.engine import Engine, Identity
from pdkv.core.ledger import Account
from pdkv.core.ports import Finished, NewRequest, Outputs, Preempted
from pdkv.core.scheduler.request import Request, Status

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, it finds its neighbours too
from tests.conformance.capacity import is_capacity_row, replay_capacity
from tests.conformance.replay_remote import is_remote_row, replay_remote

Row = dict[str, Any]


class Mismatch(Exception):
    """The first difference of a row."""


class NotBuilt(Exception):
    """The row needs a kind of layer that a later issue builds."""


def expect(where: str, ours: object, theirs: object) -> None:
    """Raise `Mismatch` unless both are equal."""
    if ours != theirs:
        raise Mismatch(f"{where}: ours {ours!r}, reference {theirs!r}")


# ------------------------------------------------------------------------------------------------ scheduler traces


def sampled_token(request_id: str, position: int) -> int:
    """Token of a request at an output position, as the recorder defines it."""
    return (sum(request_id.encode()) * 31 + position * 7) % 997


def group_of(facts: Row) -> Group:
    """A recorded group as the core's fact about it."""
    kind, size = facts["kind"], facts["block_size"]
    if kind in ("full", "full_attention", "mla_attention", "mla"):
        return FullGroup(block_size=size)
    if kind in ("sw", "sliding_window", "sliding_window_mla"):
        return WindowGroup(block_size=size, window=facts["sliding_window"])
    if kind in ("chunked", "chunked_local", "chunked_local_attention"):
        return ChunkedGroup(block_size=size, chunk=facts["attention_chunk_size"])
    if kind == "mamba":
        aligned = facts.get("mamba_cache_mode", "none") == "align"
        return StateGroup(block_size=size, aligned=aligned, speculative_blocks=facts.get("num_speculative_blocks", 0))
    raise NotBuilt(f"a group of kind {kind}")


def replay_schedule(row: Row) -> None:
    """One row of sched_traces: every step's batch, preemptions, blocks, queue lengths and frees."""
    config = row["config"]
    kinds = config.get("groups") or [
        {"block_size": config["block_size"], **config, "kind": kind} for kind in config.get("kinds", ["full"])
    ]
    if config.get("async_scheduling"):
        raise NotBuilt("asynchronous scheduling")
    engine = Engine(
        EngineConfig(
            num_blocks=config["num_blocks"],
            block_size=config["block_size"],
            groups=tuple(group_of(kind) for kind in kinds),
            prefix_match_unit=config.get("hash_block_size"),
            prefix_cache_retention_interval=config.get("prefix_cache_retention_interval"),
            max_model_len=config["max_model_len"],
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            long_prefill_token_threshold=config["long_prefill_token_threshold"],
            full_sequence_must_fit=config["full_sequence_must_fit"],
            watermark=(config["watermark_blocks"] + 0.5) / config["num_blocks"] if config["watermark_blocks"] else 0.0,
            enable_prefix_caching=config.get("enable_caching", config.get("enable_prefix_caching", True)),
            priority_scheduling=config.get("policy") == "priority",
            transfer=VLLM,
        ),
        Identity(engine_id="replay", nonce=1, secret=b"replay"),
        np.zeros((64, 2), dtype=np.uint64),
    )
    for number, step in enumerate(row["steps"]):
        replay_step(engine, row, step, f"step {number}")
        engine.check()


def replay_step(engine: Engine, row: Row, step: Row, where: str) -> None:
    """One schedule and one complete."""
    arrivals = [request for request in row["requests"] if request["id"] in step["arrived"]]
    plan = engine.schedule(
        step["step"],
        [
            NewRequest(
                request_id=request["id"],
                prompt=np.asarray(request["prompt"], dtype=np.int32),
                max_tokens=request["max_tokens"],
                priority=request["priority"],
            )
            for request in arrivals
        ],
    )
    batch = plan.batch
    scheduled = dict(zip(batch.request_ids, batch.num_scheduled.tolist(), strict=True))
    expect(f"{where} scheduled", list(scheduled.items()), list(step["scheduled"].items()))
    preempted = [event.request_id for event in plan.events if isinstance(event, Preempted)]
    expect(f"{where} preempted", sorted(preempted), sorted(step["preempted"]))
    computed = dict(zip(batch.request_ids, batch.num_computed.tolist(), strict=True))
    for entry in (*step["new"], *step["cached"]):
        expect(f"{where} {entry['id']} computed tokens", computed[entry["id"]], entry["num_computed_tokens"])
    for entry in step["new"]:
        for group, theirs in enumerate(entry["block_ids"]):
            held = engine.manager.blocks_of(entry["id"], group).tolist()
            expect(f"{where} {entry['id']} blocks of group {group}", held, theirs)
    for entry in step["cached"]:
        for group, new in enumerate(entry["new_block_ids"] or ()):
            held = engine.manager.blocks_of(entry["id"], group).tolist()
            ours = held if entry["resumed"] else held[len(held) - len(new) :]
            expect(f"{where} {entry['id']} new blocks of group {group}", ours, new)
    if "copies" in step:
        expect(f"{where} copies", batch.copies.tolist(), step["copies"])
    running = [request.request_id for request in engine.scheduler.running]
    expect(f"{where} running", running, step["running"])
    expect(f"{where} waiting", len(engine.scheduler.waiting) + len(engine.scheduler.holding), step["num_waiting"])
    expect(f"{where} free after schedule", engine.manager.pool.num_free, step["free_blocks_after_schedule"])
    tokens = np.zeros(len(batch), dtype=np.int32)
    for index, request_id in enumerate(batch.request_ids):
        if batch.samples[index]:
            tokens[index] = sampled_token(request_id, engine.requests[request_id].num_outputs)
    sampled = {key: int(tokens[i]) for i, key in enumerate(batch.request_ids) if batch.samples[i]}
    expect(f"{where} sampled", sampled, step["sampled"])
    events = engine.complete(plan.step_id, Outputs(tokens=tokens), step["step"])
    finished = [event.request_id for event in events if isinstance(event, Finished)]
    theirs = [entry["id"] if isinstance(entry, dict) else entry for entry in step["finished"]]
    expect(f"{where} finished", sorted(finished), sorted(theirs))
    expect(f"{where} free after update", engine.manager.pool.num_free, step["free_blocks_after_update"])


# ----------------------------------------------------------------------------------------------- block pool traces


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
        )
        self.requests: dict[str, Request] = {}
        self.hits: dict[str, Hit] = {}
        self.sequence = 0
        self.hashes: dict[Any, bytes | None] = {}  # theirs -> ours, as met in KV events

    def apply(self, step: Row, where: str) -> None:
        """One operation and the state after it."""
        self.manager.pool.events = []
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


def replay_pool(row: Row) -> None:
    """One row of blockpool_traces."""
    replay = PoolReplay(row["config"])
    for number, step in enumerate(row["steps"]):
        replay.apply(step, f"step {number} {step['op']}({step.get('req', '')})")
    expect("final free queue", replay.manager.pool.free_order().tolist(), row["final"]["free_queue_block_ids"])
    assert replay.manager.pool.ledger.counts[Account.NULL] == 1


# ----------------------------------------------------------------------------------------------------------- files


def replay_row(row: Row) -> None:
    """Raises `Mismatch` or `NotBuilt`."""
    if is_remote_row(row):
        if row["config"]["kinds"] != ["full"]:
            raise NotBuilt(f"remote loads into groups {row['config']['kinds']}")
        replay_remote(row)
    elif "requests" in row:
        replay_schedule(row)
    elif "groups" in row.get("config", {}):
        replay_pool(row)
    elif is_capacity_row(row):
        refusal = replay_capacity(row)
        if refusal is not None:
            print(f"{row.get('id', '?')}: agrees, but its config is refused: {refusal}", file=sys.stderr)
    else:
        raise NotBuilt("a row of an unknown format")


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of one JSON-lines file."""
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)


def main(paths: list[str]) -> int:
    """Exit status of the command line."""
    passed = failed = skipped = 0
    for path in paths:
        for row in read_rows(Path(path)):
            try:
                replay_row(row)
                passed += 1
            except NotBuilt:
                skipped += 1
            except (Mismatch, AssertionError) as error:
                failed += 1
                print(f"{row.get('id', '?')}: {error}")
    if skipped:
        print(f"{skipped} rows need layer kinds that are not built yet: skipped")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
