"""The proof that the checker sees what it must: each planted bug is caught within 200 worlds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pdkv.core.blocks.kinds.window import WindowKind
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.config import STRICT
from pdkv.core.ledger import Account
from pdkv.core.ports import Int32Array, MoverRestarted, Plan
from pdkv.core.scheduler.request import Request
from pdkv.core.transfer import consumer
from pdkv.core.transfer.consumer import Consumer
from pdkv.core.transfer.grants import Promise, WriteGrants
from pdkv.core.transfer.lease import Lease, LeaseSlots
from pdkv.core.transfer.messages import CancelGrant, Fenced
from pdkv.core.transfer.next_turn import NextTurns
from pdkv.core.transfer.pairs import pair_blocks
from pdkv.core.transfer.producer import Producer
from pdkv.core.transfer.rendezvous import Announcements
from pdkv.core.transfer.withdrawn import WithdrawnGrants
from pdkv.core.transfer.writes import Writes
from pdkv.simulate.instance import Life
from pdkv.simulate.weather import MS, Weather
from pdkv.simulate.world import BLOCK, MODELS, Violation, World

REQUESTS = 60
BY_NIXL = {"mode": "write", "shared_memory": False}


def no_slot_comparison(patch: pytest.MonkeyPatch) -> None:
    """Data is used although the lease had ended before it arrived."""
    patch.setattr(Consumer, "_judge", lambda self, load, report: None if report.slot else report.error)


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """The destination of a READ that was given up is free at once, as if cancelling were a fence."""
    real = Consumer.abandon

    def abandon(self: Consumer, request: Request, cause: str) -> None:
        real(self, request, cause)
        if self._given_up:  # not a grant
            self._fence(max(self._given_up))

    patch.setattr(Consumer, "abandon", abandon)


def timer_is_a_fence(patch: pytest.MonkeyPatch) -> None:
    """Quarantine ends on its timer instead of with the mover."""

    def sweep(self: Consumer) -> None:
        for handle, given_up in list(self._given_up.items()):
            if given_up.deadline_ns <= self._journal.now_ns:
                self._fence(handle)

    patch.setattr(Consumer, "sweep", sweep)


def hashed_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a load can be hit while their KV is still on its way."""
    real = Consumer.begin

    def begin(self: Consumer, request: Request, local_blocks: int, tokens: int) -> None:
        real(self, request, local_blocks, tokens)
        self._manager.cache_blocks(request, request.num_computed)

    patch.setattr(Consumer, "begin", begin)


def slot_stays_armed(patch: pytest.MonkeyPatch) -> None:
    """P frees the blocks of a lease without clearing its slot."""
    patch.setattr(LeaseSlots, "clear", lambda self, slot: self._free.append(slot))


def no_expiry(patch: pytest.MonkeyPatch) -> None:
    """Leases never expire: with a lost Done P keeps the blocks for good."""
    patch.setattr(Producer, "sweep", lambda self: None)


def one_free_skipped(patch: pytest.MonkeyPatch) -> None:
    """A batch of blocks that is given back loses its last one."""
    real = BlockPool.give_back

    def give_back(self: BlockPool, blocks: Int32Array, account: Account) -> None:
        real(self, blocks[:-1] if len(blocks) > 3 else blocks, account)

    patch.setattr(BlockPool, "give_back", give_back)


def heartbeat_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The first lease to be kept alive is left out of the beats."""
    real = Life._do

    def do(self: Life, plan: Plan) -> None:
        real(self, plan)
        self._keepalives = self._keepalives[1:]

    patch.setattr(Life, "_do", do)


def no_load_deadline(patch: pytest.MonkeyPatch) -> None:
    """A load may take for ever."""
    patch.setattr(Consumer, "overdue", lambda self: [])


def window_too_small(patch: pytest.MonkeyPatch) -> None:
    """A sliding window gives back a block that its next token still looks at."""
    real = WindowKind.skipped_tokens
    patch.setattr(WindowKind, "skipped_tokens", lambda self, computed: real(self, computed) + BLOCK)


def last_token_computed_by_p(patch: pytest.MonkeyPatch) -> None:
    """P computes the whole prompt of a model with windows: what D's last token looks back at is gone by then."""
    patch.setattr(KVCacheManager, "leaves_last_token", False)


def slot_outlives_its_blocks(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a kept turn that gives way are free at once, its slot is cleared a second later."""
    real_release, real_sweep = Producer._release, Producer.sweep
    late: dict[Producer, list[tuple[int, int]]] = {}

    def release(self: Producer, lease: Lease, *, expired: bool, gave_way: bool = False) -> None:
        if gave_way:
            armed = self._slots._slots[lease.slot].copy()
            real_release(self, lease, expired=expired, gave_way=True)
            self._slots._free.remove(lease.slot)
            self._slots._slots[lease.slot] = armed
            late.setdefault(self, []).append((self._journal.now_ns + 10**9, lease.slot))
        else:
            real_release(self, lease, expired=expired)

    def sweep(self: Producer) -> None:
        due = [slot for at_ns, slot in late.get(self, []) if at_ns <= self._journal.now_ns]
        late[self] = [(at_ns, slot) for at_ns, slot in late.get(self, []) if slot not in due]
        for slot in due:
            self._slots.clear(slot)
        real_sweep(self)

    patch.setattr(Producer, "_release", release)
    patch.setattr(Producer, "sweep", sweep)


def common_beginning_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    """P takes all that D has kept for its own tokens, though they part before the end."""
    patch.setattr(
        NextTurns, "_usable_tokens", lambda self, request, source: min(source.grant.num_tokens, request.num_prompt)
    )


def reuse_before_fenced(patch: pytest.MonkeyPatch) -> None:
    """D frees what it has granted as soon as it gives it up, as if CANCEL were a fence."""
    real = WriteGrants.take_back

    def take_back(self: WriteGrants, promise: Promise, cause: str) -> None:
        real(self, promise, cause)
        self.withdrawn.on_fenced((promise.grant.grant_id,))

    patch.setattr(WriteGrants, "take_back", take_back)


def write_after_cancel(patch: pytest.MonkeyPatch) -> None:
    """P answers FENCED at once, and goes on with the WRITE that it has, or gets to later."""

    def on_cancel(self: Writes, message: CancelGrant, origin: bytes) -> None:
        self._reply(origin, Fenced(message.nonce, message.grant_id))

    patch.setattr(Writes, "on_cancel", on_cancel)
    patch.setattr(Announcements, "on_cancel", lambda *_: None)
    patch.setattr(Announcements, "on_withdraw", lambda *_: None)


def sources_go_with_their_lease(patch: pytest.MonkeyPatch) -> None:
    """P frees what it is still writing from when the lease ends."""
    patch.setattr(Writes, "uses", lambda self, lease: False)


def cut_off_is_a_fence(patch: pytest.MonkeyPatch) -> None:
    """D takes P's word that it has stopped for a fence, although what had left P may be on its way."""
    patch.setattr(WithdrawnGrants, "_fence_here", WithdrawnGrants._fence)


def cut_off_is_written_again(patch: pytest.MonkeyPatch) -> None:
    """P's new mover writes what the old one was writing: all is there before that has ended."""
    real = Writes.on_mover_restarted

    def on_mover_restarted(self: Writes, report: MoverRestarted) -> list[tuple[Lease, bool]]:
        return real(self, replace(report, cut_off=False))

    patch.setattr(Writes, "on_mover_restarted", on_mover_restarted)


def a_new_life_answers_for_the_old(patch: pytest.MonkeyPatch) -> None:
    """P, started again, says of a grant that its earlier life was writing under that nothing is."""
    real_refuse, real_on_cancel = Announcements._refuse, Writes.on_cancel

    def refuse(self: Announcements, *about: Any, cut_off: bool = False) -> None:
        real_refuse(self, *about)

    def on_cancel(self: Writes, message: CancelGrant, origin: bytes) -> None:
        real_on_cancel(self, msgspec.structs.replace(message, producer=self._engine_id), origin)

    patch.setattr(Announcements, "_refuse", refuse)
    patch.setattr(Writes, "on_cancel", on_cancel)


def no_grant_deadline(patch: pytest.MonkeyPatch) -> None:
    """D waits for a WRITE for ever."""
    patch.setattr(WriteGrants, "overdue", lambda self: [])


def nothing_presses(patch: pytest.MonkeyPatch) -> None:
    """P keeps what D has no memory for, and D keeps memory for what P has no room for, until a lease's time is up."""
    patch.setattr(Producer, "make_way_for", lambda *_: None)


def units_out_of_order(patch: pytest.MonkeyPatch) -> None:
    """Of a peer's blocks that are larger or smaller, what is read is the right tokens' KV in the wrong order."""

    def pair(*args: Any) -> tuple[Int32Array, Int32Array]:
        remote, local = pair_blocks(*args)
        return remote[::-1], local

    patch.setattr(consumer, "pair_blocks", pair)


def partly_loaded_can_be_hit(patch: pytest.MonkeyPatch) -> None:
    """A block that the smaller ones of a peer's window fill from its middle on is registered as whole."""
    patch.setattr(consumer, "hide_partly_loaded", lambda *_: None)


#: With the world in which each is seen soonest. In bad weather a lease may well expire without a heartbeat, in calm
#: weather it may not. A lease ends before its WRITE only where D's registrations, which renew it, do not arrive while D
#: goes on waiting. WRITEs go by NIXL, for copies through shared memory look at the slot, and so at what is wrong.
#: For the next life of P to answer in time, D has to wait for it longer than it would by itself.
PLANTS: dict[Callable[[Any], None], dict[str, Any]] = {
    no_slot_comparison: {},
    no_quarantine: {},
    timer_is_a_fence: {"weather": Weather(hang=0.3, read_ms=300)},
    hashed_in_flight: {},
    slot_stays_armed: {},
    no_expiry: {},
    one_free_skipped: {},
    heartbeat_forgotten: {"weather": Weather(read_ms=2000)},
    no_load_deadline: {},
    window_too_small: {"groups": MODELS[1]},
    last_token_computed_by_p: {"groups": MODELS[1]},
    slot_outlives_its_blocks: {"mode": "pull", "talks": True},
    common_beginning_not_looked_for: {"mode": "pull", "talks": True},
    reuse_before_fenced: BY_NIXL,
    write_after_cancel: BY_NIXL,
    sources_go_with_their_lease: {
        **BY_NIXL, "weather": Weather(late=0.5, outage=0.3), "kv_load_timeout_ns": 20_000 * MS,
    },
    cut_off_is_a_fence: {**BY_NIXL, "weather": Weather(mover_crash=1.0, read_ms=3000)},
    cut_off_is_written_again: {**BY_NIXL, "weather": Weather(mover_crash=1.0, read_ms=3000)},
    a_new_life_answers_for_the_old: {
        **BY_NIXL, "weather": Weather(crash=0.1, read_ms=2000), "fence_timeout_ns": 8000 * MS,
    },
    no_grant_deadline: BY_NIXL,
    nothing_presses: {**BY_NIXL, "weather": Weather(max_delay_ms=100, read_ms=300)},
    units_out_of_order: {"unlike": True},
    partly_loaded_can_be_hit: {"groups": MODELS[1], "mode": "pull", "unlike": True, "weather": Weather()},
}  # fmt: skip


#: For time's sake: a world that is looked at before all others, for plants that few of the first ones show.
LOOKED_AT_FIRST = {a_new_life_answers_for_the_old: 90, nothing_presses: 44, partly_loaded_can_be_hit: 20}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_caught(plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is the plant that is caught: without it, that world is as it should be."""
    settings = {"groups": MODELS[0], **PLANTS[plant]}
    plant(monkeypatch)
    seeds = sorted(range(200), key=lambda seed: seed != LOOKED_AT_FIRST.get(plant))
    seed = next((seed for seed in seeds if _violation(seed, settings)), None)
    assert seed is not None, f"{plant.__name__} goes unnoticed in 200 worlds"
    monkeypatch.undo()
    without = _violation(seed, settings)
    assert without is None, f"seed {seed} says nothing about {plant.__name__}: {without}"


def _violation(seed: int, settings: dict[str, Any]) -> Violation | None:
    return World(seed, STRICT, requests=REQUESTS, **settings).play().violation
