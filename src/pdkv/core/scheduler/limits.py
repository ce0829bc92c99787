"""What bounds one step: its tokens, the cap on long prefills, pauses, and the steps in which prompts are computed."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from pdkv.core.config import EngineConfig
from pdkv.core.scheduler.request import Request
from pdkv.core.scheduler.running import RunningSet


class PauseState(enum.Enum):
    """How much of the work goes on (spec scheduler 3)."""

    UNPAUSED = enum.auto()
    PAUSED_NEW = enum.auto()  # who holds blocks goes on to its end, nobody else is let in
    PAUSED_ALL = enum.auto()  # nothing is computed, nobody is let in


class Rows(enum.Enum):
    """What the running requests have in this step so far."""

    NONE = enum.auto()
    DECODE = enum.auto()  # at least one, and none computes a part of its prompt
    MIXED = enum.auto()


class Budget:
    """Tokens of one step that are not given away yet (spec scheduler 3).

    ``max_num_scheduled_tokens`` may be given in all; and what is given must fit ``max_num_batched_tokens`` together
    with the ``slots`` that each row takes for its drafter.
    """

    __slots__ = ("_inputs", "_slots", "_tokens")

    def __init__(self, config: EngineConfig, *, paused: bool) -> None:
        self._slots = config.speculation.drafting_slots if config.speculation else 0
        self._tokens = 0 if paused else config.max_scheduled_tokens
        self._inputs = config.max_num_batched_tokens

    @property
    def left(self) -> int:
        """The most that one more row can be given; none when that is not positive."""
        return min(self._tokens, self._inputs - self._slots)

    def take(self, tokens: int, rows: int = 1) -> None:
        """``tokens`` go to ``rows`` rows."""
        self._tokens -= tokens
        self._inputs -= tokens + rows * self._slots

    def give_back(self, tokens: int) -> None:
        """A row of ``tokens`` tokens is not computed after all."""
        self._tokens += tokens
        self._inputs += tokens + self._slots


@dataclass(frozen=True, slots=True)
class StepRules:
    """What holds for everyone in one step.

    ``threshold`` caps each request's tokens, 0: nothing does. ``decode_only``: parts of prompts wait for a later step.
    """

    threshold: int
    decode_only: bool = False

    def cap(self, tokens: int) -> int:
        """``tokens`` cut to the threshold."""
        return min(tokens, self.threshold) if self.threshold else tokens


def long_prefill_threshold(config: EngineConfig, requests: int) -> int:
    """The cap on each request's tokens among ``requests`` that wait or run; 0 where there is none.

    It is there for the others' sake, so who is alone has none; where it is adaptive nobody gets less than a fair share.
    """
    threshold = config.long_prefill_token_threshold if requests > 1 else 0
    if threshold and config.long_prefill_token_threshold_adaptive:
        return max(threshold, config.max_num_batched_tokens // requests)
    return threshold


class PrefillPace:
    """Data parallelism: prompts are computed only in every n-th step, so that all ranks are slow in the same ones.

    Steps count from 0 when an instance has been idle. While somebody decodes, prompts wait for the next n-th step,
    unless the last step that let prompts in could not let in all of them (``prefill_schedule_interval``).
    """

    def __init__(self, interval: int) -> None:
        self.active = interval > 1
        self._interval = interval
        self._step = 0
        self._overloaded = False

    def next_step(self, running: Iterable[Request]) -> bool:
        """A step begins; whether it leaves prompts out."""
        aligned = self._step % self._interval == 0
        self._step += 1
        return not aligned and not self._overloaded and any(not request.prefilling for request in running)

    def let_in(self, waiting: Iterable[Request]) -> None:
        """The step has let in whom it could; ``waiting`` still wait."""
        self._overloaded = any(not request.skipped for request in waiting)

    def skip(self, steps: int) -> None:
        """So many steps in which nobody waited."""
        self._step += steps
        self._overloaded = False

    def idle(self) -> None:
        """Nobody is left."""
        self._step = 0


class AdaptersOfStep:
    """The adapters (LoRA) that one step computes with, ``most`` of them.

    Those of the running requests, and more as others are let in. ``every``: of those too that have no share of this
    step, which may have one of the next (vLLM lets others in for them, and has too many adapters then).
    """

    def __init__(self, most: int, running: RunningSet, *, every: bool) -> None:
        self._most = most
        self._names = {one.new.lora for one in running if one.new.lora and (every or running.scheduled[one.column])}

    def takes(self, request: Request) -> bool:
        """Whether the request can come in: with an adapter in use, with none, or while there is room for one."""
        lora = request.new.lora
        return lora is None or lora in self._names or len(self._names) < self._most

    def add(self, request: Request) -> None:
        """It has come in."""
        if request.new.lora is not None:
            self._names.add(request.new.lora)
