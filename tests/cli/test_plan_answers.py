"""What `pdkv plan` prints for a person: what matters stands first, and nothing that is not known is shown as known."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pdkv.cli.main import run
from pdkv.models.catalog import catalog

SMALL = ("smollm2", "--kv-cache-memory-bytes", "2GiB")


class Printed:
    """Lines of stdout and stderr of `pdkv plan ARGUMENTS`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[list[str], list[str]]:
        self._monkeypatch.setattr(sys, "argv", ["pdkv", "plan", *arguments])
        with pytest.raises(SystemExit) as end:
            run()
        printed = self._capsys.readouterr()
        assert end.value.code == (2 if printed.err and not printed.out else 0)
        return printed.out.splitlines(), printed.err.splitlines()


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    return Printed(monkeypatch, capsys)


def test_a_length_beyond_the_model_is_said_below_the_verdict(plan: Printed) -> None:
    out, err = plan(*SMALL, "--max-model-len", "16k")
    assert out[0].startswith("fits: ")
    assert out[1].startswith("warning: beyond-model-length: smollm2 was made for 8,192 tokens")
    assert sum("beyond-model-length" in line for line in out) == 1
    assert not err
    solved, _ = plan(*SMALL, "--target-concurrency", "5", "--at-tokens", "9k")
    assert solved[1].startswith("warning: beyond-model-length: ")
    table, _ = plan(*SMALL, "--compare", "max_model_len=8k:9k")
    assert sum(line.startswith("warning: beyond-model-length: ") for line in table) == 1
    emitted, errors = plan(*SMALL, "--max-model-len", "16k", "--emit")
    assert emitted[0].startswith("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve ")
    assert errors[0].startswith("pdkv: beyond-model-length: ")


def test_what_was_not_understood_is_said_with_every_answer(plan: Printed) -> None:
    asked = (*SMALL, "--enable-lora")
    for answer in ((), ("--compare", "kv_cache_dtype=auto"), ("--target-concurrency", "1", "--at-tokens", "1k")):
        out, _ = plan(*asked, *answer)
        assert any(line.startswith("note: --enable-lora: ") for line in out)
    assert any(line.startswith("pdkv: --enable-lora: ") for line in plan(*asked, "--emit")[1])


def test_fewer_gpus_by_8_bits_stand_below_what_gives_nothing_up(plan: Printed) -> None:
    # 5,825 blocks of 16 tokens: 1,456 requests of 64 tokens, and twice as many in 8 bits.
    many, _ = plan(*SMALL, "--target-concurrency", "2900", "--at-tokens", "64")
    assert many[0].startswith("2 GPUs hold 2,900 requests of 64 tokens at once: --data-parallel-size 2")
    assert "--kv-cache-dtype" not in many[0]
    assert many[1].startswith("1 GPU holds them in 8 bits, which rounds keys and values")
    assert many[1].endswith("--kv-cache-dtype fp8")
    one, _ = plan(*SMALL, "--target-concurrency", "1", "--at-tokens", "1")
    assert one[0] == "1 GPU holds 1 request of 1 token at once: nothing to set"
    assert "8 bits" not in one[1]
    only, _ = plan(*SMALL, "--target-concurrency", "2900", "--at-tokens", "64", "--max-gpus", "1")
    assert only[0].startswith("not on 1 GPU with KV in the model's own type: 2,900 requests")
    assert only[1].startswith("1 GPU holds them in 8 bits")
    none, _ = plan(*SMALL, "--target-concurrency", "9000", "--at-tokens", "64", "--max-gpus", "1")
    assert none[0].startswith("not on 1 GPU: 9,000 requests")
    assert none[1].startswith("nearest: ")


def test_the_command_names_the_model_as_vllm_knows_it(plan: Printed, tmp_path: Path) -> None:
    def served(ref: str) -> str:
        return plan(ref, "--kv-cache-memory-bytes", "99GiB", "--emit")[0][0].removesuffix(" \\")

    assert served("smollm2") == "vllm serve HuggingFaceTB/SmolLM2-135M-Instruct"
    # An alias is another checkpoint of the same shape: the one that was asked for is served.
    assert served("smollm2-135m") == "vllm serve HuggingFaceTB/SmolLM2-135M"
    assert served("huggingfacetb/smollm2-135M") == "vllm serve HuggingFaceTB/SmolLM2-135M"
    assert all(any("/" in name for name in model.names) for model in catalog().values())
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(catalog()["smollm2"].config))
    assert served(str(folder)) == served(str(folder / "config.json")) == f"vllm serve '{folder}'"


def row(lines: list[str], name: str) -> str:
    """What stands beside ``name`` in a table: outside a terminal a row is a line."""
    [found] = [line.strip() for line in lines if line.strip().startswith(f"{name} ")]
    return found.removeprefix(name).strip()


def test_what_times_would_decide_is_not_shown_as_nothing(plan: Printed) -> None:
    bare, _ = plan(*SMALL, "--role", "decode")
    assert not any("D holds" in line for line in bare)
    assert row(bare, "not known without").startswith("--prompt-tokens, --output-tokens, --request-rate, ")
    load = ("--role", "decode", "--prompt-tokens", "1k", "--output-tokens", "100", "--request-rate", "2")
    some, _ = plan(*SMALL, *load)
    assert row(some, "D holds") == "not known: running, loading"
    assert row(some, "not known without") == "--time-per-output-token, --prefill-time, --transfer-bandwidth"
    more, _ = plan(*SMALL, *load, "--time-per-output-token", "0.01")
    # 2 requests a second for 1 s each, 1,050 tokens in 66 blocks.
    assert row(more, "D holds") == "132 running blocks on average; not known: loading"
    times = ("--time-per-output-token", "0.01", "--prefill-time", "0.5", "--transfer-bandwidth", "100G")
    whole, _ = plan(*SMALL, *load, *times)
    assert row(whole, "D holds").startswith("132 running, 0.0")
    assert not any("not known" in line for line in whole)


def test_given_bytes_have_no_share_of_the_gpu_beside_them(plan: Printed) -> None:
    given, _ = plan(*SMALL, "--gpu", "h200")
    assert not any("asked for" in line for line in given)
    assert row(given, "beside it").startswith("weights 257.59 MiB, ")
    assert row(given, "beside it").endswith("estimated; the GPU has 139.80 GiB")
    assert not any(line.strip().startswith("beside it") for line in plan(*SMALL)[0])
    both, _ = plan(*SMALL, "--gpu", "h200", "--gpu-memory-utilization", "0.5")
    assert any(line.endswith("--gpu-memory-utilization was not used") for line in both)
    share, _ = plan("smollm2", "--gpu", "h200", "--gpu-memory-utilization", "0.5")
    assert row(share, "of").startswith("69.90 GiB of 139.80 GiB asked for; ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--command", "vllm serve smollm2 -tp two"], "pdkv: --command: --tensor-parallel-size 'two': "),
        (["--command", "vllm serve smollm2 -tp 0"], "pdkv: --command: --tensor-parallel-size 0: must be"),
        (["--command", "vllm serve smollm2 -tp"], "pdkv: --command: --tensor-parallel-size needs a value"),
        (["--command", "vllm serve $M"], "pdkv: --command: $M is a variable"),
        (["--command", "vllm serve no/such"], "pdkv: --command: the model no/such: not a name"),
        (["no/such", "--command", "vllm serve smollm2"], "pdkv: no/such: not a name"),
        (["smollm2", "--watermark"], "pdkv: --watermark needs a value"),
        (["smollm2", "--watermark", "x"], "pdkv: --watermark 'x': not a number"),
    ],
)
def test_errors_say_which_part_of_the_command_was_meant(plan: Printed, arguments: list[str], says: str) -> None:
    out, [error] = plan(*arguments)
    assert not out
    assert error.startswith(says)


def test_an_unknown_model_hides_no_unknown_flag(plan: Printed) -> None:
    for model in ((), ("no/such",)):
        _, [error] = plan(*model, "--command", "vllm serve no/such --foo 3 --enable-lora")
        assert "no/such: not a name in the catalogue" in error
        assert error.endswith(". Also in --command, no flags of vLLM 0.32: --foo")
