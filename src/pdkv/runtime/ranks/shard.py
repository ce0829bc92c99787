"""One rank's share of a model, cut out of the whole one after transformers' tensor-parallel plan for it.

Plain modules with plain weights (docs/decisions/tensor-parallel.md): a column-parallel layer stays the
`torch.nn.Linear` that it was, with fewer rows, a row-parallel one gets an all-reduce behind it. So the C kernels take
their place as in a whole model. Output layer and embedding are divided by vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.runtime.ranks.group import RankGroup
from pdkv.units import cdiv

_UNCHANGED = ("replicated_with_grad_allreduce",)  # norms over a head: each rank applies them to its own heads
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


class RowParallel(torch.nn.Module):
    """``y = x W^T + b`` where each rank has some columns of W, and the part of x that belongs to them."""

    def __init__(self, linear: torch.nn.Linear, group: RankGroup) -> None:
        """Takes over ``linear``, which holds this rank's columns and the whole bias."""
        super().__init__()
        self.bias, linear.bias = linear.bias, None
        self.linear = linear
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features of the rank] -> [..., out_features], the same on all ranks."""
        out = self._group.all_reduce(self.linear(x))
        return out if self.bias is None else out + self.bias


class ReducedExperts(torch.nn.Module):
    """Experts of which each rank has a slice of every one: their outputs add up."""

    def __init__(self, experts: torch.nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.experts = experts
        self._group = group

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the experts give, summed over the ranks."""
        return self._group.all_reduce(self.experts(*args, **kwargs).contiguous())


class VocabEmbedding(torch.nn.Module):
    """An embedding of which each rank has an equal number of rows, one rank's behind the other's."""

    def __init__(self, embedding: torch.nn.Embedding, group: RankGroup) -> None:
        """Takes over ``embedding``, which holds this rank's rows."""
        super().__init__()
        self.embedding = embedding
        self._rows = embedding.num_embeddings
        self._first = group.rank * self._rows
        self._group = group

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64[...] -> [..., hidden], the same on all ranks."""
        local = ids - self._first
        elsewhere = (local < 0) | (local >= self._rows)
        found = self.embedding(local.masked_fill(elsewhere, 0))
        return self._group.all_reduce(found.masked_fill(elsewhere[..., None], 0))


class VocabLogits(torch.nn.Module):
    """An output layer of which each rank computes some columns. Only rank 0 gets the whole: it samples."""

    def __init__(self, linear: torch.nn.Linear, vocab_size: int, group: RankGroup) -> None:
        """Takes over ``linear``, which holds this rank's rows."""
        super().__init__()
        self.linear = linear
        self._vocab_size = vocab_size
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, n, hidden] -> [1, n, vocab_size] on rank 0, this rank's own columns elsewhere."""
        own: torch.Tensor = self.linear(x)
        if own.shape[1] == 0:  # nobody samples in this step
            return own if self._group.rank else own.new_empty(1, 0, self._vocab_size)
        parts = self._group.gather(own.contiguous())
        return torch.cat(parts, dim=-1)[..., : self._vocab_size] if parts else own


def shard_model(model: Any, group: RankGroup, kv_heads: int, head_dim: int, name: str) -> None:
    """Keep this rank's part of every weight of ``model`` and put the collectives in; the rest is given back.

    Attention heads, MLPs and experts are divided by the model's plan, the vocabulary evenly. KV heads are copied where
    there are more ranks than heads. Raises `UnsupportedModel` for a model without a plan, or with one that asks for
    more, and `ConfigError` for sizes that do not divide.
    """
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    if not any(".*." in path for path in plan):  # nothing about its layers
        raise UnsupportedModel(
            f"{name}: transformers has no tensor-parallel plan for {type(model).__name__}; use --tensor-parallel-size 1"
        )
    cut = _Cut(model, group, kv_heads, head_dim, name)
    for path, parameter in list(model.named_parameters()):
        style = plan.get(_LAYER_NUMBER.sub(".*", path))
        if style is not None:
            cut.parameter(path, parameter, style)
    for path, module in list(model.named_modules()):
        style = plan.get(_LAYER_NUMBER.sub(".*", path))
        if style is not None:
            cut.module(path, module, style)
    cut.vocabulary()


class _Cut:
    """`shard_model` at work."""

    def __init__(self, model: Any, group: RankGroup, kv_heads: int, head_dim: int, name: str) -> None:
        self.model, self.group, self.name = model, group, name
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.output, self.embedding = model.get_output_embeddings(), model.get_input_embeddings()

    def parameter(self, path: str, parameter: torch.nn.Parameter, style: str) -> None:
        """Divide one parameter that the plan names: experts, whose weights are [experts, rows, columns]."""
        if style == "packed_colwise":  # gate and up of an expert lie one behind the other
            part = torch.cat([self._part(path, half, -2) for half in parameter.chunk(2, dim=-2)], dim=-2)
        elif style == "rowwise":
            part = self._part(path, parameter, -1)
        else:
            raise self._unsupported(path, "a parameter", style)
        owner, _, last = path.rpartition(".")
        setattr(self.model.get_submodule(owner), last, _kept(part))

    def module(self, path: str, module: torch.nn.Module, style: str) -> None:
        """Divide one module that the plan names."""
        if style in _UNCHANGED or module is self.output or module is self.embedding:
            return
        owner, _, last = path.rpartition(".")
        parent = self.model.get_submodule(owner)
        if style == "colwise" and type(module) is torch.nn.Linear:
            self._columns(path, module, in_attention=hasattr(parent, "layer_idx"))
        elif style == "rowwise" and type(module) is torch.nn.Linear:
            module.weight = _kept(self._part(path, module.weight, 1))
            module.in_features = module.weight.shape[1]
            setattr(parent, last, RowParallel(module, self.group))
        elif style == "moe_tp_experts":
            setattr(parent, last, ReducedExperts(module, self.group))
        else:
            raise self._unsupported(path, type(module).__name__, style)

    def vocabulary(self) -> None:
        """Divide embedding and output layer by rows. What was tied stays tied."""
        output, embedding, group = self.output, self.embedding, self.group
        if type(output) is not torch.nn.Linear or not isinstance(embedding, torch.nn.Embedding):
            raise UnsupportedModel(
                f"{self.name}: {type(self.model).__name__} has no plain embedding and output layer to divide; use "
                "--tensor-parallel-size 1"
            )
        tied = output.weight.data_ptr() == embedding.weight.data_ptr()
        vocab = output.out_features
        output.weight = self._rows(output.weight)
        output.bias = None if output.bias is None else self._rows(output.bias)
        output.out_features = output.weight.shape[0]
        embedding.weight = output.weight if tied else self._rows(embedding.weight)
        embedding.num_embeddings, embedding.padding_idx = embedding.weight.shape[0], None
        self.model.set_output_embeddings(VocabLogits(output, vocab, group))
        self.model.set_input_embeddings(VocabEmbedding(embedding, group))

    def _columns(self, path: str, linear: torch.nn.Linear, *, in_attention: bool) -> None:
        """Keep this rank's outputs of ``linear``: one whole head, where it makes K or V of fewer heads than ranks."""
        makes_kv = in_attention and linear.out_features == self.kv_heads * self.head_dim

        def kept(tensor: torch.Tensor) -> torch.nn.Parameter:
            if makes_kv and self.kv_heads < self.group.size:
                first = self.group.rank * self.kv_heads // self.group.size * self.head_dim
                return _kept(tensor[first : first + self.head_dim])
            return _kept(self._part(path, tensor, 0))

        linear.weight = kept(linear.weight)
        linear.bias = None if linear.bias is None else kept(linear.bias)
        linear.out_features = linear.weight.shape[0]

    def _part(self, path: str, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        size, ranks = tensor.shape[dim], self.group.size
        if size % ranks:
            raise ConfigError(
                f"--tensor-parallel-size {ranks}: {path} of {self.name} has {size} "
                f"{'columns' if dim in (1, -1) else 'rows'}, which do not divide into {ranks}; use a divisor of {size}"
            )
        return tensor.chunk(ranks, dim)[self.group.rank]

    def _rows(self, tensor: torch.Tensor) -> torch.nn.Parameter:
        """This rank's rows of a vocabulary; every rank has as many, with zeros behind the last."""
        rows = cdiv(tensor.shape[0], self.group.size)
        part = tensor[self.group.rank * rows : (self.group.rank + 1) * rows]
        return _kept(torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])]))

    def _unsupported(self, path: str, what: str, style: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.name}: transformers' tensor-parallel plan divides {path} ({what}) by {style!r}, which pdkv does "
            "not do; use --tensor-parallel-size 1"
        )


def _kept(part: torch.Tensor) -> torch.nn.Parameter:
    """A copy, so that the whole tensor can go."""
    return torch.nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
