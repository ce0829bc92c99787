"""Tensor-parallel instances: P and D of any mix of ranks give transformers' tokens; a dead rank ends its instance."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from tests.e2e.harness import Flight, array, decode, idle_blocks, instance, prefill, source_of
from tests.e2e.processes import Part, tokens_of, until
from tests.runtime.tiny import save_tiny
from transformers import AutoModelForCausalLM

from pdkv.core.events import Announced, LoadFailed, LoadFinished, Registered
from pdkv.core.ports import NewRequest
from pdkv.core.transfer.messages import Awaited, Peer
from pdkv.runtime.instance import Instance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NEW_TOKENS = 6
SIZES = {
    "max_model_len": 256,
    "num_gpu_blocks_override": 80,
    "kv_cache_memory_bytes": None,
    "bidirectional_kv_xfer": True,
    "kv_recompute_threshold": 16,
}
RANKS = pytest.mark.parametrize(("of_p", "of_d"), [(1, 2), (2, 1), (2, 2)])


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


@RANKS
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


def unseen(length: int) -> list[int]:
    """A prompt that no cache has."""
    return [5 + secrets.randbelow(90) for _ in range(length)]


@RANKS
@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("write", [False, True], ids=["late push", "WRITE"])
def test_kv_is_pushed_between_any_numbers_of_ranks(
    instances: dict[tuple[str, int], Instance], tiny: Tiny, of_p: int, of_d: int, first: str, write: bool
) -> None:
    """Whichever leg comes first. With a beginning that D has in its cache, only the rest moves."""
    p, d = instances["prefill", of_p], instances["decode", of_d]
    free = idle_blocks(p), idle_blocks(d)
    prompt = unseen(100)
    for tokens, lacking in ((prompt, 7), (prompt[:70] + unseen(40), 3)):
        info, transfer_id = p.info, secrets.token_hex(16)
        peer = Peer(info.engine_id, info.side_channel_host, info.side_channel_port)
        new = NewRequest(
            request_id=transfer_id, prompt=array(tokens), max_tokens=1, produce=True, transfer_id=transfer_id
        )
        awaited = Awaited(peer=peer, transfer_id=transfer_id, write=write)
        if first == "P":
            Flight(p, new).wait()
            flight = decode(d, transfer_id, tokens, None, NEW_TOKENS, awaited=awaited)
        else:
            flight = decode(d, transfer_id, tokens, None, NEW_TOKENS, awaited=awaited)
            until(lambda: d.memory().accounts["loading"] > 0) if write else flight.wait_for(Registered)
            Flight(p, new).wait()
        flight.wait()
        assert not flight.of(LoadFailed), flight.events
        (loaded,) = flight.of(LoadFinished)
        assert loaded.blocks == lacking  # type: ignore[attr-defined]
        assert flight.tokens == tiny.generate(tokens)
        assert bool(flight.of(Announced)) != write, "late push is announced, a WRITE is not"
    until(lambda: (idle_blocks(p), idle_blocks(d)) == free)


@RANKS
def test_a_turn_goes_back_and_forth_between_any_numbers_of_ranks(
    instances: dict[tuple[str, int], Instance], tiny: Tiny, of_p: int, of_d: int
) -> None:
    """D keeps its answer, the next turn's prefill on P reads it, and D reads what it lacks of that."""
    p, d = instances["prefill", of_p], instances["decode", of_d]
    free = idle_blocks(p), idle_blocks(d)
    prompt = unseen(40)
    first = decode(d, f"first {prompt}", prompt, prefill(p, f"p {prompt}", prompt), 40, keep_turn=True).wait()
    assert first.finished.kept_until_ns is not None
    kept = msgspec.structs.replace(source_of(d, first.finished), expires_ns=first.finished.kept_until_ns)
    prompt = prompt + first.tokens + unseen(30)
    second = NewRequest(request_id=f"q {prompt}", prompt=array(prompt), max_tokens=1, produce=True, source=kept)
    leg = Flight(p, second).wait()
    assert not leg.of(LoadFailed), leg.events
    (loaded,) = leg.of(LoadFinished)
    assert loaded.blocks == 3  # type: ignore[attr-defined]  # tokens 32 to 79; P has the first two blocks
    flight = decode(d, f"second {prompt}", prompt, source_of(p, leg.finished), NEW_TOKENS).wait()
    assert flight.of(LoadFinished)
    assert flight.tokens == tiny.generate(prompt)
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
