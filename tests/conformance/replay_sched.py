"""Replay scheduler traces (../shared/oracle/README.md, part C) against pdkv's engine, policy `vllm`."""

from __future__ import annotations

import dataclasses

import numpy as np
from tests.conformance.rows import Row, expect, group_of, sampled_token, watermark_share

from pdkv.core.blocks.extra_keys import LoraAdapter, MultimodalItem
from pdkv.core.config import VLLM, EngineConfig
from pdkv.core.engine import Engine, Identity
from pdkv.core.events import Finished, Preempted
from pdkv.core.multimodal import EncoderLimits
from pdkv.core.ports import Abort, Int32Array, NewRequest, Outputs
from pdkv.core.speculation import Speculation


def replay_schedule(row: Row) -> None:
    """One row of sched_traces: every step's batch, preemptions, blocks, queue lengths and frees."""
    config = row["config"]
    kinds = config.get("groups") or [
        {"block_size": config["block_size"], **config, "kind": kind} for kind in config.get("kinds", ["full"])
    ]
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
            long_prefill_token_threshold=config.get("long_prefill_token_threshold", 0),
            enable_chunked_prefill=config.get("enable_chunked_prefill", True),
            full_sequence_must_fit=config.get("full_sequence_must_fit", True),
            watermark=watermark_share(config),
            enable_prefix_caching=config.get("enable_caching", config.get("enable_prefix_caching", True)),
            priority_scheduling=config.get("policy") == "priority",
            speculation=speculation_of(config),
            encoder=encoder_of(config),
            max_loras=config.get("max_loras"),
            shared_prefix_checkpoint=config.get("shared_prefix_checkpoint", False),
            transfer=dataclasses.replace(VLLM, skipped_go_first=False),  # it has no connector to show blocks to
        ),
        Identity(engine_id="replay", nonce=1, secret=b"replay"),
        np.zeros((64, 2), dtype=np.uint64),
    )
    # The reference lets what does not fit the pool (any more) wait for ever; pdkv refuses it, or serves it after all.
    engine.validate = lambda new: None  # type: ignore[method-assign]
    engine.manager.outgrown = lambda request: False  # type: ignore[method-assign]
    for number, step in enumerate(row["steps"]):
        replay_step(engine, row, step, f"step {number}")
        engine.check()


def encoder_of(config: Row) -> EncoderLimits | None:
    """The recorded encoder."""
    facts = config.get("encoder")
    if facts is None:
        return None
    whole = facts.get("whole_items", False)
    return EncoderLimits(step_embeddings=facts["step"], cache_embeddings=facts["cache"], whole_items=whole)


def item_of(name: str, offset: int, length: int, spans: list[list[int]] | None) -> MultimodalItem:
    """A recorded item."""
    return MultimodalItem(name, offset, length, None if spans is None else tuple((one, two) for one, two in spans))


def speculation_of(config: Row) -> Speculation | None:
    """The recorded drafter."""
    if "speculation" not in config:
        return None
    groups = tuple(config["eagle_groups"]) if "eagle_groups" in config else None
    return Speculation(**config["speculation"], drop_groups=groups)


def outputs_of(names: tuple[str, ...], tokens: Int32Array, step: Row) -> Outputs:
    """The recorded outcome of a step's drafts, and the drafts for the next one."""
    if "drafts" not in step:
        return Outputs(tokens=tokens)
    more, drafts = (
        tuple(np.asarray(step[what].get(name, ()), dtype=np.int32) for name in names) for what in ("more", "drafts")
    )
    return Outputs(tokens=tokens, more=more, drafts=drafts)


def replay_step(engine: Engine, row: Row, step: Row, where: str) -> None:
    """One schedule and one complete."""
    arrivals = [request for request in row["requests"] if request["id"] in step["arrived"]]
    plan = engine.schedule(
        step["step"],
        [Abort(request_id) for request_id in step.get("aborted", ())]
        + [
            NewRequest(
                request_id=request["id"],
                prompt=np.asarray(request["prompt"], dtype=np.int32),
                max_tokens=request["max_tokens"],
                priority=request.get("priority", 0),
                arrival_ns=step["step"],
                cache_salt=request.get("cache_salt"),
                items=tuple(item_of(*item) for item in request.get("items", ())),
                lora=LoraAdapter(*request["lora"]) if request.get("lora") else None,
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
    if "encode" in step:
        encode: dict[str, list[int]] = {}
        for name, item in batch.encode:
            encode.setdefault(name, []).append(item)
        expect(f"{where} encode", encode, step["encode"])
        expect(f"{where} dropped", list(batch.dropped), step["dropped"])
    running = [request.request_id for request in engine.scheduler.running]
    expect(f"{where} running", running, step["running"])
    expect(f"{where} waiting", len(engine.scheduler.waiting) + len(engine.scheduler.holding), step["num_waiting"])
    if "kv_usage_after_schedule" in step:
        expect(f"{where} usage", round(engine.manager.pool.usage, 9), step["kv_usage_after_schedule"])
    expect(f"{where} free after schedule", engine.manager.pool.num_free, step["free_blocks_after_schedule"])
    tokens = np.zeros(len(batch), dtype=np.int32)
    for index, request_id in enumerate(batch.request_ids):
        if batch.samples[index]:
            tokens[index] = sampled_token(request_id, engine.requests[request_id].num_outputs)
    if "num_drafts" in step:
        drafts = {key: int(batch.num_drafts[i]) for i, key in enumerate(batch.request_ids) if batch.num_drafts[i]}
        expect(f"{where} drafts to check", drafts, step["num_drafts"])
    sampled = {key: int(tokens[i]) for i, key in enumerate(batch.request_ids) if batch.samples[i]}
    expect(f"{where} sampled", sampled, step["sampled"])
    events = engine.complete(plan.step_id, outputs_of(batch.request_ids, tokens, step), step["step"])
    finished = [event.request_id for event in events if isinstance(event, Finished)]
    theirs = [entry["id"] if isinstance(entry, dict) else entry for entry in step["finished"]]
    expect(f"{where} finished", sorted(finished), sorted(theirs))
    if engine.scheduler.encoder is not None:
        cache = engine.scheduler.encoder.cache
        expect(f"{where} free embeddings", [cache.num_free, cache.num_reclaimable], step["encoder_free"])
    expect(f"{where} free after update", engine.manager.pool.num_free, step["free_blocks_after_update"])
