"""Where each layer's pages lie in the one allocation of a rank (spec kv-layout, section 6, and vLLM's KVCacheTensor).

The logical shape is layers, blocks, heads, tokens, content. A layout is an order of these axes in memory: layers
outermost give every layer a region of its own, blocks outermost put all layers' pages of a block side by side. Groups
lie over one another: a block belongs to one of them at a time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.layout.specs import AttentionCache, Cache

_L, _B, _H, _N, _C = range(5)


class KvLayout(enum.Enum):
    """Order of the axes in memory, outermost first; vLLM's names."""

    LBHNC = (_L, _B, _H, _N, _C)
    LBNHC = (_L, _B, _N, _H, _C)
    LHBNC = (_L, _H, _B, _N, _C)
    BLHNC = (_B, _L, _H, _N, _C)
    BLNHC = (_B, _L, _N, _H, _C)
    BHLNC = (_B, _H, _L, _N, _C)

    @property
    def blocks_outermost(self) -> bool:
        """Whether all layers of a block lie together."""
        return self.value[0] == _B

    @property
    def layers_outermost(self) -> bool:
        """Whether all blocks of a layer lie together."""
        return self.value[0] == _L

    @property
    def pages_contiguous(self) -> bool:
        """Whether a page is one run of bytes."""
        return set(self.value[:2]) == {_L, _B}


def find_layout(name: str) -> KvLayout:
    """The layout called ``name``; NHD and HND are vLLM's older words. Raises ConfigError when there is none."""
    name = {"NHD": "LBNHC", "HND": "LBHNC"}.get(name.upper(), name.upper())
    if name not in KvLayout.__members__:
        raise ConfigError(f"KV layout {name}: there are {', '.join(KvLayout.__members__)}")
    return KvLayout[name]


@dataclass(frozen=True, slots=True)
class Placement:
    """Layers of one shape: layer ``i``'s page of block ``b`` is at ``offset + i * layer_stride + b * block_stride``."""

    layers: tuple[str, ...]
    layer_stride: int
    block_stride: int
    offset: int


def layer_stride_bytes(cache: Cache) -> int:
    """Distance between two blocks of a layer with a region of its own: its page, up to the stride it asks for."""
    return round_up(cache.page_bytes, cache.stride_bytes)


def round_up(value: int, multiple: int) -> int:
    """``value``, up to a multiple of ``multiple``."""
    return -(-value // multiple) * multiple


def strides(
    cache: Cache, num_blocks: int, num_layers: int, layout: KvLayout, fixed_block_stride: int | None
) -> tuple[int, int]:
    """(layer stride, block stride) in bytes of ``num_layers`` layers like ``cache``."""
    heads, states, content = 1, 1, cache.dense_page_bytes
    if isinstance(cache, AttentionCache):
        heads, states, content = cache.head_slots or cache.kv_heads, cache.states, cache.bytes_per_state
    shape = (num_layers, num_blocks, heads, states, content)
    order = layout.value
    page_end = max(order.index(_L), order.index(_B))
    found, stride = [0] * 5, 1
    for position in range(4, -1, -1):
        axis = order[position]
        if cache.padded_page_bytes is not None and position == page_end:
            stride = max(stride, cache.padded_page_bytes)
        found[axis] = fixed_block_stride if axis == _B and fixed_block_stride is not None else stride
        stride = found[axis] * shape[axis]
    return found[_L], found[_B]


def place(
    groups: Sequence[Mapping[str, Cache]], num_blocks: int, layout: KvLayout, bytes_per_block: int
) -> tuple[Placement, ...]:
    """Every layer's place in the allocation of a rank; ``groups`` map its layers' names to their caches."""
    found = []
    for members in groups:
        by_shape: dict[Cache, list[str]] = {}
        for name, cache in members.items():
            by_shape.setdefault(cache, []).append(name)
        offset = 0
        for cache, names in by_shape.items():
            fixed = bytes_per_block if layout.blocks_outermost else None
            if fixed is None and layer_stride_bytes(cache) != cache.page_bytes:
                fixed = layer_stride_bytes(cache)
            layer, block = strides(cache, num_blocks, len(names), layout, fixed)
            found.append(Placement(tuple(names), layer, block, offset))
            offset += len(names) * (cache.page_bytes if layout.blocks_outermost else layer)
    return tuple(found)
