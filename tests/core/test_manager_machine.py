"""Random lives of blocks in the manager: after every rule each block is in exactly one account and has its owners."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdkv.core.blocks.groups import FullGroup, granularity
from pdkv.core.blocks.hashing import raw_sha256
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.ledger import Account
from pdkv.core.ports import NewRequest
from pdkv.core.scheduler.request import Request, Status

BLOCK = 2
MOVES = [
    Account.RETAINED,
    Account.LOADED_WAITING,
    Account.RUNNING,
    Account.DEFERRED,
    Account.LOADING,
    Account.QUARANTINE,
]


class ManagerMachine(RuleBasedStateMachine):
    """``tables`` is what each owner must hold, kept by list operations only."""

    @initialize(num_blocks=st.integers(2, 14), watermark=st.sampled_from([0.0, 0.2]), caching=st.booleans())
    def start(self, num_blocks: int, watermark: float, caching: bool) -> None:
        groups = (FullGroup(block_size=BLOCK),)
        self.manager = KVCacheManager(
            num_blocks=num_blocks,
            groups=groups,
            sizes=granularity(groups, hash_tokens=None, enable_caching=caching),
            max_model_len=16,
            watermark=watermark,
            enable_caching=caching,
        )
        self.tables: dict[str, list[int]] = {}
        self.live: dict[str, Request] = {}
        self.content: dict[int, bytes] = {}
        self.count = 0

    def pick(self, pool: dict[str, object], seed: int) -> str:
        return sorted(pool)[seed % len(pool)]

    def owned(self, block: int) -> bool:
        return any(block in table for table in self.tables.values())

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def arrive(self, tokens: list[int]) -> None:
        self.count += 1
        new = NewRequest(request_id=f"r{self.count}", prompt=np.asarray(tokens, dtype=np.int32), max_tokens=99)
        request = Request(new, arrival_ns=0, sequence=self.count, hash_tokens=BLOCK)
        if self.manager.pool.enable_caching:
            request.extend_hashes(raw_sha256)
        self.live[request.request_id] = request

    @precondition(lambda self: self.live)
    @rule(
        seed=st.integers(0, 99), want=st.integers(1, 6), external=st.integers(0, 5), reserved=st.integers(0, 3),
        full=st.booleans(), running=st.booleans(),
    )  # fmt: skip
    def allocate(self, seed: int, want: int, external: int, reserved: int, full: bool, running: bool) -> None:
        key = self.pick(self.live, seed)
        request = self.live[key]
        manager, pool = self.manager, self.manager.pool
        fresh = request.status is not Status.RUNNING
        found = manager.lookup(request) if fresh else None
        hit = found.blocks[0] if found else np.empty(0, dtype=np.int32)
        for block, name in zip(hit.tolist(), request.hashes, strict=False):
            assert self.content[block] == name, "a hit on a block whose content is another"
        local = request.num_computed + len(hit) * BLOCK
        external = min(external, request.num_tokens - local) if request.status is Status.WAITING else 0
        new = 0 if external else min(want, request.num_tokens - local, manager.max_model_len - local)
        if new <= 0 and not external:
            return
        before, free = pool.free_order().tolist(), pool.num_free
        idle = sum(not self.owned(block) for block in hit.tolist())
        length = -(-(local + external + new) // BLOCK)
        watermark = manager.watermark_blocks if running and fresh else 0
        missing = length - len(self.tables.get(key, [])) - len(hit)
        fits = max(missing, 0) + idle + watermark <= free - reserved
        if full:
            whole = -(-request.num_tokens // BLOCK) - len(self.tables.get(key, [])) - len(hit)
            fits = fits and max(whole, 0) + idle + watermark <= free
        got = manager.allocate_slots(
            request, new, hit=found, external_tokens=external, delay_cache=bool(external),
            full_sequence_must_fit=full, reserved_blocks=reserved, has_scheduled=running,
        )  # fmt: skip
        assert (got is not None) == fits
        if got is None:
            assert pool.free_order().tolist() == before
            return
        queue = [block for block in before if block not in hit.tolist()]
        taken = queue[: max(missing, 0)]
        assert not any(self.owned(block) for block in taken), "a block handed out twice"
        assert got[0].tolist() == ([] if external else taken)
        self.tables[key] = [*self.tables.get(key, []), *hit.tolist(), *taken]
        request.num_computed = local + external + new
        if fresh:
            request.move_to(Status.LOADING if external else Status.RUNNING)
        if external:  # the load ends at once
            request.move_to(Status.LOADED)
            manager.move(key, Account.LOADED_WAITING, "loaded")
            manager.cache_blocks(request, request.num_computed)
            manager.move(key, Account.RUNNING, "running")
            request.move_to(Status.RUNNING)
        for block in taken:
            self.content.pop(block, None)
        if pool.enable_caching:
            for index in range(min(request.num_computed, request.num_tokens) // BLOCK):
                self.content[self.tables[key][index]] = request.hashes[index]

    @precondition(lambda self: self.live)
    @rule(seed=st.integers(0, 99), token=st.integers(0, 1))
    def sample(self, seed: int, token: int) -> None:
        request = self.live[self.pick(self.live, seed)]
        if request.num_computed == request.num_tokens < self.manager.max_model_len:
            request.append(np.asarray([token], dtype=np.int32))
            if self.manager.pool.enable_caching:
                request.extend_hashes(raw_sha256)

    def gave_back(self, blocks: list[int], before: list[int]) -> None:
        """Unhashed blocks go to the head, hashed ones to the tail, each in the given order."""
        idle = [block for block in blocks if not self.owned(block)]
        head = [block for block in idle if block not in self.content]
        tail = [block for block in idle if block in self.content]
        assert self.manager.pool.free_order().tolist() == [*head, *before, *tail]

    @precondition(lambda self: self.tables)
    @rule(seed=st.integers(0, 99))
    def release(self, seed: int) -> None:
        key, before = self.pick(self.tables, seed), self.manager.pool.free_order().tolist()
        table = [block for block in self.tables.pop(key) if block]
        assert self.manager.release(key) == len(table)
        self.live.pop(key, None)
        self.gave_back(table[::-1], before)

    @precondition(lambda self: any(key in self.live for key in self.tables))
    @rule(seed=st.integers(0, 99))
    def preempt(self, seed: int) -> None:
        key = self.pick({key: 0 for key in self.tables if key in self.live}, seed)
        before = self.manager.pool.free_order().tolist()
        table = self.tables.pop(key)
        self.manager.release(key)
        self.live[key].move_to(Status.PREEMPTED)
        self.live[key].num_computed = 0
        self.gave_back(table[::-1], before)

    @precondition(lambda self: any(key in self.live for key in self.tables))
    @rule(seed=st.integers(0, 99), account=st.sampled_from(MOVES))
    def outlive(self, seed: int, account: Account) -> None:
        """The request ends; its blocks go on under another key and account."""
        key = self.pick({key: 0 for key in self.tables if key in self.live}, seed)
        self.manager.rename(key, f"kept:{key}")
        self.manager.move(f"kept:{key}", account, "kept")
        self.tables[f"kept:{key}"] = self.tables.pop(key)
        del self.live[key]
        view = {holder.request_id: holder for holder in self.manager.holders()}
        assert view[key].account == account.name.lower()

    @precondition(lambda self: any(key not in self.live for key in self.tables))
    @rule(seed=st.integers(0, 99), keep=st.integers(0, 4), head=st.booleans())
    def shorten(self, seed: int, keep: int, head: bool) -> None:
        key = self.pick({key: 0 for key in self.tables if key not in self.live}, seed)
        before, table = self.manager.pool.free_order().tolist(), self.tables[key]
        if head:
            self.manager.release_hits(key, keep * BLOCK)
            gone, self.tables[key] = table[:keep], [0] * min(keep, len(table)) + table[keep:]
        else:
            kept = self.manager.keep_for_peer(key, keep * BLOCK)
            gone, self.tables[key] = table[keep:], table[:keep]
            assert kept == (tuple(table[:keep]),)
        self.gave_back([block for block in gone[::-1] if block], before)

    @precondition(lambda self: any(key in self.live for key in self.tables))
    @rule(seed=st.integers(0, 99), tokens=st.integers(0, 12))
    def forget(self, seed: int, tokens: int) -> None:
        key = self.pick({key: 0 for key in self.tables if key in self.live}, seed)
        request = self.live[key]
        tokens = min(tokens, request.num_computed)
        self.manager.forget_from(request, tokens)
        request.num_computed = tokens
        for block in self.tables[key][tokens // BLOCK :]:
            self.content.pop(block, None)

    @rule()
    def reset(self) -> None:
        idle = not any(self.tables.values())
        assert self.manager.pool.reset_prefix_cache() == idle
        if idle:
            self.content.clear()

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        pool = self.manager.pool
        for key, table in self.tables.items():
            assert self.manager.blocks_of(key).tolist() == table
        assert sum(pool.ledger.as_dict().values()) == pool.num_blocks
        held = {block for table in self.tables.values() for block in table} - {0}
        assert pool.num_free == pool.num_blocks - 1 - len(held)
        assert pool.usage == 1 - pool.num_free / (pool.num_blocks - 1)
        hashed = np.flatnonzero(pool.ledger.hashed(np.arange(pool.num_blocks)))
        assert set(hashed.tolist()) == set(self.content)
        assert pool.ledger.num_hashed == len(self.content)


ManagerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestManager = ManagerMachine.TestCase
