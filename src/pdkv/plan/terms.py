"""The terms of a memory budget, each with what it may be off by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What one rank of a stage spends before KV, in bytes, each with what it may be off by (``*_off``)."""

    weights: int
    activation: int
    non_torch: int
    graphs: int
    weights_off: int
    activation_off: int
    non_torch_off: int
    graphs_off: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.activation + self.non_torch + self.graphs

    @property
    def off(self) -> int:
        """What all of it may be off by."""
        return self.weights_off + self.activation_off + self.non_torch_off + self.graphs_off

    @property
    def largest(self) -> str:
        """The name of the largest term."""
        found = {
            "weights": self.weights,
            "activations": self.activation,
            "memory outside PyTorch": self.non_torch,
            "CUDA graphs": self.graphs,
        }
        return max(found, key=lambda name: found[name])
