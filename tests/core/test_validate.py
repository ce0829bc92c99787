"""What can never be served is refused at once, with the numbers and the way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.core.helpers import assert_all_free, finished_of, make_engine, new_request, source_for, step

from pdkv.core.blocks.groups import CrossGroup, FullGroup
from pdkv.core.config import STRICT, EngineConfig
from pdkv.core.events import FinishReason, Preempted
from pdkv.errors import BadRequest, ConfigError, DoesNotFit


def test_encoder_tokens_are_those_that_cross_attention_takes() -> None:
    groups = (FullGroup(block_size=4), CrossGroup(block_size=4, encoder_tokens=10))
    engine = make_engine(num_blocks=9, groups=groups, enable_prefix_caching=False)
    engine.validate(new_request("a", 5, encoder_tokens=10))
    with pytest.raises(BadRequest, match=r"11 tokens of an encoder.* 0 to 10"):
        engine.validate(new_request("a", 5, encoder_tokens=11))
    with pytest.raises(DoesNotFit, match="9 blocks"):
        engine.validate(new_request("a", 20, encoder_tokens=10))
    with pytest.raises(BadRequest, match="0 to 0"):
        make_engine().validate(new_request("a", 5, encoder_tokens=1))
    plan, _ = step(engine, 0, [new_request("a", 5, encoder_tokens=7)])
    assert [table.shape[1] for table in plan.batch.group_tables] == [2, 2]


@pytest.mark.parametrize(
    ("length", "max_tokens", "error", "text"),
    [
        (0, 4, BadRequest, "at least one token"),
        (128, 4, BadRequest, r"128 tokens.*at most 127 \(max_model_len 128\)"),
        (10, 0, BadRequest, "max_tokens is 0"),
        (100, 4, DoesNotFit, "needs 26 blocks of 4 tokens; the whole pool has 19"),
        (76, 4, DoesNotFit, "needs 20 blocks"),
    ],
)
def test_refused(length: int, max_tokens: int, error: type[Exception], text: str) -> None:
    engine = make_engine(num_blocks=20)
    with pytest.raises(error, match=text):
        engine.validate(new_request("r", length, max_tokens))
    assert not engine.requests


def test_the_largest_that_fits() -> None:
    make_engine(num_blocks=20).validate(new_request("r", 75, 1))
    make_engine(num_blocks=33).validate(new_request("r", 127, 1))


@pytest.mark.parametrize("change", [{"num_tokens": 0}, {"num_tokens": 21}, {"num_tokens": 16}, {"block_ids": (1, 2)}])
def test_a_source_that_does_not_match_the_prompt(change: dict[str, Any]) -> None:
    source = source_for(20, 4)
    source = msgspec.structs.replace(source, grant=msgspec.structs.replace(source.grant, **change))
    with pytest.raises(BadRequest, match="Pass the prefill instance's answer on unchanged"):
        make_engine().validate(new_request("r", 20, 4, source=source))
    make_engine().validate(new_request("r", 20, 4, source=source_for(20, 4)))
    make_engine().validate(new_request("r", 20, 4, source=source_for(13, 4)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": -5}, "num_blocks is -5; it must be at least 1"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_outstanding_plans": 0}, "max_outstanding_plans is 0"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1; it must be at least 0"),
        ({"lease_ns": 0}, "lease_ns is 0"),
        ({"prefix_match_unit": 2}, "one hash covers 2 tokens, but hits of a single group end .* blocks of 4"),
        ({"prefix_match_unit": 0}, "one hash covers 0 tokens"),
        ({"max_num_seqs": 64}, r"max_num_batched_tokens \(32\) is smaller than max_num_seqs \(64\)"),
        ({"enable_chunked_prefill": False}, "without chunked prefill"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"watermark": -0.1}, "watermark is -0.1"),
        ({"max_leased_fraction": 0.0}, "max_leased_fraction is 0.0"),
        ({"max_leased_fraction": 1.1}, "max_leased_fraction is 1.1"),
        ({"transfer": replace(STRICT, load_failure="retry")}, "use 'recompute' or 'fail'"),
    ],
)
def test_a_config_that_cannot_work(change: dict[str, Any], text: str) -> None:
    values: dict[str, Any] = {
        "num_blocks": 20, "block_size": 4, "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32,
    } | change  # fmt: skip
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**values)


def test_lease_arithmetic_is_vllm_s() -> None:
    config = make_engine().config
    assert (config.lease_ns, config.lease_extension_ns) == (30 * 10**9, 20 * 10**9)


@pytest.mark.parametrize("outstanding", [1, 2])
def test_a_request_that_outgrows_the_pool_ends_by_length(outstanding: int) -> None:
    """A pool smaller than the model's length (--num-gpu-blocks-override): it must not preempt itself for ever."""
    engine = make_engine(num_blocks=6, max_model_len=128, max_outstanding_plans=outstanding)
    events = []
    for _ in range(60):
        events += step(engine, 0, [new_request("r", 10, 100)] if not events else [])[1]
    outcome = finished_of(events)["r"]
    assert (outcome.reason, outcome.output_tokens) == (FinishReason.LENGTH, 11)  # 20 tokens' KV and one sampled
    assert not any(isinstance(event, Preempted) for event in events)
    assert_all_free(engine)
