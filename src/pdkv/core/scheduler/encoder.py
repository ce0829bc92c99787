"""What the encoder computes in a step, and where prompts must wait for it (spec scheduler 3.1)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from pdkv.core.multimodal import EncoderLimits
from pdkv.core.ports import EncoderInput
from pdkv.core.scheduler.encoder_cache import EncoderCache
from pdkv.core.scheduler.request import Request


@dataclass(slots=True)
class Share:
    """So many ``tokens`` of a request can be computed, once the encoder has done its items ``encode``.

    ``repeats`` are items with the content of one of those. ``left`` is then left of the encoder's step.
    """

    tokens: int
    left: int
    encode: list[int] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)


class EncoderWork:
    """The encoder's part of the steps. ``lookahead``: prompt tokens that a drafter reads beyond those computed.

    ``begins_items``: where a whole item does not fit the step behind the tokens in front of it, a chunk of those tokens
    ends where the item begins, whatever is read ahead. The next one begins with the item, and may end inside. (vLLM
    computes nothing more, until a step has room for all of them.) ``lacks_room``: somebody found no room in the cache
    this step.
    """

    def __init__(self, limits: EncoderLimits, lookahead: int, *, begins_items: bool = True) -> None:
        self.cache = EncoderCache(limits.cache_embeddings)
        self._limits = limits
        self._lookahead, self._begins_items = lookahead, begins_items
        self.lacks_room = False
        self._left = 0
        self._step: dict[str, tuple[Request, list[int]]] = {}
        self._confused: dict[str, tuple[Request, str]] = {}

    def new_step(self) -> None:
        """A step begins."""
        self._left, self._step, self.lacks_room = self._limits.step_embeddings, {}, False

    def share(self, request: Request, start: int, tokens: int) -> Share:
        """How many of ``tokens`` tokens from ``start`` on the request can compute now.

        Fewer where an item among them has no room in the cache or in the encoder's step: those in front of it. The
        request holds outputs that are there already from now on, whatever becomes of its step. (vLLM's
        ``_try_schedule_encoder_inputs``)
        """
        items, ahead = request.new.items, start + self._lookahead
        share, names, planned = Share(tokens, self._left), dict[str, int](), 0
        end = start + tokens + self._lookahead
        first = bisect_left(items, start + 1, key=lambda item: item.offset + item.length)
        for number in range(first, bisect_left(items, end, key=lambda item: item.offset)):
            item = items[number]
            stop = item.offset + item.length
            if item.offset >= end:
                break
            if self._limits.whole_items and start < item.offset and start + share.tokens < stop:
                if ahead < item.offset or not self._begins_items:
                    share.tokens = max(0, item.offset - ahead)
                    break
                share.tokens = min(share.tokens, item.offset - start)
                end = ahead + share.tokens
            size = names[item.identifier] if item.identifier in names else self.cache.size_of(item.identifier)
            if size is not None and size != item.embeddings:
                self._confused[request.request_id] = (
                    request,
                    f"its item {number} has {item.embeddings} embeddings, but {item.identifier!r} names a content of "
                    f"{size}: a client's name for one content was used for another",
                )
                return Share(0, self._left)
            if item.identifier in names:
                share.repeats.append(number)
                continue
            if self.cache.hit(request, number):
                continue
            fits = item.embeddings <= share.left
            if not fits or not self.cache.make_room(item.embeddings + planned):
                self.lacks_room = self.lacks_room or fits
                share.tokens = max(0, item.offset - ahead)
                break
            if not item.embeddings_in(max(0, start - item.offset), min(item.length, end - item.offset)):
                continue
            planned += item.embeddings
            share.left -= item.embeddings
            names[item.identifier] = item.embeddings
            share.encode.append(number)
        return share

    def nothing(self) -> Share:
        """The share of a request without items."""
        return Share(0, self._left)

    def room_for(self, embeddings: int) -> bool:
        """Whether an encoder's output that goes into no cache (cross attention) can be computed in this step."""
        return embeddings <= self._left

    def take(self, request: Request, share: Share, embeddings: int = 0) -> None:
        """The request computes its share; and ``embeddings`` that go into no cache."""
        self._left = share.left - embeddings
        for number in share.encode:
            self.cache.add(request, number)
        for number in share.repeats:
            self.cache.hit(request, number)
        if share.encode:
            self._step[request.request_id] = (request, share.encode)

    def release(self, request: Request) -> None:
        """The request has ended or lost its place; what was to be computed for it alone in this step is not."""
        self.cache.release(request)
        _, numbers = self._step.pop(request.request_id, (request, ()))
        kept = []
        for number in numbers:
            item = request.new.items[number]
            self.cache.forget(item)
            if self.cache.size_of(item.identifier) is None:
                self._left += item.embeddings
            else:  # another one counts on it
                kept.append(number)
        if kept:
            self._step[request.request_id] = (request, kept)

    def take_inputs(self) -> tuple[EncoderInput, ...]:
        """What the step's plan computes, once."""
        step, self._step = self._step, {}
        return tuple(
            EncoderInput(request.request_id, number) for request, numbers in step.values() for number in numbers
        )

    def passed(self, request: Request, tokens: int) -> None:
        """Its first ``tokens`` tokens are computed for good: items before the drafter's reach are needed no more."""
        for number in self.cache.items_of(request):
            item = request.new.items[number]
            if item.offset + item.length + self._lookahead <= tokens:
                self.cache.drop(request, number)

    def take_confused(self) -> list[tuple[Request, str]]:
        """Requests whose items cannot be what their names say, and how; once."""
        confused, self._confused = list(self._confused.values()), {}
        return confused
