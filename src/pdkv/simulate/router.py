"""The P/D router in virtual time: prefill leg, decode leg, retries, and clients that leave."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_struct

from pdkv.core.events import Event, Finished, FinishReason, TokenSampled
from pdkv.core.ports import NewRequest
from pdkv.core.transfer.messages import Awaited, Grant, RemoteSource, TransferMode
from pdkv.simulate.weather import MS

if TYPE_CHECKING:
    from pdkv.simulate.instance import Instance, Life
    from pdkv.simulate.world import World

_SILENCE_NS = 8000 * MS  # an instance that shows no sign of life for so long is given up (`--instance-timeout`)
_MOST_LEGS = 8


class Outcome(enum.Enum):
    """What a client can see of its request, exactly once."""

    COMPLETED = "completed"
    ERROR = "error"
    LEFT = "the client left"


@dataclass(slots=True, eq=False)
class Call:
    """One client's request, and what was streamed to it."""

    new: NewRequest
    tokens: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    error: str = ""
    source: RemoteSource | None = None  # what the prefill leg granted
    before: RemoteSource | None = None  # what a decode instance kept of the turn before
    kept: RemoteSource | None = None  # what it keeps of this one
    turn: int = 0
    leg: Leg | None = None  # the one under way that matters to the client
    prefill: Leg | None = None  # push: the prefill leg beside it
    legs: int = 0
    sent: set[bool] = field(default_factory=set)  # legs there were: to a prefill instance (True), a decode one (False)
    leaves_at: str = ""  # the event of a leg behind which its client leaves


@dataclass(slots=True, eq=False)
class Leg:
    """A request to one life of an instance, on behalf of a call."""

    call: Call
    new: NewRequest
    life: Life

    @property
    def state(self) -> str:
        """Where its request is, for people."""
        request = self.life.engine.requests.get(self.new.request_id)
        awaits = request is not None and request.awaited is not None
        return "not there" if request is None else "AWAITING" if awaits else request.status.name


class Router:
    """Sends each call to a prefill and then to a decode instance; what is lost is tried again where that is safe.

    In worlds that talk, what a decode instance keeps goes with the call (`World.ended`) to the next turn's prefill.
    In mode ``push`` and ``write`` to both at once, under a transfer id: the prefill instance announces what it has to
    the decode instance, or writes it.
    """

    def __init__(
        self, world: World, prefill: Sequence[Instance], decode: Sequence[Instance], mode: TransferMode
    ) -> None:
        self._world, self._prefill, self._decode, self.mode = world, prefill, decode, mode
        self._turn = 0

    def arrive(self, call: Call) -> None:
        """A client's request."""
        if self.mode != "pull":
            self._both_legs(call)
            return
        new = replace(call.new, produce=True, max_tokens=1, source=call.before)
        if not self._send(call, self._prefill, new):
            self._decode_leg(call)  # no prefill instance answers: the decode instance computes the prompt

    def leave(self, call: Call) -> None:
        """The client closes its connection."""
        if call.outcome is None:
            for leg in (call.leg, call.prefill):
                if leg is not None:
                    self._world.counts[f"left while {leg.state}"] += 1
            self._end(call, Outcome.LEFT)

    # ---------------------------------------------------------------------------------------- what instances answer

    def heard(self, leg: Leg, event: Event) -> None:
        """A token or the end of a leg. Of a leg that was given up nothing is passed on."""
        call = leg.call
        if type(event).__name__ == call.leaves_at:
            call.leaves_at = ""
            self._world.time.after(self._world.rng.randrange(5 * MS), self.leave, call)
        if leg is call.prefill:
            if isinstance(event, Finished):  # well or badly: the decode instance is told
                call.prefill = None
            return
        if call.leg is not leg:
            return
        if isinstance(event, TokenSampled) and not leg.new.produce:
            call.tokens.append(event.token)
        elif isinstance(event, Finished):
            call.leg = None
            if leg.new.produce:
                self._prefilled(call, leg, event)
            elif event.reason is FinishReason.LENGTH:
                if event.lease is not None:
                    call.kept = replace_struct(remote_source(leg, event.lease), expires_ns=event.kept_until_ns)
                self._end(call, Outcome.COMPLETED)
            else:
                self._end(call, Outcome.ERROR, event.error or event.reason.value)

    def lost(self, leg: Leg) -> None:
        """The instance died, or shows no sign of life: another one may do, while no token has been streamed."""
        call = leg.call
        if leg is call.prefill:  # nobody will tell the decode instance
            call.prefill, decode = None, call.leg
            if decode is not None and not call.tokens:
                call.leg = None
                decode.life.abort(decode)
                self.arrive(call)
            return
        if call.leg is not leg:
            return
        call.leg = None
        if leg.new.produce:
            self.arrive(call)
        elif call.tokens:
            self._end(call, Outcome.ERROR, "the decode instance died in the middle of its answer")
        elif self.mode != "pull":
            if call.prefill is not None:
                call.prefill.life.abort(call.prefill)
                call.prefill = None
            self.arrive(call)
        else:
            self._decode_leg(call)

    # -------------------------------------------------------------------------------------------------------- legs

    def _both_legs(self, call: Call) -> None:
        """In either order: what one of them does may come to the other before its request."""
        transfer_id = f"{call.new.request_id}/{call.legs}"
        prefill = replace(call.new, produce=True, max_tokens=1, transfer_id=transfer_id)
        if not self._send(call, self._prefill, prefill):
            self._decode_leg(call)
            return
        call.prefill, call.leg = call.leg, None
        assert call.prefill is not None
        awaited = Awaited(peer=call.prefill.life.peer, transfer_id=transfer_id, write=self.mode == "write")
        if not self._send(call, self._decode, replace(call.new, awaited=awaited)):
            self._end(call, Outcome.ERROR, "no decode instance answers")

    def _prefilled(self, call: Call, leg: Leg, event: Finished) -> None:
        if event.lease is not None:
            call.source = remote_source(leg, event.lease)
        self._world.time.after(self._world.network.delay_ns(), self._decode_leg, call)

    def _decode_leg(self, call: Call) -> None:
        if call.outcome is not None:
            return
        keeps = self._world.talks and call.source is not None
        if not self._send(call, self._decode, replace(call.new, source=call.source, keep_turn=keeps)):
            self._end(call, Outcome.ERROR, "no decode instance answers")

    def _send(self, call: Call, instances: Sequence[Instance], new: NewRequest) -> bool:
        """To the next instance that answers, unless the call has been tried often enough."""
        if call.legs >= _MOST_LEGS:
            return False
        for _ in instances:
            self._turn += 1
            life = instances[self._turn % len(instances)].life
            if life is None:
                continue
            self._world.counts["leg tried again"] += new.produce in call.sent
            call.sent.add(new.produce)
            call.legs += 1
            call.leg = Leg(call, replace(new, request_id=f"{new.request_id}/{call.legs}"), life)
            life.submit(call.leg)
            self._world.time.after(_SILENCE_NS, self._look, call.leg)
            return True
        return False

    def _look(self, leg: Leg) -> None:
        """A stopped instance breaks no connection: only asking it for a sign of life tells."""
        if leg not in (leg.call.leg, leg.call.prefill):
            return
        if leg.life.stopped_for_ns:
            leg.life.abort(leg)
            self.lost(leg)
        else:
            self._world.time.after(_SILENCE_NS, self._look, leg)

    def _end(self, call: Call, outcome: Outcome, error: str = "") -> None:
        assert call.outcome is None, f"{call.new.request_id}: {outcome.value} after {call.outcome}"
        call.outcome, call.error = outcome, error
        for leg in (call.leg, call.prefill):
            if leg is not None:
                leg.life.abort(leg)
        call.leg = call.prefill = None
        self._world.ended(call)


def remote_source(leg: Leg, lease: Grant) -> RemoteSource:
    """The grant as `kv_transfer_params` carries it."""
    return RemoteSource(peer=leg.life.peer, request_id=leg.new.request_id, grant=lease)
