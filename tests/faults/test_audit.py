"""What a world checks after every event is what `Engine.check` checks: both pass, and both see what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdkv.core.audit import Audit
from pdkv.core.config import STRICT
from pdkv.core.engine import Engine
from pdkv.core.ledger import Account
from pdkv.simulate.weather import Weather
from pdkv.simulate.world import BLOCK, MODELS, World


@pytest.mark.parametrize("seed", range(3))
def test_both_say_the_same_after_every_event(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, checks = Audit.check, 0

    def check(self: Audit) -> None:
        nonlocal checks
        checks += 1
        real(self)
        self._engine.check()

    monkeypatch.setattr(Audit, "check", check)
    story = World(seed, STRICT, requests=40).play()
    assert story.violation is None, story.violation
    assert checks > 300


def _busy_engine() -> Engine:
    """In the middle of a world of windows beside full attention: somebody runs, somebody waits."""
    calm = Weather(max_delay_ms=2, read_ms=20)
    world = World(3, STRICT, requests=60, groups=MODELS[1], weather=calm, mode="pull", enable_prefix_caching=True)
    while True:
        assert not world.time.run(10**15, world.time.played + 1), "no engine was ever busy"
        for life in world.lives():
            scheduler = life.engine.scheduler
            if len(scheduler.running) > 1 and len(scheduler.waiting) and life.engine.manager.pool.num_free > 3:
                return life.engine


def _count(engine: Engine) -> None:
    engine.manager.pool.ledger.counts[Account.FREE] += 1


def _peak(engine: Engine) -> None:
    engine.manager.pool.ledger.peaks[Account.RUNNING] = 0


def _free_twice(engine: Engine) -> None:
    queue = engine.manager.pool._queue
    queue.append(queue.order()[:1].copy())


def _free_and_held(engine: Engine) -> None:
    pool = engine.manager.pool
    pool.ledger.hold(pool.free_order()[:1], Account.RUNNING)


def _lost(engine: Engine) -> None:
    pool = engine.manager.pool
    pool._queue.pop(1)


def _foreign_block(engine: Engine) -> None:
    manager = engine.manager
    table = manager._holders[engine.scheduler.running[0].request_id].groups[0].table
    table.replace(0, manager.pool.free_order().item(0))


def _block_twice(engine: Engine) -> None:
    manager = engine.manager
    holder = manager._holders[engine.scheduler.running[0].request_id]
    table = holder.groups[0].table
    table.extend(table.ids[:1].copy())
    manager.pool.ledger.hold(table.ids[:1], holder.account)


def _dropped_and_there(engine: Engine) -> None:
    manager = engine.manager
    hold = manager._holders[engine.scheduler.running[0].request_id].groups[0]
    hold.num_dropped = 1


def _owner_gone(engine: Engine) -> None:
    del engine.manager._holders[engine.scheduler.running[0].request_id]


def _copy_forgotten(engine: Engine) -> None:
    engine.manager.pool.copies.append((0, 1, 2))


def _waiting_twice(engine: Engine) -> None:
    del engine.requests[engine.scheduler.waiting.head().request_id]


def _waits_and_holds(engine: Engine) -> None:
    manager = engine.manager
    key = engine.scheduler.waiting.head().request_id
    holder = manager._open(key, Account.RUNNING)
    holder.groups[0].table.extend(manager.pool.take(1, Account.RUNNING))


def _last_token(engine: Engine) -> None:
    engine.scheduler.running[0].last_token += 1


def _column(engine: Engine) -> None:
    engine.scheduler.running[0].column, engine.scheduler.running[1].column = 1, 1


def _growth_put_off(engine: Engine) -> None:
    request = engine.scheduler.running[0]
    request.num_computed = engine.manager.num_blocks_of(request.request_id) * BLOCK  # needs its next block, then
    engine.manager.growth._idle_until[:] = 1000


def _scheduled(engine: Engine) -> None:
    engine.scheduler.running.scheduled[-1] = 1


CORRUPTIONS = [
    _count, _peak, _free_twice, _free_and_held, _lost, _foreign_block, _block_twice, _dropped_and_there, _owner_gone,
    _copy_forgotten, _waiting_twice, _waits_and_holds, _last_token, _column, _growth_put_off, _scheduled,
]  # fmt: skip


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_both_see_what_is_wrong(corrupt: Callable[[Engine], None]) -> None:
    engine = _busy_engine()
    audit = Audit(engine)
    audit.check()
    engine.check()
    corrupt(engine)
    with pytest.raises((AssertionError, KeyError)):
        engine.check()
    with pytest.raises((AssertionError, KeyError)):
        audit.check()
    assert audit.recounts < 3, "the twin was called, so this says nothing"
