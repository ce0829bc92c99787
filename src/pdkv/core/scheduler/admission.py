"""Whether the request at the head of a waiting queue may come in now (spec scheduler section 3.2)."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pdkv.core.blocks.holders import Hit
from pdkv.core.blocks.kinds.base import resume_point
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.scheduler.encoder import EncoderWork, Share
from pdkv.core.scheduler.limits import Rows, StepRules
from pdkv.core.scheduler.request import Request, Status
from pdkv.core.transfer.consumer import Consumer
from pdkv.core.transfer.next_turn import Turn
from pdkv.core.transfer.producer import Producer


class Verdict(enum.Enum):
    """What became of the attempt."""

    RUN = enum.auto()  # blocks allocated; compute ``tokens`` now
    LOAD = enum.auto()  # blocks allocated; ``external_tokens`` are to come from the producer first
    SKIP = enum.auto()  # not this step; others behind it may be tried
    STOP = enum.auto()  # does not fit: nobody behind it is tried either (head-of-line blocking)
    LATER = enum.auto()  # it might fit, but prompts wait for a later step: nobody behind it is tried in this one


@dataclass(frozen=True, slots=True)
class Admission:
    """The verdict and the tokens it is about."""

    verdict: Verdict
    tokens: int = 0
    local_tokens: int = 0
    external_tokens: int = 0
    replay: int = 0  # of the local tokens, the last ones, computed once more for windows that were not hit
    padding: int = 0  # of ``tokens``, its last ones, drafts that stand for nothing: all rows have one shape
    share: Share | None = None  # of the encoder's step
    share_used_up: bool = False  # skipped as what is kept for peers, and on its way to them, fills its share
    lacks_memory: bool = False  # stopped for blocks that are not free, and for nothing else


def awaits(request: Request) -> bool:
    """Whether what it was promised is still to be announced, and nothing new here can take the place of that.

    Or its grammar is still to be compiled.
    """
    if request.awaits_grammar:
        return True
    return request.awaited is not None and not request.awaited.write and not request.look_for_hits


class Admitter:
    """Tries to bring one request in. Allocates on success; else only ``wait_cause`` and ``produces`` may change."""

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        producer: Producer,
        consumer: Consumer,
        encoder: EncoderWork | None,
    ) -> None:
        self._config = config
        self._encoder = encoder
        self._replay = config.replay_tokens
        self._manager = manager
        self._producer = producer
        self._consumer = consumer

    def admit(
        self,
        request: Request,
        budget: int,
        running: Sequence[Request],
        holding: Iterable[Request],
        *,
        rules: StepRules,
        rows: Rows,
    ) -> Admission:
        """Try ``request`` with ``budget`` tokens left in this step."""
        if request.status is Status.LOADED:
            return self._compute(request, budget, running, hit=None, rules=rules, rows=rows)
        holding = tuple(holding)
        others = [other for other in (*running, *holding) if other is not request] if request.produces else []
        if request.produces and not self._may_produce(request, others):
            if not self._waits_for_itself(request, others):
                request.wait_cause = "leases pin their share of the pool (--max-leased-fraction)"
                return Admission(Verdict.SKIP, share_used_up=True)
            request.produces = False
        written = request.awaited is not None and request.awaited.write
        if (request.source is not None or written) and self._config.transfer.loads_bring_states:
            hit, lacks_state = self._manager.lookup_for_load(request)
        else:
            hit, lacks_state = self._manager.lookup(request), False
        lacks_little = request.num_prompt - hit.tokens <= self._config.sizes.scheduler_tokens
        if request.awaited is not None and not written and not lacks_little:
            request.wait_cause = f"waits for {request.awaited.peer.engine_id[:80]} to announce its prompt's KV"
            request.look_for_hits = False
            return Admission(Verdict.SKIP)
        if written and lacks_little and self._config.transfer.push_answers:
            external = 0
        else:
            hit, external = self._external(request, hit)
        if external and request.source is not None and request.source.expires_ns is not None:
            decided = self._consumer.turns.decide(request)
            if decided is Turn.WAIT:
                request.wait_cause = f"asks {request.source.peer.engine_id[:80]} for how long it keeps the turn before"
                return Admission(Verdict.SKIP)
            if decided is Turn.DECLINED:
                self._consumer.forget(request)
                hit, external, lacks_state = self._manager.lookup(request), 0, False
        if lacks_state and not external:
            hit = self._manager.lookup(request)
        request.shared_boundary = hit.boundary
        if external == 0:
            return self._compute(request, budget, running, hit=hit, rules=rules, rows=rows)
        return self._load(request, hit, external, running, holding)

    def _external(self, request: Request, hit: Hit) -> tuple[Hit, int]:
        """The hit and the tokens that a peer supplies behind it.

        A load begins where every group's block ends: a hit that ends inside one loses its tail when the peer has more,
        else the peer is not needed (spec scheduler 3.2, step 3).
        """
        if request.new.skip_reading_prefix_cache:
            return hit, 0
        tail = hit.tokens % self._config.sizes.scheduler_tokens
        external = self._consumer.external_tokens(request, hit.tokens - tail)
        if not tail or not external:
            return hit, external
        return (self._manager.shorten(hit, hit.tokens - tail), external) if external > tail else (hit, 0)

    def _load(
        self, request: Request, hit: Hit, external: int, running: Sequence[Request], holding: Iterable[Request]
    ) -> Admission:
        sharer = self._consumer.shares_with(request, hit.tokens)
        if sharer is not None:
            request.wait_cause = f"the same prefix is being loaded for {sharer}"
            return Admission(Verdict.SKIP)
        if request.awaited is not None and request.source is None and self._consumer.is_pressed(request.awaited.peer):
            request.wait_cause = f"{request.awaited.peer.engine_id[:80]} keeps KV that is to get memory before"
            return Admission(Verdict.SKIP)
        if request.source is None and not self._consumer.grants.has_room:
            request.wait_cause = "as much of the memory is granted to producers as there are slots"
            return Admission(Verdict.SKIP)
        fits = self._allocate(
            request,
            0,
            hit=hit,
            external_tokens=external,
            delay_cache=True,
            full_sequence_must_fit=self._config.full_sequence_must_fit,
            reserved_blocks=self._reserved(running, holding) + self._manager.step_blocks,
            has_scheduled=bool(running),
        )
        if not fits:
            request.wait_cause = "its blocks do not fit the free pool"
            return Admission(Verdict.STOP, lacks_memory=True)
        return Admission(Verdict.LOAD, 0, hit.tokens, external)

    def _allocate(self, request: Request, new_tokens: int, **demand: Any) -> bool:
        """Whether the blocks fit, what is kept for next turns given way as far as need be (`allocate_slots`)."""
        while self._manager.allocate_slots(request, new_tokens, **demand) is None:
            if not self._producer.give_way():
                return False
        return True

    def _compute(
        self,
        request: Request,
        budget: int,
        running: Sequence[Request],
        *,
        hit: Hit | None,
        rules: StepRules,
        rows: Rows,
    ) -> Admission:
        local = hit.tokens if hit else 0
        replay = 0
        if local and self._replay:  # a hit of no more than is computed again saves nothing
            hit, local = (hit, local) if local > self._replay else (self._manager.nothing, 0)
            replay = min(local, self._replay)
        request.replay_end = local if replay else 0
        tokens = request.num_tokens - request.num_computed - local
        if rules.decode_only and tokens > 1:
            request.wait_cause = "prompts are computed in every n-th step only (prefill_schedule_interval)"
            return Admission(Verdict.LATER)
        start = request.num_computed + local - replay
        tokens = rules.cap(tokens + replay)
        outgrown = self._manager.outgrown(request)
        if outgrown:
            tokens = min(tokens, self._config.sizes.scheduler_tokens)
        padding = self._padding(request, tokens, start, rows)
        if padding and tokens + padding > budget:
            request.wait_cause = "its row, padded to the shape of the others, does not fit this step's token budget"
            return Admission(Verdict.STOP)
        if tokens > budget and not self._config.enable_chunked_prefill:
            request.wait_cause = "its whole prompt does not fit this step's token budget"
            return Admission(Verdict.STOP)
        if self._encoder is not None and not self._encoder.room_for(request.new.encoder_tokens):
            request.wait_cause = "what its encoder is to put out does not fit this step"
            return Admission(Verdict.LATER)
        tokens, share = fit_chunk(request, min(tokens, budget), self._config, start=start, encoder=self._encoder)
        if tokens == 0:
            for_encoder = share is not None and not share.tokens
            cause = (
                "its chunk must end at a block boundary, or in front of what a drafter reads, beyond this step's tokens"
            )
            request.wait_cause = "its next item's embeddings do not fit the encoder's step" if for_encoder else cause
            self._release_items(request)
            return Admission(Verdict.LATER if for_encoder else Verdict.STOP)
        loaded = request.status is Status.LOADED
        fits = self._allocate(
            request,
            max(tokens + padding - replay, 0),
            hit=hit,
            lookahead_tokens=self._config.lookahead_tokens,
            full_sequence_must_fit=self._config.full_sequence_must_fit and not outgrown,
            has_scheduled=bool(running) and not (loaded and self._config.transfer.loaded_skips_watermark),
        )
        if not fits:
            self._release_items(request)
            request.wait_cause = "its blocks do not fit the free pool"
            return Admission(Verdict.STOP, lacks_memory=True)
        return Admission(Verdict.RUN, tokens + padding, local, replay=replay, padding=padding, share=share)

    def _release_items(self, request: Request) -> None:
        """It does not come in: others may have the room of what it would have used of the encoder's cache."""
        if self._encoder is not None:
            self._encoder.cache.release(request)

    def _padding(self, request: Request, tokens: int, start: int, rows: Rows) -> int:
        """Drafts to add to a request that computes one token among rows that decode: all then have one shape."""
        speculation = self._config.speculation
        if speculation is None or tokens != 1 or rows is Rows.MIXED or (rows is Rows.NONE and start == 0):
            return 0
        drafts = speculation.num_tokens
        fits = start + drafts + 2 <= self._config.max_model_len
        whole = fits and align_chunk(request, 1 + drafts, self._config, start=start) == 1 + drafts
        return drafts if whole else 0

    def _may_produce(self, request: Request, others: Sequence[Request]) -> bool:
        in_flight = [self._manager.blocks_for(other.num_prompt) for other in others if other.produces]
        return self._producer.may_prefill(request, len(in_flight), sum(in_flight))

    def passed_over(self, request: Request) -> bool:
        """Whether it is left out where a prefill for a peer waits for its share of the pool: no other passes that.

        But those may for which a consumer has granted memory, as `Producer.may_prefill` says.
        """
        if request.produces and not self._producer.announcements.has_memory(request):
            return True
        return awaits(request)

    def _waits_for_itself(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether what fills the share has a part that nobody reads before this request has ended, too."""
        answer_id = request.new.answer_id
        if answer_id is None:
            return False
        in_flight = any(other.produces and other.new.answer_id == answer_id for other in others)
        return in_flight or self._producer.keeps_for(answer_id)

    def _reserved(self, running: Sequence[Request], holding: Iterable[Request]) -> int:
        """Blocks that prefills and loads under way still need for what is known of their sequences."""
        under_way = [request for request in running if request.num_computed < request.num_tokens]
        return sum(self._manager.blocks_missing(request) for request in (*under_way, *holding))


def fit_chunk(
    request: Request, tokens: int, config: EngineConfig, *, start: int, encoder: EncoderWork | None = None
) -> tuple[int, Share | None]:
    """``tokens`` from ``start`` on, cut so that the chunk ends where it may; and what the encoder does for it first."""
    tokens, share = align_chunk(request, tokens, config, start=start), None
    if encoder is not None and tokens and request.new.items:
        share = encoder.share(request, start, tokens)
        tokens = share.tokens
    return reserve_lookahead(request, tokens, config, start=start), share


def reserve_lookahead(request: Request, tokens: int, config: EngineConfig, *, start: int) -> int:
    """``tokens`` cut so that behind the chunk is nothing, or as many known tokens as the drafter reads ahead."""
    lookahead = config.prefill_lookahead_tokens
    left = request.num_tokens - start - tokens
    return max(tokens - (lookahead - left), 0) if 0 < left < lookahead else tokens


def align_chunk(request: Request, tokens: int, config: EngineConfig, *, start: int) -> int:
    """``tokens`` from ``start`` on, cut so that the chunk ends where a state must be kept (aligned state groups).

    States are written at the ends of chunks, so a prompt's chunks end at block boundaries, at the last place where the
    prompt can be resumed, and at the end of a prefix that others share. A block too large for one step is advanced
    inside (spec block-pool 6.2, scheduler 3.1).
    """
    block = config.state_block_size
    if block is None:
        return tokens
    prefill_end = max(request.num_prompt, request.num_tokens - 1)
    if start >= prefill_end:
        return tokens
    unit, fine = config.sizes.hash_tokens, config.sizes.fine_hits
    end = start + tokens
    if end < prefill_end:
        threshold = config.long_prefill_token_threshold
        most = min(config.max_row_tokens, threshold) if threshold > 0 else config.max_row_tokens
        aligned = end // block * block
        if aligned > start or block <= most:
            end = aligned
    drafted = bool(config.drafting.groups)
    last = resume_point(request.num_tokens, block, drafted=drafted)  # the last block's end whose state can be hit
    tail = resume_point(request.num_prompt, unit, drafted=drafted) if fine else 0
    inside = start % block != 0
    if start + tokens >= prefill_end and (spec := config.checkpoint_group) is not None:
        position = resume_point(prefill_end, unit if fine else config.sizes.scheduler_tokens, drafted=drafted)
        if spec.checkpoint_fits(start, start + tokens, position, hash_tokens=unit):
            last, tail, inside = 0, 0, False  # the state there is written inside this chunk
    junction = request.shared_boundary
    stop = start + (junction - start) // block * block
    if config.stops_at_junctions and junction <= request.num_prompt:
        stop = junction
    stops = (
        (start // block + 1) * block if inside else 0,
        last,
        tail if last < tail < request.num_prompt else 0,
        stop if start < junction < end else 0,
    )
    return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)
