"""What a decode instance needs: counted here by hand on small numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.plan.models import planned

from pdkv.errors import ConfigError
from pdkv.plan.decode import LOAD_FLAGS, DecodeFacts, Workload
from pdkv.plan.kv_transfer import CONNECTORS, parse_kv_transfer
from pdkv.plan.options import PlanOptions
from pdkv.plan.planner import make_plan
from pdkv.units import GIB

LOAD = Workload(
    prompt_tokens=8000,
    output_tokens=800,
    requests_per_s=2.0,
    time_per_output_token_s=0.05,
    prefill_time_s=1.5,
    transfer_bandwidth=10 * GIB,
)
# One block of the dense model: 16 layers, 8 heads, K and V of 128 elements, 2 bytes, 16 tokens.
BLOCK = 16 * 8 * 256 * 2 * 16


def decode(name: str, connector: dict[str, Any] | None, load: Workload | None = LOAD, **settings: Any) -> DecodeFacts:
    transfer = None if connector is None else parse_kv_transfer({"kv_role": "kv_consumer"} | connector)
    options = PlanOptions(kv_cache_memory_bytes=40 * GIB, kv_transfer=transfer, **settings)
    facts = make_plan(planned(name), options, workload=load).decode
    assert facts is not None
    return facts


def test_pull_by_hand() -> None:
    facts = decode("dense", {"kv_connector": "NixlConnector"})
    assert (facts.mode, facts.role) == ("pull", "kv_consumer")
    assert facts.transferred_bytes_per_request == facts.transferred_bytes_all_ranks == 500 * BLOCK
    assert facts.transfer_time_s == 500 * BLOCK / (10 * GIB)
    assert facts.preempted_tokens == 8400
    assert facts.preempted_time_s == pytest.approx(1.5 * 8400 / 8000)
    assert facts.decode is not None
    assert facts.prefill is not None
    # 2 requests a second that decode for 40 s, with 8400 tokens on average.
    assert facts.decode.running == 2.0 * 40 * 525
    assert facts.decode.loading == pytest.approx(2.0 * 500 * facts.transfer_time_s)
    assert facts.decode.retained == 0
    usable = 40 * GIB // BLOCK - 1
    assert facts.decode.total == pytest.approx(facts.decode.running + facts.decode.loading)
    assert facts.decode.engines == pytest.approx(facts.decode.total / usable)
    assert facts.prefill.running == 2.0 * 1.5 * 500
    assert facts.prefill.retained == pytest.approx(facts.decode.loading)
    # P is busy for 3 s of every second: three of them, though their memory would do for more.
    assert facts.prefill.engines == 3.0
    assert facts.prefill_engines_per_decode_engine == pytest.approx(3.0 / facts.decode.engines)
    assert facts.lease_bytes_bound == 2 * 30 * 500 * BLOCK
    assert (facts.host_buffer_bytes, facts.device_buffer_bytes) == (0, 0)


def test_a_watermark_leaves_less_to_admission() -> None:
    free, kept = (decode("dense", {"kv_connector": "NixlConnector"}, watermark=share) for share in (0.0, 0.25))
    blocks = 40 * GIB // BLOCK
    assert (free.watermark_blocks, kept.watermark_blocks) == (0, blocks // 4)
    assert free.decode is not None
    assert kept.decode is not None
    assert free.decode.engines is not None
    assert kept.decode.engines == pytest.approx(free.decode.engines * (blocks - 1) / (blocks - 1 - blocks // 4))


def test_push_holds_blocks_through_the_prefill() -> None:
    pull, push = (decode("dense", {"kv_connector": name}) for name in ("NixlConnector", "NixlPushConnector"))
    assert push.mode == "push"
    assert pull.decode is not None
    assert push.decode is not None
    assert push.decode.loading is not None
    assert pull.decode.loading is not None
    assert push.decode.loading - pull.decode.loading == pytest.approx(2.0 * 500 * 1.5)
    assert any(note.startswith("push:") for note in push.notes)


def test_bidirectional_keeps_finished_requests() -> None:
    extra = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 100}
    facts = decode("dense", {"kv_connector": "NixlConnector", "kv_connector_extra_config": extra})
    assert facts.decode is not None
    assert facts.decode.retained == 2.0 * 550 * 100
    assert any("up to 100 s" in note for note in facts.notes)


def test_host_buffers_are_the_whole_pool() -> None:
    facts = decode("dense", {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}, tensor_parallel_size=2)
    assert facts.host_buffer_bytes == 40 * GIB // (BLOCK // 2) * (BLOCK // 2)
    assert facts.transferred_bytes_per_request == 500 * BLOCK // 2
    assert facts.transferred_bytes_all_ranks == 500 * BLOCK
    assert decode("dense", {"kv_connector": "LMCacheConnectorV1"}).device_buffer_bytes is None


def test_a_window_is_reserved_by_the_batch_but_held_by_the_window() -> None:
    facts = decode("windowed", {"kv_connector": "NixlConnector"}, max_num_batched_tokens=2048)
    full = math.ceil(8800 / 16)
    reserved_window = math.ceil(min(1023 + 2 * 2048, 8800) / 16) + 1
    assert facts.reserved_blocks_per_request == full + reserved_window
    assert facts.decoding_blocks_per_request == full + math.ceil(1023 / 16) + 1
    assert facts.in_flight_tokens == 4096
    # Of windows only the last blocks travel.
    assert facts.transferred_bytes_per_request == (500 + 1024 // 16 + 1) * BLOCK // 2


def test_states_travel_as_one_page_each() -> None:
    report = make_plan(
        planned("states"),
        PlanOptions(kv_cache_memory_bytes=40 * GIB),
        workload=replace(LOAD, prompt_tokens=1, output_tokens=1),
    )
    assert report.decode is not None
    groups = report.kv.groups
    assert {group.kind for group in groups} == {"mamba", "full_attention"}
    assert report.decode.transferred_bytes_per_request == sum(group.bytes_per_block for group in groups)


def test_unknown_times_leave_out_what_they_decide() -> None:
    facts = decode("dense", {"kv_connector": "NixlConnector"}, Workload(prompt_tokens=8000, output_tokens=800))
    assert facts.decode is facts.prefill is facts.lease_bytes_bound is facts.transfer_time_s is None
    assert facts.missing == ("--request-rate", "--time-per-output-token", "--prefill-time", "--transfer-bandwidth")
    partly = decode("dense", None, replace(LOAD, transfer_bandwidth=None, prefill_time_s=None))
    assert partly.decode is not None
    assert partly.decode.running == 42_000
    assert partly.decode.loading is partly.decode.total is partly.decode.engines is None
    assert partly.prefill_engines_per_decode_engine is partly.preempted_time_s is None
    alone = decode("dense", {"kv_connector": "NixlConnector"}, None)
    assert alone.prompt_tokens is None
    assert len(alone.missing) == 6
    assert decode("dense", None).missing == ()
    assert alone.reserved_blocks_per_request == 131072 // 16
    assert make_plan(planned("dense"), PlanOptions(kv_cache_memory_bytes=GIB)).decode is None


@pytest.mark.parametrize("name", LOAD.__slots__)
def test_loads_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{LOAD_FLAGS[name]} 0: must be above 0"):
        replace(LOAD, **{name: 0})


def test_states_and_connectors() -> None:
    facts = decode("states", {"kv_connector": "NixlConnector"})
    assert any("VLLM_SSM_CONV_STATE_LAYOUT=DS" in note for note in facts.notes)
    with pytest.raises(ConfigError, match="FlexKVConnectorV1 switches the hybrid manager off, and"):
        decode("states", {"kv_connector": "FlexKVConnectorV1"})
    with pytest.raises(ConfigError, match="FlexKVConnectorV1 cannot work with it"):
        decode("windowed", {"kv_connector": "FlexKVConnectorV1"}, disable_hybrid_kv_cache_manager=False)
    multi = parse_kv_transfer(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "connectors": [{"kv_connector": "NixlConnector"}, {"kv_connector": "LMCacheConnectorV1"}]
            },
        }
    )
    assert multi.without_hybrid_support == ("LMCacheConnectorV1",)
    assert multi.moves_between_instances
    assert parse_kv_transfer({"kv_connector": "Mine", "kv_role": "kv_both"}).unknown == ("Mine",)
    assert all(isinstance(supports, bool) for supports in CONNECTORS.values())
