"""What a model is made of: one `Matrix` per weight, with how tensor and expert parallelism divide it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdkv.units import cdiv

# vLLM pads the vocabulary to a multiple of this before it divides it (vocab_parallel_embedding.py).
VOCAB_PADDING = 64


class Split(enum.Enum):
    """How the ranks of a tensor-parallel group share a matrix (vLLM's parallel linear layers)."""

    WHOLE = "whole"
    """A copy on every rank: norms, routers, what comes before a latent."""
    COLUMN = "column"
    """Outputs are divided."""
    ROW = "row"
    """Inputs are divided."""
    HEADS = "heads"
    """Outputs are divided head by head (or group by group), down to one that the ranks then have copies of."""
    VOCAB = "vocab"
    """Rows of the vocabulary, padded, are divided."""
    EXPERT_COLUMN = "expert_column"
    """An expert's outputs are divided, or whole experts under expert parallelism."""
    EXPERT_ROW = "expert_row"
    """An expert's inputs are divided, or whole experts under expert parallelism."""
    EXPERT_WHOLE = "expert_whole"
    """Every rank has it of each of its experts: a bias of the outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Over how many ranks layers are divided.

    Experts are shared out over the ranks of all data-parallel engines (``expert_ranks``; 0: as many as
    ``tensor_parallel``): each of them inside, or whole ones under ``expert_parallel`` (fused_moe/config.py).
    """

    tensor_parallel: int = 1
    expert_ranks: int = 0
    expert_parallel: bool = False


@dataclass(frozen=True, slots=True)
class Matrix:
    """``count`` matrices of ``rows`` outputs and ``cols`` inputs (1: a vector), whole model, before quantization.

    ``name`` is the path of the module in the checkpoint without a prefix such as ``model.``: ignore lists are matched
    against it. ``fused`` is what the engine allocates it in, together with others (``qkv_proj``). ``heads`` are what
    HEADS divides by. ``linear`` says whether a quantization format applies. ``dtype`` is set where the type is not the
    model's own. ``derived`` ones are made at loading: they take memory and are no parameters.
    """

    name: str
    rows: int
    cols: int
    split: Split = Split.WHOLE
    count: int = 1
    heads: int = 0
    linear: bool = False
    fused: str = ""
    dtype: str | None = None
    derived: bool = False

    @property
    def params(self) -> int:
        """Elements of the whole model."""
        return 0 if self.derived else self.rows * self.cols * self.count

    @property
    def allocation(self) -> str:
        """What it is allocated in."""
        return self.fused or self.name

    def on_rank(self, division: Division) -> tuple[int, int, int]:
        """(rows, cols, count) on the rank that has most."""
        ranks = division.tensor_parallel
        match self.split:
            case Split.WHOLE:
                return self.rows, self.cols, self.count
            case Split.COLUMN:
                return cdiv(self.rows, ranks), self.cols, self.count
            case Split.ROW:
                return self.rows, cdiv(self.cols, ranks), self.count
            case Split.HEADS:
                return self.rows // self.heads * max(1, cdiv(self.heads, ranks)), self.cols, self.count
            case Split.VOCAB:
                padded = cdiv(self.rows, VOCAB_PADDING) * VOCAB_PADDING
                return cdiv(padded, ranks), self.cols, self.count
        ranks = division.expert_ranks or ranks
        if division.expert_parallel:
            return self.rows, self.cols, cdiv(self.count, ranks)
        if self.split is Split.EXPERT_COLUMN:
            return cdiv(self.rows, ranks), self.cols, self.count
        if self.split is Split.EXPERT_ROW:
            return self.rows, cdiv(self.cols, ranks), self.count
        return self.rows, self.cols, self.count


@dataclass(frozen=True, slots=True)
class Part:
    """Matrices that live on one pipeline stage: a decoder layer (``layer``), or what comes before or after them."""

    kind: str
    matrices: tuple[Matrix, ...]
    layer: int | None = None


def linear(
    name: str, rows: int, cols: int, split: Split, *, heads: int = 0, bias: bool = False, fused: str = ""
) -> list[Matrix]:
    """A linear layer, with its bias if it has one."""
    found = [Matrix(name, rows, cols, split, heads=heads, linear=True, fused=fused)]
    if bias:
        # What divides inputs adds its bias once, after the sum.
        kept = Split.WHOLE if split is Split.ROW else split
        found.append(Matrix(f"{name}.bias", rows, 1, kept, heads=heads, fused=f"{fused}.bias" if fused else ""))
    return found


def norm(name: str, width: int, *, bias: bool = False) -> list[Matrix]:
    """A normalisation's weights."""
    return [Matrix(name, width, 1), *([Matrix(f"{name}.bias", width, 1)] if bias else [])]
