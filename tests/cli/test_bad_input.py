"""Sizes that cannot be, through `pdkv plan`: the numbers and the way out on stderr, exit status 2, no traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pdkv.cli.main import run

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def plan(directory: Path, config: dict[str, Any], *flags: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit status of ``pdkv plan`` for a model of ``config``."""
    (directory / "config.json").write_text(json.dumps(config))
    arguments = ["pdkv", "plan", str(directory), "--kv-cache-memory-bytes", "20GiB", *flags, "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as end:
        run()
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_attention_heads": 33}, "hidden_size 4096 does not divide by 33 heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be an integer of at least 1"),
        ({"num_key_value_heads": -8}, "num_key_value_heads is -8"),
        ({"num_key_value_heads": 5}, "32 attention heads do not divide into 5 KV heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"num_hidden_layers": 10**30}, "no model has more than 10000"),
        ({"num_hidden_layers": None}, "the config has no num_hidden_layers"),
        ({"hidden_size": "many"}, "hidden_size is 'many'"),
        ({"hidden_size": 4096.5}, "hidden_size is 4096.5"),
        ({"max_position_embeddings": 0}, "no context length"),
    ],
)
def test_a_config_that_cannot_be(
    change: dict[str, Any],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = {name: value for name, value in (LLAMA | change).items() if value is not None}
    assert plan(tmp_path, config, monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--block-size", "0"), "--block-size 0: must be at least 1"),
        (("--block-size", "-16"), "--block-size -16: must be at least 1"),
        (("--block-size", "24"), "--block-size 24: the FLASH_ATTN backend takes multiples of 16"),
        (("--tensor-parallel-size", "0"), "--tensor-parallel-size 0: must be at least 1"),
        (
            ("--tensor-parallel-size", "3"),
            "32 attention heads do not divide over --tensor-parallel-size 3; possible: 1",
        ),
        (("--tensor-parallel-size", "64"), "possible: 1, 2, 4, 8, 16, 32"),
        (("--pipeline-parallel-size", "33"), "--pipeline-parallel-size 33 is more than the model's 32 layers"),
        (("--decode-context-parallel-size", "3"), "3 must divide --tensor-parallel-size 1"),
        (("--max-model-len", "0"), "--max-model-len 0: must be at least 1"),
        (("--max-model-len", "-5"), "--max-model-len '-5'"),
        (("--max-num-batched-tokens", "0"), "--max-num-batched-tokens 0: must be at least 1"),
        (("--max-num-seqs", "-1"), "--max-num-seqs -1: must be at least 1"),
        (("--num-gpu-blocks-override", "0"), "--num-gpu-blocks-override 0: must be at least 1"),
        (("--kv-cache-memory-bytes", "-5"), "--kv-cache-memory-bytes '-5'"),
        (("--kv-cache-dtype", "fp7"), "--kv-cache-dtype fp7: there is no such type; there are: auto"),
        (("--watermark", "2"), "at least 0 and below 1"),
        # More digits than Python converts.
        (("--max-model-len", "9" * 5000), "--max-model-len '999999999999999999999999999999...'"),
        (("--kv-cache-memory-bytes", "9" * 5000), "not a number that can be used"),
        (("--hf-overrides", '{"num_hidden_layers": ' + "9" * 5000 + "}"), "--hf-overrides is not valid JSON"),
        (("--kv-transfer-config", '{"kv_rank": ' + "9" * 5000 + "}"), "--kv-transfer-config is not valid JSON"),
        (("--kv-offloading-size", "1e308"), "--kv-offloading-size 1e308: a number of GiB"),
    ],
)
def test_flags_that_cannot_be(
    flags: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan(tmp_path, LLAMA, *flags, monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert "Traceback" not in err


def test_a_pool_too_small_for_one_request_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan says that it does not fit, and what would; only `serve` refuses to start."""
    for size, most in (("1", 0), ("1GiB", 8176)):
        assert plan(tmp_path, LLAMA, "--kv-cache-memory-bytes", size, monkeypatch=monkeypatch) == 0
        capacity = json.loads(capsys.readouterr().out)["capacity"]
        assert capacity["fits"] is False
        assert (capacity["estimated_max_model_len"] or 0) == most
