"""What the run index is made of (`pdkv.core.blocks.run_index`): runs of hashes, and layers of blocks over them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from pdkv.core.blocks.hashing import HashChain


@dataclass(slots=True, eq=False)
class Run:
    """``length`` hashes side by side; the first is hash number ``depth`` of every sequence that has it.

    They stand at the start of ``hashes``: a copy, or, where it ``shares`` that, a sequence's own chain, which grows by
    itself.
    """

    depth: int
    hashes: HashChain
    closed_length: int
    shares: bool = False
    layers: dict[int, Layer] = field(default_factory=dict)  # by number, which is the order of insertion
    open: Layer | None = None  # the last layer, if the run ends where it does: then the run grows with it
    dead: int = 0  # entries, those of layers that are gone included, that belong to no block any more

    @classmethod
    def of(cls, hashes: HashChain, at: int, count: int) -> Run:
        """The ``count`` hashes of a sequence from number ``at`` on.

        Its own chain is kept where most of it belongs to the run, so that what is kept is in proportion to the blocks.
        """
        if at == 0 and hashes.grows and len(hashes) <= 2 * count:
            return cls(0, hashes, count, shares=True)
        return cls(at, hashes.copy(at, at + count), count)

    @property
    def length(self) -> int:
        """How many hashes."""
        return self.closed_length if self.open is None else self.open.end

    def append(self, hashes: HashChain, at: int, count: int) -> None:
        """Hashes ``at:at + count`` of a sequence follow; ``length`` is the caller's to change."""
        if hashes is self.hashes:
            return
        if self.shares:
            self.hashes, self.shares = self.hashes.copy(0, self.length), False
            if self.open is not None:
                self.open.grows_with = None
        self.hashes.extend_from(hashes, at, at + count)

    def extend(self, hashes: HashChain, at: int, count: int) -> None:
        """Hashes ``at:at + count`` of a sequence follow, to be covered by a layer."""
        self.append(hashes, at, count)
        self.close()
        self.closed_length += count

    def close(self) -> None:
        """No layer may grow any more without a look at the others."""
        if self.open is not None:
            self.closed_length, self.open.grows_with, self.open = self.length, None, None

    def open_with(self, layer: Layer) -> None:
        """The last layer ends where the run does."""
        self.close()
        self.open = layer
        layer.grows_with = self.hashes if self.shares else None

    def digest(self, position: int) -> bytes:
        """One hash."""
        return self.hashes.item(position)

    def same(self, position: int, hashes: HashChain, at: int, end: int) -> int:
        """How many hashes from ``position`` on are those of ``hashes[at:end]``."""
        low, high = 0, min(self.length - position, end - at)
        probe = high  # most of the time all of them
        while low < high:
            if self.hashes.item(position + probe - 1) == hashes.item(at + probe - 1):
                low = probe
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        return low


@dataclass(slots=True, eq=False)
class Layer:
    """``blocks[i]`` was cached with the content of the run's hash ``start + i``; ``lost`` of them hold it no longer.

    The sequence whose chain it ``grows_with`` may append blocks, and with that to the run.
    """

    number: int
    run: Run
    start: int
    blocks: array[int]
    lost: int = 0
    grows_with: HashChain | None = None

    @property
    def end(self) -> int:
        """The position in the run behind its last block."""
        return self.start + len(self.blocks)
