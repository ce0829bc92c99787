"""`--emit`: what is printed is read back as the same options, whatever they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.models.catalog import catalog
from pdkv.plan.emit import serve_command
from pdkv.plan.kv_transfer import CONNECTORS, ROLES, KvTransfer, parse_kv_transfer
from pdkv.plan.options import PlanOptions
from pdkv.plan.planner import make_plan
from pdkv.plan.vllm_args import parse_command
from pdkv.source import find_spec

WORDS = st.text("abcdefghij_-./'\" 0123456789", min_size=1, max_size=12).map(lambda text: "x" + text)
POSITIVE = st.integers(1, 1 << 45)
SIZES = st.integers(1, 64)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def transfers(draw: st.DrawFn, depth: int = 1) -> KvTransfer:
    children = draw(st.lists(transfers(depth=0), max_size=2)) if depth else []
    role = draw(st.sampled_from(ROLES))
    bidirectional = draw(st.booleans())
    return KvTransfer(
        connector=draw(st.sampled_from(sorted(CONNECTORS))),
        role=role,
        buffer_device=draw(maybe(st.sampled_from(("cpu", "cuda")))),
        load_failure_policy=draw(st.sampled_from(("fail", "recompute"))),
        lease_s=draw(st.integers(1, 1000)),
        bidirectional=bidirectional,
        blocks_ttl_s=draw(st.integers(1, 1000)) if bidirectional else 480,
        children=tuple(children),
    )


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "kv_cache_memory_bytes": maybe(POSITIVE),
    "num_gpu_blocks_override": maybe(POSITIVE),
    "gpu_memory_utilization": maybe(st.floats(0.01, 1.0)),
    "block_size": maybe(SIZES),
    "max_model_len": st.none() | st.just("auto") | POSITIVE,
    "max_num_batched_tokens": maybe(POSITIVE),
    "max_num_seqs": maybe(POSITIVE),
    "throughput_mode": st.booleans(),
    "async_scheduling": st.booleans(),
    "v1_runner": st.booleans(),
    "enable_prefix_caching": st.booleans(),
    "watermark": st.floats(0, 0.99),
    "dtype": st.sampled_from(("auto", "bfloat16", "float16", "float32")),
    "quantization": maybe(WORDS),
    "kv_cache_dtype": st.just("auto") | WORDS,
    "kv_cache_dtype_skip_layers": st.lists(st.integers(0, 99).map(str), max_size=4).map(tuple),
    "mamba_cache_dtype": st.sampled_from(("auto", "float32")),
    "mamba_ssm_cache_dtype": st.sampled_from(("auto", "bfloat16")),
    "mamba_cache_mode": st.sampled_from((None, "none", "align")),
    "attention_backend": maybe(WORDS),
    "kv_cache_layout": maybe(WORDS),
    "disable_hybrid_kv_cache_manager": maybe(st.booleans()),
    "chunked_local_with_hybrid": st.booleans(),
    "tensor_parallel_size": SIZES,
    "pipeline_parallel_size": SIZES,
    "decode_context_parallel_size": SIZES,
    "prefill_context_parallel_size": SIZES,
    "data_parallel_size": SIZES,
    "enable_chunked_prefill": st.booleans(),
    "enable_expert_parallel": st.booleans(),
    "speculative_method": maybe(WORDS),
    "speculative_model": maybe(WORDS),
    "speculative_tokens": maybe(SIZES),
    "kv_transfer": maybe(transfers()),
    "kv_offloading_bytes": maybe(POSITIVE),
    "enforce_eager": st.booleans(),
    "cudagraph_mode": maybe(WORDS),
    "cudagraph_capture_sizes": maybe(st.lists(SIZES, min_size=1, max_size=5).map(tuple)),
    "max_cudagraph_capture_size": maybe(SIZES),
    "estimate_cudagraphs": st.booleans(),
    "language_model_only": st.booleans(),
    "mm_ipc_gpu_memory_bytes": maybe(POSITIVE),
}
# Not settings of vLLM: the machine and the release that the plan is for.
OF_THE_PLAN = {"gpu", "gpu_memory_bytes", "vllm_version"}
OVERRIDES = st.dictionaries(WORDS, st.integers() | st.text() | st.dictionaries(WORDS, st.booleans(), min_size=1))


def test_every_option_is_covered() -> None:
    assert set(OPTIONS) | OF_THE_PLAN == set(PlanOptions.__slots__)


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.sampled_from(sorted(OPTIONS)), max_size=12).flatmap(
        lambda names: st.fixed_dictionaries({name: OPTIONS[name] for name in sorted(names)})
    ),
    st.sampled_from(("smollm2", "Qwen/Qwen3-8B", "/models/with blank's/x")),
    OVERRIDES,
)
def test_what_is_printed_is_read_back(values: dict[str, Any], model: str, overrides: dict[str, Any]) -> None:
    options = PlanOptions(**values)
    text = serve_command(model, options, overrides)
    back = parse_command(text)
    assert (back.model, back.options, dict(back.overrides)) == (model, options, overrides)
    assert not [warning for warning in back.warnings if "connector" not in warning]


@pytest.mark.parametrize("name", list(catalog())[::9])
def test_the_command_of_a_plan_gives_the_plan(name: str) -> None:
    """Models of the catalogue on a decode instance, over as many ranks as they can be divided."""
    transfer = parse_kv_transfer({"kv_connector": "NixlConnector", "kv_role": "kv_consumer"})
    for size in (8, 1):
        options = PlanOptions(gpu="h200", tensor_parallel_size=size, max_model_len=65536, kv_transfer=transfer)
        try:
            plan = make_plan(find_spec(name), options, served_as=name)
        except ConfigError:
            continue  # its heads do not divide by eight, or it is one that is known but not sized
        back = parse_command(plan.command)
        assert back.model == name
        assert make_plan(find_spec(name), replace(back.options, gpu="h200"), served_as=name) == plan


def test_defaults_are_left_out() -> None:
    assert serve_command("smollm2", PlanOptions()) == "vllm serve smollm2"
    assert serve_command("a/b", PlanOptions(tensor_parallel_size=8, enable_prefix_caching=False)) == (
        "vllm serve a/b \\\n  --no-enable-prefix-caching \\\n  --tensor-parallel-size 8"
    )
