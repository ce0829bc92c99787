"""The executor against transformers itself: same tokens, same logits, whatever the batch looks like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.runtime.tiny import HandEngine, load_tiny, make_executor, reference

from pdkv.core.ports import Batch
from pdkv.errors import BadRequest, ConfigError
from pdkv.runtime.executor import Executor
from pdkv.runtime.kv_pool import KvPool
from pdkv.runtime.models import LoadedModel
from pdkv.runtime.sampler import SamplingParams

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[5, 9, 11], list(range(20, 57)), [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]


@pytest.fixture(scope="module", params=["llama", "qwen3", "granite"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, torch.nn.Module]:
    """A model as pdkv loads it, and as transformers does."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    model = load_tiny(request.param, directory)
    return model, reference(model, directory)


def expected_tokens(plain: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    out = plain.generate(torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False)  # type: ignore[operator]
    return out[0].tolist()


def logits_of(executor: Executor, batch: Batch) -> torch.Tensor:
    return executor._forward(batch)


def test_chunked_prefill_and_decode_equal_generate(pair: tuple[LoadedModel, torch.nn.Module]) -> None:
    model, plain = pair
    engine = HandEngine(make_executor(model))
    engine.add("a", PROMPTS[1], GREEDY, min_tokens=12, stop_token_ids=model.eos_token_ids)
    for chunk in (10, 1, 7, 19):
        engine.step({"a": chunk})
    for _ in range(11):
        engine.step({"a": 1})
    assert engine.tokens["a"] == expected_tokens(plain, PROMPTS[1], 12)


def test_mixed_batches_equal_generate_for_every_row(pair: tuple[LoadedModel, torch.nn.Module]) -> None:
    """Prefills, continued chunks and decodes of very different lengths share batches; order of rows changes."""
    model, plain = pair
    engine = HandEngine(make_executor(model), seed=3)
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, GREEDY, min_tokens=10, stop_token_ids=model.eos_token_ids)
    engine.step({"0": 3, "1": 11})
    engine.step({"1": 20, "0": 1, "2": 1})
    engine.step({"3": 16, "2": 1, "0": 1, "1": 6})
    for _ in range(12):
        rows = {i: engine.left(i) for i in ("2", "0", "3", "1") if len(engine.tokens[i]) < len(PROMPTS[int(i)]) + 10}
        if rows:
            engine.step(rows)
    for i, prompt in enumerate(PROMPTS):
        assert engine.tokens[str(i)] == expected_tokens(plain, prompt, 10), f"row {i}"


def test_logits_equal_the_plain_forward_to_1e_4(pair: tuple[LoadedModel, torch.nn.Module]) -> None:
    model, plain = pair
    engine = HandEngine(make_executor(model), seed=5)
    engine.add("a", PROMPTS[1], GREEDY)
    engine.add("b", PROMPTS[3], GREEDY)
    engine.add("c", PROMPTS[0], GREEDY)
    engine.step({"a": 13, "b": 16, "c": 2})
    got = logits_of(engine.executor, engine.batch({"c": 1, "a": 24, "b": 1}))
    with torch.inference_mode():
        for row, prompt in zip(got, (PROMPTS[0], PROMPTS[1], PROMPTS[3]), strict=True):
            want = plain(torch.tensor([prompt])).logits[0, -1]
            torch.testing.assert_close(row, want, atol=1e-4, rtol=1e-4)


def test_decodes_of_many_lengths_equal_one_at_a_time(pair: tuple[LoadedModel, torch.nn.Module]) -> None:
    model, _ = pair
    prompts = {str(n): [(n * 7 + k) % 90 + 3 for k in range(n)] for n in (1, 2, 3, 5, 8, 16, 17, 40, 100)}
    together, alone = HandEngine(make_executor(model)), HandEngine(make_executor(model), seed=9)
    for i, prompt in prompts.items():
        together.add(i, prompt, GREEDY)
        alone.add(i, prompt, GREEDY)
        alone.step({i: len(prompt)})
        for _ in range(5):
            alone.step({i: 1})
    together.step({i: len(p) for i, p in prompts.items()})
    for _ in range(5):
        together.step(dict.fromkeys(prompts, 1))
    assert together.tokens == alone.tokens


def test_pending_tokens_are_filled_in(pair: tuple[LoadedModel, torch.nn.Module]) -> None:
    """Asynchronous scheduling: the batch does not know the token that the one before it samples."""
    model, plain = pair
    engine = HandEngine(make_executor(model))
    engine.add("a", PROMPTS[3], GREEDY, min_tokens=6, stop_token_ids=model.eos_token_ids)
    engine.step({"a": len(PROMPTS[3])})
    for _ in range(5):
        engine.step({"a": 1}, pending=True)
    assert engine.tokens["a"] == expected_tokens(plain, PROMPTS[3], 6)


def test_preempted_request_continues_with_the_same_tokens(pair: tuple[LoadedModel, torch.nn.Module]) -> None:
    """A seeded, penalised request loses its KV in the middle: recomputing must not draw or count anything twice."""
    model, _ = pair
    sampling = SamplingParams(temperature=0.9, seed=11, repetition_penalty=1.3, frequency_penalty=0.4)
    results = []
    for preempt_at in (None, 4):
        engine = HandEngine(make_executor(model))
        engine.add("a", PROMPTS[3], sampling)
        for step in range(9):
            if step == preempt_at:
                engine.preempt("a")
            while engine.left("a") > 8:
                engine.step({"a": 8})
            engine.step({"a": engine.left("a")})
        results.append(engine.tokens["a"])
    assert results[0] == results[1]


def test_rows_that_do_not_sample_give_zero_and_no_state(pair: tuple[LoadedModel, torch.nn.Module]) -> None:
    model, _ = pair
    engine = HandEngine(make_executor(model))
    engine.add("a", PROMPTS[1], SamplingParams(temperature=0, logprobs=3))
    result = engine.step({"a": 8})
    assert result.outputs.tokens.tolist() == [0]
    assert result.logprobs == {}
    assert result.outputs.tokens.dtype == np.int32


def test_logprobs_are_of_the_raw_distribution(pair: tuple[LoadedModel, torch.nn.Module]) -> None:
    model, plain = pair
    engine = HandEngine(make_executor(model))
    engine.add("a", PROMPTS[0], SamplingParams(temperature=0.5, seed=1, presence_penalty=1.0, logprobs=4))
    engine.add("b", PROMPTS[2], GREEDY)
    result = engine.step({"a": 3, "b": 1})
    assert set(result.logprobs) == {"a"}
    got = result.logprobs["a"]
    with torch.inference_mode():
        want = plain(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1)
    assert got.token == engine.tokens["a"][-1]
    assert got.logprob == pytest.approx(want[got.token].item(), abs=1e-4)
    assert got.rank == int((want > want[got.token]).sum()) + 1
    assert [t for t, _ in got.top] == want.topk(4).indices.tolist()
    assert [p for _, p in got.top] == pytest.approx(want.topk(4).values.tolist(), abs=1e-4)


def test_an_empty_batch_does_nothing(pair: tuple[LoadedModel, torch.nn.Module]) -> None:
    model, _ = pair
    none = np.zeros(0, np.int32)
    empty = Batch((), none, none, none, none.astype(bool), np.zeros((0, 0), np.int32), none.astype(bool))
    assert make_executor(model).execute(empty).outputs.tokens.shape == (0,)


def test_null_block_and_foreign_blocks_are_not_touched(pair: tuple[LoadedModel, torch.nn.Module]) -> None:
    model, _ = pair
    executor = make_executor(model)
    before = executor.pool.tensor.clone()
    engine = HandEngine(executor)
    engine.add("a", PROMPTS[1], GREEDY)
    engine.add("b", PROMPTS[2], GREEDY)
    engine.step({"a": len(PROMPTS[1]), "b": 1})
    engine.step({"a": 1, "b": 1})
    mine = set(engine.blocks["a"] + engine.blocks["b"])
    others = [b for b in range(executor.pool.num_blocks) if b not in mine]
    assert torch.equal(executor.pool.tensor[others].view(torch.int32), before[others].view(torch.int32))


def test_requests_and_pools_that_do_not_fit_are_refused(pair: tuple[LoadedModel, torch.nn.Module]) -> None:
    model, _ = pair
    executor = make_executor(model)
    with pytest.raises(BadRequest, match=r"top_p must be above 0, at most 1; got 1\.5"):
        executor.add_request("a", np.ones(1, np.int32), SamplingParams(top_p=1.5))
    executor.remove_request("a")
    wrong = KvPool.create(4, model.num_layers + 1, 4, model.kv_heads, model.head_dim, model.dtype)
    with pytest.raises(ConfigError, match=r"KV pool is \(4, .*needs \(3,"):
        Executor(model, wrong)


def test_a_model_without_its_executor_says_so(pair: tuple[LoadedModel, torch.nn.Module]) -> None:
    model, _ = pair
    with pytest.raises(RuntimeError, match="runs through its Executor only"):
        model.model(torch.tensor([[1, 2]]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_gives_the_tokens_of_the_cpu(tmp_path: Path, dtype: str) -> None:
    from tests.runtime.tiny import save_tiny

    from pdkv.runtime.models import load_model

    files = save_tiny("llama", tmp_path)
    answers = []
    for device in ("cpu", "cuda"):
        model = load_model(files, device=device, dtype=dtype)
        pool = KvPool.create(64, model.num_layers, 16, model.kv_heads, model.head_dim, model.dtype, str(model.device))
        engine = HandEngine(Executor(model, pool))
        engine.add("a", PROMPTS[1], GREEDY)
        engine.add("b", PROMPTS[3], SamplingParams(temperature=0.7, seed=3, top_k=20))
        engine.step({"a": 20, "b": 17})
        engine.step({"a": 17, "b": 1})
        for _ in range(6):
            engine.step({"a": 1, "b": 1})
        answers.append(engine.tokens)
    if dtype == "float32":
        assert answers[0] == answers[1]
    else:
        assert {i: len(t) for i, t in answers[0].items()} == {i: len(t) for i, t in answers[1].items()}
