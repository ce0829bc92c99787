"""Test passes through a loaded model: does pdkv's attention fit it, and do its ranks' shares make the whole?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pdkv.errors import PdkvError, UnsupportedModel
from pdkv.layout.pages import kv_heads_per_rank
from pdkv.runtime.attention import ATTENTION_NAME, STEP_KWARG, Step, cacheless_step
from pdkv.runtime.models.support import ModelFacts
from pdkv.runtime.ranks.group import RankGroup

_TOKENS = 12
# How far a forward pass through pdkv's attention may be from transformers' own, relative to the size of its logits.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """What a test pass through the undivided model gave: the KV shape of every layer, and the logits [12, vocab]."""

    kv_heads: int
    head_dim: int
    logits: torch.Tensor


@torch.inference_mode()
def probe(model: Any, facts: ModelFacts, name: str) -> Whole:
    """Run 12 tokens through pdkv's and through transformers' eager attention: they must give the same logits.

    The KV shape is the one that every layer used; configs do not always tell.
    """
    step = cacheless_step([_TOKENS], model.device, record=True)
    try:
        ours = _probe_pass(model, facts, step)
        model.set_attn_implementation("eager")
        theirs = _probe_pass(model, facts, step)
    except PdkvError:
        raise
    except Exception as error:  # a model whose code does not fit the registry can fail in any way
        raise UnsupportedModel(f"{name}: a test pass through {type(model).__name__} failed: {error}") from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    assert step.seen is not None
    shapes = sorted(set(step.seen.values()))
    if sorted(step.seen) != list(range(facts.num_layers)) or len(shapes) != 1:
        raise UnsupportedModel(
            f"{name}: {len(step.seen)} of {facts.num_layers} layers of {type(model).__name__} use the attention "
            f"registry, with (kv_heads, head_dim) {shapes}; pdkv needs all of them, of one shape"
        )
    difference = _difference(ours, theirs)
    if not difference <= _TOLERANCE.get(ours.dtype, 1e-1):
        raise UnsupportedModel(
            f"{name}: {type(model).__name__} gives other logits with pdkv's attention than with transformers' own "
            f"(relative difference {difference:.2g}); its attention has a feature that pdkv does not compute"
        )
    return Whole(*shapes[0], ours)


@torch.inference_mode()
def check_shards(model: Any, whole: Whole, facts: ModelFacts, name: str, group: RankGroup) -> None:
    """Run the same tokens through all ranks' shares: every layer must see its heads, and rank 0 get the same logits."""
    group.meet()
    step = cacheless_step([_TOKENS], model.device, record=True)
    try:
        logits = _probe_pass(model, facts, step)
    except PdkvError:
        raise
    except Exception as error:  # its code does not expect a share of the heads
        raise UnsupportedModel(f"{name}: {type(model).__name__} does not run divided over ranks: {error}") from error
    assert step.seen is not None
    expected = {(kv_heads_per_rank(whole.kv_heads, group.size), whole.head_dim)}
    if set(step.seen.values()) != expected:
        raise UnsupportedModel(
            f"{name}: divided over {group.size} ranks, {type(model).__name__} has (kv_heads, head_dim) "
            f"{sorted(set(step.seen.values()))} on a rank instead of {sorted(expected)}; use --tensor-parallel-size 1"
        )
    if group.rank == 0:
        difference = _difference(logits.to(whole.logits.device), whole.logits)
        if not difference <= _TOLERANCE.get(logits.dtype, 1e-1):
            raise UnsupportedModel(
                f"{name}: {type(model).__name__} gives other logits divided over {group.size} ranks than whole "
                f"(relative difference {difference:.2g}): its tensor-parallel plan is not complete; use "
                "--tensor-parallel-size 1"
            )


def _probe_pass(model: Any, facts: ModelFacts, step: Step) -> torch.Tensor:
    """Logits [tokens, vocab] of a fixed prompt."""
    tokens = (torch.arange(_TOKENS, device=model.device) * 7919 % facts.vocab_size)[None]
    logits: torch.Tensor = model(tokens, position_ids=step.position_ids, use_cache=False, **{STEP_KWARG: step}).logits
    return logits[0]


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).float().norm() / theirs.float().norm().clamp_min(1e-12)).item()
