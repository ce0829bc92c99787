"""What is refused before torch is imported, in which words; and the devices that are refused right after."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.tiny import save_tiny

from pdkv.errors import ConfigError, DoesNotFit
from pdkv.runtime import boot, precheck
from pdkv.runtime.precheck import check
from pdkv.serve.options import InstanceOptions


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tiny Llama: 256 positions, 3 layers of 2 KV heads of 8; in float32 a block of 16 tokens takes 6 KiB."""
    return save_tiny("llama", tmp_path / "model").directory


def options(directory: Path, **changes: Any) -> InstanceOptions:
    return InstanceOptions(role="prefill", model=str(directory), **{"device": "cpu", **changes})


def test_good_options_give_the_files(directory: Path) -> None:
    assert check(options(directory, max_model_len=256, num_gpu_blocks_override=17)).directory == directory
    assert check(options(directory, max_model_len="auto", kv_cache_memory_bytes=1 << 20)).name == "model"


def test_it_needs_no_torch(directory: Path) -> None:
    code = (
        "import sys; from pdkv.runtime.precheck import check; from pdkv.serve.options import InstanceOptions;"
        f"check(InstanceOptions(role='decode', model={str(directory)!r}, num_gpu_blocks_override=99));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_length_beyond_the_models(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 257 is more than the 256 positions that model was made"):
        check(options(directory, max_model_len=257))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tensor_parallel_size": 4},
            r"model: 6 attention heads do not divide over --tensor-parallel-size 4; possible: 1",
        ),
        (
            {"tensor_parallel_size": 3},
            r"model: 2 KV heads can neither be divided nor replicated evenly over .*-size 3;",
        ),
        ({"tensor_parallel_size": 2, "device": "cuda:0"}, r"CUDA"),
    ],
)
def test_ranks_that_cannot_be_had(directory: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(options(directory, **changes))


def test_a_rank_needs_room_for_its_own_heads_only(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 100}))
    with pytest.raises(DoesNotFit, match=f"needs {17 * 100 * 2 * 16 * 2 * 8 * 4} bytes"):
        check(options(directory, kv_cache_memory_bytes=2 << 20))
    check(options(directory, kv_cache_memory_bytes=2 << 20, tensor_parallel_size=2))


@pytest.mark.parametrize(("asked", "shorter"), [(None, 32), (256, 32), (100, 32)])
def test_too_few_blocks_name_the_override_and_how_many(directory: Path, asked: int | None, shorter: int) -> None:
    needed = -(-(asked or 256) // 16)
    with pytest.raises(DoesNotFit) as refused:
        check(options(directory, max_model_len=asked, num_gpu_blocks_override=3, kv_cache_memory_bytes=1 << 30))
    text = str(refused.value)
    assert f"raise or remove --num-gpu-blocks-override (at least {needed + 1})" in text
    assert f"lower --max-model-len to {shorter} (or say auto)" in text
    assert "--kv-cache-memory-bytes" not in text  # the override beats it
    check(options(directory, max_model_len=asked, num_gpu_blocks_override=needed + 1))


def test_auto_fits_itself_to_the_blocks_there_are(directory: Path) -> None:
    check(options(directory, max_model_len="auto", num_gpu_blocks_override=3))


def test_too_few_bytes(tmp_path: Path) -> None:
    files = save_tiny("llama", tmp_path / "m", max_position_embeddings=65536)
    with pytest.raises(DoesNotFit, match="one request of 65536 tokens needs .*--kv-cache-memory-bytes"):
        check(options(files.directory, kv_cache_memory_bytes=16 << 20))
    check(options(files.directory, kv_cache_memory_bytes=32 << 20))


@pytest.mark.parametrize(
    ("option", "value"), [("kv_cache_memory_bytes", 999 << 40), ("num_gpu_blocks_override", (999 << 40) // 6144)]
)
def test_more_than_there_is_ram(directory: Path, option: str, value: int) -> None:
    words = rf"99[89]\.\d\d TiB is more than the .* of RAM .*; lower --{option.replace('_', '-')}, or"
    with pytest.raises(DoesNotFit, match=words):
        check(options(directory, **{option: value}))


def test_where_a_gpu_may_be_the_smaller_dtype_is_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = save_tiny("llama", tmp_path / "m", max_position_embeddings=65536)
    monkeypatch.setattr(precheck, "_GPU_NODES", ("/dev/null",))
    check(options(files.directory, device="auto", kv_cache_memory_bytes=16 << 20))
    with pytest.raises(DoesNotFit):
        check(options(files.directory, device="auto", kv_cache_memory_bytes=8 << 20))


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", r"config\.json is not valid JSON \(.*line 1"), ("[]", "holds a JSON list"), ("\udcff", "not valid JSON")],
)
def test_configs_that_are_no_json_object(directory: Path, text: str, words: str) -> None:
    (directory / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=words):
        check(options(directory))


def test_what_a_config_does_not_say_is_left_to_the_loader(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for field in ("head_dim", "max_position_embeddings"):
        del config[field]
    path.write_text(json.dumps(config))
    check(options(directory, max_model_len=10**6, num_gpu_blocks_override=2))


def test_options_that_contradict_each_other(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(4\) is smaller than max_num_seqs \(8\)"):
        check(options(directory, max_num_batched_tokens=4, max_num_seqs=8))


def test_cuda_is_refused_by_the_version_of_torch(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.99.0+cpu")
    with pytest.raises(ConfigError, match=r"--device cuda: this torch \(2\.99\.0\+cpu\) has no CUDA .* cpu or auto"):
        check(options(directory, device="cuda"))
    check(options(directory, device="auto"))


def test_a_cuda_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert boot.choose_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"--device cuda:1: this torch .* has no CUDA device; use .* auto"):
        boot.choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [boot.choose_device(name) for name in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda", "cuda", "cuda:1", "cpu"]
    with pytest.raises(ConfigError, match=r"--device cuda:2: there is no such device, .* cuda:0 to cuda:1; use one"):
        boot.choose_device("cuda:2")
