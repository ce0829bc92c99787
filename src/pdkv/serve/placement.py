"""Which instance a request goes to: the one that will have the most KV memory left with it, prefixes it holds counted.

Each instance's own `/metrics` are asked once a second (vLLM's names, so vLLM's instances can be placed on as well);
between two answers the router counts what it has sent there itself. An instance that says nothing is taken in turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from pdkv.errors import PdkvError
from pdkv.logs.metrics_text import Metrics, parse_metrics
from pdkv.serve.affinity import PrefixMemory, prefix_keys
from pdkv.serve.backends import Backend, Pool
from pdkv.units import cdiv

LOG = logging.getLogger("pdkv.router")

ASK_EVERY_S = 1.0
_STALE_S = 5.0
_BYTES_PER_TOKEN = 4  # of a prompt's text, roughly: only for prompts whose tokens nobody has counted yet


@dataclass(frozen=True, slots=True)
class Figures:
    """What an instance said of itself at ``at_s`` (`time.monotonic`): blocks of KV, and its queue."""

    at_s: float
    num_blocks: int
    block_size: int
    free_blocks: int
    waiting: int


def figures_of(metrics: Metrics, at_s: float) -> Figures | None:
    """The figures in a `/metrics` text of pdkv or vLLM, or ``None`` when they are not all there."""
    config = metrics.series("vllm:cache_config_info")
    usage = metrics.total("vllm:kv_cache_usage_perc")
    if not config or usage is None:
        return None
    try:
        num_blocks = int(config[0].labels["num_gpu_blocks"])
        block_size = int(config[0].labels["block_size"])
    except (KeyError, ValueError):
        return None
    if num_blocks < 1 or block_size < 1:
        return None
    free_blocks = round((num_blocks - 1) * (1 - usage))
    accounts = metrics.values("pdkv:kv_blocks", "account")
    if {"free", "cached"} <= accounts.keys():
        free_blocks = int(accounts["free"] + accounts["cached"])
    waiting = int(metrics.total("vllm:num_requests_waiting") or 0)
    return Figures(at_s, num_blocks, block_size, free_blocks, waiting)


@dataclass(eq=False, slots=True)
class Seat:
    """One instance as a place for requests. ``sent`` are (time, tokens) of requests it was given lately."""

    backend: Backend
    figures: Figures | None = None
    draining: bool = False
    in_flight: int = 0
    sent: list[tuple[float, int]] = field(default_factory=list)

    def blocks_left(self, tokens: int, known_share: float) -> int | None:
        """Free blocks once it has admitted ``tokens`` more; less than 0: they do not fit now. ``None``: unknown."""
        figures = self.figures
        if figures is None or time.monotonic() - figures.at_s > _STALE_S:
            return None
        coming = sum(cdiv(count, figures.block_size) for _, count in self.sent)
        new_tokens = tokens - int(tokens * known_share)
        return figures.free_blocks - coming - cdiv(new_tokens, figures.block_size)

    def told(self, figures: Figures | None) -> None:
        """What the instance says now; requests older than a round of questions are in it."""
        self.figures = figures
        known_since = time.monotonic() - ASK_EVERY_S
        self.sent = [(at_s, tokens) for at_s, tokens in self.sent if at_s > known_since]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the router knows of a prompt before anybody has tokenised it."""

    keys: list[bytes]
    tokens: int

    @classmethod
    def of(cls, body: dict[str, Any]) -> Prompt:
        """From a request's body. The tokens are exact for a list of token ids, else estimated from the text."""
        content = body.get("prompt", body.get("messages"))
        if isinstance(content, list) and content and isinstance(content[0], int):
            return cls(prefix_keys(body), len(content))
        return cls(prefix_keys(body), cdiv(len(str(content)), _BYTES_PER_TOKEN))

    def with_tokens(self, params: Any) -> Prompt:
        """With the count that the prefill instance gave (``remote_num_tokens``), if it gave one."""
        count = params.get("remote_num_tokens") if isinstance(params, dict) else None
        return Prompt(self.keys, count) if type(count) is int and 0 < count < 1 << 31 else self


class Placement:
    """The order in which to try the instances of one role for a request.

    ``on_lost`` are called with the label of an instance that gives its figures no longer.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.seats = {backend.label: Seat(backend) for backend in pool.backends}
        self._memory = PrefixMemory()
        self.on_lost: list[Callable[[str], None]] = [self._memory.forget]

    def order(self, prompt: Prompt) -> list[Backend]:
        """Instances to try, best first: not resting, not draining, not short of memory with others queueing before.

        A prefix that an instance holds counts as memory it does not need. Equals, and those whose figures are unknown,
        take turns. A draining instance is left out unless there is no other.
        """
        in_turn = self._pool.candidates()
        open_ones = [backend for backend in in_turn if not self.seats[backend.label].draining]
        return sorted(open_ones or in_turn, key=lambda backend: self._rank(backend, prompt))

    def _rank(self, backend: Backend, prompt: Prompt) -> tuple[bool, int, int, float]:
        seat, share = self.seats[backend.label], self._memory.share(prompt.keys, backend.label)
        left = seat.blocks_left(prompt.tokens, share)
        if left is None:
            return backend.resting, 0, 0, -share
        queueing = seat.figures.waiting if seat.figures is not None else 0
        return backend.resting, queueing if left < 0 else 0, -left, -share

    @contextmanager
    def sending(self, backend: Backend, prompt: Prompt) -> Iterator[None]:
        """``backend`` is being sent the request; in the block it counts as in flight there."""
        seat = self.seats[backend.label]
        sent = (time.monotonic(), prompt.tokens)  # counted by hand until the instance's own figures show it
        seat.sent.append(sent)
        self._memory.remember(prompt.keys, backend.label)
        seat.in_flight += 1
        try:
            yield
        finally:
            seat.in_flight -= 1
            if sent in seat.sent:
                seat.sent.remove(sent)

    async def ask_all(self, client: httpx.AsyncClient) -> None:
        """One round of questions."""
        await asyncio.gather(*(self._ask(client, seat) for seat in self.seats.values()))

    async def _ask(self, client: httpx.AsyncClient, seat: Seat) -> None:
        asked_s = time.monotonic()
        try:
            response = await client.get(f"{seat.backend.url}/metrics", timeout=_STALE_S)
            figures = figures_of(parse_metrics(response.content), asked_s) if response.is_success else None
        except (httpx.HTTPError, PdkvError) as error:
            figures = None
            if isinstance(error, httpx.ConnectError):
                seat.backend.lost()
        if figures is None and seat.figures is not None:
            for forget in self.on_lost:  # it may have died and come back with an empty cache
                forget(seat.backend.label)
        seat.told(figures)


async def keep_asking(client: httpx.AsyncClient, placements: Sequence[Placement]) -> None:
    """Ask for ever; to be cancelled. What goes wrong with one round must not end the others."""
    while True:
        try:
            await asyncio.gather(*(placement.ask_all(client) for placement in placements))
        except Exception:
            LOG.exception("asking the instances for their figures failed")
        await asyncio.sleep(ASK_EVERY_S)
