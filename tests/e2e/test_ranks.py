"""Tensor-parallel instances: P and D of any mix of ranks give transformers' tokens; a dead rank ends its instance."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.e2e.harness import decode, idle_blocks, instance, prefill
from tests.e2e.processes import Part, tokens_of, until
from tests.runtime.tiny import save_tiny
from transformers import AutoModelForCausalLM

from pdkv.core.events import LoadFailed, LoadFinished
from pdkv.runtime.instance import Instance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NEW_TOKENS = 6
SIZES = {"max_model_len": 256, "num_gpu_blocks_override": 80, "kv_cache_memory_bytes": None}


class Tiny:
    """A random Llama with two KV heads: its directory, and how transformers goes on."""

    def __init__(self, directory: Path) -> None:
        self.path = str(save_tiny("llama", directory, num_attention_heads=4, eos_token_id=None).directory)
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def generate(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        exactly = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), eos_token_id=None, pad_token_id=0, **exactly
        )
        return [int(token) for token in out[0, len(prompt) :]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def instances(tiny: Tiny) -> Iterator[dict[tuple[str, int], Instance]]:
    """P and D with one rank and with two."""
    running: dict[tuple[str, int], Instance] = {}
    try:
        for role in ("prefill", "decode"):
            for ranks in (1, 2):
                running[role, ranks] = instance(role, tiny.path, tensor_parallel_size=ranks, **SIZES)
        yield running
    finally:
        for one in running.values():
            one.close()


@pytest.mark.parametrize(("of_p", "of_d"), [(1, 2), (2, 1), (2, 2)])
def test_kv_moves_between_any_numbers_of_ranks(
    instances: dict[tuple[str, int], Instance], tiny: Tiny, of_p: int, of_d: int
) -> None:
    p, d = instances["prefill", of_p], instances["decode", of_d]
    free = idle_blocks(p), idle_blocks(d)
    for length in (16, 33, 150):
        prompt = [(7 * i * i + 3 * of_p + 5 * of_d + length) % 97 for i in range(length)]
        name = f"{of_p}:{of_d} {length}"
        flight = decode(d, name, prompt, prefill(p, name, prompt), NEW_TOKENS).wait()
        assert not flight.of(LoadFailed), flight.events
        (loaded,) = flight.of(LoadFinished)
        assert loaded.blocks == -(-length // 16)  # type: ignore[attr-defined]
        assert flight.tokens == tiny.generate(prompt), name
    until(lambda: (idle_blocks(p), idle_blocks(d)) == free)


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """Rank processes below ``process``."""
    return [one for one in process.children(recursive=True) if "pdkv.runtime.ranks.worker" in one.cmdline()]


OPTIONS = ("--port", "0", "--threads", "2", "--max-model-len", "256", "--num-gpu-blocks-override", "80", "--debug")


class Run(Part):
    """`pdkv serve` as a user starts it, for its exit code."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("ab") as stderr:
            self.process: Any = subprocess.Popen(
                [sys.executable, "-m", "pdkv", "serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def test_one_instance_says_its_ranks_and_ctrl_c_ends_them(tiny: Tiny, tmp_path: Path) -> None:
    part = Run(tmp_path / "log", "decode", tiny.path, *OPTIONS, "-tp", "2").ready()
    try:
        (rank,) = ranks_of(psutil.Process(part.process.pid))
        prompt = list(range(3, 40))
        assert " ranks=2 " in part.ready_line
        assert tokens_of(part.ask(prompt, NEW_TOKENS)) == tiny.generate(prompt)
        memory = part.memory()
        assert memory["tensor_parallel_size"] == part.counter("pdkv:tensor_parallel_ranks") == 2
        one_head_of_all_layers = 3 * 2 * 16 * 1 * 8 * 4
        assert memory["bytes_per_block"] == part.counter("pdkv:kv_block_bytes") == one_head_of_all_layers
        part.signal(signal.SIGINT)
        assert part.process.wait(30) == 0
        assert not rank.is_running()
    finally:
        part.end()
    said = part.log.read_text()
    assert "on each of 2 tensor-parallel ranks" in said
    assert "Traceback" not in said


def test_a_killed_rank_ends_its_instance_and_is_named(tiny: Tiny, tmp_path: Path) -> None:
    part = Run(tmp_path / "log", tiny.path, *OPTIONS, "--decode-tensor-parallel-size", "2").ready()
    try:
        assert " prefill_ranks=1 decode_ranks=2" in part.ready_line
        prompt = list(range(5, 60))
        assert tokens_of(part.ask(prompt, NEW_TOKENS)) == tiny.generate(prompt)
        everyone = psutil.Process(part.process.pid).children(recursive=True)
        (rank,) = ranks_of(psutil.Process(part.process.pid))
        os.kill(rank.pid, signal.SIGKILL)
        assert part.process.wait(60) == 1
        until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in everyone))
    finally:
        part.end()
    said = part.log.read_text()
    assert re.search(rf"the decode process \(pid \d+\).*rank 1 \(pid {rank.pid}\) was killed by SIGKILL", said, re.S), (
        said
    )
