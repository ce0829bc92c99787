"""What `pdkv plan` prints for a person: what matters stands first, and nothing that is not known is shown as known."""

from __future__ import annotations

import sys

import pytest

from pdkv.cli.main import run

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
