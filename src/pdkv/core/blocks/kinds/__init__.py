"""The rules of each kind of group, one file a kind."""

from __future__ import annotations

from pdkv.core.blocks.groups import ChunkedGroup, FullGroup, Group, StateGroup, WindowGroup
from pdkv.core.blocks.kinds.base import Kind, Settings
from pdkv.core.blocks.kinds.chunked import ChunkedKind
from pdkv.core.blocks.kinds.full import FullKind
from pdkv.core.blocks.kinds.state import StateKind
from pdkv.core.blocks.kinds.window import WindowKind
from pdkv.core.blocks.pool import BlockPool


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
