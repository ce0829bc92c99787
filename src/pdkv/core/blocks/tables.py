"""Block tables: the blocks of one owner, in token order; those of running requests are the rows of one array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdkv.core.ports import BlockIds, Int32Array, Int64Array

#: Stands in a table where no block is needed (any more): never handed out, never freed.
NULL_BLOCK = 0


def without_null(blocks: BlockIds) -> BlockIds:
    """Those of ``blocks`` that are not the null block; ``blocks`` itself where all are."""
    return blocks if np.count_nonzero(blocks) == len(blocks) else blocks[blocks != NULL_BLOCK]


_EMPTY_TABLE = np.asarray([[0], [0], [0], [-1]])  # its length, how much of it is hashed and dropped, its last state


class TableStore:
    """Tables of one group as the rows of an array that grows, with the numbers that belong to each.

    ``blocks`` int32[rows, width] is 0 beyond a table's length; int64[rows] are ``lengths``, ``hashed`` (leading entries
    that registration is through with), ``dropped`` (leading entries given back, or never needed) and ``last_state``
    (state groups: the entry whose state the next step starts from, -1 for none). Steps over many requests work on
    these arrays, and everything about one of them goes through its `BlockTable`: there is no second copy.
    """

    __slots__ = ("_numbers", "blocks", "dropped", "hashed", "last_state", "lengths")
    lengths: Int64Array
    hashed: Int64Array
    dropped: Int64Array
    last_state: Int64Array

    def __init__(self, rows: int = 1) -> None:
        self.blocks: Int32Array = np.zeros((rows, 0), dtype=np.int32)
        self._name(_EMPTY_TABLE.copy() if rows == 1 else np.repeat(_EMPTY_TABLE, rows, axis=1))

    def _name(self, numbers: Int64Array) -> None:
        self._numbers = numbers  # a column a table: those of one table are moved as a whole
        self.lengths, self.hashed = numbers[0], numbers[1]
        self.dropped, self.last_state = numbers[2], numbers[3]

    def reserve(self, rows: int, width: int) -> None:
        """Room for ``rows`` tables of ``width`` entries; what is grown is at least doubled."""
        have, wide = self.blocks.shape
        if rows <= have and width <= wide:
            return
        rows = max(rows, 2 * have) if rows > have else have
        grown = np.zeros((rows, max(width, 2 * wide) if width > wide else wide), dtype=np.int32)
        if wide:
            grown[:have, :wide] = self.blocks
        self.blocks = grown
        if rows > have:
            more = TableStore(rows)._numbers
            more[:, :have] = self._numbers
            self._name(more)

    def push(self, rows: npt.NDArray[np.intp], blocks: BlockIds) -> None:
        """Append ``blocks[i]`` to the table of ``rows[i]``; no row stands twice."""
        at = self.lengths[rows]
        self.reserve(0, int(np.maximum.reduce(at, initial=0)) + 1)
        self.blocks[rows, at] = blocks
        self.lengths[rows] = at + 1

    def put(self, rows: Int64Array, entries: Int64Array, blocks: BlockIds) -> None:
        """``blocks[i]`` becomes entry ``entries[i]`` of the table of ``rows[i]``: behind what is there, in order."""
        self.reserve(0, int(entries.max(initial=0)) + 1)
        self.blocks[rows, entries] = blocks
        self.lengths[rows] = entries + 1  # of a row that stands there often the last counts

    def before(self, rows: npt.NDArray[np.intp], entries: Int64Array) -> Int32Array:
        """int32[n]: the block in front of entry ``entries[i]`` of the table of ``rows[i]``, null at the start."""
        blocks: Int32Array = np.where(entries > 0, self.blocks[rows, entries - 1], NULL_BLOCK)
        return blocks

    def move(self, row: int, target: TableStore, to: int) -> None:
        """The table of ``row`` becomes that of row ``to``, which is empty, in ``target``; ``row`` is left as it is."""
        length = self.lengths.item(row)
        target.reserve(to + 1, length)
        target.blocks[to, :length] = self.blocks[row, :length]
        target._numbers[:, to] = self._numbers[:, row]

    def empty(self, row: int) -> None:
        """Nothing is in ``row`` any more."""
        self.blocks[row, : self.lengths.item(row)] = NULL_BLOCK
        self._numbers[:, row : row + 1] = _EMPTY_TABLE

    def padded(self, rows: npt.NDArray[np.intp]) -> Int32Array:
        """int32[n, longest]: a copy of these tables, 0 beyond each one's length."""
        width = int(self.lengths[rows].max(initial=0))
        tables: Int32Array = self.blocks[rows, :width]
        return tables


class BlockTable:
    """The blocks of one owner in token order; 0, the null block, where its tokens need none.

    A handle to a row of a `TableStore`: of its own at first, of the running requests' while it is seated there.
    """

    __slots__ = ("row", "store")

    def __init__(self) -> None:
        self.store = TableStore()
        self.row = 0

    def seat(self, store: TableStore, row: int) -> None:
        """Move to row ``row`` of ``store``, which is empty; the store left behind goes with what was there."""
        self.store.move(self.row, store, row)
        self.store, self.row = store, row

    def unseat(self) -> None:
        """Move to a store of its own; the row left behind is empty then."""
        store, row = self.store, self.row
        self.seat(TableStore(), 0)
        store.empty(row)

    def __len__(self) -> int:
        return self.store.lengths.item(self.row)

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < len(self), f"block table: entry {index} of {len(self)}"
        return self.store.blocks.item(self.row, index)

    @property
    def ids(self) -> Int32Array:
        """int32[len]: a view, valid until the next change; copy what is kept."""
        return self.store.blocks[self.row, : len(self)]

    def plain(self) -> tuple[list[int], int]:
        """The block ids, and how many leading entries were given back, or never needed."""
        store, row = self.store, self.row
        return store.blocks[row, : store.lengths.item(row)].tolist(), store.dropped.item(row)

    def extend(self, blocks: BlockIds) -> None:
        """Append ``blocks``."""
        length = len(self)
        end = length + len(blocks)
        self.store.reserve(0, end)
        self.store.blocks[self.row, length:end] = blocks
        self.store.lengths[self.row] = end

    def pad(self, length: int) -> None:
        """Append null blocks up to ``length`` entries."""
        if length > len(self):
            self.extend(np.zeros(length - len(self), dtype=np.int32))

    def replace(self, index: int, block: int) -> None:
        """Another block at ``index``."""
        assert 0 <= index < len(self)
        self.store.blocks[self.row, index] = block

    def blank(self, start: int, stop: int) -> Int32Array:
        """Put null blocks at ``start:stop``; returns a copy of the blocks that stood there, null ones left out."""
        window = self.ids[start:stop]
        blocks: Int32Array = window[window != NULL_BLOCK]
        window[:] = NULL_BLOCK
        return blocks

    def cut(self, length: int) -> Int64Array:
        """Shorten to ``length``; returns a copy of the blocks cut off, deepest first."""
        window = self.ids[length:]
        tail = window[::-1].astype(np.int64)
        window[:] = NULL_BLOCK
        if len(tail):
            self.store.lengths[self.row] = length
        return tail
