"""Sampling: every setting against a slow, literal implementation; draws that depend on nothing but their own seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.errors import BadRequest
from pdkv.runtime.sampler import SamplingParams, SamplingState, keep_mask, sample

VOCAB = 50


def state(prompt: list[int] | None = None, output: list[int] | None = None, **params: object) -> SamplingState:
    made = SamplingState(SamplingParams(**params), np.asarray(prompt or [1], np.int32))  # type: ignore[arg-type]
    made.output += output or []
    return made


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, *states: SamplingState) -> list[int]:
    return sample(logits.clone(), list(states))[0].tolist()


# --------------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "0 or more"),
        ("temperature", math.nan, "0 or more"),
        ("temperature", math.inf, "0 or more"),
        ("temperature", 10**400, "0 or more"),
        ("top_p", 0.0, "above 0, at most 1"),
        ("top_p", 1.01, "above 0, at most 1"),
        ("top_k", -1, r"0 \(off\) or more"),
        ("min_p", 1.5, "0 to 1"),
        ("repetition_penalty", 0.0, "above 0"),
        ("presence_penalty", 2.5, "-2 to 2"),
        ("frequency_penalty", -2.5, "-2 to 2"),
        ("seed", math.nan, "a 64-bit integer"),
        ("top_k", 10**400, r"0 \(off\) or more"),
        ("seed", 1 << 64, "a 64-bit integer"),
        ("logprobs", 21, "0 to 20"),
    ],
)
def test_bad_values_name_field_value_and_range(field: str, value: float, allowed: str) -> None:
    with pytest.raises(BadRequest, match=f"{field} must be {allowed}; got "):
        SamplingParams(**{field: value}).validate()  # type: ignore[arg-type]


def test_the_defaults_and_the_extremes_are_valid() -> None:
    SamplingParams().validate()
    SamplingParams(temperature=0, top_p=1e-9, top_k=10**6, min_p=1, seed=-(1 << 63), logprobs=0).validate()
    SamplingParams(seed=(1 << 64) - 1, presence_penalty=-2, frequency_penalty=2, logprobs=20).validate()


# -------------------------------------------------------------------------------------------------------------- draws


def test_greedy_is_argmax_and_top_k_1_is_greedy() -> None:
    logits = random_logits(0, 8)
    best = logits.argmax(-1).tolist()
    assert draw(logits, *[state(temperature=0) for _ in best]) == best
    assert draw(logits, *[state(temperature=1.5, top_k=1) for _ in best]) == best
    assert draw(logits, *[state(temperature=1.5, top_p=1e-9) for _ in best]) == best
    assert draw(logits, *[state(temperature=1.5, min_p=1.0) for _ in best]) == best


def test_a_seeded_request_draws_the_same_in_any_company() -> None:
    logits = random_logits(1, 20)
    alone = state(seed=42, temperature=0.8, top_p=0.9)
    tokens = [draw(row[None], alone)[0] for row in logits]
    assert len(set(tokens)) > 5
    crowd = state(seed=42, temperature=0.8, top_p=0.9)
    others = [state(), state(temperature=0), state(seed=7, top_k=3), state(min_p=0.2, repetition_penalty=1.2)]
    for i, row in enumerate(logits):
        rows = torch.cat([random_logits(100 + i, len(others)), row[None]])
        assert draw(rows, *others, crowd)[-1] == tokens[i]


def test_unseeded_requests_differ_and_other_seeds_differ() -> None:
    logits = random_logits(2, 30)
    runs = [[draw(row[None], s)[0] for row in logits] for s in (state(), state(), state(seed=1), state(seed=2))]
    assert len({tuple(run) for run in runs}) == 4


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    one = state(seed=5, temperature=2.0)
    n = 4000
    counts = np.bincount([draw(logits, one)[0] for _ in range(n)], minlength=4)
    want = (logits[0] / 2).softmax(-1).numpy()
    assert np.abs(counts / n - want).max() < 4 * math.sqrt(0.25 / n)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((1, 6), -math.inf)
    logits[0, 2], logits[0, 4] = 0.0, 0.5
    one = state(seed=0)
    assert {draw(logits, one)[0] for _ in range(200)} == {2, 4}


# --------------------------------------------------------------------------------------------------- which tokens stay


def slow_keep(probs: list[float], params: SamplingParams) -> set[int]:
    """Literal: min-p, then top-k of what is left, then the shortest list whose share reaches p."""
    kept = [i for i, p in enumerate(probs) if p >= params.min_p * max(probs)]
    kept.sort(key=lambda i: -probs[i])
    if params.top_k and params.top_k < len(kept):
        kept = [i for i in kept if probs[i] >= probs[kept[params.top_k - 1]]]
    if params.top_p < 1:
        total, share, short = sum(probs[i] for i in kept), 0.0, []
        for i in kept:
            if share >= params.top_p * total:
                break
            short.append(i)
            share += probs[i]
        kept = short
    return set(kept)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    params=st.lists(
        st.builds(
            SamplingParams,
            top_k=st.sampled_from([0, 1, 3, 10, 49, 50, 200]),
            top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
            min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_kept_sets_equal_the_literal_ones(seed: int, params: list[SamplingParams]) -> None:
    probs = random_logits(seed, len(params)).softmax(-1, dtype=torch.float64)
    keep = keep_mask(probs, [SamplingState(p, np.ones(1, np.int32)) for p in params])
    for row, kept, p in zip(probs.tolist(), keep, params, strict=True):
        assert set(kept.nonzero()[:, 0].tolist()) == slow_keep(row, p)


# ---------------------------------------------------------------------------------------------------------- penalties


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=30),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 1.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.5, -1.0]),
)
def test_penalties_equal_the_literal_ones(
    seed: int, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    logits = random_logits(seed)
    want = logits[0].tolist()
    for token in set(prompt) | set(output):
        want[token] = want[token] / repetition if want[token] > 0 else want[token] * repetition
    for token in set(output):
        want[token] -= frequency * output.count(token) + presence
    one = state(
        prompt,
        output,
        temperature=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    got = logits.clone()
    tokens, _ = sample(got, [one])
    np.testing.assert_allclose(got[0].numpy(), want, rtol=1e-5, atol=1e-5)
    assert one.output == [*output, int(tokens[0])]


def test_stop_tokens_cannot_be_sampled_before_min_tokens() -> None:
    logits = torch.tensor([[1.0, 9.0, 2.0, 0.0]])
    one = SamplingState(SamplingParams(temperature=0), np.ones(1, np.int32), min_tokens=2, stop_token_ids=(1,))
    assert [draw(logits, one)[0] for _ in range(4)] == [2, 2, 1, 1]


def test_logprobs_rank_and_alternatives() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 3.0, 1.0, 2.0], [5.0, 1.0, 1.0, 1.0]])
    ban = SamplingState(SamplingParams(temperature=0, logprobs=2), np.ones(1, np.int32), 1, (1,))
    tokens, logprobs = sample(logits.clone(), [state(temperature=0, logprobs=0), ban, state(temperature=0)])
    want = logits[0].log_softmax(-1)
    assert tokens.tolist() == [1, 3, 0]
    assert logprobs[2] is None
    first, second = logprobs[0], logprobs[1]
    assert first is not None
    assert (first.token, first.rank, first.top) == (1, 1, ())
    assert second is not None
    assert (second.token, second.rank) == (3, 2)
    assert second.logprob == pytest.approx(want[3].item())
    assert [t for t, _ in second.top] == [1, 3]
