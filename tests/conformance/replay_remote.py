"""Replay recordings of vLLM's scheduler with remote loads (tests/data/README.md) against pdkv's engine, policy `vllm`.

What a recording reports after a step (a load that ended) reaches the engine with its next ``schedule``, through the
inbox: blocks that come back because of such reports are therefore taken off the recorded number of free blocks.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np
from tests.conformance.rows import Row, expect, group_of, sampled_token, watermark_share

from pdkv.core.config import VLLM, EngineConfig
from pdkv.core.engine import Engine, Identity
from pdkv.core.events import Admitted, Finished, FinishReason, LoadStarted, Preempted
from pdkv.core.ports import Abort, InboxItem, NewRequest, Outputs, Plan, ReadEnded
from pdkv.core.scheduler.limits import PauseState
from pdkv.core.transfer.messages import Grant, Peer, RemoteSource

_NONCE = 5


def is_remote_row(row: Row) -> bool:
    """Whether a row is one of `record.py`."""
    return "load_failure" in row.get("config", {})


def facts_of(kind: str, config: Row) -> Row:
    """One of the recorded kinds as a group of part B."""
    size = config["state_block_size"] if kind == "mamba" else config["block_size"]
    if kind == "swr":
        return {**config, "kind": "sliding_window_mla", "block_size": size, "bounded_replay": True}
    return {**config, "kind": kind, "block_size": size}


def engine_config(config: Row) -> EngineConfig:
    """The recorded configuration as an engine takes it."""
    return EngineConfig(
        num_blocks=config["num_blocks"],
        block_size=config["block_size"],
        groups=tuple(group_of(facts_of(kind, config)) for kind in config["kinds"]),
        prefix_match_unit=config["hash_block_size"] if len(config["kinds"]) > 1 else None,
        prefix_cache_retention_interval=config.get("retention_interval", 0),
        max_model_len=config["max_model_len"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        long_prefill_token_threshold_adaptive=config.get("long_prefill_token_threshold_adaptive", False),
        max_num_active_seqs=config.get("max_num_active_seqs"),
        max_num_scheduled_tokens=config.get("max_num_scheduled_tokens"),
        prefill_schedule_interval=config.get("prefill_schedule_interval", 1),
        full_sequence_must_fit=config["full_sequence_must_fit"],
        watermark=watermark_share(config),
        enable_prefix_caching=config["enable_caching"],
        priority_scheduling=config["policy"] == "priority",
        max_outstanding_plans=config["concurrent_batches"],
        transfer=dataclasses.replace(
            VLLM, load_failure=config["load_failure"], loads_bring_states=config.get("divergent_hits", False)
        ),
    )


class RemoteReplay:
    """One row against one engine."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.requests = {request["id"]: request for request in row["requests"]}
        identity = Identity(engine_id="replay", nonce=1, secret=b"replay")
        self.engine = Engine(engine_config(row["config"]), identity, np.zeros((64, 2), dtype=np.uint64))
        self.engine.validate = lambda new: None  # type: ignore[method-assign]  # the stub's loads bring the last token too
        self.handles: dict[str, int] = {}
        self.plans: deque[Plan] = deque()
        self.reports: list[InboxItem] = []
        self.failed: list[str] = []  # recorded as ended with an error; ours end at the next schedule

    def run(self) -> None:
        """Every step; raises `Mismatch` at the first one."""
        for step in self.row["steps"]:
            where = f"step {step['step']}"
            self._schedule(step, where)
            if step["processed"] is not None:
                self._complete(step, where)
            released = step.get("released_by_reports", 0)
            free = step["free_blocks_after_update"] - released
            expect(f"{where} free blocks after the update", self.engine.manager.pool.num_free, free)
            self.engine.check()
        if not self.reports:
            order = self.engine.manager.pool.free_order().tolist()
            expect("final free queue", order, self.row["final"]["free_queue_block_ids"])

    # ---------------------------------------------------------------------------------------------------- schedule

    def _schedule(self, step: Row, where: str) -> None:
        inbox, self.reports = self.reports, []
        inbox += [Abort(request_id) for request_id in step["aborted"]]
        inbox += [self._arrival(self.requests[request_id]) for request_id in step["arrived"]]
        if "pause" in step:
            self.engine.pause(PauseState[step["pause"]])
        plan = self.engine.schedule(step["step"], inbox)
        self.plans.append(plan)
        self._compare_events(plan, step, where)
        batch = plan.batch
        scheduled = dict(zip(batch.request_ids, batch.num_scheduled.tolist(), strict=True))
        expect(f"{where} scheduled", list(scheduled.items()), list(step["scheduled"].items()))
        computed = dict(zip(batch.request_ids, batch.num_computed.tolist(), strict=True))
        for entry in (*step["new"], *step["cached"]):
            expect(f"{where} {entry['id']} computed tokens", computed[entry["id"]], entry["num_computed_tokens"])
            self._compare_blocks(entry, where)
        scheduler = self.engine.scheduler
        expect(f"{where} running", [request.request_id for request in scheduler.running], step["running"])
        expect(f"{where} holding", [request.request_id for request in scheduler.holding], step["holding"])
        expect(f"{where} waiting", [request.request_id for request in scheduler.waiting], step["waiting"])
        expect(f"{where} free blocks", self.engine.manager.pool.num_free, step["free_blocks_after_schedule"])
        if "unfinished" in step:
            expect(f"{where} unfinished", scheduler.num_unfinished, step["unfinished"])
        if self.row["config"]["kinds"] == ["full"]:  # of the others, null entries have been counted too
            holders = self.engine.memory().holders
            deferred = sum(holder.blocks for holder in holders if holder.account == "deferred")
            expect(f"{where} deferred blocks", deferred, step["deferred_blocks_after_schedule"])

    def _arrival(self, request: Row) -> NewRequest:
        external = request["external_tokens"]
        counts = [stop - first for first, stop in self.engine.manager.peer_spans(external)]
        grant = Grant(
            block_ids=tuple(range(sum(counts))),
            block_size=self.engine.manager.paged_block_size,
            group_blocks=tuple(counts) if len(counts) > 1 else (),
            num_tokens=external,
            slot=0,
            nonce=_NONCE,
            lease_id=1,
            token=request["id"].encode().ljust(16),
            proof=b"",
        )
        source = RemoteSource(peer=Peer("P", "127.0.0.1", 5600), request_id=request["id"], grant=grant)
        return NewRequest(
            request_id=request["id"],
            prompt=np.asarray(request["prompt"], dtype=np.int32),
            max_tokens=request["max_tokens"],
            stop_token_ids=frozenset(request["stop_token_ids"]),
            priority=request["priority"],
            source=source if external else None,
        )

    def _compare_events(self, plan: Plan, step: Row, where: str) -> None:
        preempted = [event.request_id for event in plan.events if isinstance(event, Preempted)]
        expect(f"{where} preempted", sorted(preempted), sorted(step["preempted"]))
        ended = [event for event in plan.events if isinstance(event, Finished)]
        failed = [event.request_id for event in ended if event.reason is FinishReason.ERROR]
        aborted = [event.request_id for event in ended if event.reason is FinishReason.ABORT]
        expect(f"{where} failed by a report", failed, self.failed)
        expect(f"{where} aborted", aborted, step["aborted"])
        self.handles |= {read.source.request_id: read.handle for read in plan.reads}
        local = {event.request_id: event.local_tokens for event in plan.events if isinstance(event, Admitted)}
        started = [
            {
                "id": event.request_id,
                "local_tokens": local[event.request_id],
                "external_tokens": event.tokens,
                "block_ids": self._tables(event.request_id),
            }
            for event in plan.events
            if isinstance(event, LoadStarted)
        ]
        expect(f"{where} loads started", started, step["loads_started"])

    def _compare_blocks(self, entry: Row, where: str) -> None:
        held = self._tables(entry["id"])
        if "block_ids" in entry:
            expect(f"{where} {entry['id']} blocks", held, entry["block_ids"])
        elif entry["new_block_ids"]:
            for group, (table, new) in enumerate(zip(held, entry["new_block_ids"], strict=True)):
                ours = table if entry["resumed"] else table[len(table) - len(new) :]
                expect(f"{where} {entry['id']} new blocks of group {group}", ours, new)

    def _tables(self, request_id: str) -> list[list[int]]:
        manager = self.engine.manager
        return [manager.blocks_of(request_id, group).tolist() for group in range(len(manager.kinds))]

    # ---------------------------------------------------------------------------------------------------- complete

    def _complete(self, step: Row, where: str) -> None:
        plan = self.plans.popleft()
        expect(f"{where} processed", plan.step_id, step["processed"])
        batch = plan.batch
        tokens = np.zeros(len(batch), dtype=np.int32)
        sampled = {}
        for index, request_id in enumerate(batch.request_ids):
            request = self.engine.requests.get(request_id)
            if batch.samples[index] and request is not None:
                tokens[index] = sampled[request_id] = sampled_token(request_id, request.num_outputs)
        expect(f"{where} sampled", sampled, step["sampled"])
        outputs = Outputs(tokens=tokens, invalid_blocks=tuple(step.get("invalid_blocks", ())))
        events = self.engine.complete(plan.step_id, outputs, step["step"])
        ended = {event.request_id: event.reason.value for event in events if isinstance(event, Finished)}
        theirs = {end["id"]: end["reason"] for end in step["finished"]}
        hurt = step.get("hurt", ())  # those whose error is told by block end with the step itself
        self.failed = [key for key, reason in theirs.items() if reason == "error" and key not in hurt]
        expect(f"{where} finished", ended, {key: value for key, value in theirs.items() if key not in self.failed})
        self.reports += [self._report(end["id"], failed=end["failed"]) for end in step["loads_ended"]]

    def _report(self, request_id: str, *, failed: bool) -> ReadEnded:
        handle = self.handles[request_id]
        if failed:
            return ReadEnded(handle=handle, slot=None, error="recorded as failed")
        return ReadEnded(handle=handle, slot=(_NONCE, 1), moved_bytes=1, seconds=0.0)


def replay_remote(row: Row) -> None:
    """One row; raises `Mismatch`."""
    RemoteReplay(row).run()
