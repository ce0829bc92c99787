"""Random lives of blocks from a seed: what `make proof` runs 10,000 times, and the test suite a few hundred times.

Each life is one manager of a random model with a random pool, and random operations on it: arrivals, lookups and
allocations with their computation, loads, samples, ends into every account, preemptions, resets. A device judges
content (`GroupCache`), and after every operation the invariants are recounted here from the owners' tables alone.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, it finds its neighbours too
from tests.core.group_cache import GroupCache, one_row
from tests.core.helpers import prefix_tags

from pdkv.core.blocks.groups import (
    ChunkedGroup,
    Drafting,
    FullGroup,
    Group,
    ReferenceWindowGroup,
    RingGroup,
    StateGroup,
    WindowGroup,
)
from pdkv.core.blocks.hashing import raw_sha256
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.ledger import Account
from pdkv.core.ports import NewRequest
from pdkv.core.scheduler.admission import fit_chunk
from pdkv.core.scheduler.request import Request, Status
from pdkv.core.speculation import Speculation

LENGTH = 24
OPERATIONS = 12
FULL, STATE = FullGroup(block_size=2), StateGroup(block_size=2, aligned=True)
#: groups, hash unit, prefix caching
MODELS: list[tuple[tuple[Group, ...], int | None, bool]] = [
    ((FULL,), None, True),
    ((FullGroup(block_size=4),), None, True),
    ((FULL,), None, False),
    ((FULL, FULL), None, True),
    ((FULL, WindowGroup(block_size=2, window=4)), None, True),
    ((WindowGroup(block_size=2, window=3), WindowGroup(block_size=4, window=6)), None, True),
    ((FULL, ChunkedGroup(block_size=2, chunk=6)), None, True),
    ((FULL, STATE), None, True),
    ((FULL, WindowGroup(block_size=2, window=5), STATE), None, True),
    ((FullGroup(block_size=4), StateGroup(block_size=4, aligned=True)), 1, True),
    ((FULL, RingGroup(block_size=2)), None, True),
    ((FULL, ReferenceWindowGroup(block_size=2, window=3)), None, False),
]
KEPT = (Account.RETAINED, Account.DEFERRED, Account.QUARANTINE)


class BlockLives:
    """One manager and its owners. ``run`` returns a digest of everything that happened."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        groups, unit, caching = rng.choice(MODELS)
        thinned = any(isinstance(group, WindowGroup | StateGroup) for group in groups)
        drafts = rng.random() < 0.3 and caching and not any(isinstance(group, ChunkedGroup) for group in groups)
        self.config = EngineConfig(
            num_blocks=rng.randrange(6, 28), block_size=2, max_model_len=LENGTH, groups=groups, prefix_match_unit=unit,
            enable_prefix_caching=caching, max_num_seqs=1, max_num_batched_tokens=16,
            prefix_cache_retention_interval=rng.choice([None, 0, 8]) if thinned else 0,
            speculation=Speculation(num_tokens=2, lookahead_tokens=2, drop_groups=()) if drafts else None,
        )  # fmt: skip
        self.manager = KVCacheManager(
            num_blocks=self.config.num_blocks, groups=groups, sizes=self.config.sizes, max_model_len=LENGTH,
            watermark=rng.choice([0.0, 0.0, 0.2]), enable_caching=caching, max_in_flight_tokens=16,
            retention_interval=self.config.prefix_cache_retention_interval,
            drafting=self.config.drafting if drafts else Drafting(), step_tokens=self.config.step_tokens,
        )  # fmt: skip
        self.cache = GroupCache(self.config.num_blocks, groups)
        self.live: dict[str, Request] = {}
        self.kept: list[str] = []
        self.count = 0
        self.stem = [rng.randrange(2) for _ in range(14)]
        self.trace = hashlib.sha256()

    def run(self, operations: int = OPERATIONS) -> str:
        """That many random operations; hexadecimal digest of the tables and the free queue after each."""
        choices = (self.compute, self.compute, self.compute, self.sample, self.end, self.let_go, self.preempt)
        self.arrive()
        for _ in range(operations):
            roll = self.rng.random()
            if roll < 0.2 or not self.live:
                self.arrive()
            elif roll < 0.24:
                self.reset()
            elif roll < 0.34:
                self.load()
            else:
                self.rng.choice(choices)()
            self.check()
        self.manager.check()
        return self.trace.hexdigest()

    # -------------------------------------------------------------------------------------------------- operations

    def pick(self, *statuses: Status) -> Request | None:
        """A live request in one of these states."""
        found = [request for request in self.live.values() if request.status in statuses]
        return self.rng.choice(found) if found else None

    def arrive(self) -> None:
        """A prompt that begins like most others."""
        self.count += 1
        tail = [self.rng.randrange(2) for _ in range(self.rng.choice([0, 0, 1, 3, 6]))]
        tokens = [*self.stem[: self.rng.randrange(1, 15)], *tail]
        new = NewRequest(request_id=f"r{self.count}", prompt=np.asarray(tokens, dtype=np.int32), max_tokens=99)
        request = Request(new, arrival_ns=0, sequence=self.count, hash_tokens=self.manager.sizes.hash_tokens)
        self.extend(request)
        self.live[request.request_id] = request
        self.cache.add(new)

    def extend(self, request: Request) -> None:
        """Hash what is new."""
        if self.manager.pool.enable_caching:
            request.extend_hashes(raw_sha256)

    def compute(self) -> None:
        """One step of one request, from lookup to the device."""
        request, manager = self.pick(Status.WAITING, Status.PREEMPTED, Status.RUNNING), self.manager
        if request is None:
            return
        fresh = request.status is not Status.RUNNING
        hit = manager.lookup(request) if fresh else None
        if hit is not None:
            self.judge_hit(request, hit.tokens, [blocks.tolist() for blocks in hit.blocks])
            request.shared_boundary = hit.boundary
        start = request.num_computed + (hit.tokens if hit else 0)
        want = min(self.rng.randrange(1, 17), request.num_tokens - start)
        tokens, _ = fit_chunk(request, want, self.config, start=start)
        if tokens <= 0:
            return
        before, held = manager.pool.num_free, manager.num_blocks_of(request.request_id)
        got = manager.allocate_slots(
            request, tokens, hit=hit, lookahead_tokens=self.config.lookahead_tokens,
            full_sequence_must_fit=self.rng.random() < 0.5, reserved_blocks=self.rng.choice([0, 0, 2]),
            has_scheduled=self.rng.random() < 0.5,
        )  # fmt: skip
        if got is None:  # at most what no token looks at any more has come back
            dropped = held - manager.num_blocks_of(request.request_id)
            assert 0 <= manager.pool.num_free - before <= dropped, "a failed allocation changed something"
            return
        self.forward(request, start, tokens)
        if fresh:
            request.move_to(Status.RUNNING)

    def forward(self, request: Request, start: int, tokens: int) -> None:
        """The device computes: it refuses to read what is not the request's own."""
        copies, owners = self.manager.take_copies()
        tables = tuple(self.tables(request.request_id))
        owners_of = self.claims()
        for kind, table in zip(self.manager.kinds, tables, strict=True):
            if not isinstance(kind.spec, StateGroup | RingGroup):
                written = table[0, start // kind.block_size : -(-(start + tokens) // kind.block_size)].tolist()
                assert all(owners_of[block] == 1 for block in written), "a block is written that others hold"
        request.num_computed = start + tokens
        self.cache.run(one_row(request, start, tokens, tables, copies))
        for owner in owners:
            self.manager.release(owner)
        self.manager.new_step()

    def tables(self, key: str) -> list[np.ndarray]:
        """int32[1, n] for each group."""
        return [self.manager.blocks_of(key, kind.group).reshape(1, -1).copy() for kind in self.manager.kinds]

    def judge_hit(self, request: Request, tokens: int, tables: list[list[int]]) -> None:
        """What is hit holds the request's own prefix, as far as its group looks back."""
        assert tokens < request.num_tokens
        tags = prefix_tags(request.tokens.tolist())
        for kind, table in zip(self.manager.kinds, tables, strict=True):
            for entry, block in enumerate(table):
                end = min((entry + 1) * kind.block_size, tokens)
                if block and isinstance(kind.spec, StateGroup):
                    assert self.cache.states[block] == tags[end - 1], "a hit on a state that was overwritten"
                elif block:
                    span = range(entry * kind.block_size, end)
                    seen = [int(self.cache.slots[block, at % kind.block_size]) for at in span]
                    assert seen == [tags[at] for at in span], "a hit on content that was overwritten"

    def load(self) -> None:
        """A peer supplies the rest of a prompt but its last token: blocks first, content later, or never."""
        request, manager = self.pick(Status.WAITING), self.manager
        if request is None or request.num_tokens < 2:
            return
        hit = manager.lookup(request)
        hit = manager.shorten(hit, hit.tokens - hit.tokens % manager.sizes.scheduler_tokens)
        total = request.num_tokens - 1
        if total <= hit.tokens:
            return
        local, key = hit.tokens, request.request_id
        request.shared_boundary = hit.boundary
        external = total - local
        if manager.allocate_slots(request, 0, hit=hit, external_tokens=external, delay_cache=True) is None:
            return
        request.num_computed = total
        request.move_to(Status.LOADING)
        self.check()
        if self.rng.random() < 0.25:  # given up: the transfer may still write there
            manager.release_hits(key, local)
            manager.rename(key, f"read:{key}")
            manager.move(f"read:{key}", Account.QUARANTINE, "given up")
            self.kept.append(f"read:{key}")
            del self.live[key]
            return
        self.receive(request, local, total)
        request.move_to(Status.LOADED)
        manager.move(key, Account.LOADED_WAITING, "loaded")
        self.check()
        manager.cache_blocks(request, total)
        manager.move(key, Account.RUNNING, "running")
        request.move_to(Status.RUNNING)
        manager.new_step()

    def receive(self, request: Request, local: int, total: int) -> None:
        """The peer's content arrives in the blocks that it was allocated."""
        tags = prefix_tags(request.tokens.tolist())
        spans = self.manager.peer_spans(total, local)
        for kind, (first, stop) in zip(self.manager.kinds, spans, strict=True):
            table, size = self.manager.blocks_of(request.request_id, kind.group), kind.block_size
            for entry in range(first, stop):
                if isinstance(kind.spec, StateGroup):
                    self.cache.states[table[entry]] = tags[total - 1]
                elif not isinstance(kind.spec, RingGroup):
                    for at in range(entry * size, min((entry + 1) * size, total)):
                        self.cache.slots[table[entry], at % size] = tags[at]

    def sample(self) -> None:
        """One more token of a request that has computed all it has."""
        request = self.pick(Status.RUNNING)
        if request is not None and request.num_computed == request.num_tokens < LENGTH:
            token = self.rng.randrange(2)
            request.append(np.asarray([token], dtype=np.int32))
            self.cache.known[request.request_id].append(token)
            self.extend(request)

    def end(self) -> None:
        """Over: the blocks go at once, or stay under another owner for a while."""
        request = self.rng.choice(list(self.live.values()))
        key, manager = request.request_id, self.manager
        del self.live[key]
        if self.rng.random() < 0.5 or not manager.num_blocks_of(key):
            self.release(key)
            return
        account = self.rng.choice(KEPT)
        if account is Account.RETAINED:
            manager.keep_for_peer(key, request.num_computed)
        manager.rename(key, f"kept:{key}")
        manager.move(f"kept:{key}", account, "kept")
        self.kept.append(f"kept:{key}")

    def let_go(self) -> None:
        """The fence has passed, the lease has ended."""
        if self.kept:
            self.release(self.kept.pop(0))

    def preempt(self) -> None:
        """The request loses its blocks and its progress."""
        request = self.pick(Status.RUNNING)
        if request is not None:
            self.release(request.request_id)
            request.move_to(Status.PREEMPTED)
            request.num_computed = 0

    def release(self, key: str) -> None:
        """All blocks of one owner go: without hash to the head in the given order, hashed ones to the tail."""
        pool = self.manager.pool
        queue = pool.free_order().tolist()
        others = self.claims(but=key)
        given = [[block for block in table[0].tolist()[::-1] if block] for table in self.tables(key)]
        hashed = set(np.flatnonzero(pool.ledger.hashed(np.arange(pool.num_blocks, dtype=np.int32))).tolist())
        for blocks in given:
            idle = [block for block in blocks if not others[block]]
            queue = [b for b in idle if b not in hashed] + queue + [b for b in idle if b in hashed]
        assert self.manager.release(key) == sum(len(blocks) for blocks in given)
        assert pool.free_order().tolist() == queue, "freed blocks stand elsewhere in the queue"

    def reset(self) -> None:
        """Works exactly when nobody holds anything."""
        idle = not self.claims()
        assert self.manager.pool.reset_prefix_cache() == idle

    # -------------------------------------------------------------------------------------------------- invariants

    def claims(self, *, but: str = "") -> Counter[int]:
        """How many owners each block has (``but`` one of them), from the tables alone."""
        claims: Counter[int] = Counter()
        for key in {*self.live, *self.kept} - {but}:
            for table in self.tables(key):
                claims.update(block for block in table[0].tolist() if block)
        return claims

    def check(self) -> None:
        """Accounts, sharing and the free queue, recounted; and one more entry in the trace."""
        pool = self.manager.pool
        ledger, everything = pool.ledger, np.arange(pool.num_blocks, dtype=np.int32)
        hashed, claims = ledger.hashed(everything), self.claims()
        shared = [block for block, owners in claims.items() if owners > 1]
        assert hashed[shared].all(), "a block in two tables that no hash explains"
        order = pool.free_order()
        assert sorted([*claims, *order.tolist()]) == everything[1:].tolist(), "a block is lost, or free and held"
        counts = Counter(ledger.account_of(block) for block in everything.tolist())
        assert {account: counts[account] for account in Account} == {a: int(ledger.counts[a]) for a in Account}
        assert sum(int(count) for count in ledger.counts) == pool.num_blocks
        for block in order.tolist():
            assert ledger.account_of(block) is (Account.CACHED if hashed[block] else Account.FREE)
        assert not any(ledger.account_of(block) in (Account.FREE, Account.CACHED) for block in claims)
        self.trace.update(order.tobytes() + hashed.tobytes())


def main(sequences: int, first_seed: int) -> int:
    """Run them; one line for each that fails. Exit status."""
    failed = 0
    for seed in range(first_seed, first_seed + sequences):
        try:
            BlockLives(seed).run()
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: {' '.join(str(error).split()) or 'assertion failed'}", flush=True)
    print(f"{sequences - failed} sequences hold, {failed} do not (seeds {first_seed} to {first_seed + sequences - 1})")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*(int(value) for value in sys.argv[1:3])))
