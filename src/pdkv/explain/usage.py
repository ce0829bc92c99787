"""Where the blocks of an engine are: exact from pdkv's ledger, with bounds from what vLLM's metrics say."""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.explain.reading import EngineReading


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Blocks held for one cause: between ``low_blocks`` and ``high_blocks``, which are equal where it is known.

    ``likely_blocks`` is an estimate within the bounds, ``None`` where there is nothing to estimate from; ``bytes`` are
    those of ``low_blocks`` and ``high_blocks`` where the size of a block is known.
    """

    cause: str
    low_blocks: int
    high_blocks: int
    likely_blocks: int | None
    low_bytes: int | None
    high_bytes: int | None
    text: str

    @property
    def exact(self) -> bool:
        """Whether nothing is left open."""
        return self.low_blocks == self.high_blocks


_ACCOUNT_TEXTS = {
    "null": "block 0, which pads block tables",
    "free": "without content",
    "cached": "free, with content that a prefix can hit",
    "running": "of requests that compute",
    "draft": "lookahead of running requests",
    "loading": "allocated, their KV is on its way",
    "loaded_waiting": "their KV has come, the request does not run yet",
    "retained": "of finished requests, kept for a peer",
    "deferred": "freed, but a step that used them is not over",
    "quarantine": "a transfer that was given up may still write to them",
}


def split(engine: EngineReading) -> tuple[Share, ...]:
    """Every block of the pool by cause. Empty when the server does not say how large its pool is."""
    if engine.accounts is not None:
        return tuple(
            _share(engine, account, blocks, blocks, None, _ACCOUNT_TEXTS.get(account, account))
            for account, blocks in engine.accounts.items()
        )
    usable, pinned = engine.usable_blocks, engine.pinned_blocks
    if usable is None or pinned is None:
        return ()
    loading, running, held = _bounds(engine, pinned)
    return (
        _share(engine, "null", 1, 1, None, _ACCOUNT_TEXTS["null"]),
        _share(engine, "free or cached", usable - pinned, usable - pinned, None, "not in use; content may be hit"),
        _share(engine, "loading", *loading, _likely(engine, loading), _loading_text(engine)),
        _share(engine, "running", *running, None, f"of {engine.running:,} running requests"),
        _share(
            engine,
            "without a request",
            *held,
            None,
            "kept for a peer, waiting for a step to end, or lost: no metric says",
        ),
    )


def _bounds(engine: EngineReading, pinned: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Bounds of what loads, running requests and nobody's requests hold; the three add up to ``pinned``.

    Every request that holds anything has at least one block that no other shares: the one it writes next.
    """
    loads = engine.loading
    deferred = engine.deferred if engine.deferred is not None else engine.waiting
    least_running = min(pinned, engine.running)
    least_loading = min(pinned - least_running, loads or 0)
    may_load = loads if loads is not None else deferred
    most_loading = pinned - least_running if may_load else 0
    most_running = pinned - least_loading if engine.running else 0
    least_held = pinned if not engine.running and not may_load else 0
    return (
        (least_loading, most_loading),
        (least_running, most_running),
        (least_held, pinned - least_running - least_loading),
    )


def _likely(engine: EngineReading, bounds: tuple[int, int]) -> int | None:
    """Loads times the blocks of a mean prompt: fair for one group of layers, too little for more."""
    if not engine.loading or not engine.mean_prompt_tokens or not engine.block_size:
        return None
    blocks = round(engine.loading * engine.mean_prompt_tokens / engine.block_size)
    return min(bounds[1], max(bounds[0], blocks))


def _loading_text(engine: EngineReading) -> str:
    if engine.loading is None:
        return "the server does not say how many requests load"
    return f"of {engine.loading:,} requests whose KV is on its way or has come"


def _share(engine: EngineReading, cause: str, low: int, high: int, likely: int | None, text: str) -> Share:
    size = engine.bytes_per_block
    return Share(
        cause=cause,
        low_blocks=low,
        high_blocks=high,
        likely_blocks=likely,
        low_bytes=None if size is None else low * size,
        high_bytes=None if size is None else high * size,
        text=text,
    )
