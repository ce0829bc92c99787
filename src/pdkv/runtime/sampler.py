"""From logits to tokens: penalties, temperature, min-p, top-k, top-p, seeds and log-probabilities.

The order and the meaning of every setting are vLLM's (v1 sampler): log-probabilities are of the raw distribution;
then penalties; then temperature, min-p, top-k, top-p; then the draw. One request's draw uses one number of its own
generator per token, so what else is in the batch cannot change it.
"""

from __future__ import annotations

import math
import secrets
import sys
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from pdkv.core.ports import Int32Array
from pdkv.errors import BadRequest

MAX_LOGPROBS = 20
_GREEDY_BELOW = 1e-5  # vLLM: temperatures below this are greedy


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. ``temperature`` 0 is greedy, ``top_k`` 0 is off, ``logprobs`` n asks for n alternatives."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None

    def validate(self) -> None:
        """Raises BadRequest that names the field, its value and the allowed range."""
        logprobs_good = self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS
        for name, value, allowed, good in (
            ("temperature", self.temperature, "0 or more", self.temperature >= 0),
            ("top_p", self.top_p, "above 0, at most 1", 0 < self.top_p <= 1),
            ("top_k", self.top_k, "0 (off) or more", self.top_k >= 0),
            ("min_p", self.min_p, "0 to 1", 0 <= self.min_p <= 1),
            ("repetition_penalty", self.repetition_penalty, "above 0", self.repetition_penalty > 0),
            ("presence_penalty", self.presence_penalty, "-2 to 2", -2 <= self.presence_penalty <= 2),
            ("frequency_penalty", self.frequency_penalty, "-2 to 2", -2 <= self.frequency_penalty <= 2),
            ("seed", self.seed, "a 64-bit integer", self.seed is None or -(1 << 63) <= self.seed < 1 << 64),
            ("logprobs", self.logprobs, f"0 to {MAX_LOGPROBS}", logprobs_good),
        ):
            if not good or not abs(value or 0) <= sys.float_info.max:  # NaN is not, either
                raise BadRequest(f"{name} must be {allowed}; got {value}")

    @property
    def greedy(self) -> bool:
        """The most likely token is always taken."""
        return self.temperature < _GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A sampled token, its natural-log probability and its rank (1 = most likely), and the ``top`` alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class SamplingState:
    """What sampling remembers of one request: its settings, its tokens so far, its generator.

    Until ``min_tokens`` tokens were sampled, ``stop_token_ids`` cannot be.
    """

    params: SamplingParams
    prompt: Int32Array
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=torch.Generator)
    prompt_ids: torch.Tensor | None = None

    def __post_init__(self) -> None:
        seed = self.params.seed
        # An unseeded request still gets a generator of its own: nobody's draw moves anybody else's.
        self.generator.manual_seed(secrets.randbits(63) if seed is None else seed)
        if self.params.repetition_penalty != 1.0:
            self.prompt_ids = torch.from_numpy(np.unique(self.prompt).astype(np.int64))

    @property
    def changes_logits(self) -> bool:
        """This step's logits must be edited before anything is chosen from them."""
        return self.params.penalised or (len(self.output) < self.min_tokens and len(self.stop_token_ids) > 0)


def sample(logits: torch.Tensor, states: list[SamplingState]) -> tuple[Int32Array, list[TokenLogprobs | None]]:
    """One token per row of ``logits`` [n, vocab] (any float dtype, any device), appended to each state's output.

    Returns int32[n] tokens and, per row, log-probabilities if its request asked for them. ``logits`` may be changed.
    """
    logits = logits.float()
    asked = [i for i, state in enumerate(states) if state.params.logprobs is not None]
    raw = logits[asked].log_softmax(-1) if asked else None
    for row, state in enumerate(states):
        if state.changes_logits:
            _edit_logits(logits[row], state)
    tokens = logits.argmax(-1)
    drawn = [i for i, state in enumerate(states) if not state.params.greedy]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [states[i] for i in drawn])
    result = tokens.to("cpu", torch.int32).numpy()
    for state, token in zip(states, result.tolist(), strict=True):
        state.output.append(token)
    logprobs: list[TokenLogprobs | None] = [None] * len(states)
    if raw is not None:
        for row, i in zip(raw, asked, strict=True):
            logprobs[i] = _token_logprobs(row, int(result[i]), states[i].params.logprobs or 0)
    return result, logprobs


def _edit_logits(row: torch.Tensor, state: SamplingState) -> None:
    """Apply penalties and the ban on stop tokens to one row [vocab], in place.

    Repetition (prompt and output tokens): positive logits are divided, negative ones multiplied. Frequency: minus the
    penalty per occurrence in the output; presence: minus the penalty once.
    """
    params = state.params
    if len(state.output) < state.min_tokens:
        row[list(state.stop_token_ids)] = -math.inf
    if not params.penalised:
        return
    output, counts = torch.unique(torch.tensor(state.output, dtype=torch.int64), return_counts=True)
    output, counts = output.to(row.device), counts.to(row.device, torch.float32)
    if state.prompt_ids is not None:
        state.prompt_ids = state.prompt_ids.to(row.device)
        seen = torch.unique(torch.cat([state.prompt_ids, output]))
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    row[output] -= params.frequency_penalty * counts + params.presence_penalty


def keep_mask(probs: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    """Which tokens each row may draw: bool[n, vocab] from probabilities [n, vocab] after temperature.

    min-p keeps tokens with at least that share of the top probability. top-k then keeps the k most likely of those
    (ties with the last of them included). top-p then keeps the shortest most-likely-first list whose share of what is
    left reaches p. The most likely token always stays.
    """
    device = probs.device
    min_p = torch.tensor([s.params.min_p for s in states], dtype=probs.dtype, device=device)[:, None]
    keep = probs >= min_p * probs.amax(-1, keepdim=True)
    vocab = probs.shape[1]
    top_k = [min(s.params.top_k or vocab, vocab) for s in states]
    if any(k < vocab for k in top_k):
        bounded = [k if k < vocab else 1 for k in top_k]
        best = torch.where(keep, probs, 0).topk(max(bounded), dim=-1).values
        threshold = best.gather(-1, torch.tensor(bounded, device=device)[:, None] - 1)
        unlimited = torch.tensor([k >= vocab for k in top_k], device=device)[:, None]
        keep &= (probs >= threshold) | unlimited
    limited = [i for i, s in enumerate(states) if s.params.top_p < 1]
    if limited:
        top_p = torch.tensor([states[i].params.top_p for i in limited], dtype=probs.dtype, device=device)[:, None]
        ordered, order = torch.where(keep[limited], probs[limited], 0).sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        inside = before < top_p * ordered.sum(-1, keepdim=True)
        keep[limited] &= torch.zeros_like(inside).scatter_(-1, order, inside)
    return keep


def _draw(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    """One draw per row: a uniform number of the request's own generator, inverted through the kept distribution."""
    temperature = torch.tensor([s.params.temperature for s in states], device=logits.device)[:, None]
    probs = (logits / temperature).softmax(-1, dtype=torch.float64)
    probs = torch.where(keep_mask(probs, states), probs, 0)
    cumulative = probs.cumsum(-1)
    uniform = torch.cat([torch.rand(1, generator=s.generator, dtype=torch.float64) for s in states])
    target = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding can lift the target to the very end, behind the last token that has any probability.
    return torch.where(index < probs.shape[-1], index, probs.argmax(-1))


def _token_logprobs(row: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    best = row.topk(top)
    chosen = row[token]
    return TokenLogprobs(
        token=token,
        logprob=float(chosen),
        rank=int((row > chosen).sum()) + 1,
        top=tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
    )
