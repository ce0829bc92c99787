"""What one engine is told once, at the start. Checked here, passed whole, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdkv.core.blocks.groups import (
    NO_DRAFTING,
    Drafting,
    FullGroup,
    Granularity,
    Group,
    StateGroup,
    check_groups,
    granularity,
    replay_tokens,
)
from pdkv.core.multimodal import EncoderLimits
from pdkv.core.speculation import Speculation
from pdkv.errors import ConfigError
from pdkv.units import NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPolicy:
    """How D treats KV that is on its way (design 6.5). `STRICT` and `VLLM` are the two presets."""

    name: str
    share_loads: bool  # a second request with the same prefix waits for the first load
    bounded_waits: bool  # loads, loaded requests without a place, fences and grammars being compiled have deadlines
    loaded_skips_watermark: bool  # a request whose KV has arrived is not held back by the watermark
    load_failure: str  # "recompute" | "fail"
    abort_frees_hits: bool = True  # an aborted load's own prefix hits come back at once: its READ does not touch them
    loads_bring_states: bool = True  # a load may begin behind a prefix whose state is not here
    skipped_go_first: bool = True  # a request that ends first gives back what no token looks at, then the rest
    push_answers: bool = True  # WRITE push: registrations are repeated and always answered, given up grants cancelled
    failure_frees_at_once: bool = True  # a failed load's blocks come back when it is reported, not when next looked at
    bad_blocks_hurt_all: bool = True  # whoever has a block reported bad goes back to it; what lies behind is not hit
    counts_all_adapters: bool = True  # adapters of running requests that a step leaves out count for `max_loras` too
    frees_encoder: bool = True  # who waits for the encoder's room in vain gets it: an item is begun, or others give way
    kept_gives_way: bool = True  # KV kept for a next turn goes, the oldest first, when somebody needs the memory


STRICT = TransferPolicy(
    name="strict", share_loads=True, bounded_waits=True, loaded_skips_watermark=True, load_failure="recompute"
)
VLLM = TransferPolicy(
    name="vllm",
    share_loads=False,
    bounded_waits=False,
    loaded_skips_watermark=False,
    load_failure="fail",
    abort_frees_hits=False,
    push_answers=False,
    failure_frees_at_once=False,
    bad_blocks_hurt_all=False,
    counts_all_adapters=False,
    frees_encoder=False,
    kept_gives_way=False,
)
TRANSFER_POLICIES = {policy.name: policy for policy in (STRICT, VLLM)}


_LEAST = {
    "num_blocks": 1,
    "block_size": 1,
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_outstanding_plans": 1,
    "long_prefill_token_threshold": 0,
    "prefill_schedule_interval": 1,
    "kv_load_timeout_ns": 1,
    "fence_timeout_ns": 1,
    "lease_ns": 1,
    "kept_ttl_ns": 1,
    "grammar_timeout_ns": 1,
    "kv_recompute_threshold": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One instance's memory and scheduling. Durations are integer nanoseconds; defaults are vLLM's where it has one.

    ``groups`` are the model's KV groups (default: one of full attention, ``block_size`` tokens a block).
    ``prefix_match_unit`` is the tokens of one block hash (default: the greatest common divisor of the block sizes).
    ``prefix_cache_retention_interval`` thins what window and state groups keep for hits: 0 where a request can be
    resumed, N every N tokens as well, ``None`` everywhere. ``kv_events`` collects what enters and leaves the prefix
    cache, ``kv_metrics_sample`` (0, 1] the times of that share of all blocks (vLLM: 0.01 when on).

    ``shared_prefix_checkpoint``: see `stops_at_junctions`.

    A step has at most ``max_num_scheduled_tokens`` (default: ``max_num_batched_tokens``, which also holds the rows that
    a drafter takes). ``max_num_active_seqs`` (default: ``max_num_seqs``) run at once. While there are others nobody
    gets more than ``long_prefill_token_threshold`` tokens of a step (0: no such cap), or, adaptive, than a fair share
    if that is more. Prompts are computed in every ``prefill_schedule_interval``-th step only, while somebody decodes.

    A step computes with ``max_loras`` adapters at most (``None``: with any number); requests with further ones wait.
    A request whose grammar is not compiled ``grammar_timeout_ns`` after its arrival ends with an error (`strict`).

    With ``encoder`` limits a request's items are encoded here, and its prompt waits for that; without them items are
    only names (somebody else has their embeddings).

    Of bidirectional mode: an answer's KV is kept for ``kept_ttl_ns``, in at most ``max_kept_fraction`` of the pool, and
    read by the next turn's prefill if that lacks ``kv_recompute_threshold`` tokens of it or more.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    groups: tuple[Group, ...] = ()
    prefix_match_unit: int | None = None
    prefix_cache_retention_interval: int | None = 0
    kv_events: bool = False
    kv_metrics_sample: float | None = None
    max_num_seqs: int = 256
    max_num_active_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    prefill_schedule_interval: int = 1
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    full_sequence_must_fit: bool = True
    watermark: float = 0.0
    priority_scheduling: bool = False
    max_outstanding_plans: int = 1
    shared_prefix_checkpoint: bool = False
    speculation: Speculation | None = None
    encoder: EncoderLimits | None = None
    max_loras: int | None = None
    transfer: TransferPolicy = field(default=STRICT)
    kv_load_timeout_ns: int = 60 * NS_PER_S
    push_registration_timeout_ns: int = 480 * NS_PER_S
    fence_timeout_ns: int = 10 * NS_PER_S
    lease_ns: int = 30 * NS_PER_S
    max_leased_fraction: float = 0.8
    kept_ttl_ns: int = 480 * NS_PER_S
    grammar_timeout_ns: int = 60 * NS_PER_S
    max_kept_fraction: float = 0.8
    kv_recompute_threshold: int = 64

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.groups:
            object.__setattr__(self, "groups", (FullGroup(block_size=self.block_size),))
        caching, interval = self.enable_prefix_caching, self.prefix_cache_retention_interval
        check_groups(self.groups, enable_caching=caching, retention_interval=interval, drafting=self.drafting)
        _ = self.sizes
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than max_num_seqs "
                f"({self.max_num_seqs}): a step could not give every running request its token. "
                "Raise the first or lower the second"
            )
        self._check_at_most("max_num_active_seqs", "max_num_seqs")
        if self.max_loras is not None and self.max_loras < 1:
            raise ConfigError(f"max_loras is {self.max_loras}; it must be at least 1, or left out: no limit")
        self._check_at_most("max_num_scheduled_tokens", "max_num_batched_tokens")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill a prompt must fit one step: max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) < max_model_len ({self.max_model_len}). Raise it or enable chunking"
            )
        if not self.enable_chunked_prefill and self.max_row_tokens < self.max_model_len - 1:
            raise ConfigError(
                f"without chunked prefill a prompt of up to {self.max_model_len - 1} tokens (max_model_len - 1) must "
                f"fit one step, and one request has at most {self.max_row_tokens} of it (max_num_scheduled_tokens, and "
                "max_num_batched_tokens without the drafter's rows). Raise them or enable chunking"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark}; it is a share of the pool in [0, 1)")
        if self.kv_metrics_sample is not None and not 0 < self.kv_metrics_sample <= 1:
            raise ConfigError(f"kv_metrics_sample is {self.kv_metrics_sample}; it is a share of all blocks in (0, 1]")
        if not 0 < self.max_leased_fraction <= 1:
            raise ConfigError(f"max_leased_fraction is {self.max_leased_fraction}; it is a share of the pool in (0, 1]")
        if not 0 < self.max_kept_fraction <= 1:
            raise ConfigError(f"max_kept_fraction is {self.max_kept_fraction}; it is a share of the pool in (0, 1]")
        if self.transfer.load_failure not in ("recompute", "fail"):
            raise ConfigError(f"load failure policy is {self.transfer.load_failure!r}; use 'recompute' or 'fail'")

    def _check_at_most(self, name: str, other: str) -> None:
        value, most = getattr(self, name), getattr(self, other)
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"{name} is {value}; it must be at least 1 and at most {other} ({most}), or left out")

    @property
    def active_limit(self) -> int:
        """So many requests run at most; an executor may have room (``max_num_seqs``) for more."""
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs

    @property
    def max_scheduled_tokens(self) -> int:
        """Tokens of one step at most."""
        own = self.max_num_scheduled_tokens
        return self.max_num_batched_tokens if own is None else own

    @property
    def max_row_tokens(self) -> int:
        """Tokens of one request in one step at most, beside what its drafter takes."""
        slots = self.speculation.drafting_slots if self.speculation else 0
        return min(self.max_scheduled_tokens, self.max_num_batched_tokens - slots)

    @property
    def prefill_lookahead_tokens(self) -> int:
        """Prompt tokens that a drafter reads behind those computed."""
        return self.speculation.prefill_lookahead_tokens if self.speculation else 0

    @property
    def drafting(self) -> Drafting:
        """What a drafter does to cached prefixes."""
        return NO_DRAFTING if self.speculation is None else self.speculation.drafting(self.groups)

    @property
    def lookahead_tokens(self) -> int:
        """Slots behind what a step computes, for the drafter."""
        return 0 if self.speculation is None else self.speculation.lookahead_tokens

    @property
    def step_tokens(self) -> int:
        """Slots that a decode step of one request takes beyond its known tokens; 0 without speculation."""
        return 0 if self.speculation is None else self.speculation.step_tokens

    @property
    def sizes(self) -> Granularity:
        """Tokens of the scheduler's block, of a hash, and between two places where a hit can end."""
        return granularity(self.groups, hash_tokens=self.prefix_match_unit, enable_caching=self.enable_prefix_caching)

    @property
    def state_block_size(self) -> int | None:
        """Tokens between two places where states are kept, at which chunks must end; ``None`` without such groups."""
        sizes = (group.block_size for group in self.groups if isinstance(group, StateGroup) and group.aligned)
        return next(sizes, None)

    @property
    def checkpoint_group(self) -> StateGroup | None:
        """The first group of states, where all of them are written inside of chunks too; else ``None``."""
        states = [group for group in self.groups if isinstance(group, StateGroup)]
        return states[0] if states and all(group.checkpoint_blocks for group in states) else None

    @property
    def stops_at_junctions(self) -> bool:
        """Whether a chunk ends exactly where a prefix ends that others share, for its state to be hit there.

        Opt-in, and only where a drafter makes hits lose their end, and hits may end inside of blocks.
        """
        drafting = self.drafting
        settled = bool(drafting.groups) and drafting.unsettled_tokens == 0
        return self.shared_prefix_checkpoint and settled and self.sizes.fine_hits

    @property
    def replay_tokens(self) -> int:
        """Tokens at the end of a prefix hit that are computed once more, for windows that are never hit."""
        return replay_tokens(self.groups) if self.enable_prefix_caching else 0

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens that can be scheduled and not yet settled; windows keep their blocks for those."""
        return self.max_outstanding_plans * self.max_num_batched_tokens

    @property
    def registration_ns(self) -> int:
        """How often a registration is repeated until it is answered: every sixth of the lease (30 s -> 5 s)."""
        return self.lease_ns // 6

    @property
    def lease_extension_ns(self) -> int:
        """How far a heartbeat moves the deadline from its arrival: two thirds of the lease (30 s -> 20 s)."""
        return self.lease_ns * 2 // 3
