"""A whole P/D system under virtual time and faults, judged by what its memory holds and what its clients see."""

from __future__ import annotations

import enum
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from pdkv.core.blocks.groups import ChunkedGroup, FullGroup, Group, WindowGroup
from pdkv.core.config import EngineConfig, TransferPolicy
from pdkv.core.events import Event, LeaseReleased, LeaseRenewed, LoadFailed, LoadFinished
from pdkv.core.ports import NewRequest
from pdkv.core.transfer.messages import Peer, TransferMode
from pdkv.simulate.clock import VirtualTime
from pdkv.simulate.device import ForeignKV, expected_output
from pdkv.simulate.instance import Instance, Life
from pdkv.simulate.network import Network
from pdkv.simulate.router import Call, Outcome, Router
from pdkv.simulate.sockets import Sockets
from pdkv.simulate.weather import MS, Weather
from pdkv.units import cdiv

BLOCK = 4
#: Tokens of a block on an instance of a world whose instances' blocks differ: each is a multiple of the smaller ones.
BLOCK_SIZES = (2, BLOCK, 2 * BLOCK)
MAX_LEN = 40
_FULL = FullGroup(block_size=BLOCK)
#: Models: half of all worlds have one of full attention alone.
MODELS: tuple[tuple[Group, ...], ...] = (
    (_FULL,),
    (_FULL, WindowGroup(block_size=BLOCK, window=2 * BLOCK)),
    (_FULL, WindowGroup(block_size=BLOCK, window=BLOCK - 1), WindowGroup(block_size=BLOCK, window=3 * BLOCK + 1)),
    (_FULL, ChunkedGroup(block_size=BLOCK, chunk=2 * BLOCK)),
    (WindowGroup(block_size=BLOCK, window=2 * BLOCK + 1),),
)
_LONGEST_PROMPT = 30
_MOST_TURNS = 3
#: Behind which of a leg's events a client may leave.
_MOMENTS = (
    "Registered", "LoadStarted", "LoadFinished", "LoadFailed", "Admitted", "TokenSampled", "Preempted", "LeaseGranted",
    "Finished",
)  # fmt: skip
_PATIENCE_NS = 1200_000 * MS  # everything must have ended so long after the last arrival
_LEASE_NS = 3000 * MS
_CALM_TIMEOUT_NS = 600_000 * MS  # longer than any queue; two that wait for each other stand still
_MOST_ACTIONS = 600  # per request: more means that somebody goes round in circles

#: Hears the story: (time in ns, who, what, details).
Note = Callable[[int, str, str, object], None]


def _draw_model(seed: int) -> tuple[Group, ...]:
    """By lots of its own, so that a world goes on as before when there are more models."""
    rng = Random(f"{seed} model")
    return MODELS[0] if rng.random() < 0.5 else MODELS[rng.randrange(1, len(MODELS))]


class Kind(enum.Enum):
    """What can be wrong with a world."""

    FOREIGN_KV = "a token was computed from KV that is not its prompt's"
    STUCK = "somebody waits or holds memory beyond every deadline"
    STRANDED = "memory is still held after the traffic has ended"
    OUTCOME = "a client saw no outcome, two, or wrong tokens"
    LEDGER = "accounts, owners and blocks disagree, or a deadline has passed"
    CRASHED = "an engine raised an exception"
    WASTE = "a lease expired, a load failed, or all stood still, although nothing had gone wrong"


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong, and the facts."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """How a world ended: its first violation, if any, and how often each thing happened."""

    seed: int
    weather: Weather
    violation: Violation | None
    counts: Counter[str]
    virtual_ns: int


class World:
    """Everything is drawn from ``seed``; `play` runs it to its end. ``note`` hears all that happens.

    ``groups`` (of the model), ``weather``, ``mode``, ``shared_memory``, ``talks``, ``unlike`` and ``settings`` (of
    every instance's `EngineConfig`) take the place of what would be drawn. ``talks``: up to half of the ``requests`` go
    on from earlier answers, which are kept for that (pull only). ``unlike``: instances have blocks of their own sizes.
    ``over_tcp``: what does not go through shared memory goes through `Sockets`.
    """

    def __init__(
        self,
        seed: int,
        policy: TransferPolicy,
        *,
        requests: int = 200,
        groups: tuple[Group, ...] | None = None,
        weather: Weather | None = None,
        mode: TransferMode | None = None,
        shared_memory: bool | None = None,
        over_tcp: bool = True,
        talks: bool | None = None,
        unlike: bool | None = None,
        note: Note | None = None,
        **settings: Any,
    ) -> None:
        self.seed, self._note, self._settings = seed, note, settings
        self.rng = Random(seed)
        self.weather = Weather.draw(self.rng) if weather is None else weather
        self._groups = _draw_model(seed) if groups is None else groups
        self.time = VirtualTime()
        lots = Random(f"{seed} mode")  # of its own, as that of the model
        self.shared_memory = lots.random() < 0.5 if shared_memory is None else shared_memory
        self.counts: Counter[str] = Counter()
        self.sockets = Sockets(seed, self.counts, used=over_tcp and not self.shared_memory)
        self.network = Network(self.time, self.rng, self.weather, self.counts)
        self._wasted = ""
        self._in_flight, self._moved_ns, self._gets_on = 0, 0, policy.bounded_waits
        self._lots = Random(f"{seed} turns")  # of their own, as above
        if policy.bounded_waits and self.rng.random() < 0.25:
            policy = replace(policy, load_failure="fail")
        write = lots.random() < 1 / 3 if mode is None else mode == "write"
        self._sizes = Random(f"{seed} blocks")  # of their own, as above
        differ = self._sizes.random() < 1 / 3 if unlike is None else unlike
        self._block_sizes: tuple[int, ...] = BLOCK_SIZES if differ else (BLOCK,)
        self._instances: list[Instance] = []
        prefill = [self._instance(f"P{i}", i, policy) for i in range(self.rng.randrange(1, 3))]
        if write and self.weather.calm and not all(isinstance(group, FullGroup) for group in self._groups):
            # P refuses to write what a window begins with into blocks larger than its own (`unlike_target`).
            least = min(instance.config.block_size for instance in prefill)
            self._block_sizes = tuple(size for size in self._block_sizes if size <= least)
        decode = [self._instance(f"D{i}", 10 + i, policy) for i in range(self.rng.randrange(1, 3))]
        push = self.rng.random() < 0.5
        if mode is None:
            mode = "write" if write else "push" if push else "pull"
        self.router = Router(self, prefill, decode, mode)
        half = self._lots.random() < 0.5
        self.talks = mode == "pull" and (half if talks is None else talks)
        self._most_calls = requests
        self.calls = list(self._arrivals((requests + 1) // 2 if self.talks else requests))
        self.open = len(self.calls)
        for instance in self._instances:
            self.time.after(100 * MS, self._misfortune, instance)

    # ----------------------------------------------------------------------------------------------------- drawing it

    def _instance(self, name: str, port: int, policy: TransferPolicy) -> Instance:
        instance = Instance(self, name, port, self._config(policy))
        self._instances.append(instance)
        return instance

    def _config(self, policy: TransferPolicy) -> EngineConfig:
        rng, size = self.rng, self._sizes.choice(self._block_sizes)
        # The longest request fits, and some more tokens; a window needs not begin where a block does.
        blocks = 1 + cdiv(MAX_LEN, size) + (MAX_LEN // size + 1) * (len(self._groups) - 1)
        drawn = EngineConfig(
            num_blocks=blocks + rng.randrange(0, 19) * BLOCK // size,
            block_size=size,
            max_model_len=MAX_LEN,
            groups=tuple(replace(group, block_size=size) for group in self._groups),
            max_num_seqs=rng.randrange(1, 9),
            max_num_batched_tokens=rng.choice([8, 24, 64]),
            watermark=rng.choice([0.0, 0.1]),
            enable_prefix_caching=bool(rng.random() < 0.8),
            priority_scheduling=bool(rng.random() < 0.2),
            max_outstanding_plans=rng.randrange(1, 3),
            full_sequence_must_fit=bool(rng.random() < 0.8),
            transfer=policy,
            kv_load_timeout_ns=_CALM_TIMEOUT_NS if self.weather.calm else rng.choice([300, 6000]) * MS,
            push_registration_timeout_ns=_CALM_TIMEOUT_NS if self.weather.calm else rng.choice([2000, 30_000]) * MS,
            fence_timeout_ns=1000 * MS,
            lease_ns=_LEASE_NS,
            max_leased_fraction=rng.choice([0.4, 0.8]),
            kept_ttl_ns=self._lots.choice([6000, 12_000, 60_000]) * MS,
            max_kept_fraction=self._lots.choice([0.4, 1.0]),
            kv_recompute_threshold=self._lots.choice([0, BLOCK, 2 * BLOCK]),
        )
        return replace(drawn, **self._settings)

    def _arrivals(self, requests: int) -> Iterator[Call]:
        rng = self.rng
        self._families = [np.array([rng.randrange(50) for _ in range(MAX_LEN)], dtype=np.int32) for _ in range(4)]
        at_ns, gap_ms = 0, rng.choice([40, 120, 250] if self.talks else [10, 30, 90])  # memory to keep turns in
        for number in range(requests):
            at_ns += rng.randrange(0, 2 * gap_ms * MS)
            call = self._opening(number)
            self._arrive_in(at_ns, call)
            yield call
        self._last_arrival_ns = at_ns

    def _opening(self, number: int) -> Call:
        """A call that goes on from no other."""
        rng = self.rng
        prompt = rng.choice(self._families)[: rng.randrange(1, _LONGEST_PROMPT + 1)].copy()
        if rng.random() < 0.6:
            prompt[rng.randrange(len(prompt))] = 60 + number  # shares its head only
        new = NewRequest(
            request_id=f"r{number}", prompt=prompt, max_tokens=rng.randrange(1, 17), priority=rng.randrange(0, 2),
            cache_salt="salt" if rng.random() < 0.1 else None,
        )  # fmt: skip
        return Call(new)

    def _talk_on(self, call: Call) -> None:
        """The client goes on from its answer, perhaps, or somebody else begins; until there were enough calls."""
        number = len(self.calls)
        if number == self._most_calls:
            return
        after = self._next_turn(call) or self._opening(number)
        self.calls.append(after)
        self.open += 1
        self._arrive_in(self.rng.randrange(self.rng.choice([300, 3000, 12_000]) * MS), after)

    def _next_turn(self, call: Call) -> Call | None:
        """By the answer's tokens or, now and then, by others of the same text."""
        rng = self.rng
        if call.outcome is not Outcome.COMPLETED or call.turn == _MOST_TURNS or rng.random() < 0.2:
            return None
        answer = np.asarray(call.tokens, dtype=np.int32)
        if rng.random() < 0.2:
            answer[rng.randrange(len(answer))] = 55
        more = np.array([rng.randrange(50) for _ in range(rng.randrange(1, 4))], dtype=np.int32)
        prompt = np.concatenate((call.new.prompt, answer, more))
        if len(prompt) > _LONGEST_PROMPT:
            return None
        new = replace(call.new, request_id=f"{call.new.request_id}+", prompt=prompt, max_tokens=rng.randrange(1, 9))
        before = call.kept if rng.random() < 0.9 else None  # the router has forgotten it
        return Call(new, before=before, turn=call.turn + 1)

    def _arrive_in(self, delay_ns: int, call: Call) -> None:
        """A call that its client may give up again, after a time or at a certain moment."""
        self.time.after(delay_ns, self._arrive, call)
        if self.rng.random() >= self.weather.abort:
            return
        if self.rng.random() < 0.5:
            call.leaves_at = self.rng.choice(_MOMENTS)
        else:
            self.time.after(delay_ns + self.rng.randrange(0, 3000 * MS), self.router.leave, call)

    def _arrive(self, call: Call) -> None:
        self._moved()
        self._in_flight += 1
        self.router.arrive(call)

    def _moved(self) -> None:
        """Something has happened: was it long that nothing had, although a client waited?"""
        now_ns = self.time.now_ns
        if now_ns - self._moved_ns >= _LEASE_NS and self._in_flight and self._gets_on:
            since_s, until_s = self._moved_ns / 1e9, now_ns / 1e9
            self._wasted = self._wasted or f"nothing happened from {since_s:.3f} to {until_s:.3f} s"
        self._moved_ns = now_ns

    def _misfortune(self, instance: Instance) -> None:
        """Ten times a second an instance may be hit by what has a rate."""
        rng, weather, life = self.rng, self.weather, instance.life
        if life is not None:
            if rng.random() < weather.crash / 10:
                instance.kill()
                self.time.after(rng.randrange(1, 4000 * MS), self._restart, instance)
            elif rng.random() < weather.pause / 10:
                duration_ns = rng.randrange(50, 8000) * MS
                self.note(life.name, "stopped", f"for {duration_ns // MS} ms")
                life.stop_for(duration_ns)
            elif rng.random() < weather.mover_crash / 10:
                life.later(0, life.mover.kill)
            elif rng.random() < weather.outage / 10:
                self.network.cut(life.peer.port, self.time.now_ns + rng.randrange(100, 6000) * MS)
        if self.open:
            self.time.after(100 * MS, self._misfortune, instance)

    def _restart(self, instance: Instance) -> None:
        instance.start()

    # -------------------------------------------------------------------------------------------- what its parts ask

    def lives(self) -> Iterator[Life]:
        """The instances that are up."""
        for instance in self._instances:
            if instance.life is not None:
                yield instance.life

    def life_of(self, peer: Peer) -> Life | None:
        """The very life that ``peer`` names, if it still is."""
        return next((life for life in self.lives() if life.peer == peer), None)

    def took(self, life: Life, events: tuple[Event, ...]) -> None:
        """What an engine reported."""
        if not all(isinstance(event, LeaseRenewed) for event in events):
            self._moved()
        for event in events:
            name = type(event).__name__
            if isinstance(event, LeaseReleased) and event.next_turn:
                self.counts["TurnExpired"] += event.expired
                self.counts["TurnGaveWay"] += event.gave_way
            elif isinstance(event, LeaseReleased) and event.expired:
                self.counts["LeaseExpired"] += 1
                self._wasted = self._wasted or f"{life.name}: the lease of {event.request_id} expired"
            elif isinstance(event, LoadFinished):
                self.counts["TurnRead"] += self._of_a_kept_turn(life, event)
            elif isinstance(event, LoadFailed) and not self._of_a_kept_turn(life, event):
                self._wasted = self._wasted or f"{life.name}: {event.request_id}: {event.cause}"
            self.note(life.name, name, event)

    @staticmethod
    def _of_a_kept_turn(life: Life, event: Event) -> bool:
        """That one was let go, for its time or the memory, before it was read is no waste."""
        leg = life.legs.get(event.request_id)
        return leg is not None and leg.new.produce and leg.new.source is not None

    def ended(self, call: Call) -> None:
        """A client has seen an outcome."""
        assert call.outcome is not None
        self.open -= 1
        self._in_flight -= 1
        if self.talks:
            self._talk_on(call)
        self.note("router", call.outcome.name, f"{call.new.request_id} {call.error}")

    def note(self, who: str, what: str, details: object = "") -> None:
        """One more thing happened: it is counted, and told if somebody listens."""
        self.counts[what] += 1
        if self._note is not None:
            self._note(self.time.now_ns, who, what, details)

    # --------------------------------------------------------------------------------------------------- playing it

    def play(self) -> Story:
        """To the end of all requests, and then of all leases and fences, or to the first violation."""
        try:
            violation = self._play()
        except ForeignKV as error:
            violation = Violation(Kind.FOREIGN_KV, str(error))
        except AssertionError as error:
            violation = Violation(Kind.LEDGER, str(error))
        except Exception as error:  # whatever it is, the instance would be gone
            *_, frame = traceback.extract_tb(error.__traceback__)
            where = f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
            violation = Violation(Kind.CRASHED, f"{type(error).__name__}: {error} in {where}")
        if violation is not None:
            self.note("checker", violation.kind.name, violation.text)
        return Story(
            seed=self.seed, weather=self.weather, violation=violation, counts=self.counts,
            virtual_ns=self.time.now_ns,
        )  # fmt: skip

    def _play(self) -> Violation | None:
        most = _MOST_ACTIONS * len(self.calls)
        over = self.time.run(self._last_arrival_ns + _PATIENCE_NS, most)
        for life in self.lives():
            life.engine.check()
        held = [line for life in self.lives() for line in life.held()]
        if not over or self.open:
            waiting = [call.new.request_id for call in self.calls if call.outcome is None]
            return Violation(Kind.STUCK if self.open else Kind.STRANDED, f"{waiting[:5]} wait; {held[:20]}")
        if held or any(life.slots[:, 1].any() for life in self.lives()):
            return Violation(Kind.STRANDED, f"{held[:5]}, or a lease slot is still armed")
        for call in self.calls:
            wrong = self._judge(call)
            if wrong:
                return Violation(Kind.OUTCOME, f"{call.new.request_id}: {wrong}")
        if self.weather.calm and self._wasted:
            return Violation(Kind.WASTE, self._wasted)
        return None

    @staticmethod
    def _judge(call: Call) -> str | None:
        """What is wrong with what the client saw."""
        expected = expected_output(call.new.prompt, min(call.new.max_tokens, MAX_LEN - len(call.new.prompt)))
        if call.tokens != expected[: len(call.tokens)]:
            return f"it was given {call.tokens}, which does not begin {expected}"
        if call.outcome is Outcome.COMPLETED and call.tokens != expected:
            return f"it ended well after {len(call.tokens)} of {len(expected)} tokens"
        if call.outcome is Outcome.ERROR and not call.error:
            return "an error without a cause"
        return None
