"""One cache on one rank: bytes of a page, and how many blocks of it a request can hold (spec kv-layout, 2 and 3).

A `models.spec.LayerSpec` says what a layer keeps; a cache here is that layer after tensor parallelism, the storage
type, the attention backend's packing and the block size were chosen. All sizes are bytes, all lengths tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

from pdkv.errors import ConfigError
from pdkv.layout.dtypes import ELEMENT_BYTES
from pdkv.models.spec import LayerKind
from pdkv.units import cdiv

WINDOWED = frozenset({LayerKind.SLIDING_WINDOW, LayerKind.SLIDING_WINDOW_MLA})
FULL_LIKE = frozenset({LayerKind.FULL_ATTENTION, LayerKind.MLA, LayerKind.SINK_FULL, LayerKind.RSWA})
"""Kinds that keep every token: they share groups with plain full attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the size of one request depends on besides its length.

    ``max_in_flight_tokens`` are tokens scheduled but not settled: a batch for every step in flight. Windows and chunks
    need it (``None``: not given, and sizing one of those is refused). ``encoder_tokens`` bounds cross attention.
    """

    max_in_flight_tokens: int | None = None
    decode_context_parallel: int = 1
    encoder_tokens: int | None = None

    def in_flight(self) -> int:
        """``max_in_flight_tokens``. Raises ConfigError when it was not given."""
        if self.max_in_flight_tokens is None:
            raise ConfigError(
                "a sliding window or chunked layer is sized by the tokens in flight: give --max-num-batched-tokens"
            )
        return self.max_in_flight_tokens


def _known_element(element: str) -> None:
    """Raise ConfigError unless the bytes of ``element`` are known."""
    if element not in ELEMENT_BYTES:
        raise ConfigError(f"{element!r} is no type that a cache is made of; there are: {', '.join(ELEMENT_BYTES)}")


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """A stride rule: blocks are split into kernel blocks of up to ``tokens``, which packed blocks must keep whole."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCache:
    """K and V, or a latent, for every token that a layer still needs.

    ``page_bytes = head slots * states * bytes per state``, padded up to ``padded_page_bytes`` when that is set. A
    backend that packs sets ``head_slots`` and ``state_bytes``; without, a state is ``head_dim + head_dim_v`` elements.
    ``reach`` is the window or chunk; on full attention only the memory of one, after it was promoted. The fields from
    ``storage`` on are what two caches must agree on to share one description.
    """

    kind: LayerKind
    block_size: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    element: str
    quant: str = "NONE"
    head_slots: int | None = None
    state_bytes: int | None = None
    tokens_per_state: int | Fraction = 1
    padded_page_bytes: int | None = None
    stride: int | KernelBlocks | None = None
    dcp_sharded: bool = True
    max_tp_shards: int | None = None
    reach: int | None = None
    chunk: int | None = None
    extra_retained: int = 0
    bounded_replay: bool = False
    storage: str | None = None
    role: str | None = None
    leads_index: bool = False
    model_version: str | None = None
    page_alignment: int | None = None
    sink_tokens: int | None = None

    def __post_init__(self) -> None:
        for what in ("block_size", "kv_heads", "head_dim"):
            if getattr(self, what) < 1:
                raise ConfigError(
                    f"{what} of a {self.kind.value} layer is {getattr(self, what)}; it must be at least 1"
                )
        _known_element(self.element)
        if self.page_alignment is not None:
            rounded = cdiv(self.dense_page_bytes, self.page_alignment) * self.page_alignment
            if rounded != self.dense_page_bytes:
                object.__setattr__(self, "padded_page_bytes", rounded)
        if self.padded_page_bytes is not None and self.padded_page_bytes < self.dense_page_bytes:
            raise ConfigError(
                f"a page of {self.dense_page_bytes} bytes cannot be padded to {self.padded_page_bytes} bytes"
            )

    @property
    def states(self) -> int:
        """Stored states in one block."""
        return int(self.block_size // self.tokens_per_state)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state in one head slot."""
        if self.state_bytes is not None:
            return self.state_bytes
        return (self.head_dim + self.head_dim_v) * ELEMENT_BYTES[self.element]

    @property
    def dense_page_bytes(self) -> int:
        """Bytes of a page before padding."""
        return (self.head_slots or self.kv_heads) * self.states * self.bytes_per_state

    @property
    def page_bytes(self) -> int:
        """Bytes that one layer stores for one block."""
        return self.dense_page_bytes if self.padded_page_bytes is None else self.padded_page_bytes

    @property
    def prefix_cacheable(self) -> bool:
        """Whether blocks of this cache can be found again by their hash."""
        return self.kind not in (LayerKind.CIRCULAR_BUFFER,) and not self.bounded_replay

    @property
    def stride_bytes(self) -> int:
        """The distance between two blocks must be a multiple of this."""
        if not isinstance(self.stride, KernelBlocks):
            return self.stride or 1
        kernel = math.gcd(self.stride.tokens, self.block_size)
        return 1 if kernel == self.block_size else self.with_block_size(kernel).page_bytes

    def with_block_size(self, block_size: int) -> AttentionCache:
        """The same cache with another block size."""
        return replace(self, block_size=block_size)

    def blocks_for(self, num_tokens: int, limits: Limits) -> int:
        """Most blocks that one request of at most ``num_tokens`` tokens holds at once (section 3)."""
        if self.kind is LayerKind.ENCODER_ONLY:
            return 0
        if self.kind is LayerKind.CIRCULAR_BUFFER:
            return 1
        if self.kind is LayerKind.CROSS:
            if limits.encoder_tokens is None:
                raise ConfigError("cross attention is sized by the encoder's input: give its longest length in tokens")
            return cdiv(limits.encoder_tokens, self.block_size)
        if self.kind is LayerKind.CHUNKED_LOCAL:
            return cdiv(min(self.reach_tokens + limits.in_flight(), num_tokens), self.block_size)
        if self.kind in WINDOWED:
            held = self.reach_tokens - 1 + self.extra_retained + limits.in_flight()
            # One more: the window need not begin where a block does.
            return cdiv(min(held, num_tokens), self.block_size) + 1
        shards = limits.decode_context_parallel if self.dcp_sharded else 1
        return cdiv(cdiv(num_tokens, shards), self.block_size)

    @property
    def reach_tokens(self) -> int:
        """The window or chunk of a kind that has one. Raises ConfigError when it was left out."""
        tokens = self.chunk if self.kind is LayerKind.CHUNKED_LOCAL else self.reach
        if tokens is None or tokens < 1:
            raise ConfigError(f"a {self.kind.value} layer needs a window of at least one token, not {tokens}")
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCache:
    """A recurrent state: ``state_bytes`` whatever the block size is. ``tensors`` are (shape, element) of its parts.

    ``aligned`` states are saved at block ends for prefix caching, so that a request holds two, and
    ``checkpoint_blocks`` more while a long prefill runs.
    """

    block_size: int
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    padded_page_bytes: int | None = None
    mode: str = "none"
    speculative_blocks: int = 0
    checkpoint_blocks: int = 0
    checkpoint_alignment: int | None = None
    tp_replicated: bool = False
    family: str | None = None
    stride: int | KernelBlocks | None = None
    dcp_sharded: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size of a recurrent layer is {self.block_size}; it must be at least 1")
        for _, element in self.tensors:
            _known_element(element)
        if self.padded_page_bytes is not None and self.padded_page_bytes < self.state_bytes:
            raise ConfigError(f"a state of {self.state_bytes} bytes cannot be padded to {self.padded_page_bytes} bytes")

    @property
    def kind(self) -> LayerKind:
        """Always a recurrent layer."""
        return LayerKind.MAMBA

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return sum(math.prod(shape) * ELEMENT_BYTES[element] for shape, element in self.tensors)

    @property
    def dense_page_bytes(self) -> int:
        """Bytes of a page before padding: one state."""
        return self.state_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes that one layer stores for one block."""
        return self.state_bytes if self.padded_page_bytes is None else self.padded_page_bytes

    @property
    def prefix_cacheable(self) -> bool:
        """States count as cacheable; whether any is kept depends on the mode."""
        return True

    @property
    def tokens_per_state(self) -> int:
        """A state is of all tokens so far."""
        return 0

    @property
    def stride_bytes(self) -> int:
        """The distance between two blocks must be a multiple of this."""
        return self.stride if isinstance(self.stride, int) else 1

    def with_block_size(self, block_size: int) -> StateCache:
        """The same cache with another block size."""
        return replace(self, block_size=block_size)

    def blocks_for(self, num_tokens: int, limits: Limits) -> int:
        """States that one request holds; its length does not matter."""
        del num_tokens, limits
        if self.mode == "align":
            return 2 + self.speculative_blocks + self.checkpoint_blocks
        return 1 + self.speculative_blocks


Cache: TypeAlias = AttentionCache | StateCache
