"""P's side of WRITE push: KV that is kept under a lease, written into memory that a consumer has granted (design 3.2).

A grant is served once. What became of it is remembered (a tombstone), so that a registration that comes twice, or after
its cancellation, is answered and never served again. The sources stay where they are until the handle has ended,
whatever becomes of their lease.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.events import WriteFailed, WriteFinished, WriteStarted
from pdkv.core.journal import Journal
from pdkv.core.ports import Int32Array, MoverRestarted, PostWrite, Reply, WriteEnded
from pdkv.core.transfer.lease import Lease
from pdkv.core.transfer.messages import (
    CancelGrant,
    Fenced,
    Noted,
    NotWritten,
    Register,
    RegisterWrite,
    WriteGrant,
    Written,
)
from pdkv.core.transfer.pairs import granted_blocks, named_blocks, pair_blocks, unlike_target
from pdkv.core.transfer.quarantine import LastFence
from pdkv.units import NS_PER_S

_MOST_TOMBSTONES = 16384
_CANCELLED = "cancelled by its consumer"
_CUT_OFF = "the producer's mover was replaced in the middle of the write"

#: The consumer's boot nonce, and the number of its grant.
GrantKey = tuple[int, int]


@dataclass(slots=True)
class Write:
    """One WRITE in flight: unit i of ``local`` goes to unit i of the consumer's ``remote`` (`PostWrite`).

    ``blocks`` of ours are read from.
    """

    handle: int
    lease: Lease
    message: RegisterWrite
    grant: WriteGrant
    origin: bytes
    remote: Int32Array
    local: Int32Array
    blocks: int
    deadline_ns: int
    stopped: str | None = None  # why it is not wanted any more
    cancelled: bool = False  # the consumer waits for `Fenced`
    cut_off: bool = False  # what was posted once may still be on its way


def key_of(grant: WriteGrant | CancelGrant) -> GrantKey:
    """What names a grant among those of all consumers."""
    return grant.nonce, grant.grant_id


class Writes:
    """Every WRITE of this instance, and what became of those that are over."""

    def __init__(
        self,
        config: EngineConfig,
        engine_id: str,
        manager: KVCacheManager,
        handles: Iterator[int],
        last_fence: LastFence,
        journal: Journal,
    ) -> None:
        self._config, self._engine_id, self._manager, self._journal = config, engine_id, manager, journal
        self._handles, self._last_fence = handles, last_fence
        self._active: dict[int, Write] = {}  # by handle
        self._over: OrderedDict[GrantKey, Written | NotWritten | Fenced] = OrderedDict()
        self._posts: list[PostWrite] = []
        self._cancels: list[int] = []
        self.replies: list[Reply] = []

    # ---------------------------------------------------------------------------------------------- registrations

    def known(self, grant: WriteGrant, origin: bytes) -> Lease | bool:
        """Whether this grant has been met: answered again if so. The lease whose WRITE is under way, if one is."""
        over = self._over.get(key_of(grant))
        if over is not None:
            self._reply(origin, over)
            return True
        write = self._find(key_of(grant))
        if write is None:
            return False
        write.origin = origin
        if not write.stopped:
            self.note(grant, origin, writing=True)
        return write.lease

    def note(self, grant: WriteGrant, origin: bytes, *, writing: bool) -> None:
        """Tell the consumer that its registration has arrived."""
        self._reply(origin, Noted(grant.nonce, grant.grant_id, writing))

    def refuse(self, grant: WriteGrant, origin: bytes, reason: str, *, cut_off: bool = False) -> None:
        """Nothing (more) will be written under this grant; ``cut_off`` as in `NotWritten`."""
        self._settle(key_of(grant), origin, NotWritten(grant.nonce, grant.grant_id, reason, cut_off))

    def start(self, lease: Lease, message: Register | RegisterWrite, origin: bytes) -> bool:
        """Post the WRITE of what ``lease`` keeps, unless the grant is not one for that; whether it is kept on.

        The consumer of a grant that was refused computes its prompt itself. (The reference refuses none: it keeps it.)
        """
        assert isinstance(message, RegisterWrite)
        grant = message.grant
        assert grant is not None
        problem = self._misfit(lease, grant)
        if problem is not None:
            if self._config.transfer.push_answers:
                self.refuse(grant, origin, problem)
            return not self._config.transfer.push_answers
        remote, local = pair_blocks(self._manager, lease.key, grant, grant.num_tokens, grant.first_token)
        deadline_ns = self._journal.now_ns + self._config.kv_load_timeout_ns
        spans = self._manager.peer_spans(grant.num_tokens, grant.first_token)
        blocks = sum(stop - first for first, stop in spans)
        write = Write(next(self._handles), lease, message, grant, origin, remote, local, blocks, deadline_ns)
        self._post(write)
        self.note(grant, origin, writing=True)
        self._journal.emit(
            WriteStarted(request_id=lease.request_id, at_ns=self._journal.now_ns, handle=write.handle, blocks=blocks)
        )
        return True

    def _misfit(self, lease: Lease, grant: WriteGrant) -> str | None:
        """Why ``grant`` has no place for what ``lease`` keeps: its numbers are a stranger's."""
        if grant.num_tokens != lease.num_tokens or grant.prompt_digest != lease.prompt_digest:
            return (
                f"the prefill was of {lease.num_tokens} tokens, the grant is for {grant.num_tokens}, or for others: "
                "both instances must turn the request into the same tokens (tokenizer, chat template)"
            )
        unlike = unlike_target(self._manager, grant.block_size)
        if unlike is not None:
            return f"the grant is of {unlike}"
        own = self._manager.paged_block_size
        unit = self._config.sizes.scheduler_tokens * grant.block_size // own  # where all blocks of the consumer end
        if not 0 <= grant.first_token < grant.num_tokens or grant.first_token % unit:
            return f"the grant begins at token {grant.first_token} of {grant.num_tokens}; blocks hold {unit} tokens"
        expected, counts = granted_blocks(self._manager, grant), named_blocks(grant)
        if counts != expected or len(grant.block_ids) != sum(expected):
            return f"the grant has {counts} blocks, {expected} are needed"
        least, most = min(grant.block_ids, default=1), max(grant.block_ids, default=1)
        if not 0 < least <= most < (1 << 31) // max(1, grant.block_size // own):
            return "the grant names blocks that no pool has"
        return None

    # -------------------------------------------------------------------------------------------------------- ends

    def on_ended(self, report: WriteEnded) -> tuple[Lease, bool] | None:
        """A handle is over: its lease, if it was one of this instance's, and whether that may still be wanted.

        It may after a cancellation, which concerns the grant alone: `Withdraw` says that the KV is not wanted, either.
        """
        write = self._active.pop(report.handle, None)
        if write is None:
            return None
        write.cut_off |= report.cut_off
        error = write.stopped or report.error if report.error is not None else None
        grant, now_ns = write.grant, self._journal.now_ns
        if error is None:
            self._journal.emit(
                WriteFinished(
                    request_id=write.lease.request_id,
                    at_ns=now_ns,
                    handle=write.handle,
                    blocks=write.blocks,
                    moved_bytes=report.moved_bytes,
                    seconds=report.seconds,
                )
            )
            self._settle(key_of(grant), write.origin, Written(grant.nonce, grant.grant_id, report.moved_bytes))
        else:
            self._end_in_vain(write, error)
        # The reference keeps what it could not write until the lease ends.
        return write.lease, write.cancelled or (error is not None and not self._config.transfer.push_answers)

    def _end_in_vain(self, write: Write, error: str) -> None:
        grant, now_ns = write.grant, self._journal.now_ns
        failed = WriteFailed(request_id=write.lease.request_id, at_ns=now_ns, handle=write.handle, cause=error)
        self._journal.emit(failed)
        if write.cancelled:
            self._settle(key_of(grant), write.origin, Fenced(grant.nonce, grant.grant_id, write.cut_off))
        elif self._config.transfer.push_answers:
            self.refuse(grant, write.origin, error, cut_off=write.cut_off)

    def on_cancel(self, message: CancelGrant, origin: bytes) -> None:
        """Post nothing more under this grant, and say so when nothing is under way any more."""
        key = key_of(message)
        write = self._find(key)
        if write is None:
            unknown = Fenced(*key, cut_off=message.producer != self._engine_id)
            self._settle(key, origin, self._over.get(key, unknown))  # what was written before is, all of it
            return
        write.origin, write.cancelled = origin, True
        self._stop(write, _CANCELLED)

    def _stop(self, write: Write, reason: str) -> None:
        if write.stopped is None:
            write.stopped = reason
            write.deadline_ns = self._journal.now_ns + self._config.fence_timeout_ns
            self._cancels.append(write.handle)

    def on_mover_restarted(self, report: MoverRestarted) -> list[tuple[Lease, bool]]:
        """Its handles are over: what is still wanted is posted again; of the rest as `on_ended`.

        Not what was cut off: it would be there before its first attempt has ended, and then that could come into
        memory which its consumer has given to somebody else. (The reference tells nobody that it does not write.)
        """
        over: list[tuple[Lease, bool]] = []
        for handle in report.handles:
            write = self._active.pop(handle, None)
            if write is None:
                continue
            write.cut_off |= report.cut_off
            if write.stopped is None and not (write.cut_off and self._config.transfer.push_answers):
                write.handle = next(self._handles)
                self._post(write)
            else:
                self._end_in_vain(write, write.stopped or _CUT_OFF)
                over.append((write.lease, write.cancelled))
        for write in self._active.values():
            if write.stopped is not None:  # the new mover is to report it
                write.deadline_ns = self._journal.now_ns + self._config.fence_timeout_ns
        return over

    @property
    def under_way(self) -> bool:
        """Whether anything is being written."""
        return bool(self._active)

    def uses(self, lease: Lease) -> bool:
        """Whether what ``lease`` keeps, or kept, is being written somewhere."""
        return any(write.lease is lease for write in self._active.values())

    # --------------------------------------------------------------------------------------------------- deadlines

    def sweep(self) -> None:
        """Stop what takes too long; order a new mover where that does not help."""
        if not self._active or not self._config.transfer.bounded_waits:
            return
        for write in self._active.values():
            if write.deadline_ns > self._journal.now_ns:
                continue
            if write.stopped is None:
                seconds = self._config.kv_load_timeout_ns // NS_PER_S
                self._stop(write, f"not written within {seconds} s (--kv-load-timeout)")
            else:
                self._last_fence.order()

    def next_deadline_ns(self) -> int | None:
        """When `sweep` is wanted next."""
        if not self._active or not self._config.transfer.bounded_waits:
            return None
        waits = (
            write.deadline_ns
            for write in self._active.values()
            if write.stopped is None or not self._last_fence.pending
        )
        return min(waits, default=None)

    # -------------------------------------------------------------------------------------------------- the outbox

    def take_posts(self) -> tuple[PostWrite, ...]:
        """WRITEs to post, once."""
        posts, self._posts = tuple(self._posts), []
        return posts

    def take_cancels(self) -> tuple[int, ...]:
        """Handles to post no further slice of, once."""
        cancels, self._cancels = tuple(self._cancels), []
        return cancels

    def _post(self, write: Write) -> None:
        self._active[write.handle] = write
        remote, local = write.remote.copy(), write.local.copy()
        message = write.message
        self._posts.append(PostWrite(write.handle, message.consumer, write.grant, remote, local, message.epoch))

    def _find(self, key: GrantKey) -> Write | None:
        return next((write for write in self._active.values() if key_of(write.grant) == key), None)

    def _settle(self, key: GrantKey, origin: bytes, answer: Written | NotWritten | Fenced) -> None:
        """It is over for good: say so, and remember it for who asks again."""
        self._over[key] = answer
        self._over.move_to_end(key)
        while len(self._over) > _MOST_TOMBSTONES:
            self._over.popitem(last=False)
        self._reply(origin, answer)

    def _reply(self, origin: bytes, message: Noted | Written | NotWritten | Fenced) -> None:
        self.replies.append(Reply(origin, message))
