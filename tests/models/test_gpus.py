"""The device catalogue: complete, sourced, found by the names that people write."""

from __future__ import annotations

import pytest

from pdkv.errors import ConfigError
from pdkv.models.gpus import find_gpu, gpus
from pdkv.units import GIB, MIB


def test_every_device_is_complete_and_sourced() -> None:
    assert len(gpus()) >= 35
    assert len({gpu.name for gpu in gpus()}) == len(gpus())
    for gpu in gpus():
        assert 8 * GIB < gpu.total_bytes < 400 * GIB, gpu.name
        assert gpu.memory_from in ("runtime", "management", "datasheet"), gpu.name
        assert gpu.total_bytes <= gpu.memory_mib * MIB
        assert gpu.bandwidth_gb_s > 0
        assert gpu.tflops["bf16"] > 0
        assert gpu.link_gb_s > 0
        assert gpu.processors > 0
        assert len(gpu.memory_source) > 10, gpu.name
        assert len(gpu.spec_source) > 10, gpu.name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("H100-PCIe", "H100 PCIe"),
        ("a100-sxm4-80gb", "A100 SXM 80GB"),
        ("A100 80 GB", "A100 SXM 80GB"),
        ("A100-SXM4-40GB", "A100 40GB"),
        ("rtx4090", "RTX 4090"),
        ("GeForce RTX 5090", "RTX 5090"),
        ("RTX6000 Ada", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("gaudi3", "Gaudi 3"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Ascend910B", "Ascend 910B"),
        ("tpu-v5e", "TPU v5e"),
        ("H20", "H20"),
        ("GH200", "GH200 96GB"),
        ("GB10", "GB10"),
    ],
)
def test_names_are_matched_leniently(written: str, name: str) -> None:
    assert find_gpu(written).name == name


def test_no_name_means_two_devices() -> None:
    for gpu in gpus():
        for name in (gpu.name, *gpu.aliases):
            assert find_gpu(name) is gpu, name


def test_an_unknown_device_is_refused_with_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"near it are.*RTX A6000"):
        find_gpu("A6001")
    with pytest.raises(ConfigError, match="--gpu-memory-bytes"):
        find_gpu("abacus")


def test_totals_are_those_of_start_up_logs(shared) -> None:  # type: ignore[no-untyped-def]
    import json

    names = {"H100-80GB": "H100 SXM", "RTX 3090": "RTX 3090"}
    for line in (shared / "field" / "startup_observations.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("gpu_total_gib") and row.get("gpu") in names:
            assert find_gpu(row["gpu"]).name == names[row["gpu"]]
            assert find_gpu(row["gpu"]).total_bytes / GIB == pytest.approx(row["gpu_total_gib"], abs=0.006)
