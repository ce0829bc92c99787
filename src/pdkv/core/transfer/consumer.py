"""D's side: KV that is still on a producer, on its way, or given up (design 3, 3.1, 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.events import LoadFailed, LoadFinished, LoadStarted
from pdkv.core.journal import Journal
from pdkv.core.ledger import Account
from pdkv.core.ports import Int32Array, Keepalive, PostRead, ReadEnded, SendMessage
from pdkv.core.scheduler.request import Request
from pdkv.core.transfer.grants import Promise, WriteGrants
from pdkv.core.transfer.lease import LeaseSlots
from pdkv.core.transfer.messages import Done, OfGrant, Peer, RemoteSource
from pdkv.core.transfer.next_turn import NextTurns
from pdkv.core.transfer.pairs import hide_partly_loaded, pair_blocks
from pdkv.core.transfer.quarantine import LastFence, Quarantine
from pdkv.core.transfer.rendezvous import Waits
from pdkv.units import NS_PER_S


@dataclass(slots=True)
class Load:
    """One READ in flight: unit i of ``remote`` goes to unit i of ``local`` (`PostRead`), whatever group they belong to.

    ``blocks`` of ours are written to.
    """

    request: Request
    source: RemoteSource
    handle: int
    first: int  # tokens the request had already: the prefix hit
    remote: Int32Array
    local: Int32Array
    blocks: int
    deadline_ns: int

    @property
    def num_tokens(self) -> int:
        """With how many tokens the request goes on."""
        return self.source.usable_tokens


@dataclass(slots=True)
class GivenUp:
    """A READ nobody waits for any more, whose handle has not ended: its blocks are in quarantine."""

    request_id: str
    blocks: int
    deadline_ns: int


def _owner(handle: int) -> str:
    """Who owns the blocks of a READ that was given up, in the manager."""
    return f"read:{handle}"


class Consumer:
    """Which leases to keep alive, which READs are out, and when blocks that a READ may touch are safe again."""

    def __init__(
        self,
        config: EngineConfig,
        engine_id: str,
        manager: KVCacheManager,
        slots: LeaseSlots,
        handles: Iterator[int],
        last_fence: LastFence,
        journal: Journal,
    ) -> None:
        self._config = config
        self._engine_id = engine_id
        self._manager = manager
        self._journal = journal
        self._wanted: dict[str, RemoteSource] = {}  # by request id: to be kept alive
        self._pressing: dict[str, Peer] = {}  # request ids, and who keeps their KV, until they have memory
        self._loads: dict[int, Load] = {}
        self._given_up: dict[int, GivenUp] = {}
        self._handles, self._last_fence = handles, last_fence
        self._reads: list[PostRead] = []
        self._cancels: list[int] = []
        self._messages: list[SendMessage] = []
        self._quarantine = Quarantine(config, manager, journal)
        self.grants = WriteGrants(config, manager, slots, self._quarantine, journal, self._messages)
        self.waits = Waits(config, journal, self._messages, self.grants)
        self.turns = NextTurns(config, manager, journal)

    # ------------------------------------------------------------------------------------- before anything is read

    def arrive(self, request: Request) -> None:
        """Keep the lease alive, or register for it, from now on, long before a block is allocated."""
        if request.source is not None and request.source.expires_ns is not None:
            self.turns.arrive(request)
        elif request.source is not None:
            self._wanted[request.request_id] = request.source
        elif request.awaited is not None:
            self.waits.arrive(request)

    def announced(self, request: Request, source: RemoteSource) -> None:
        """What the request waited for is kept for it under a lease.

        If it was to be written, it is announced because it presses; it is read now.
        """
        written = request.awaited is not None and request.awaited.write
        self.waits.announced(request)
        request.source = source
        self._wanted[request.request_id] = source
        if written:
            self.press(source)

    def press(self, source: RemoteSource) -> None:
        """What is kept there keeps out prefills for which memory is granted here: it is to get memory before those."""
        has_memory = {load.request.request_id for load in self._loads.values()}
        for request_id, wanted in self._wanted.items():
            same = (wanted.peer, wanted.grant.token) == (source.peer, source.grant.token)
            if same and request_id not in has_memory:
                self._pressing[request_id] = source.peer

    def is_pressed(self, peer: Peer) -> bool:
        """Whether something that ``peer`` keeps presses."""
        return peer in self._pressing.values()

    def make_way(self) -> None:
        """Somebody waits for memory: what is granted for a prefill that does not begin is asked back."""
        self.grants.recall_idle(pressed_by=self._pressing.values())

    def forget(self, request: Request) -> None:
        """The producer's copy is not needed (any more): say so and stop the heartbeats."""
        self.waits.drop(request, tell=True)
        self.turns.forget(request)
        self._wanted.pop(request.request_id, None)
        self._pressing.pop(request.request_id, None)
        source, request.source = request.source, None
        if source is not None:
            self.decline(source)

    def decline(self, source: RemoteSource) -> None:
        """Tell the producer that its copy is not needed."""
        self._messages.append(SendMessage(source.peer, Done(source.grant.token, self._engine_id)))

    def external_tokens(self, request: Request, local_tokens: int) -> int:
        """Tokens the producer can supply beyond the local hit; 0 when there is nothing (left) to load."""
        source = request.source
        if source is None:
            written = request.awaited is not None and request.awaited.write
            return max(self.grants.expected_tokens(request) - local_tokens, 0) if written else 0
        if source.expires_ns is not None:
            return self.turns.external_tokens(source, local_tokens)
        return max(source.usable_tokens - local_tokens, 0)

    def shares_with(self, request: Request, local_tokens: int) -> str | None:
        """Id of a request whose load brings this one's next block too (it then waits, `strict`).

        Only for models whose groups keep every block: of the others a load brings little that a second one can hit.
        """
        if not self._config.transfer.share_loads or not self._manager.shares_prefixes:
            return None
        unit = self._config.sizes.hash_tokens
        position = local_tokens // unit
        if position >= len(request.hashes):
            return None
        wanted = request.hashes[position]
        promises = self.grants.shareable(only_begun=request.source is not None)
        loads: tuple[Load | Promise, ...] = (*self._loads.values(), *promises)
        for load in loads:
            full = load.num_tokens // unit
            if load.first <= local_tokens and position < full and load.request.hashes[position] == wanted:
                return load.request.request_id
        return None

    # ------------------------------------------------------------------------------------------------- the read

    def begin(self, request: Request, local_tokens: int, tokens: int) -> None:
        """Post the READ of everything behind the first ``local_tokens`` tokens, which the request has already.

        Or grant the blocks of it to the producer that is to write it.
        """
        source = request.source
        if source is None:
            self.waits.admitted(request)
            self.grants.open(request, local_tokens, tokens)
            return
        self._pressing.pop(request.request_id, None)
        key, granted, usable = request.request_id, source.grant, source.usable_tokens
        remote, local = pair_blocks(self._manager, key, granted, usable, local_tokens)
        hide_partly_loaded(self._manager, key, granted.block_size, usable, local_tokens)
        blocks = sum(stop - first for first, stop in self._manager.peer_spans(usable, local_tokens))
        deadline_ns = self._journal.now_ns + self._config.kv_load_timeout_ns
        load = Load(request, source, next(self._handles), local_tokens, remote, local, blocks, deadline_ns)
        self._loads[load.handle] = load
        shown = deadline_ns if self._config.transfer.bounded_waits else None
        self._manager.move(request.request_id, Account.LOADING, f"reading from {source.peer.engine_id[:80]}", shown)
        self._post(load)
        self._journal.emit(
            LoadStarted(
                request_id=request.request_id,
                at_ns=self._journal.now_ns,
                handle=load.handle,
                blocks=blocks,
                tokens=tokens,
            )
        )

    def on_read_ended(self, report: ReadEnded) -> tuple[Request, str | None] | None:
        """What a handle's end means: (request, None) loaded, (request, cause) failed, or ``None``: a fence passed."""
        if report.handle in self._given_up:
            self._fence(report.handle)
            return None
        load = self._loads.pop(report.handle, None)
        if load is None:
            return None
        cause = self._judge(load, report)
        self.forget(load.request)
        if cause is not None:
            self._fail(load, cause)
            return load.request, cause
        self._journal.emit(
            LoadFinished(
                request_id=load.request.request_id,
                at_ns=self._journal.now_ns,
                handle=load.handle,
                blocks=load.blocks,
                moved_bytes=report.moved_bytes,
                seconds=report.seconds,
            )
        )
        self._loaded(load.request)
        return load.request, None

    def on_grant(self, message: OfGrant, peer: Peer) -> tuple[Request, str | None] | None:
        """What a producer says about a grant of this instance's memory means: as `on_read_ended`."""
        ended = self.grants.on_message(message, peer)
        if ended is not None:
            request, cause = ended
            request.awaited = None  # nothing to withdraw
            if cause is None:
                self._loaded(request)
        return ended

    def _loaded(self, request: Request) -> None:
        if self._config.transfer.bounded_waits:
            request.loaded_deadline_ns = self._journal.now_ns + self._config.kv_load_timeout_ns
        self._manager.move(
            request.request_id,
            Account.LOADED_WAITING,
            "loaded; waiting for a running slot",
            request.loaded_deadline_ns,
        )

    def abandon(self, request: Request, cause: str) -> None:
        """Nobody waits for this load any more: its blocks stay in quarantine until it has ended or is fenced."""
        self.forget(request)
        promise = self.grants.find(request)
        if promise is not None:
            self.grants.take_back(promise, cause)
            return
        load = next(load for load in self._loads.values() if load.request is request)
        del self._loads[load.handle]
        self._fail(load, cause)
        key, blocks = _owner(load.handle), load.blocks
        danger = "its READ may still write"
        deadline_ns = self._quarantine.enter(request, key, load.handle, load.first, blocks, cause, danger)
        self._given_up[load.handle] = GivenUp(request.request_id, blocks, deadline_ns)
        self._cancels.append(load.handle)

    def put_off(self, promise: Promise, cause: str) -> None:
        """A grant gives way that its producer has not given back: its memory is free when it is fenced."""
        self.grants.put_off(promise, cause)
        self.read_later(promise)

    def read_later(self, promise: Promise) -> None:
        """A request whose grant has given way goes on by late push, and holds no memory."""
        promise.request.awaited = msgspec.structs.replace(promise.awaited, write=False)
        self.waits.resume(promise.request, promise.deadline_ns)

    def is_loading(self, request: Request) -> bool:
        """Whether a READ or WRITE for this request is out."""
        return self.grants.find(request) is not None or any(load.request is request for load in self._loads.values())

    def on_mover_restarted(self, handles: tuple[int, ...]) -> None:
        """``handles`` are fenced; loads still wanted are posted again under new handles.

        Given-up READs that had not been handed over yet have the new mover to report them: it gets the full fence time.
        """
        for handle in handles:
            if handle in self._given_up:
                self._fence(handle)
            elif handle in self._loads:
                load = self._loads.pop(handle)
                load.handle = next(self._handles)
                self._loads[load.handle] = load
                self._post(load)
        fence_ns = self._journal.now_ns + self._config.fence_timeout_ns
        for handle, given_up in self._given_up.items():
            given_up.deadline_ns = fence_ns
            if self._config.transfer.bounded_waits:
                self._manager.set_deadline(_owner(handle), fence_ns)

    # ------------------------------------------------------------------------------------------------- deadlines

    def overdue(self) -> list[tuple[Request, str]]:
        """Requests whose load has outlived its deadline, and how."""
        late = self.grants.overdue()
        if self._loads and self._config.transfer.bounded_waits:
            seconds = self._config.kv_load_timeout_ns // NS_PER_S
            cause = f"not there {seconds} s after its READ was posted (--kv-load-timeout)"
            now_ns = self._journal.now_ns
            late += [(load.request, cause) for load in self._loads.values() if load.deadline_ns <= now_ns]
        return late

    def sweep(self) -> None:
        """Register again; order a new mover once a given-up READ has not ended within the fence time.

        That is the last fence (design 3.2).
        """
        self.waits.sweep()
        self.grants.sweep()
        if not self._given_up or not self._config.transfer.bounded_waits:
            return
        if any(given_up.deadline_ns <= self._journal.now_ns for given_up in self._given_up.values()):
            self._last_fence.order()

    def next_deadline_ns(self) -> int | None:
        """When a load, a fence or a wait runs out next, or a message is to be repeated."""
        rules = (self.waits, self.grants, self.turns)
        times = [time for rule in rules if (time := rule.next_deadline_ns()) is not None]
        if self._config.transfer.bounded_waits and (self._loads or self._given_up):
            times += [load.deadline_ns for load in self._loads.values()]
            if not self._last_fence.pending:
                times += [given_up.deadline_ns for given_up in self._given_up.values()]
        return min(times, default=None)

    # ------------------------------------------------------------------------------------------------- the outbox

    def take_reads(self) -> tuple[PostRead, ...]:
        """READs to post, once."""
        reads, self._reads = tuple(self._reads), []
        return reads

    def take_cancels(self) -> tuple[int, ...]:
        """Handles to post no further slice of, once."""
        cancels, self._cancels = tuple(self._cancels), []
        return cancels

    def take_messages(self) -> tuple[SendMessage, ...]:
        """Messages to send, once."""
        messages = tuple(self._messages)
        self._messages.clear()
        return messages

    def keepalives(self) -> tuple[Keepalive, ...]:
        """Leases to renew, by peer: every request from its arrival, or announcement, until its READ has ended."""
        awaited = dict.fromkeys((*self.waits.peers(), *self.grants.peers(), *self.turns.peers()))
        if not awaited and not self._wanted:
            return ()
        by_peer: dict[Peer, list[bytes]] = {}
        for source in self._wanted.values():
            by_peer.setdefault(source.peer, []).append(source.grant.token)
        for peer in awaited:
            by_peer.setdefault(peer, [])
        return tuple(Keepalive(peer, tuple(tokens), peer in awaited) for peer, tokens in by_peer.items())

    # ---------------------------------------------------------------------------------------------------- helpers

    def _judge(self, load: Load, report: ReadEnded) -> str | None:
        if report.slot is None:
            return report.error or "the transfer failed"
        grant = load.source.grant
        if report.slot != (grant.nonce, grant.lease_id) and load.source.expires_ns is not None:
            return "the turn before was let go, for its time or for the memory, before its KV had arrived"
        if report.slot != (grant.nonce, grant.lease_id):
            return (
                f"the lease ended before the data had arrived (slot {grant.slot} holds lease {report.slot[1]}, "
                f"not {grant.lease_id}); raise --kv-lease-duration on the prefill instance if this repeats"
            )
        return None

    def _fail(self, load: Load, cause: str) -> None:
        self._journal.emit(
            LoadFailed(request_id=load.request.request_id, at_ns=self._journal.now_ns, handle=load.handle, cause=cause)
        )

    def _fence(self, handle: int) -> None:
        given_up = self._given_up.pop(handle)
        self._quarantine.leave(given_up.request_id, _owner(handle), handle, given_up.blocks)

    def _post(self, load: Load) -> None:
        self._reads.append(PostRead(load.handle, load.source, load.remote.copy(), load.local.copy()))
