"""The mover of one instance in virtual time: a READ copies tags block by block, and ends in any way a real one can.

From the moment a READ is handed over until it has ended or the mover was killed it may write at any time, long after
it was cancelled too: cancelling is a hint, not a fence (design 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdkv.core.ports import MoverRestarted, PostRead, ReadEnded
from pdkv.core.transfer.proof import is_proved, proof_key
from pdkv.simulate.weather import MS, PEER_DEATH_SEEN_NS
from pdkv.units import NS_PER_S

if TYPE_CHECKING:
    from pdkv.simulate.instance import Life


@dataclass(slots=True, eq=False)
class Read:
    """One READ: whose memory it reads, which life of the mover has it (``None`` while it is queued), what it moved."""

    post: PostRead
    posted_ns: int
    source: Life | None = None
    mover: int | None = None
    moved_bytes: int = 0
    ended: bool = False


class Mover:
    """Every READ that one life of an instance has posted."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._world = life.world
        self._rng, self._weather = life.world.rng, life.world.weather
        self._reads: dict[int, Read] = {}
        self.number = 0  # of the mover's own lives
        self.ready_ns = 0  # nothing of this life moves before what it fenced has been told

    def post(self, post: PostRead) -> None:
        """Take a READ; it is begun a moment later."""
        assert post.handle not in self._reads, f"handle {post.handle} is used twice"
        read = Read(post, self._world.time.now_ns)
        self._reads[post.handle] = read
        self._life.later(self._rng.randrange(0, 3 * MS), self._begin, read)

    def cancel(self, handle: int) -> None:
        """Some movers stop soon, some go on as if nothing had been said. Unknown handles are ignored."""
        read = self._reads.get(handle)
        if read is not None and not read.ended and self._rng.random() < 0.5:
            self._life.later(self._rng.randrange(0, 200 * MS), self._stop, read)

    def kill(self) -> None:
        """The last fence: all it had been handed is over; what was still queued goes to the next one."""
        fenced = [read for read in self._reads.values() if not read.ended and read.mover == self.number]
        for read in fenced:
            read.ended = True
        handles = (*(read.post.handle for read in fenced), *self._life.writer.fence())
        self.number += 1
        self._world.note(self._life.name, "mover killed", f"handles {list(handles)} fenced")
        self._life.fences.mover_lost()
        lasts_ns = self._rng.randrange(1, 300 * MS)
        self.ready_ns = self._world.time.now_ns + lasts_ns
        self._life.later(lasts_ns, self._life.deliver, MoverRestarted(handles, not self._world.shared_memory))

    def peer_died(self, peer: Life) -> None:
        """What was being read from ``peer`` fails, a little later."""
        for read in self._reads.values():
            if read.source is peer and self._runs(read):
                self._life.later(self._rng.randrange(1, PEER_DEATH_SEEN_NS), self._report, read, None, "the peer died")

    # ---------------------------------------------------------------------------------------------------- one READ

    def _begin(self, read: Read) -> None:
        if read.ended:
            return
        waits_ns = self.ready_ns - self._world.time.now_ns
        if waits_ns > 0:
            self._life.later(waits_ns, self._begin, read)
            return
        read.mover = self.number
        read.source = self._world.life_of(read.post.source.peer)
        if read.source is None:
            delay_ns = self._rng.randrange(1, PEER_DEATH_SEEN_NS)
            self._life.later(delay_ns, self._report, read, None, "no handshake: nobody with that engine id is there")
            return
        problem = _refusal(read.post, read.source) or _range_error(read.post, read.source, self._life)
        if problem is not None:
            self._report(read, None, problem)
            return
        rng = self._rng
        lasts_ns, late, hangs, fails = self._weather.fate(rng)
        self._world.counts["READ late"] += late
        self._world.counts["READ hangs"] += hangs
        self._world.counts["READ breaks"] += fails
        post = read.post
        for remote, local in zip(post.remote_blocks.tolist(), post.local_blocks.tolist(), strict=True):
            if (hangs or fails) and rng.random() < 0.3:
                continue  # half done
            self._life.later(rng.randrange(0, 12_000 * MS if hangs else lasts_ns), self._copy, read, remote, local)
        if not hangs:
            self._life.later(lasts_ns, self._data_over, read, fails)

    def _runs(self, read: Read) -> bool:
        """Whether it can still write."""
        return not read.ended and read.mover == self.number

    def _copy(self, read: Read, remote: int, local: int) -> None:
        source = read.source
        assert source is not None
        if not self._runs(read) or not source.alive:
            return
        if source.stopped_for_ns:
            self._life.later(source.stopped_for_ns, self._copy, read, remote, local)
            return
        read.moved_bytes += self._life.device.copy(local, source.device, remote)

    def _data_over(self, read: Read, fails: bool) -> None:
        """All data is there: now, and not before, the slot is read."""
        source = read.source
        assert source is not None
        if not self._runs(read) or not source.alive:
            return  # `peer_died` reports
        if source.stopped_for_ns:
            self._life.later(source.stopped_for_ns + MS, self._data_over, read, fails)
            return
        grant = read.post.source.grant
        nonce, lease_id = (int(word) for word in source.slots[grant.slot])
        self._world.counts["READ after its lease"] += (nonce, lease_id) != (grant.nonce, grant.lease_id)
        self._report(read, None if fails else (nonce, lease_id), "the transfer broke")

    def _stop(self, read: Read) -> None:
        if not read.ended and read.mover in (None, self.number):
            self._report(read, None, "cancelled")

    def _report(self, read: Read, slot: tuple[int, int] | None, error: str) -> None:
        if read.ended or read.mover not in (None, self.number):
            return
        read.ended = True
        seconds = (self._world.time.now_ns - read.posted_ns) / NS_PER_S
        self._life.deliver(
            ReadEnded(
                handle=read.post.handle, slot=slot, moved_bytes=read.moved_bytes, seconds=seconds,
                error=None if slot else error,
            )
        )  # fmt: skip


def _refusal(post: PostRead, source: Life) -> str | None:
    """Why nothing may move: `runtime.moves` asks the same of a peer's handshake."""
    grant, identity = post.source.grant, source.engine.identity
    if grant.nonce != identity.nonce:
        return f"{source.name}: the lease is of another life of this engine"
    if not is_proved(proof_key(identity.secret), grant, post.source.prompt_digest):
        return f"{source.name} did not give this grant for this prompt"
    return None


def _range_error(post: PostRead, source: Life, life: Life) -> str | None:
    unit = life.device.unit_of(source.device)
    for ids, device, whose in (
        (post.remote_blocks, source.device, "the peer's"),
        (post.local_blocks, life.device, "the pool's"),
    ):
        units = len(device.tags) // unit
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < units:
            return f"block ids {ids.min()}..{ids.max()} outside {whose} {units} blocks"
    return None
