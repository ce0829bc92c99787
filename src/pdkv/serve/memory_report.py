"""`/debug/memory` (design 6.4): the ledger of an instance as JSON."""

from __future__ import annotations

from typing import Any

from pdkv.core.ports import MemoryView
from pdkv.serve.engine import InfoLike
from pdkv.units import NS_PER_S


def memory_report(info: InfoLike, view: MemoryView, now_ns: int) -> dict[str, Any]:
    """One entry of ``instances``; ``accounts`` sum to ``num_blocks``. ``bytes_per_block`` are those of one rank, of
    ``tensor_parallel_size``: each has ``num_blocks`` of them.

    ``since_s`` is how long ago a holder began, ``deadline_s`` how long it may still hold: null where nothing bounds it
    but its own end, negative when the deadline has passed and is being dealt with. ``awaiting`` are requests without
    memory, whose prompt's KV a prefill instance is still to announce (push).
    """
    return {
        "role": info.role,
        "engine_id": info.engine_id,
        "model": info.model_name,
        "transport": info.transport,
        "num_blocks": view.num_blocks,
        "block_size": view.block_size,
        "bytes_per_block": info.bytes_per_block,
        "tensor_parallel_size": info.tensor_parallel_size,
        "accounts": dict(view.accounts),
        "peaks": dict(view.peaks),
        "holders": [
            {
                "request_id": holder.request_id,
                "account": holder.account,
                "blocks": holder.blocks,
                "cause": holder.cause,
                "since_s": _seconds(now_ns - holder.since_ns),
                "deadline_s": None if holder.deadline_ns is None else _seconds(holder.deadline_ns - now_ns),
            }
            for holder in view.holders
        ],
        "awaiting": [
            {
                "request_id": wait.request_id,
                "producer": wait.producer,
                "cause": wait.cause,
                "since_s": _seconds(now_ns - wait.since_ns),
                "deadline_s": None if wait.deadline_ns is None else _seconds(wait.deadline_ns - now_ns),
            }
            for wait in view.awaiting
        ],
    }


def _seconds(ns: int) -> float:
    return round(ns / NS_PER_S, 3)
