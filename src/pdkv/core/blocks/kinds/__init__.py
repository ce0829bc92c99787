"""The rules of each kind of group, one file a kind."""

from __future__ import annotations

from pdkv.core.blocks.groups import (
    ChunkedGroup,
    CrossGroup,
    FullGroup,
    Group,
    ReferenceWindowGroup,
    RingGroup,
    StateGroup,
    WindowGroup,
)
from pdkv.core.blocks.kinds.base import Kind, Settings
from pdkv.core.blocks.kinds.chunked import ChunkedKind
from pdkv.core.blocks.kinds.full import FullKind
from pdkv.core.blocks.kinds.scratch import FixedKind, ReferenceWindowKind
from pdkv.core.blocks.kinds.state import StateKind
from pdkv.core.blocks.kinds.window import WindowKind
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.blocks.prefix_index import DictPrefixIndex, PrefixIndex
from pdkv.core.blocks.run_index import RunPrefixIndex


def kind_of(spec: Group, group: int, pool: BlockPool, settings: Settings) -> Kind:
    """The rules of group number ``group``."""
    match spec:
        case FullGroup():
            return FullKind(spec, group, pool, settings)
        case WindowGroup():
            return WindowKind(spec, group, pool, settings)
        case ChunkedGroup():
            return ChunkedKind(spec, group, pool, settings)
        case StateGroup():
            return StateKind(spec, group, pool, settings)
        case ReferenceWindowGroup():
            return ReferenceWindowKind(spec, group, pool, settings)
        case RingGroup() | CrossGroup():
            return FixedKind(spec, group, pool, settings)


def index_for(spec: Group, num_blocks: int) -> PrefixIndex:
    """The prefix index of a group: runs where every block of a sequence is kept, else an entry for each block."""
    return RunPrefixIndex(num_blocks) if isinstance(spec, FullGroup) else DictPrefixIndex()
