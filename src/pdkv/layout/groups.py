"""Layers -> groups (spec kv-layout, section 5).

A block id belongs to one group at a time and all groups overlay the same memory, so a block takes the bytes of the
*largest* group. Layers of one kind form one group: its page is the sum of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.layout.dtypes import KvDtype
from pdkv.layout.pages import page_bytes
from pdkv.models.spec import LayerKind, LayerSpec
from pdkv.units import cdiv


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block tables. ``page_bytes[i]`` is what layer ``layers[i]`` stores for one block."""

    kind: LayerKind
    layers: tuple[int, ...]
    block_size: int
    page_bytes: tuple[int, ...]

    @property
    def bytes_per_block(self) -> int:
        """Bytes one block of this group takes over all its layers."""
        return sum(self.page_bytes)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that one request of ``num_tokens`` tokens holds at its largest."""
        return cdiv(num_tokens, self.block_size)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How one rank lays out its KV."""

    groups: tuple[Group, ...]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the pool: the largest group's."""
        return max(group.bytes_per_block for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of the pool that one request of ``num_tokens`` tokens holds, over all groups."""
        return sum(group.blocks_for(num_tokens) for group in self.groups)


def group_layers(
    layers: tuple[LayerSpec, ...], *, first: int = 0, block_size: int, dtype: KvDtype, tensor_parallel: int = 1
) -> RankLayout:
    """The layout of a rank that holds ``layers``, the model's layers from index ``first`` on."""
    groups = []
    for kind in dict.fromkeys(layer.kind for layer in layers):
        members = [index for index, layer in enumerate(layers) if layer.kind is kind]
        pages = tuple(
            page_bytes(layers[index], block_size=block_size, dtype=dtype, tensor_parallel=tensor_parallel)
            for index in members
        )
        groups.append(Group(kind, tuple(first + index for index in members), block_size, pages))
    return RankLayout(tuple(groups))
