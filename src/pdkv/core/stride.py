"""Many decode steps at once, where nothing can be decided in between (design 1: quiet_steps / advance)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdkv.core.blocks.hashing import HashFunction
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.ports import Int32Array
from pdkv.core.scheduler.limits import PauseState
from pdkv.core.scheduler.request import Request, Status
from pdkv.core.scheduler.scheduler import Scheduler


def quiet_steps(scheduler: Scheduler, manager: KVCacheManager, config: EngineConfig, limit: int) -> int:
    """How many steps only decode: no admission, no end by length, and free blocks for all the growth."""
    running = scheduler.running
    count = len(running)
    if (
        config.speculation is not None
        or scheduler.pause_state is PauseState.PAUSED_ALL
        or not 0 < count <= config.max_scheduled_tokens
        or running.decoding(0, count) < count
    ):
        return 0
    if scheduler.pace.active and (scheduler.waiting or scheduler.holding or any(one.prefilling for one in running)):
        return 0
    steps = min(limit, running.fewest_tokens_left() - 1)
    if (scheduler.holding or (scheduler.waiting and scheduler.admits_new)) and count < config.active_limit:
        steps = min(steps, _steps_blocked(running, scheduler.blocked_by, manager))
    return manager.growth.steps_with_room(running, steps) if steps > 0 else 0


def _steps_blocked(running: Sequence[Request], head: Request | None, manager: KVCacheManager) -> int:
    """How long ``head`` keeps not fitting: free blocks only get fewer, but a growing twin can lengthen its hit.

    (Groups that recycle blocks may give some back at any step.)
    """
    if head is None or not manager.plain:
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


def advance(
    scheduler: Scheduler,
    manager: KVCacheManager,
    hash_function: HashFunction,
    tokens: Int32Array,
    first_step: int,
) -> None:
    """Apply ``tokens`` int32[k, n]: block pops and registrations in the order (step, running order)."""
    running, steps = scheduler.running, len(tokens)
    assert tokens.shape == (steps, len(running)), "advance: one token per step and running request"
    for number, request in enumerate(running):
        stops = request.new.stop_token_ids
        own = tokens[:, number]
        assert not stops or not np.isin(own, np.fromiter(stops, dtype=np.int32)).any(), "advance: a stop token"
    running.append_steps(tokens)
    if manager.pool.enable_caching:
        for request in running:
            request.extend_hashes(hash_function)
    manager.grow_by(running, steps)
    scheduler.pace.skip(steps)
    running.counters.last_step[running.columns] = first_step + steps - 1
