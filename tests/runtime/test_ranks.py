"""Tensor parallel for real: models divided over processes give what transformers gives, and a dead rank is named."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from tests.runtime.ranked import divided
from tests.runtime.tiny import HandEngine, reference, save_tiny
from transformers import AutoModelForCausalLM

from pdkv.core.ports import Batch
from pdkv.errors import ConfigError, RankFailed, UnsupportedModel
from pdkv.runtime.executor import Executor
from pdkv.runtime.models import ModelFiles
from pdkv.runtime.ranks import processes
from pdkv.runtime.ranks.messages import Begin, Inbox, batch_of, step_of
from pdkv.runtime.ranks.shard import shard_model
from pdkv.runtime.sampler import SamplingParams
from pdkv.runtime.wire import pack

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[5, 9, 11], list(range(20, 57)), [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]
# Vocabularies of 97 do not divide; "granite" has one KV head, which both ranks get.
MODELS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "granite": {},
    "qwen3_moe": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Executor, torch.nn.Module]]:
    """A model on two ranks, and as transformers runs it."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    files = save_tiny(request.param, directory, **MODELS[request.param])
    with divided(files, 2) as executor:
        yield executor, reference(executor.model, directory)


def expected_tokens(plain: Any, prompt: list[int], count: int) -> list[int]:
    out = plain.generate(torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return [int(token) for token in out[0]]


def test_chunks_batches_and_preemption_equal_generate(pair: tuple[Executor, torch.nn.Module]) -> None:
    executor, plain = pair
    engine = HandEngine(executor, seed=3)
    stops = executor.model.eos_token_ids
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, GREEDY, min_tokens=10, stop_token_ids=stops)
    engine.step({"0": 3, "1": 11})
    engine.step({"1": 20, "0": 1, "2": 1})
    engine.preempt("0")
    engine.step({"3": 16, "2": 1, "0": 5, "1": 6})
    for step in range(12):
        if step == 4:
            engine.preempt("3")
        rows = {i: engine.left(i) for i in ("2", "0", "3", "1") if len(engine.tokens[i]) < len(PROMPTS[int(i)]) + 10}
        if rows:
            engine.step(rows, pending=step == 7)
    for i, prompt in enumerate(PROMPTS):
        assert engine.tokens[str(i)] == expected_tokens(plain, prompt, 10), f"row {i}"
        executor.remove_request(str(i))


def test_logits_equal_the_undivided_model(pair: tuple[Executor, torch.nn.Module]) -> None:
    executor, plain = pair
    engine = HandEngine(executor, seed=5)
    engine.add("a", PROMPTS[1], GREEDY)
    engine.step({"a": 13})
    got = executor._forward(engine.batch({"a": 24}))
    executor.remove_request("a")
    with torch.inference_mode():
        want = plain(torch.tensor([PROMPTS[1]])).logits[0, -1:]
    assert got.shape == want.shape
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_each_rank_holds_its_share(pair: tuple[Executor, torch.nn.Module]) -> None:
    executor, plain = pair
    model, pool = executor.model, executor.pool
    heads = plain.config.num_key_value_heads
    assert (model.ranks, model.total_kv_heads, model.kv_heads) == (2, heads, max(1, heads // 2))
    engine = HandEngine(executor, seed=1)
    engine.add("b", PROMPTS[3], GREEDY)
    engine.step({"b": 17})
    executor.remove_request("b")
    mine, theirs = pool.memory.array(np.float32, (2, pool.tensor.numel()))  # type: ignore[union-attr]
    own, other = (part.reshape(pool.tensor.shape)[engine.blocks["b"][0]] for part in (mine, theirs))
    assert other.any(axis=-1).all(), "rank 1 wrote no KV into its part"
    assert np.array_equal(own, other) == (heads == 1), "a single KV head is on both ranks; others are on one each"


class OneOf:
    """A rank that has met nobody: enough to be dealt its share."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def deal(files: ModelFiles, ranks: int, kv_heads: int, head_dim: int) -> list[dict[str, torch.Tensor]]:
    """Every rank's weights, by the names that they have in the undivided model."""
    shares = []
    for rank in range(ranks):
        model = AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32)
        shard_model(model, OneOf(rank, ranks), kv_heads, head_dim, files.name)  # type: ignore[arg-type]
        names = ((re.sub(r"(o_proj|down_proj|lm_head)\.linear", r"\1", n), p) for n, p in model.named_parameters())
        shares.append({name: parameter.detach() for name, parameter in names})
    return shares


def test_more_ranks_than_kv_heads_share_them_in_order_and_split_the_rest(tmp_path: Path) -> None:
    files = save_tiny("llama", tmp_path, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False)
    whole = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    shares = deal(files, 4, kv_heads=2, head_dim=8)
    layer = "model.layers.1."
    for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
        first, second = whole[layer + name].chunk(2)
        for rank, head in enumerate((first, first, second, second)):
            assert torch.equal(shares[rank][layer + name], head), f"{name} of rank {rank}"
    for name, dim in (("self_attn.q_proj.weight", 0), ("self_attn.o_proj.weight", 1), ("mlp.down_proj.weight", 1)):
        assert torch.equal(torch.cat([share[layer + name] for share in shares], dim), whole[layer + name])
    output = torch.cat([share["lm_head.weight"] for share in shares])
    assert torch.equal(output[:97], whole["lm_head.weight"])
    assert output.shape[0] == 100
    assert not output[97:].any()
    for share in shares:
        stored = sum(tensor.numel() for tensor in share.values())
        assert stored < 0.3 * sum(tensor.numel() for tensor in whole.values())


@pytest.mark.parametrize(
    ("kind", "changes", "error", "words"),
    [
        ("llama", {"intermediate_size": 65}, ConfigError, "has 65 (rows|columns), which do not divide into 2"),
        ("gpt2", {"n_head": 4, "n_layer": 1}, UnsupportedModel, "no tensor-parallel plan for GPT2LMHeadModel"),
        (
            "phi3",
            {"num_attention_heads": 4, "num_key_value_heads": 2},
            UnsupportedModel,
            "'rowwise_split_input', which pdkv does not do",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    kind: str, changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    files = save_tiny(kind, tmp_path, **changes)
    with pytest.raises(error, match=words):
        deal(files, 2, kv_heads=2, head_dim=8)


def rank_processes() -> list[psutil.Process]:
    """Ranks that this process has started and that still run."""
    return [one for one in psutil.Process().children() if "pdkv.runtime.ranks.worker" in one.cmdline()]


def test_what_one_rank_refuses_ends_all(tmp_path: Path) -> None:
    files = save_tiny("llama", tmp_path, num_key_value_heads=3)
    before = rank_processes()
    with pytest.raises(ConfigError, match="3 KV heads can neither be divided nor replicated"), divided(files, 2):
        pass
    assert rank_processes() == before


def test_a_batch_reaches_the_other_ranks_as_it_is() -> None:
    """All of it that a forward pass looks at; more than a socket takes at once."""
    random = np.random.default_rng(0)
    counts = random.integers(1, 3000, 40).astype(np.int32)
    batch = Batch(
        request_ids=tuple(map(str, range(40))),
        num_scheduled=counts,
        num_computed=counts[::-1].copy(),
        tokens=random.integers(0, 1 << 30, int(counts.sum())).astype(np.int32),
        pending=np.zeros(40, dtype=np.bool_),
        block_tables=random.integers(0, 1 << 30, (40, 7)).astype(np.int32),
        samples=counts % 2 == 0,
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=ours.sendall, args=(pack(step_of(batch)) * 2,))
        sender.start()
        got = [batch_of(step) for _, step in zip(range(2), Inbox(theirs).messages(), strict=False)]
        sender.join()
    for one in got:
        for name in ("num_scheduled", "num_computed", "tokens", "pending", "block_tables", "samples"):
            have, want = getattr(one, name), getattr(batch, name)
            assert np.array_equal(have, want), name
            assert have.dtype == want.dtype, name
    with pytest.raises(AssertionError, match="sampled"):
        step_of(msgspec.structs.replace(batch, pending=~batch.pending))
    with pytest.raises(AssertionError, match="copies"):
        step_of(msgspec.structs.replace(batch, copies=np.array([[1, 2]], dtype=np.int32)))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here")
def test_two_gpus_equal_generate(tmp_path: Path) -> None:
    files = save_tiny("llama", tmp_path)
    with divided(files, 2, devices=("cuda:0", "cuda:1")) as executor:
        engine = HandEngine(executor)
        engine.add("a", PROMPTS[1], GREEDY, min_tokens=8, stop_token_ids=executor.model.eos_token_ids)
        for count in (30, 7, *[1] * 7):
            engine.step({"a": count})
        assert engine.tokens["a"] == expected_tokens(reference(executor.model, tmp_path), PROMPTS[1], 8)


def test_a_rank_that_has_ended_before_it_is_watched_is_told_to_who_watches_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin = Begin(
        rank=0, ranks=2, rendezvous="", model_name="m", directory=str(tmp_path), device="cpu", dtype="float32",
        weight_storage="auto", threads=1, debug=False, total_bytes=1, free_bytes=1,
    )  # fmt: skip
    ranks = processes.RankProcesses(begin, ["cpu"] * 2)
    try:
        (pid,) = ranks.pids
        os.kill(pid, signal.SIGKILL)
        ranks._others[0].thread.join(20)
        told: list[RankFailed] = []
        for _ in range(2):
            ranks.watch(told.append)
        assert [f"rank 1 (pid {pid}) was killed by SIGKILL" in str(error) for error in told] == [True, True]
        assert len([record for record in caplog.records if f"(pid {pid}) was killed" in record.getMessage()]) == 1
    finally:
        ranks.close()


def test_a_rank_that_hangs_fails_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for patience in ("_EXPLAIN_S", "_STOP_GRACE_S"):
        monkeypatch.setattr(processes, patience, 0.3)
    with divided(save_tiny("llama", tmp_path), 2) as executor:
        assert executor._ranks is not None
        engine = HandEngine(executor)
        engine.add("a", PROMPTS[0], GREEDY)
        engine.step({"a": 3})
        executor._ranks.group._step_timeout = timedelta(seconds=1)
        rank = psutil.Process(*executor._ranks.pids)
        rank.suspend()
        try:
            with pytest.raises(RankFailed, match=rf"perhaps hanging: rank 1 \(pid {rank.pid}\)"):
                engine.step({"a": 1})
        finally:
            rank.resume()
    assert not rank.is_running()
