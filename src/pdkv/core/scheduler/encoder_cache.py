"""Which outputs of the encoder are there, for whom, and which one goes next (vLLM's ``EncoderCacheManager``)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from pdkv.core.blocks.extra_keys import MultimodalItem
from pdkv.core.scheduler.request import Request


@dataclass(slots=True)
class _Output:
    """The embeddings of one content, and the ids of requests that still need them."""

    embeddings: int
    holders: set[str] = field(default_factory=set)


class EncoderCache:
    """Sizes are embeddings. Outputs that nobody needs stay, and go the oldest first when room is needed.

    ``num_free`` embeddings are free, ``num_reclaimable`` would be without what nobody needs.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._evicted: list[str] = []
        self._outputs: dict[str, _Output] = {}
        self.reset()

    def reset(self) -> None:
        """Nothing is there any more; whoever keeps the outputs hears of it as of others that have gone."""
        self._evicted += self._outputs
        self._outputs = {}
        self._unneeded: OrderedDict[str, int] = OrderedDict()
        self._items: dict[str, set[int]] = {}  # by request id: numbers of its items that it holds outputs of
        self.num_free = self._size
        self.num_reclaimable = self._size

    def items_of(self, request: Request) -> list[int]:
        """Numbers of the items whose outputs the request holds."""
        return list(self._items.get(request.request_id, ()))

    def holds(self, request: Request) -> bool:
        """Whether it holds any."""
        return request.request_id in self._items

    def __bool__(self) -> bool:
        return bool(self._items)

    def size_of(self, identifier: str) -> int | None:
        """Embeddings of the output that is there under this name."""
        output = self._outputs.get(identifier)
        return None if output is None else output.embeddings

    def hit(self, request: Request, number: int) -> bool:
        """Whether the item's output is there; from now on the request holds it."""
        identifier = request.new.items[number].identifier
        output = self._outputs.get(identifier)
        if output is None:
            return False
        if not output.holders:
            self.num_reclaimable -= self._unneeded.pop(identifier)
        output.holders.add(request.request_id)
        self._items.setdefault(request.request_id, set()).add(number)
        return True

    def make_room(self, embeddings: int) -> bool:
        """Whether so many fit; what nobody needs goes for them."""
        if embeddings > max(self.num_free, self.num_reclaimable):
            return False
        while embeddings > self.num_free:
            identifier, size = self._unneeded.popitem(last=False)
            del self._outputs[identifier]
            self._evicted.append(identifier)
            self.num_free += size
        return True

    def add(self, request: Request, number: int) -> None:
        """The request's item will be there; `make_room` has said that it fits."""
        item = request.new.items[number]
        output = self._outputs.setdefault(item.identifier, _Output(item.embeddings))
        assert output.embeddings == item.embeddings <= self.num_free, f"encoder cache: {item.identifier} does not fit"
        output.holders.add(request.request_id)
        self._items.setdefault(request.request_id, set()).add(number)
        self.num_free -= item.embeddings
        self.num_reclaimable -= item.embeddings

    def drop(self, request: Request, number: int) -> None:
        """The request needs the item's output no more; an item that stands in it twice is one to hold."""
        held = self._items[request.request_id]
        held.discard(number)
        identifier = request.new.items[number].identifier
        again = any(request.new.items[other].identifier == identifier for other in held)
        if not held:
            del self._items[request.request_id]
        output = self._outputs.get(identifier)
        if again or output is None or not output.holders:
            return
        output.holders.discard(request.request_id)
        if not output.holders:
            self._unneeded[identifier] = output.embeddings
            self.num_reclaimable += output.embeddings

    def release(self, request: Request) -> None:
        """The request needs nothing any more."""
        for number in self.items_of(request):
            self.drop(request, number)

    def forget(self, item: MultimodalItem) -> None:
        """An output that nobody holds will not come after all."""
        if self._unneeded.pop(item.identifier, None) is not None:
            del self._outputs[item.identifier]
            self.num_free += item.embeddings

    def take_evicted(self) -> tuple[str, ...]:
        """Names of outputs that went since the last call, and have not come back since."""
        evicted, self._evicted = self._evicted, []
        return tuple(identifier for identifier in evicted if identifier not in self._outputs)

    def check(self) -> None:
        """Recount; raises ``AssertionError`` on any difference."""
        used = sum(output.embeddings for output in self._outputs.values())
        unneeded = sum(output.embeddings for output in self._outputs.values() if not output.holders)
        assert self.num_free == self._size - used >= 0, "encoder cache: free embeddings differ"
        assert self.num_reclaimable == self.num_free + unneeded, "encoder cache: reclaimable embeddings differ"
        assert self._unneeded.keys() == {name for name, output in self._outputs.items() if not output.holders}
        holders = {holder for output in self._outputs.values() for holder in output.holders}
        assert holders == self._items.keys(), "encoder cache: holders and held items disagree"
