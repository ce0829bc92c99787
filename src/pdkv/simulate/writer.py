"""The WRITEs of one instance's mover in virtual time, and how the memory that they write to is fenced.

A world moves KV through shared memory or by NIXL. Shared memory is copied by P alone, slice by slice: a lock, a look at
the slot, the copy, the end of the lock, and P may be stopped in between (`runtime.transports.grant_locks`). NIXL looks
at nothing: what P's mover has begun it may write at any time, as long as it and D's mover of then live; over TCP, some
of it after P's mover has died (`Sockets`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdkv.core.ports import GrantsFenced, Plan, PostWrite, WriteEnded
from pdkv.simulate.weather import MS, PEER_DEATH_SEEN_NS
from pdkv.units import NS_PER_S

if TYPE_CHECKING:
    from pdkv.simulate.instance import Life

_BROKE = "the transfer broke"
_LOOK_NS = 20 * MS  # between two attempts at a slot's lock


@dataclass(slots=True, eq=False)
class Write:
    """One WRITE: whose memory it writes to, which lives of both movers have it (``None`` while it is queued).

    ``under_way`` are the (remote, local) units that have not arrived.
    """

    post: PostWrite
    posted_ns: int
    target: Life | None = None
    mover: int | None = None
    moved_bytes: int = 0
    ended: bool = False
    under_way: set[tuple[int, int]] = field(default_factory=set)


class Writer:
    """Every WRITE that one life of an instance has posted. Its mover is that of the READs."""

    def __init__(self, life: Life) -> None:
        self._life, self._world = life, life.world
        self._rng, self._weather = life.world.rng, life.world.weather
        self._writes: dict[int, Write] = {}

    def post(self, post: PostWrite) -> None:
        """Take a WRITE; it is begun a moment later."""
        write = self._writes[post.handle] = Write(post, self._world.time.now_ns)
        self._life.later(self._rng.randrange(0, 3 * MS), self._begin, write)

    def cancel(self, handle: int) -> None:
        """As that of READs: a hint. Unknown handles are ignored."""
        write = self._writes.get(handle)
        if write is not None and not write.ended and self._rng.random() < 0.5:
            self._life.later(self._rng.randrange(0, 200 * MS), self._stop, write)

    def fence(self) -> tuple[int, ...]:
        """The mover is killed: the handles that it had. It holds no lock any more."""
        fenced = [write for write in self._writes.values() if self._runs(write)]
        for write in fenced:
            write.ended = True
            self._world.sockets.keep(write, self._life.device)
            self._unlock(write)
        return tuple(write.post.handle for write in fenced)

    def peer_died(self, peer: Life) -> None:
        """What was being written to ``peer`` fails, a little later."""
        for write in self._writes.values():
            if write.target is peer and self._runs(write):
                delay_ns = self._rng.randrange(1, PEER_DEATH_SEEN_NS)
                self._life.later(delay_ns, self._report, write, "the peer died")

    # --------------------------------------------------------------------------------------------------- one WRITE

    def _begin(self, write: Write) -> None:
        if write.ended:
            return
        mover, post = self._life.mover, write.post
        waits_ns = mover.ready_ns - self._world.time.now_ns
        if waits_ns > 0:
            self._life.later(waits_ns, self._begin, write)
            return
        write.mover = mover.number
        target = write.target = self._world.life_of(post.consumer)
        if target is None:
            problem: str | None = "no handshake: nobody with that engine id is there"
        else:
            problem = _refusal(post, target, self._life)
        if problem is not None:
            self._life.later(self._rng.randrange(1, PEER_DEATH_SEEN_NS), self._report, write, problem)
            return
        rng = self._rng
        lasts_ns, _, hangs, fails = self._weather.fate(rng)
        for remote, local in zip(post.remote_blocks.tolist(), post.local_blocks.tolist(), strict=True):
            write.under_way.add((remote, local))
            if (hangs or fails) and rng.random() < 0.3:
                continue  # half done
            self._life.later(rng.randrange(0, 12_000 * MS if hangs else lasts_ns), self._slice, write, remote, local)
        if not hangs:
            self._life.later(lasts_ns + 2 * MS, self._over, write, fails)

    def _runs(self, write: Write) -> bool:
        return not write.ended and write.mover == self._life.mover.number

    def _slice(self, write: Write, remote: int, local: int) -> None:
        target, post = write.target, write.post
        assert target is not None
        if not self._runs(write) or not target.alive:
            return
        if not self._world.shared_memory:
            if target.fences.epoch == post.epoch:
                self._copy(write, remote, local)
            return
        words = tuple(int(word) for word in target.slots[post.grant.slot])
        if words != (post.grant.nonce, post.grant.grant_id):
            self._report(write, "the grant is over")
            return
        target.fences.locks.append((post.grant.slot, write, self._life))
        self._life.later(self._rng.randrange(1, MS), self._end_slice, write, remote, local)

    def _end_slice(self, write: Write, remote: int, local: int) -> None:
        """Held back while this instance is stopped: so long it has the lock."""
        if self._runs(write):
            self._copy(write, remote, local)
        self._unlock(write, once=True)

    def _copy(self, write: Write, remote: int, local: int) -> None:
        assert write.target is not None
        write.moved_bytes += write.target.device.copy(remote, self._life.device, local)
        write.under_way.discard((remote, local))

    def _unlock(self, write: Write, *, once: bool = False) -> None:
        if write.target is None:
            return
        locks = write.target.fences.locks
        for lock in [lock for lock in locks if lock[1] is write][: 1 if once else None]:
            locks.remove(lock)

    def _over(self, write: Write, fails: bool) -> None:
        target = write.target
        assert target is not None
        if not self._runs(write) or not target.alive:
            return  # `peer_died` reports
        if not self._world.shared_memory:
            if target.stopped_for_ns:  # it does not help the transport along
                self._life.later(target.stopped_for_ns + MS, self._over, write, fails)
                return
            fails = fails or target.fences.epoch != write.post.epoch
        self._report(write, _BROKE if fails else None)

    def _stop(self, write: Write) -> None:
        if not write.ended and (write.mover is None or self._runs(write)):
            self._report(write, "cancelled")

    def _report(self, write: Write, error: str | None) -> None:
        if write.ended or (write.mover is not None and not self._runs(write)):
            return
        if any(lock[1] is write for lock in (write.target.fences.locks if write.target else ())):
            self._life.later(MS, self._report, write, error)  # a slice of it is under way
            return
        write.ended = True
        if error == _BROKE:
            self._world.sockets.keep(write, self._life.device)
        seconds = (self._world.time.now_ns - write.posted_ns) / NS_PER_S
        ended = WriteEnded(
            handle=write.post.handle, moved_bytes=write.moved_bytes, seconds=seconds, error=error,
            cut_off=error == _BROKE,
        )  # fmt: skip
        self._life.deliver(ended)


def _refusal(post: PostWrite, target: Life, life: Life) -> str | None:
    """Why nothing may move: `runtime.moves` and `runtime.mover` ask the same."""
    grant, block_size = post.grant, target.engine.manager.paged_block_size
    if grant.nonce != target.engine.identity.nonce:
        return "the grant is of another life of this engine"
    if post.epoch != target.fences.epoch:
        return "the grant was given with a mover that is no more"
    if grant.block_size != block_size:
        return f"the grant is of blocks of {grant.block_size} tokens, its pool has blocks of {block_size}"
    ids, count = post.remote_blocks, len(target.device.tags) // target.device.unit_of(life.device)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        return f"block ids {ids.min()}..{ids.max()} outside the peer's {count} blocks"
    if not 0 <= grant.slot < len(target.slots):
        return f"slot {grant.slot} outside the peer's {len(target.slots)} slots"
    return None


class Fences:
    """Of the memory of one life: grants that were given up, until nothing can be written under them any more.

    ``locks`` are (slot, WRITE, whose): slices that are being copied into it through shared memory. ``epoch`` is that of
    the memory: NIXL's changes with the mover.
    """

    def __init__(self, life: Life) -> None:
        self._life, self._world = life, life.world
        self._slots: dict[int, int] = {}  # of revoked grants, by id
        self._fenced: set[int] = set()
        self.locks: list[tuple[int, Write, Life]] = []
        self._looking = False

    @property
    def epoch(self) -> int:
        return 0 if self._world.shared_memory else self._life.mover.number

    def take(self, plan: Plan) -> None:
        """As `runtime.grant_fences`."""
        named = {revoked.grant_id: revoked.slot for revoked in plan.revoked}
        self._fenced &= named.keys()
        self._slots = {number: slot for number, slot in named.items() if number not in self._fenced}
        evicted = [self._slots[number] for number in plan.evict if number in self._slots]
        if evicted and not self._world.shared_memory:
            self._life.mover.kill()
        for owner in dict.fromkeys(owner for slot, _, owner in self.locks if slot in evicted):
            if owner.alive:
                owner.mover.kill()
        if not self._looking:
            self._look()

    def mover_lost(self) -> None:
        """Our mover is no more, nor what NIXL could have written to."""
        if not self._world.shared_memory:
            self._report(list(self._slots))

    def _look(self) -> None:
        self._looking = False
        if self._world.shared_memory:
            locked = {slot for slot, _, _ in self.locks}
            self._report([number for number, slot in self._slots.items() if slot not in locked])
            if self._slots:
                self._looking = True
                self._life.later(_LOOK_NS, self._look)

    def _report(self, grant_ids: list[int]) -> None:
        if grant_ids:
            for number in grant_ids:
                del self._slots[number]
            self._fenced.update(grant_ids)
            self._life.deliver(GrantsFenced(tuple(grant_ids)))
