"""The proof that the checker sees what it must: each planted bug is caught within 200 worlds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdkv.core.blocks.kinds.window import WindowKind
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.config import STRICT
from pdkv.core.ledger import Account
from pdkv.core.ports import Int32Array, Plan
from pdkv.core.scheduler.request import Request
from pdkv.core.transfer.consumer import Consumer
from pdkv.core.transfer.grants import Promise, WriteGrants
from pdkv.core.transfer.lease import Lease, LeaseSlots
from pdkv.core.transfer.messages import CancelGrant, Fenced
from pdkv.core.transfer.next_turn import NextTurns
from pdkv.core.transfer.producer import Producer
from pdkv.core.transfer.rendezvous import Announcements
from pdkv.core.transfer.writes import Writes
from pdkv.simulate.instance import Life
from pdkv.simulate.weather import Weather
from pdkv.simulate.world import BLOCK, MODELS, World

REQUESTS = 60


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
        self._fence(promise.grant.grant_id)

    patch.setattr(WriteGrants, "take_back", take_back)


def write_after_cancel(patch: pytest.MonkeyPatch) -> None:
    """P answers FENCED at once, and goes on with the WRITE that it has, or gets to later."""

    def on_cancel(self: Writes, message: CancelGrant, origin: bytes) -> None:
        self._reply(origin, Fenced(message.nonce, message.grant_id))

    patch.setattr(Writes, "on_cancel", on_cancel)
    patch.setattr(Announcements, "on_cancel", lambda *_: None)
    patch.setattr(Announcements, "on_withdraw", lambda *_: None)


OF_WRITES = [reuse_before_fenced, write_after_cancel]
PLANTS = [
    no_slot_comparison, no_quarantine, timer_is_a_fence, hashed_in_flight, slot_stays_armed, no_expiry,
    one_free_skipped, heartbeat_forgotten, no_load_deadline, window_too_small, last_token_computed_by_p,
    slot_outlives_its_blocks, common_beginning_not_looked_for,
]  # fmt: skip
OF_TALKS = (slot_outlives_its_blocks, common_beginning_not_looked_for)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_caught(plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    weather = {
        heartbeat_forgotten: Weather(
            read_ms=2000
        ),  # in bad weather a lease may well expire, in calm weather it may not
        timer_is_a_fence: Weather(hang=0.3, read_ms=300),
    }.get(plant)
    groups = MODELS[1] if plant in (window_too_small, last_token_computed_by_p) else MODELS[0]
    talks: dict[str, Any] = {"mode": "pull", "talks": True} if plant in OF_TALKS else {}
    for seed in range(200):
        world = World(seed, STRICT, requests=REQUESTS, groups=groups, weather=weather, **talks)
        if world.play().violation is not None:
            return
    pytest.fail(f"{plant.__name__} goes unnoticed in 200 worlds")


@pytest.mark.parametrize("plant", OF_WRITES)
def test_a_planted_bug_of_write_push_is_caught(plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    nixl = {"mode": "write", "shared_memory": False}  # the other's copies look at the slot, and so at what is wrong
    for seed in range(200):
        if World(seed, STRICT, requests=REQUESTS, groups=MODELS[0], **nixl).play().violation is not None:  # type: ignore[arg-type]
            return
    pytest.fail(f"{plant.__name__} goes unnoticed in 200 worlds")
