"""pdkv's side of `benchmarks/core.py`: each measurement returns CPU seconds of this thread for stated work."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from core_work import (
    BLOCK,
    CHURN_BLOCKS,
    CHURN_OUTPUT,
    CHURN_PROMPT,
    CONTEXT,
    DECODERS,
    MILLION,
    WINDOW,
    Stopwatch,
    churn,
    random_tokens,
)

from pdkv.core.blocks.groups import FullGroup, Group, WindowGroup
from pdkv.core.blocks.hashing import HashChain, HashFunction, extend_hashes, raw_hash, raw_sha256
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.blocks.vllm_hashing import vllm_hash
from pdkv.core.config import EngineConfig
from pdkv.core.engine import Engine, Identity
from pdkv.core.ports import NewRequest, Outputs
from pdkv.core.scheduler.request import Request, Status
from pdkv.core.scheduler.running import RunningSet

_IDENTITY = Identity(engine_id="benchmark", nonce=1, secret=b"benchmark")


def make_engine(num_blocks: int, *, groups: tuple[Group, ...] = (), **more: Any) -> Engine:
    """An engine whose pool and limits are large enough for the measurement."""
    config = EngineConfig(
        num_blocks=num_blocks, block_size=BLOCK, max_model_len=MILLION + BLOCK, max_num_seqs=DECODERS,
        max_num_batched_tokens=more.pop("max_num_batched_tokens", 8192), groups=groups, **more,
    )  # fmt: skip
    return Engine(config, _IDENTITY, np.zeros((64, 2), dtype=np.uint64))


class Side:
    """The measurements. What costs much to set up is kept between the rounds."""

    def __init__(self) -> None:
        self._sequence = 0
        self._kept: dict[str, Any] = {}

    def _keep(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def _request(self, tokens: np.ndarray, output: np.ndarray | None = None) -> Request:
        """A request with its hashes; ``output`` is what it will have sampled, known and hashed beforehand."""
        self._sequence += 1
        new = NewRequest(request_id=f"r{self._sequence}", prompt=tokens, max_tokens=MILLION)
        request = Request(new, arrival_ns=0, sequence=self._sequence, hash_tokens=BLOCK)
        if output is not None:
            request.append(output)
        request.extend_hashes(raw_sha256)
        return request

    # ------------------------------------------------------------------------------------------------------ hashing

    def hashes(self, algorithm: str) -> tuple[float, str]:
        """Seconds for the hashes of a 1M-token prompt, and the last digest."""
        import xxhash

        functions: dict[str, HashFunction] = {
            "raw": raw_sha256,
            "raw_xxh3": raw_hash(xxhash.xxh3_128_digest, bytes(16)),
        }
        function = functions.get(algorithm) or vllm_hash(
            algorithm, python_hash_seed="0", xxh3_128=xxhash.xxh3_128_digest
        )
        tokens, found = self._keep("million", lambda: random_tokens(MILLION, 1)), HashChain()
        with Stopwatch() as watch:
            extend_hashes(found, tokens, BLOCK, function)
        return watch.seconds, found[-1].hex()

    # -------------------------------------------------------------------------------------------- one huge request

    def _huge(self) -> tuple[KVCacheManager, np.ndarray]:
        manager = make_engine(MILLION // BLOCK + 64).manager
        return manager, self._keep("million", lambda: random_tokens(MILLION, 1))

    def alloc_free(self) -> float:
        """Seconds to allocate 62,500 blocks for a prompt whose hashes are ready, and to free them."""
        manager, tokens = self._huge()
        request = self._request(tokens)
        with Stopwatch() as watch:
            assert manager.allocate_slots(request, MILLION) is not None
            manager.release(request.request_id)
        return watch.seconds

    def lookup(self) -> float:
        """Seconds for a full-hit lookup of 1M tokens."""

        def make() -> tuple[KVCacheManager, Request]:
            manager, tokens = self._huge()
            manager.allocate_slots(self._request(tokens), MILLION)
            return manager, self._request(tokens)

        manager, request = self._keep("lookup", make)
        with Stopwatch() as watch:
            hit = manager.lookup(request)
        assert hit.tokens == MILLION - BLOCK
        return watch.seconds

    # ----------------------------------------------------------------------------------------------- steady decode

    def decode(self, steps: int, *, hybrid: bool = False) -> float:
        """Seconds for the blocks of ``steps`` decode steps of 256 requests at 4k context."""
        groups = (FullGroup(block_size=BLOCK), WindowGroup(block_size=BLOCK, window=WINDOW)) if hybrid else ()
        blocks = DECODERS * (CONTEXT + steps + BLOCK) // BLOCK * (2 if hybrid else 1) + 64
        manager = make_engine(blocks, groups=groups).manager
        output = random_tokens(steps + 1, 9)
        requests = [self._request(random_tokens(CONTEXT, 100 + i), output) for i in range(DECODERS)]
        running = RunningSet(manager)
        for request in requests:
            assert manager.allocate_slots(request, CONTEXT) is not None
            request.num_computed = CONTEXT
            request.move_to(Status.RUNNING)
            running.append(request)
        computed = running.counters.num_computed
        with Stopwatch() as watch:
            for _ in range(steps):
                assert manager.grow_by_one(running) == DECODERS
                computed[running.columns] += 1
        return watch.seconds

    # --------------------------------------------------------------------------------------------- scheduler steps

    def _decoding(self, steps: int) -> Engine:
        """256 requests at 4k context, prefilled, that will not end within ``steps``."""
        engine = make_engine(DECODERS * (CONTEXT + steps + 64) // BLOCK, max_num_batched_tokens=DECODERS * CONTEXT)
        arrivals = [
            NewRequest(request_id=f"d{i}", prompt=random_tokens(CONTEXT, 100 + i), max_tokens=steps + 64)
            for i in range(DECODERS)
        ]
        plan = engine.schedule(0, arrivals)
        engine.complete(plan.step_id, Outputs(tokens=np.ones(DECODERS, dtype=np.int32)), 0)
        assert len(engine.scheduler.running) == DECODERS
        return engine

    def scheduler_step(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` schedule and complete, 256 running, one token each."""
        engine, seconds = self._decoding(steps), []
        sampled = random_tokens(steps * DECODERS, 11).reshape(steps, DECODERS)
        for step in range(steps):
            outputs = Outputs(tokens=sampled[step])
            with Stopwatch() as watch:
                plan = engine.schedule(step)
                engine.complete(plan.step_id, outputs, step)
            seconds.append(watch.seconds)
        return seconds

    def stride(self, steps: int) -> tuple[float, float]:
        """Seconds of ``steps`` single steps and of one `advance` over as many; the ledgers must agree in the end."""
        single, strided = self._decoding(steps), self._decoding(steps)
        tokens = random_tokens(steps * DECODERS, 12).reshape(steps, DECODERS)
        with Stopwatch() as one_by_one:
            for step in range(steps):
                plan = single.schedule(step)
                single.complete(plan.step_id, Outputs(tokens=tokens[step]), step)
        with Stopwatch() as at_once:
            assert strided.quiet_steps(steps) == steps
            strided.advance(tokens, steps)
        assert single.memory().accounts == strided.memory().accounts
        pools = single.manager.pool, strided.manager.pool
        assert np.array_equal(pools[0].free_order(), pools[1].free_order())
        return one_by_one.seconds, at_once.seconds

    # --------------------------------------------------------------------------------------------------------- churn

    def churn(self, count: int) -> float:
        """Seconds in the manager for ``count`` requests of 2k prompt and 200 output in 20,000 blocks."""
        return churn(Churner(make_engine(CHURN_BLOCKS).manager, self._request), count)

    # ------------------------------------------------------------------------------------------------ a million tokens

    def million(self) -> dict[str, float]:
        """One request of 62,500 blocks: admitted, grown by single tokens, hit by a second, evicted, freed."""
        times, _ = self._million_run()
        with _memory() as held:  # apart: tracing memory takes time
            _, manager = self._million_run()
            state_bytes = held()
        assert manager.pool.num_free == manager.pool.num_blocks - 1
        return times | {"state_bytes_per_block": state_bytes / (MILLION // BLOCK)}

    def _million_run(self) -> tuple[dict[str, float], KVCacheManager]:
        manager, last = make_engine(MILLION // BLOCK + 64).manager, 10_000
        tokens = self._keep("million", lambda: random_tokens(MILLION, 1))
        first = self._request(tokens)
        with Stopwatch() as admit:
            assert manager.allocate_slots(first, MILLION - last, full_sequence_must_fit=True) is not None
        first.num_computed = MILLION - last
        first.move_to(Status.RUNNING)
        with Stopwatch() as grow:
            for _ in range(last):
                manager.allocate_slots(first, 1)
                first.num_computed += 1
        manager.release(first.request_id)
        second = self._request(tokens)
        with Stopwatch() as hit_again:
            hit = manager.lookup(second)
            assert manager.allocate_slots(second, MILLION - hit.tokens, hit=hit) is not None
        with Stopwatch() as free:
            manager.release(second.request_id)
        other = self._request(random_tokens(MILLION, 2))
        with Stopwatch() as evict:
            assert manager.allocate_slots(other, MILLION) is not None
        manager.release(other.request_id)
        times = {
            "admit_ms": admit.seconds * 1e3, "grow_us_per_token": grow.seconds / last * 1e6,
            "hit_ms": hit_again.seconds * 1e3, "free_ms": free.seconds * 1e3,
            "evict_and_allocate_ms": evict.seconds * 1e3,
        }  # fmt: skip
        return times, manager


class Churner:
    """`core_work.Churner` over `KVCacheManager`."""

    def __init__(self, manager: KVCacheManager, request: Callable[[np.ndarray], Request]) -> None:
        self.arrive = request
        self._manager = manager
        self._running = RunningSet(manager)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def admit(self, request: Request) -> bool:
        hit = self._manager.lookup(request)
        tokens = CHURN_PROMPT - hit.tokens
        new = self._manager.allocate_slots(request, tokens, hit=hit, full_sequence_must_fit=True, has_scheduled=True)
        return new is not None

    def know_output(self, request: Request, tokens: np.ndarray) -> None:
        request.num_computed = CHURN_PROMPT
        request.move_to(Status.RUNNING)
        request.append(tokens)
        request.extend_hashes(raw_sha256)

    def start(self, request: Request) -> None:
        self._running.append(request)

    def step(self) -> int:
        running, at, before = self._running, 0, len(self._running)
        left = before
        while at < left:
            at += self._manager.grow_by_one(running, at, left - at)
            if at < left:
                self._leave(running[-1])
                left -= 1
        computed = running.counters.num_computed[running.columns] + 1
        running.counters.num_computed[running.columns] = computed
        ended = (computed == CHURN_PROMPT + CHURN_OUTPUT).nonzero()[0]
        for request in running.at(ended):
            self._leave(request)
        return before - left + len(ended)

    def _leave(self, request: Request) -> None:
        self._manager.release(request.request_id)
        self._running.remove(request)


@contextmanager
def _memory() -> Iterator[Callable[[], int]]:
    """Bytes that Python and numpy have allocated since the start of the block and still hold."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]

    def held() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    try:
        yield held
    finally:
        tracemalloc.stop()
