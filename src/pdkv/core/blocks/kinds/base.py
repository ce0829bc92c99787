"""What a group's kind of layer decides about its blocks, and what most kinds have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdkv.core.blocks.groups import NO_DRAFTING, Drafting, Granularity, Group
from pdkv.core.blocks.hashing import HashChain
from pdkv.core.blocks.holders import GroupHold, Hit, Holder
from pdkv.core.blocks.kv_events import BlockStored
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.blocks.prefix_index import PrefixIndex
from pdkv.core.blocks.tables import NULL_BLOCK, TableStore
from pdkv.core.ports import BlockIds, BoolArray, Int32Array, Int64Array
from pdkv.core.scheduler.request import Request
from pdkv.units import cdiv

EMPTY = np.empty(0, dtype=np.int32)
NEVER = np.iinfo(np.int64).max  # more tokens than there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every group of an instance is told."""

    sizes: Granularity
    max_model_len: int
    max_in_flight_tokens: int
    retention_interval: int | None
    drafting: Drafting = NO_DRAFTING
    junction_checkpoints: bool = False


@dataclass(slots=True, kw_only=True)
class Demand:
    """What a request asks for: slots for ``slots`` tokens, ``main`` of them without lookahead.

    ``local`` tokens are computed or hit here, ``total`` with those that a peer supplies. ``whole`` asks for the whole
    known sequence (the admission gate): kinds that recycle blocks then count what they hold at most at once.
    ``encoder`` are the tokens that the encoder put out.
    """

    slots: int
    main: int
    local: int
    total: int
    hit: Hit
    whole: bool = False
    encoder: int = 0


@dataclass(slots=True, kw_only=True)
class StateDemand(Demand):
    """The demand in models with groups of states (of its own: others should not pay for it).

    ``prefill_end`` is where the prompt's computation ends (0: not to be looked at), ``checkpoints`` what
    `Kind.blocks_needed` has found for state groups (`GroupHold.checkpoint`).
    """

    prefill_end: int = 0
    checkpoints: dict[int, tuple[int, int]] | None = None


class JointIndex:
    """The indexes of groups of one kind and size: they hit together or not at all."""

    def __init__(self, indexes: Sequence[PrefixIndex]) -> None:
        self._indexes = indexes

    def prefix(self, hashes: HashChain, most: int | None = None) -> list[Int32Array]:
        """Blocks of the longest prefix of ``hashes``, at most ``most``, that is cached in every group, by group."""
        if len(self._indexes) == 1:
            return [self._indexes[0].lookup(hashes, most)]
        found = [index.lookup(hashes, most) for index in self._indexes]
        length = min(map(len, found))
        return [blocks[:length] for blocks in found]

    def find(self, key: bytes) -> list[int] | None:
        """One block a group, or ``None`` when any group has none."""
        found: list[int] = []
        for index in self._indexes:
            block = index.find(key)
            if block is None:
                return None
            found.append(block)
        return found

    def tables(self, length: int) -> list[Int32Array]:
        """``length`` null entries a group."""
        return [np.zeros(length, dtype=np.int32) for _ in self._indexes]


def unit_hashes(hashes: HashChain, hash_tokens: int, block_size: int) -> HashChain:
    """The hashes of whole blocks: the last hash unit inside each (chaining makes that the block's own)."""
    step = block_size // hash_tokens
    return hashes if step == 1 else hashes[step - 1 :: step]


def resume_point(num_tokens: int, unit: int, *, drafted: bool) -> int:
    """The last multiple of ``unit`` at which a later request with these tokens can resume.

    It recomputes one token at least; with a drafter that drops the end of hits, it loses one unit instead.
    """
    return max(num_tokens // unit * unit - unit, 0) if drafted else (num_tokens - 1) // unit * unit


class Kind:
    """Rules of one group. This base keeps every block, and registers every full one."""

    def __init__(self, spec: Group, group: int, pool: BlockPool, settings: Settings) -> None:
        self.spec = spec
        self.group = group
        self.block_size = spec.block_size
        self.pool = pool
        self.settings = settings
        self.admission_cap: int | None = None  # blocks a request holds at most at once, for kinds that recycle them
        self.drops = group in settings.drafting.groups  # a hit loses its end: the drafter must see it computed
        self.recycles = True  # blocks may come back before the request ends
        self.registers = True  # full blocks may be hit
        self.keeps_prompt_end = False  # what is kept at `prompt_end` is registered anew by every step that begins there
        # whether requests that decode may be served together: each takes, fills or drops one whole block at a time
        self.grows_in_bulk = spec.block_size == settings.sizes.hash_tokens

    # ------------------------------------------------------------------------------------------------------ lookup

    def find(
        self, cached: JointIndex, hashes: HashChain, max_tokens: int, *, drop: bool = False
    ) -> tuple[list[Int32Array], int]:
        """The longest hit of at most ``max_tokens`` tokens: its blocks by group of ``cached``, and its tokens.

        ``drop``: without its end, which a drafter must see computed (one block, or one hash unit where hits end inside
        blocks).
        """
        raise NotImplementedError

    @property
    def dropped_tokens(self) -> int:
        """How far beyond a candidate length a hit that loses its end must be looked for."""
        return self.block_size

    # ------------------------------------------------------------------------------------------- what is not needed

    def skipped_tokens(self, computed: int) -> int:
        """Leading tokens that no token after the first ``computed`` looks at."""
        return 0

    def resident_blocks(self, tokens: int) -> int:
        """Blocks that a request of ``tokens`` tokens holds while it grows token by token."""
        return cdiv(tokens, self.block_size)

    def peer_span(self, tokens: int, block_size: int | None = None) -> tuple[int, int]:
        """(first, stop) of the table entries that are needed to go on behind the first ``tokens`` tokens.

        ``block_size``: of a peer's table, where it is another one.
        """
        size = self.block_size if block_size is None else block_size
        return max(self.skipped_tokens(tokens), 0) // size, cdiv(tokens, size)

    def drop_skipped(self, holder: Holder, processed: int, num_prompt: int) -> None:
        """Give back blocks that only tokens before the first ``processed`` needed, deepest first."""
        hold = holder.groups[self.group]
        stop = min(max(self.skipped_tokens(processed), 0) // self.block_size, len(hold.table))
        if stop > hold.num_dropped:
            self.pool.give_back(hold.table.blank(hold.num_dropped, stop)[::-1], holder.account)
            hold.num_dropped = stop

    def may_drop(
        self, store: TableStore, rows: Int64Array, processed: Int64Array, prompt: Int64Array, ahead: int = 0
    ) -> BoolArray:
        """bool[n]: for which tables `drop_skipped` has something to do, once it has dropped ``ahead`` more blocks."""
        now: BoolArray = processed >= self.next_drop(store, rows, ahead)
        return now

    def next_drop(self, store: TableStore, rows: Int64Array, ahead: int = 0) -> Int64Array:
        """int64[n]: how many tokens must be processed for that, at least."""
        return np.full(len(rows), NEVER)

    # --------------------------------------------------------------------------------------------------- allocating

    def capacity_tokens(self, lengths: Int64Array) -> Int64Array:
        """int64[n]: for how many tokens tables of ``lengths`` entries have room."""
        return lengths * self.block_size

    def blocks_needed(self, hold: GroupHold | None, demand: Demand) -> int:
        """Free blocks that ``demand`` takes: new ones, hit ones that nobody holds, one for a copy on write."""
        required = cdiv(demand.slots, self.block_size)
        if self.admission_cap is not None and demand.whole:
            required = min(required, self.admission_cap)
        held = len(hold.table) if hold else 0
        hit = demand.hit.blocks[self.group]
        skipped = max(self.skipped_tokens(demand.total), 0) // self.block_size if self.recycles else 0
        new = max(required - max(skipped, held + len(hit)), 0)
        if not len(hit):
            return new
        return new + self._idle(hit[max(skipped - held, 0) :]) + self.ends_inside(demand)

    def first_draft(self, hold: GroupHold, main: int) -> int:
        """The table entry from which on blocks hold nothing of the first ``main`` tokens."""
        return cdiv(main, self.block_size)

    def ends_inside(self, demand: Demand) -> bool:
        """Whether the local hit ends inside one of this group's blocks, which must then be copied."""
        return len(demand.hit.blocks[self.group]) > 0 and demand.local % self.block_size != 0

    def _idle(self, hit: Int32Array) -> int:
        return self.pool.num_idle(hit[hit != 0])

    def adopt(self, holder: Holder, demand: Demand) -> None:
        """Take the hit blocks into the (still empty) table, null ones in place of those that are skipped."""
        hold, hit = holder.groups[self.group], demand.hit.blocks[self.group]
        skipped = max(self.skipped_tokens(demand.total), 0) // self.block_size
        kept = hit[skipped:]
        self.pool.touch(kept[kept != 0], holder.account)
        hold.table.pad(skipped)
        hold.table.extend(kept)
        hold.num_hashed = len(hold.table)
        hold.num_dropped = skipped
        if len(kept) and demand.local % self.block_size:
            entry = demand.local // self.block_size
            hold.partial = (entry, int(kept[-1]))
            hold.num_hashed = entry  # the private copy is registered once it is full

    def grow_external(self, holder: Holder, demand: Demand) -> None:
        """Blocks for the tokens that a peer supplies, as far as any later token looks at them."""
        external = min(demand.total - max(self.skipped_tokens(demand.total), 0), demand.total - demand.local)
        if external > 0:
            self._extend(holder, cdiv(demand.total, self.block_size))

    def grow(self, holder: Holder, demand: Demand) -> BlockIds:
        """Blocks for all slots; returns int[n], those allocated now."""
        copied = EMPTY if holder.groups[self.group].partial is None else self.copy_partial(holder)
        new = self._extend(holder, cdiv(demand.slots, self.block_size))
        return np.concatenate((copied, new)) if len(copied) else new

    def copy_partial(self, holder: Holder) -> BlockIds:
        """Give the request a block of its own in place of a shared one whose content ends inside the block."""
        hold = holder.groups[self.group]
        if hold.partial is None:
            return EMPTY
        entry, source = hold.partial
        hold.partial = None
        own = self.pool.take(1, holder.account)
        hold.table.replace(entry, int(own[0]))
        self.pool.pin_copy(self.group, source, int(own[0]))
        self.pool.give_up(source, holder.account)
        return own

    def _extend(self, holder: Holder, length: int) -> BlockIds:
        table = holder.groups[self.group].table
        missing = length - len(table)
        if missing <= 0:
            return EMPTY
        blocks = self.pool.take(missing, holder.account)
        table.extend(blocks)
        return blocks

    # -------------------------------------------------------------------------------------------------- registering

    def register(self, hold: GroupHold, request: Request, tokens: int, boundaries: tuple[int, ...]) -> BlockIds:
        """Let full blocks below ``tokens`` be hit, as far as they can serve a hit; returns int[n], those blocks.

        ``boundaries`` are the token positions where a later request can resume.
        """
        first, last = hold.num_hashed, tokens // self.block_size
        if last <= first:
            return EMPTY
        hold.num_hashed = last
        blocks = hold.table.ids[first:last].astype(np.int64)
        mask = self.reachable(first, last, boundaries)
        if mask is not None:
            blocks = np.where(mask, blocks, NULL_BLOCK)
        hashes = self.block_hashes(request)
        before = hold.table[first - 1] if first else NULL_BLOCK
        chosen = self.pool.insert(self.group, hashes, first, blocks, before)
        if self.pool.events is not None:
            entries = (first + np.flatnonzero(blocks)).tolist()
            self.note_stored(request, [hashes[entry] for entry in entries], entries, first, last)
        return chosen

    def block_hashes(self, request: Request) -> HashChain:
        """The request's hashes by whole blocks of this group."""
        return unit_hashes(request.hashes, self.settings.sizes.hash_tokens, self.block_size)

    def prompt_end(self, prompt: Int64Array) -> Int64Array:
        """int64[n]: the last place inside prompts of so many tokens where a later request can resume."""
        unit = self.settings.sizes.hash_tokens
        if self.settings.drafting.groups:
            return np.maximum(prompt // unit * unit - unit, 0)
        return (prompt - 1) // unit * unit

    def register_each(self, requests: list[Request], entries: Int64Array, blocks: BlockIds, before: BlockIds) -> None:
        """`register` for decoding requests, each of which has filled the block of entry ``entries[i]`` (no events).

        ``before[i]`` stands in front of it. What is filled lies behind every place where a prompt can be resumed.
        """
        first = int(entries.min())
        mask = self.reachable(first, int(entries.max()) + 1, ())
        kept = blocks != NULL_BLOCK if mask is None else (blocks != NULL_BLOCK) & mask[entries - first]
        if not kept.all():
            requests = [requests[at] for at in np.flatnonzero(kept)]
            entries, blocks, before = entries[kept], blocks[kept], before[kept]
        if requests:
            chains = [request.hashes for request in requests]
            self.pool.insert_each(self.group, chains, entries, np.ones_like(entries), blocks, before)

    def note_stored(self, request: Request, keys: list[bytes], entries: list[int], first: int, last: int) -> None:
        """Announce ``keys`` of table entries ``entries``, which lie in ``first:last``."""
        assert self.pool.events is not None
        size = self.block_size
        parent = request.hashes[first * size // self.settings.sizes.hash_tokens - 1] if first else None
        extra = request.extra_keys
        self.pool.events.append(
            BlockStored(
                group=self.group,
                hashes=tuple(keys),
                parent=parent,
                tokens=request.tokens[first * size : last * size].copy(),
                block_size=size,
                extra_keys=tuple(extra.of(entry * size, (entry + 1) * size) for entry in entries),
                lora_name=request.new.lora.name if request.new.lora else None,
            )
        )

    def register_partial(self, request: Request, block: int, tokens: int) -> None:
        """Let ``block`` be hit at a hash boundary inside it, after the first ``tokens`` tokens."""
        unit = self.settings.sizes.hash_tokens
        position = tokens // unit
        key = request.hashes[position - 1]
        if not self.pool.insert_partial(self.group, key, block, tokens) or self.pool.events is None:
            return
        self.pool.events.append(
            BlockStored(
                group=self.group,
                hashes=(key,),
                parent=request.hashes[position - 2] if position > 1 else None,
                tokens=request.tokens[tokens - unit : tokens].copy(),
                block_size=unit,
                extra_keys=(request.extra_keys.of(tokens - unit, tokens),),
                lora_name=request.new.lora.name if request.new.lora else None,
            )
        )

    def note_hit(self, request: Request, entries: int) -> None:
        """Announce the first ``entries`` blocks once more, for a request that asks for it."""
        keys = list(self.block_hashes(request)[:entries])
        self.note_stored(request, keys, list(range(len(keys))), 0, entries)

    def reachable(self, first: int, last: int, boundaries: tuple[int, ...]) -> BoolArray | None:
        """bool[last - first]: which of these blocks can serve a hit; ``None`` for all."""
        return None
