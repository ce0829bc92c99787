"""Random lives of blocks in a manager of several groups: what a request needs is its own, and nothing is lost.

Every group's content is simulated: a block holds what its last owner computed into it. A hit must hold what its hashes
say, a token's window must be there when it is computed, and all accounts must add up after every rule.
"""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.group_cache import GroupCache, one_row

from pdkv.core.blocks.groups import ChunkedGroup, FullGroup, Group, StateGroup, WindowGroup, granularity
from pdkv.core.blocks.hashing import raw_sha256
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.ledger import Account
from pdkv.core.ports import NewRequest
from pdkv.core.scheduler.admission import align_chunk
from pdkv.core.scheduler.request import Request, Status

FULL, STATE = FullGroup(block_size=2), StateGroup(block_size=2, aligned=True)
MODELS: list[tuple[tuple[Group, ...], int | None]] = [
    ((FULL, WindowGroup(block_size=2, window=4)), None),
    ((WindowGroup(block_size=2, window=3), WindowGroup(block_size=4, window=6)), None),
    ((FULL, ChunkedGroup(block_size=2, chunk=6)), None),
    ((FULL, STATE, STATE), None),
    ((FULL, WindowGroup(block_size=2, window=5), STATE), None),
    ((FullGroup(block_size=4), StateGroup(block_size=4, aligned=True)), 1),
]
LENGTH = 24


class GroupsMachine(RuleBasedStateMachine):
    """``cache`` is the device: it refuses every read of content that is not the reader's own."""

    @initialize(
        model=st.sampled_from(MODELS), num_blocks=st.integers(8, 30), caching=st.booleans(),
        retention=st.sampled_from([None, 0, 8]),
    )  # fmt: skip
    def start(
        self, model: tuple[tuple[Group, ...], int | None], num_blocks: int, caching: bool, retention: int | None
    ) -> None:
        groups, unit = model
        if not any(isinstance(group, WindowGroup | StateGroup) for group in groups):
            retention = 0
        self.config = EngineConfig(
            num_blocks=num_blocks, block_size=2, max_model_len=LENGTH, groups=groups, prefix_match_unit=unit,
            enable_prefix_caching=caching, prefix_cache_retention_interval=retention, max_num_seqs=1,
            max_num_batched_tokens=16,
        )  # fmt: skip
        self.manager = KVCacheManager(
            num_blocks=num_blocks,
            groups=groups,
            sizes=granularity(groups, hash_tokens=unit, enable_caching=caching),
            max_model_len=LENGTH,
            enable_caching=caching,
            max_in_flight_tokens=16,
            retention_interval=retention,
        )
        self.cache = GroupCache(num_blocks, groups)
        self.live: dict[str, Request] = {}
        self.kept: list[str] = []
        self.count = 0

    def pick(self, seed: int) -> Request:
        return self.live[sorted(self.live)[seed % len(self.live)]]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def arrive(self, tokens: list[int]) -> None:
        self.count += 1
        new = NewRequest(request_id=f"r{self.count}", prompt=np.asarray(tokens, dtype=np.int32), max_tokens=99)
        request = Request(new, arrival_ns=0, sequence=self.count, hash_tokens=self.manager.sizes.hash_tokens)
        if self.manager.pool.enable_caching:
            request.extend_hashes(raw_sha256)
        self.live[request.request_id] = request
        self.cache.add(new)

    @precondition(lambda self: self.live)
    @rule(seed=st.integers(0, 99), want=st.integers(1, 16), gate=st.booleans())
    def compute(self, seed: int, want: int, gate: bool) -> None:
        """One step of one request, from lookup to the device."""
        request, manager = self.pick(seed), self.manager
        fresh = request.status is not Status.RUNNING
        hit = manager.lookup(request) if fresh else None
        start = request.num_computed + (hit.tokens if hit else 0)
        if fresh and hit:
            request.shared_boundary = hit.boundary
        tokens = align_chunk(request, min(want, request.num_tokens - start), self.config, start=start)
        if tokens <= 0:
            return
        before, free = manager.num_blocks_of(request.request_id), manager.pool.num_free
        got = manager.allocate_slots(request, tokens, hit=hit, full_sequence_must_fit=gate)
        if got is None:
            dropped = before - manager.num_blocks_of(request.request_id)
            assert 0 <= manager.pool.num_free - free <= dropped
            return
        copies, owners = manager.take_copies()
        tables = tuple(
            manager.blocks_of(request.request_id, group).reshape(1, -1).copy() for group in range(len(manager.kinds))
        )
        request.num_computed = start + tokens
        self.cache.run(one_row(request, start, tokens, tables, copies))
        for owner in owners:
            manager.release(owner)
        manager.new_step()
        if fresh:
            request.move_to(Status.RUNNING)

    @precondition(lambda self: self.live)
    @rule(seed=st.integers(0, 99), token=st.integers(0, 1))
    def sample(self, seed: int, token: int) -> None:
        request = self.pick(seed)
        if request.num_computed == request.num_tokens < LENGTH:
            request.append(np.asarray([token], dtype=np.int32))
            self.cache.known[request.request_id].append(token)
            if self.manager.pool.enable_caching:
                request.extend_hashes(raw_sha256)

    @precondition(lambda self: self.live)
    @rule(seed=st.integers(0, 99), account=st.sampled_from([None, Account.DEFERRED, Account.RETAINED]))
    def end(self, seed: int, account: Account | None) -> None:
        """Over: the blocks go at once, or stay under another owner for a while."""
        key = self.pick(seed).request_id
        del self.live[key]
        if account is None or not self.manager.num_blocks_of(key):
            self.manager.release(key)
            return
        self.manager.rename(key, f"kept:{key}")
        self.manager.move(f"kept:{key}", account, "kept")
        self.kept.append(f"kept:{key}")

    @precondition(lambda self: self.kept)
    @rule(joined=st.booleans())
    def let_go(self, joined: bool) -> None:
        key = self.kept.pop(0)
        held = self.manager.num_blocks_of(key)
        assert self.manager.release(key, joined=joined) == held

    @precondition(lambda self: self.live)
    @rule(seed=st.integers(0, 99))
    def preempt(self, seed: int) -> None:
        request = self.pick(seed)
        if request.status is Status.RUNNING:
            self.manager.release(request.request_id)
            request.move_to(Status.PREEMPTED)
            request.num_computed = 0

    @rule()
    def reset(self) -> None:
        idle = self.manager.pool.num_free == self.manager.pool.num_blocks - 1
        assert self.manager.pool.reset_prefix_cache() == idle

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, pool = self.manager, self.manager.pool
        manager.check()
        assert sum(pool.ledger.as_dict().values()) == pool.num_blocks
        owners = [*self.live, *self.kept]
        held = {
            block
            for key in owners
            for group in range(len(manager.kinds))
            for block in manager.blocks_of(key, group).tolist()
        } - {0}
        assert pool.num_free == pool.num_blocks - 1 - len(held), "a block is lost, or held by nobody"


GroupsMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestGroups = GroupsMachine.TestCase
