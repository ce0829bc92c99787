"""The memory profile: its terms add up, its limits hold, its refusals carry numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.runtime.tiny import load_tiny

from pdkv.errors import ConfigError, DoesNotFit
from pdkv.runtime import profiler
from pdkv.runtime.kernels import native
from pdkv.runtime.models import LoadedModel
from pdkv.runtime.profiler import MemoryBaseline, ProfileLimits, determine_available_memory, require_free
from pdkv.units import GIB, MIB

LIMITS = ProfileLimits(
    max_num_batched_tokens=512, max_num_seqs=8, max_model_len=256, block_size=16, bytes_per_block=6 * MIB
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("model"))


def test_terms_add_up_to_what_was_requested(model: LoadedModel) -> None:
    baseline = MemoryBaseline.take("cpu")
    huge = replace(LIMITS, max_num_seqs=10**6)
    p = determine_available_memory(model, baseline, huge, gpu_memory_utilization=0.5, share=0.5)
    assert p.basis == "measured"
    assert p.requested_bytes == math.ceil(baseline.free_bytes * 0.25)
    assert p.requested_bytes == p.weights_bytes + p.activation_bytes + p.non_torch_bytes + p.available_kv_bytes
    assert p.weights_bytes == model.weights_bytes
    assert p.non_torch_bytes > 10 * MIB  # Python and torch themselves
    assert p.activation_bytes > 0
    text = "\n".join(p.lines())
    assert "0.5 of available RAM, share 0.5" in text
    assert "(measured)" in text


def test_room_to_gather_a_context_is_kept_only_where_no_kernel_reads_it_in_place(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny("qwen3", tmp_path_factory.mktemp("whole-vectors"))
    if native.load() is None:
        pytest.skip("there are no kernels here")
    long = replace(LIMITS, max_model_len=1 << 17)
    profile = partial(determine_available_memory, model, MemoryBaseline.take("cpu"), long, gpu_memory_utilization=0.9)
    without = profile()
    monkeypatch.setattr(native, "load", lambda: None)
    masks = LIMITS.max_num_batched_tokens * long.max_model_len * 5
    assert profile().activation_bytes - without.activation_bytes > masks * 0.9


def test_no_more_than_the_running_requests_can_fill(model: LoadedModel) -> None:
    p = determine_available_memory(model, MemoryBaseline.take("cpu"), LIMITS, gpu_memory_utilization=0.9)
    assert p.basis == "capped"
    assert p.available_kv_bytes == (8 * 16 + 1) * 6 * MIB


def test_an_explicit_size_wins_and_must_be_free(model: LoadedModel) -> None:
    baseline = MemoryBaseline.take("cpu")
    p = determine_available_memory(
        model, baseline, LIMITS, kv_cache_memory_bytes=300 * MIB, gpu_memory_utilization=0.01
    )
    assert (p.available_kv_bytes, p.basis) == (300 * MIB, "given")
    with pytest.raises(
        DoesNotFit, match=r"a KV cache of 1024\.00 TiB is .* [\d.]+ GiB free on cpu; lower --kv-cache-memory-bytes"
    ):
        determine_available_memory(model, baseline, LIMITS, kv_cache_memory_bytes=1 << 50)


def test_too_small_a_budget_is_explained_term_by_term(model: LoadedModel) -> None:
    baseline = replace(MemoryBaseline.take("cpu"), free_bytes=64 * MIB)
    with pytest.raises(DoesNotFit, match=r"requested 25\.60 MiB .*0\.4, share 1\), of which weights take .* KiB"):
        determine_available_memory(model, baseline, LIMITS)


@pytest.mark.parametrize("settings", [{"gpu_memory_utilization": 0}, {"gpu_memory_utilization": 1.1}, {"share": 0}])
def test_settings_out_of_range(model: LoadedModel, settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be above 0 and at most 1"):
        determine_available_memory(model, MemoryBaseline.take("cpu"), LIMITS, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be positive; got -1"):
        determine_available_memory(model, MemoryBaseline.take("cpu"), LIMITS, kv_cache_memory_bytes=-1)


def test_the_start_up_check_names_the_largest_utilization_that_works() -> None:
    baseline = MemoryBaseline(profiler.torch.device("cuda", 0), 80 * GIB, 40 * GIB)
    require_free(baseline, 40 * GIB, 0.5)
    with pytest.raises(DoesNotFit, match=r"has 40\.00 GiB of 80\.00 GiB free, .* 73\.60 GiB .* 0\.92 .*at most 0\.5 "):
        require_free(baseline, math.ceil(80 * GIB * 0.92), 0.92)


def test_a_control_group_limit_counts_as_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_CGROUP", tmp_path)
    monkeypatch.setattr(profiler, "_machine_ram", lambda: (64 * GIB, 50 * GIB))
    assert profiler._ram() == (64 * GIB, 50 * GIB)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1\n")
    assert profiler._ram() == (64 * GIB, 50 * GIB)
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{5 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")
    assert profiler._ram() == (8 * GIB, 5 * GIB)


@pytest.mark.gpu
def test_cuda_profile_follows_the_device(tmp_path: Path) -> None:
    from tests.runtime.tiny import save_tiny

    from pdkv.runtime.models import load_model

    baseline = MemoryBaseline.take("cuda:0")
    loaded = load_model(save_tiny("llama", tmp_path), device="cuda")
    p = determine_available_memory(loaded, baseline, LIMITS, gpu_memory_utilization=0.3)
    assert p.requested_bytes == math.ceil(baseline.total_bytes * 0.3)
    assert p.available_kv_bytes == p.requested_bytes - p.weights_bytes - p.activation_bytes - p.non_torch_bytes
