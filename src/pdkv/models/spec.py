"""What the KV memory of a model depends on, and nothing else about the model.

A `LayerSpec` is one cache that a decoder layer owns, over the whole model and before any parallelism, storage type or
block size is chosen. A decoder layer may own several (a latent and its indexer, attention beside a recurrent state) or
none (a feed-forward block, a layer that reads another layer's KV).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class LayerKind(enum.Enum):
    """How a layer keeps KV; ``value`` is vLLM's word for it (spec kv-layout, section 3)."""

    FULL_ATTENTION = "full_attention"
    MLA = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CHUNKED_LOCAL = "chunked_local_attention"
    SINK_FULL = "sink_full_attention"
    ENCODER_ONLY = "encoder_only_attention"
    CROSS = "cross_attention"
    CIRCULAR_BUFFER = "circular_buffer"
    RSWA = "rswa"


class Record(enum.Enum):
    """What a latent cache holds for one token; each has its own bytes (spec kv-layout, section 3.4)."""

    PLAIN = "plain"
    """``head_dim`` elements of the KV type: every attention that is not one of those below."""
    DEEPSEEK_SPARSE = "deepseek_sparse"
    """The latent of sparse MLA (DeepSeek-V3.2, GLM-5): packed when the KV type is one of the ``ds_mla`` ones."""
    INDEXER = "indexer"
    """Keys of the sparse attention's indexer: 8-bit codes and their scales, whatever the KV type is."""
    V4_COMPRESSED = "v4_compressed"
    """DeepSeek-V4: one latent for several tokens."""
    V4_WINDOW = "v4_window"
    """DeepSeek-V4: the latents of the last tokens, not compressed."""
    V4_COMPRESSOR = "v4_compressor"
    """DeepSeek-V4: what the compressor still needs of the open group of tokens, in float32."""
    V4_INDEXER = "v4_indexer"
    """DeepSeek-V4: indexer keys, one for several tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """A state of fixed size: a window of a convolution's inputs, and a recurrence. Sizes are the whole model's.

    The convolution keeps ``conv_rows`` rows of ``conv_channels + groups * group_channels`` channels; groups are
    replicated rather than divided when the ranks do not divide them. The recurrence keeps ``heads`` matrices of
    ``cells`` elements; 0 when there is none. ``cells_dtype`` is what the checkpoint wants it kept in: ``None`` follows
    the convolution. ``checkpoint_blocks`` are extra states that a long prefill saves under prefix caching.
    """

    conv_rows: int
    conv_channels: int
    groups: int = 0
    group_channels: int = 0
    heads: int = 0
    cells: int = 0
    cells_dtype: str | None = None
    checkpoint_blocks: int = 0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One cache of one decoder layer: KV heads and the two head sizes in elements (``head_dim_v`` 0: one vector, no V).

    ``reach`` is the window or the chunk in tokens of a kind that has one. ``layer`` is the decoder layer that owns the
    cache and ``part`` what it is there (``attn``, ``indexer``, ``state`` ...). ``replicated`` caches are whole on every
    tensor-parallel rank. ``tokens_per_state`` above 1 stores one state for that many tokens; ``fixed_block`` is a block
    size that the cache has whatever the others have.
    """

    kind: LayerKind
    kv_heads: int
    head_dim: int
    head_dim_v: int
    reach: int | None = None
    layer: int = 0
    part: str = "attn"
    record: Record = Record.PLAIN
    replicated: bool = False
    tokens_per_state: int = 1
    fixed_block: int | None = None
    leads_index: bool = False
    state: RecurrentState | None = None

    @property
    def name(self) -> str:
        """Unique within a model: the decoder layer and the part."""
        return f"layers.{self.layer}.{self.part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as the layout sees it. ``layers`` holds one entry per cache, in the order in which vLLM registers them.

    ``num_layers`` are the decoder layers that pipeline stages divide (also those that own no KV; 0: as many as there
    are caches). ``dtype`` is the checkpoint's own element type (``None`` when its config does not say), ``kv_dtype``
    what a quantized checkpoint wants its KV stored as (``None`` for most). ``max_model_len`` is the longest context in
    tokens that its position encoding allows, ``served_model_len`` what it is served at unless more is asked for, where
    that is less. ``heads`` are the KV heads and the head size that the config states for the whole model, which vLLM
    reckons block sizes with also where layers differ. ``shared_layers`` maps decoder layers that read another layer's
    KV to that layer. ``draft_layers`` are the caches of its multi-token-prediction layers, for who drafts with them.
    ``warnings`` are what a person should know about how the config was read.
    """

    name: str
    architecture: str
    layers: tuple[LayerSpec, ...]
    attention_heads: int
    max_model_len: int
    dtype: str | None
    kv_dtype: str | None = None
    num_layers: int = 0
    shared_layers: tuple[tuple[int, int], ...] = ()
    draft_layers: tuple[LayerSpec, ...] = ()
    served_model_len: int | None = None
    heads: tuple[int, int] | None = None
    warnings: tuple[str, ...] = ()

    @property
    def decoder_layers(self) -> int:
        """Decoder layers, counted or as many as there are caches."""
        return self.num_layers or len(self.layers)

    def has(self, *kinds: LayerKind) -> bool:
        """Whether any cache is of one of ``kinds``."""
        return any(layer.kind in kinds for layer in self.layers)
