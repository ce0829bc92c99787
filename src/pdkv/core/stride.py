"""Many decode steps at once, where nothing can be decided in between (design 1: quiet_steps / advance)."""

from __future__ import annotations

import numpy as np

from pdkv.core.blocks.hashing import HashFunction
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.ports import Int32Array
from pdkv.core.scheduler.request import Request, Status
from pdkv.core.scheduler.scheduler import Scheduler
from pdkv.units import cdiv


def quiet_steps(scheduler: Scheduler, manager: KVCacheManager, config: EngineConfig, limit: int) -> int:
    """How many steps only decode: no admission, no end by length, and free blocks for all the growth."""
    running = scheduler.running
    if not manager.plain or config.speculation is not None:  # groups that recycle blocks are stepped one by one
        return 0
    if not running or len(running) > config.max_num_batched_tokens:
        return 0
    if any(request.num_tokens - request.num_computed != 1 for request in running):
        return 0
    waiting = bool(scheduler.waiting or scheduler.holding)
    most = manager.max_request_tokens
    steps = min(limit, min(request.tokens_left(most) for request in running) - 1)
    if waiting and len(running) < config.max_num_seqs:
        steps = min(steps, _steps_blocked(running, scheduler.blocked_by, manager))
    if steps <= 0:
        return 0
    return _steps_with_room(running, manager, steps)


def _steps_blocked(running: list[Request], head: Request | None, manager: KVCacheManager) -> int:
    """How long ``head`` keeps not fitting: free blocks only get fewer, but a growing twin can lengthen its hit."""
    if head is None:
        return 0
    size, steps = manager.block_size, manager.max_model_len
    if head.status is Status.LOADED or not manager.pool.enable_caching:
        return steps
    for request in running:
        full = request.num_computed // size
        same = len(head.hashes) > full and head.extra_keys.alike(request.extra_keys)
        if same and (full == 0 or head.hashes[full - 1] == request.hashes[full - 1]):
            tail = request.tokens[full * size :]
            if np.array_equal(tail, head.tokens[full * size : request.num_tokens]):
                steps = min(steps, (full + 1) * size - request.num_computed - 1)
    return steps


def _steps_with_room(running: list[Request], manager: KVCacheManager, steps: int) -> int:
    computed = np.fromiter((request.num_computed for request in running), dtype=np.int64)
    held = np.fromiter((manager.num_blocks_of(request.request_id) for request in running), dtype=np.int64)
    low, high = 0, steps
    while low < high:
        middle = (low + high + 1) // 2
        demand = np.maximum(-(-(computed + middle) // manager.block_size) - held, 0).sum()
        low, high = (middle, high) if demand <= manager.pool.num_free else (low, middle - 1)
    return low


def advance(
    scheduler: Scheduler,
    manager: KVCacheManager,
    config: EngineConfig,
    hash_function: HashFunction,
    tokens: Int32Array,
    first_step: int,
) -> None:
    """Apply ``tokens`` int32[k, n]: block pops and registrations in the order (step, running order)."""
    running, steps = scheduler.running, len(tokens)
    assert tokens.shape == (steps, len(running)), "advance: one token per step and running request"
    growth: list[tuple[int, int]] = []  # (step, request index) of each new block
    registrations: list[tuple[int, int, int]] = []  # (step, request index, tokens written by then)
    for index, request in enumerate(running):
        column = tokens[:, index]
        stops = request.new.stop_token_ids
        assert not stops or not np.isin(column, np.fromiter(stops, dtype=np.int32)).any(), "advance: a stop token"
        start, held, size = request.num_computed, manager.num_blocks_of(request.request_id), manager.block_size
        new_blocks = range(held, cdiv(start + steps, size))
        growth += [(max(block * size - start, 0), index) for block in new_blocks]
        filled = range(start // size + 1, (start + steps) // size + 1)
        registrations += [(block * size - start - 1, index, block * size) for block in filled]
        request.append(column)
        request.num_computed += steps
        request.last_step = first_step + steps - 1
        if manager.pool.enable_caching:
            request.extend_hashes(hash_function)
    growth.sort()
    manager.grow_all(running, [index for _, index in growth])
    for _, index, written in sorted(registrations):
        manager.cache_blocks(running[index], written)
