"""The peak of activations in vLLM's profile run, from shapes: no constant here was fitted.

The run is a step of ``max_num_batched_tokens`` dummy tokens, then one sampling of ``max_num_seqs`` rows (spec
memory-profile, section 2). Its peak is that of the larger of the two, on top of what a vision tower left behind. The
sampler's is the larger one for most models: its tensors are as wide as the vocabulary and are not divided over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdkv.models.fields import HEADS, HIDDEN, Config, first
from pdkv.models.latent import is_latent, is_v4
from pdkv.models.weights.matrices import VOCAB_PADDING, Division, Matrix, Part, Split
from pdkv.units import MIB, cdiv

# cuBLAS keeps a workspace in PyTorch's allocator (32 MiB on Hopper; CUBLAS_WORKSPACE_CONFIG).
_CUBLAS_BYTES = 32 * MIB
# Hidden states that are alive at the widest point of a layer: residual, its sum, the layer's input and output.
_HIDDEN_ALIVE = 4
# MLA expands so many latents at once, at most (v1/attention/backends/mla/common.py, chunked prefill workspace).
_MLA_CHUNK_TOKENS = 64 * 1024
# Qwen's image processors allow 16,384 tokens an image (max_pixels, longest_edge in preprocessor_config.json).
_LARGE_IMAGES, _LARGEST_IMAGE_TOKENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"), 16384
# DeepSeek's sparse indexer gathers the keys of so many requests of the longest length, 132 bytes a key.
_INDEXER_GATHER, _INDEXER_KEY_BYTES = 40, 132
_CHOSEN_EXPERTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "top_k_experts",
    "moe_k",
    "moe_top_k",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the profile run is told. ``rows`` are the requests that are sampled; ``element_bytes`` the model's type."""

    tokens: int
    rows: int
    max_model_len: int
    element_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRules:
    """What one logit takes at the sampler's peak beyond the model's own type, and the scratch of its kernel.

    ``extra_bytes`` a logit, ``scratch_rows`` float32 rows of the vocabulary for every processor of the GPU.
    """

    extra_bytes: int
    scratch: bool


# Up to 0.16: float32 logits 4, sorted values 4 and places 8, the sort's own buffers 12, probabilities 4, noise 4.
SORTING = SamplerRules(extra_bytes=36, scratch=False)
# From 0.17: float32 logits, probabilities and noise; top-k and top-p are found in a row of scratch per processor.
TRITON = SamplerRules(extra_bytes=12, scratch=True)
# Model runner V2: the dummy requests ask for nothing, so that logits are sampled as they are (0.32, read not measured).
V2_RUNNER = SamplerRules(extra_bytes=0, scratch=False)


def sampler_peak(text: Config, step: Step, rules: SamplerRules, processors: int) -> int:
    """Bytes while the first tokens are sampled, on a rank of the last pipeline stage."""
    hidden, vocabulary = _hidden(text), int(first(text, ("vocab_size", "padded_vocab_size")) or 0)
    vocabulary = cdiv(vocabulary, VOCAB_PADDING) * VOCAB_PADDING
    rows = min(step.rows, step.tokens)
    kept = step.tokens * hidden * step.element_bytes
    gathered = 2 * rows * hidden * step.element_bytes
    logits = rows * vocabulary * (step.element_bytes + rules.extra_bytes)
    scratch = processors * vocabulary * 4 if rules.scratch else 0
    return kept + gathered + logits + scratch + _CUBLAS_BYTES


def layer_widths(text: Config, parts: tuple[Part, ...], division: Division) -> dict[int, int]:
    """Elements a token at the widest point of every decoder layer."""
    return {part.layer: _layer_width(text, part, division) for part in parts if part.layer is not None}


def forward_peak(text: Config, widest: int, division: Division, step: Step) -> int:
    """Bytes at the widest point of the widest layer, which has ``widest`` elements a token (`layer_widths`)."""
    in_layer = step.tokens * step.element_bytes * (widest + _HIDDEN_ALIVE * _hidden(text))
    return in_layer + _attention_workspace(text, division, step) + _CUBLAS_BYTES


def _layer_width(text: Config, part: Part, division: Division) -> int:
    """Elements a token of the layer's widest intermediate result: an activation reads it and writes another."""
    outputs: dict[str, int] = {}
    for matrix in part.matrices:
        if matrix.linear and matrix.split in (Split.COLUMN, Split.HEADS):
            outputs[matrix.allocation] = outputs.get(matrix.allocation, 0) + matrix.on_rank(division)[0]
    dense = max((_with_activation(name, width) for name, width in outputs.items()), default=0)
    return max(dense, _experts_width(text, part.matrices, division))


def _with_activation(name: str, width: int) -> int:
    return width + width // 2 if name.endswith("gate_up_proj") else 2 * width


def _experts_width(text: Config, matrices: tuple[Matrix, ...], division: Division) -> int:
    """Every token's copies for its experts: gate and up (or the output, which shares the memory), and their product."""
    up = next((matrix for matrix in matrices if matrix.split is Split.EXPERT_COLUMN and matrix.linear), None)
    down = next((matrix for matrix in matrices if matrix.split is Split.EXPERT_ROW and matrix.linear), None)
    if up is None or down is None:
        return 0
    chosen = first(
        text, ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k", "moe_top_k")
    )
    count = chosen if isinstance(chosen, int) else 1
    return count * (max(up.on_rank(division)[0], down.rows) + down.on_rank(division)[1])


def _attention_workspace(text: Config, division: Division, step: Step) -> int:
    if not is_latent(text) or is_v4(text):
        return 0
    heads = cdiv(int(first(text, HEADS) or 0), division.tensor_parallel)
    width = int(text.get("qk_nope_head_dim") or 0) + int(text.get("v_head_dim") or 0)
    expanded = min(8 * step.max_model_len, _MLA_CHUNK_TOKENS) * heads * width * step.element_bytes
    gathered = _INDEXER_GATHER * step.max_model_len * _INDEXER_KEY_BYTES if text.get("index_topk") else 0
    return expanded + gathered


def _hidden(text: Config) -> int:
    return int(first(text, HIDDEN) or 0)


# --------------------------------------------------------------------------------------------------------- vision tower


@dataclass(frozen=True, slots=True)
class VisionPeak:
    """``kept_bytes`` stay through the step (pixels and what the tower made of them), ``peak_bytes`` is the tower's."""

    kept_bytes: int = 0
    peak_bytes: int = 0


def vision_peak(config: Config, text: Config, step: Step) -> VisionPeak:
    """The tower's part in the profile run, which encodes as many images as a step has room for; 0 without a tower."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or not vision:
        return VisionPeak()
    size = int(first(vision, ("patch_size",)) or 14)
    width = int(first(vision, ("hidden_size", "embed_dim", "vt_hidden_size")) or 0)
    inner = int(first(vision, ("intermediate_size", "vt_intermediate_size")) or 4 * width)
    # An image of the largest size is encoded even if it has more tokens than a step.
    tokens = max(step.tokens, _LARGEST_IMAGE_TOKENS if str(config.get("model_type")).startswith(_LARGE_IMAGES) else 0)
    patches = tokens * _patches_per_token(config, vision)
    pixels = patches * 3 * size * size * int(vision.get("temporal_patch_size") or 1) * step.element_bytes
    levels = 1 + len(vision.get("deepstack_visual_indexes") or ())
    kept = pixels + tokens * levels * _hidden(text) * step.element_bytes
    return VisionPeak(kept, kept + patches * (2 * inner + _HIDDEN_ALIVE * width) * step.element_bytes)


def _patches_per_token(config: Config, vision: Config) -> int:
    """Patches that become one token of the language model."""
    merge: Any = vision.get("spatial_merge_size") or config.get("spatial_merge_size")
    if isinstance(merge, int):
        return merge * merge
    pool = vision.get("pooling_kernel_size")
    if isinstance(pool, int):
        return pool * pool
    tokens, image, size = config.get("mm_tokens_per_image"), vision.get("image_size"), vision.get("patch_size")
    if isinstance(image, int) and isinstance(size, int) and str(config.get("model_type")).startswith("gemma3"):
        return max(1, (image // size) ** 2 // int(tokens or 256))
    return 4
