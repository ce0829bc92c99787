"""Matrices of vision towers, by the fields of ``vision_config``; an audio tower is refused (nothing bounds it).

Every tower here is a stack of transformer blocks between patches and a projector into the language model's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.models.fields import HIDDEN, MOST_LAYERS, Config, first, optional, positive
from pdkv.models.weights.matrices import Matrix, Split, linear, norm

_DEPTH = ("depth", "num_hidden_layers", "vt_num_hidden_layers", "layers")
_WIDTH = ("hidden_size", "embed_dim", "vt_hidden_size", "width")
_HEADS = ("num_attention_heads", "num_heads", "vt_num_attention_heads", "heads")
_INNER = ("intermediate_size", "vt_intermediate_size")
_COUNTED = ("qwen3_vl", "qwen3_5", "qwen2_5_vl", "gemma4_vision", "llama4_vision_model", "pixtral", "moonvit",
            "kimi_k25", "siglip_vision_model")  # fmt: skip
# What transformers takes for the fields of a tower that a config leaves out (its configuration classes).
_DEFAULTS: dict[str, dict[str, int]] = {
    "pixtral": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
                "image_size": 1024, "patch_size": 16},
    "siglip_vision_model": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                            "num_attention_heads": 12, "image_size": 224, "patch_size": 16},
    "moonvit": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
                "patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tower:
    """The size of a tower's blocks."""

    depth: int
    width: int
    inner: int


def tower_matrices(config: Config, text: Config, name: str) -> list[Matrix]:
    """The matrices beside the language model; none for a text model. Raises UnsupportedModel for a kind not counted."""
    for part in ("audio_config", "speech_config"):
        if config.get(part):
            raise UnsupportedModel(f"{name}: the weights of its audio tower ({part}) are not counted from a config")
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or not vision:
        return []
    kind = str(vision.get("model_type") or config.get("model_type"))
    vision = {**_DEFAULTS.get(kind, {}), **vision}
    hidden = positive(text, HIDDEN, name)
    if kind.startswith(("qwen3_vl", "qwen3_5")):
        return _qwen3_vl(vision, name)
    if kind.startswith(("qwen2_5_vl",)):
        return _qwen25_vl(vision, hidden, name)
    if kind == "gemma4_vision":
        return _gemma4(vision, hidden, name)
    if kind == "llama4_vision_model":
        return _llama4(vision, hidden, name)
    if kind == "pixtral":
        return _pixtral(config, vision, hidden, name)
    if kind in ("moonvit", "kimi_k25_vision") or ("vt_hidden_size" in vision and "mm_hidden_size" not in vision):
        return _moonvit(config, vision, hidden, name)
    if kind == "siglip_vision_model" and str(config.get("model_type")).startswith("gemma3"):
        return _gemma3(vision, hidden, name)
    return _any(vision, hidden, kind, name)


def tower_note(config: Config) -> str | None:
    """What a person should know about how the tower was counted, if anything."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or not vision:
        return None
    kind = str(vision.get("model_type") or config.get("model_type"))
    if kind.startswith(_COUNTED) or ("vt_hidden_size" in vision and "mm_hidden_size" not in vision):
        return None
    return f"a vision tower of type {kind}: counted by its depth and widths only, its projector is a guess"


def _any(vision: Config, hidden: int, kind: str, name: str) -> list[Matrix]:
    """A tower of a kind that nobody looked at: blocks by their sizes, and a projector of two layers."""
    if any(first(vision, keys) is None for keys in (_DEPTH, _WIDTH, _INNER)):
        raise UnsupportedModel(
            f"{name}: the weights of its vision tower (model type {kind!r}) are not counted: the config does not give "
            "its depth, width and intermediate size"
        )
    tower = _sizes(vision, name)
    return [
        *_patches({"patch_size": 14, **vision}, tower.width, "vision_tower", name, bias=False),
        *_blocks(tower, "vision_tower.layers", gated=False, bias=True, norm_bias=True),
        *linear("multi_modal_projector.linear_1", hidden, tower.width, Split.COLUMN),
        *linear("multi_modal_projector.linear_2", hidden, hidden, Split.ROW),
    ]


def _sizes(vision: Config, name: str) -> _Tower:
    depth = positive(vision, _DEPTH, name)
    if depth > MOST_LAYERS:
        raise ConfigError(f"{name}: a vision tower of {depth} layers; no model has more than {MOST_LAYERS}")
    return _Tower(depth, positive(vision, _WIDTH, name), positive(vision, _INNER, name))


def _blocks(tower: _Tower, path: str, *, gated: bool, bias: bool, norms: int = 2, norm_bias: bool) -> list[Matrix]:
    """Attention and a feed-forward layer, ``depth`` times."""
    found = []
    width, inner = tower.width, tower.inner
    for index in range(tower.depth):
        at = f"{path}.{index}"
        found += linear(f"{at}.attn.qkv", 3 * width, width, Split.COLUMN, bias=bias)
        found += linear(f"{at}.attn.proj", width, width, Split.ROW, bias=bias)
        if gated:
            found += linear(
                f"{at}.mlp.gate_proj", inner, width, Split.COLUMN, bias=bias, fused=f"{at}.mlp.gate_up_proj"
            )
        found += linear(f"{at}.mlp.up_proj", inner, width, Split.COLUMN, bias=bias, fused=f"{at}.mlp.gate_up_proj")
        found += linear(f"{at}.mlp.down_proj", width, inner, Split.ROW, bias=bias)
        for number in range(norms):
            found += norm(f"{at}.norm{number + 1}", width, bias=norm_bias)
    return found


def _patches(vision: Config, width: int, path: str, name: str, *, bias: bool, frames: int = 1) -> list[Matrix]:
    channels = optional(vision, ("in_channels", "num_channels", "in_chans"), name, 3)
    size = positive(vision, ("patch_size",), name)
    found = [Matrix(f"{path}.patch_embed", width, channels * frames * size * size)]
    return [*found, Matrix(f"{path}.patch_embed.bias", width, 1)] if bias else found


def _merger(path: str, inner: int, out: int, norm_width: int, *, norm_bias: bool = True) -> list[Matrix]:
    return [
        *norm(f"{path}.norm", norm_width, bias=norm_bias),
        *linear(f"{path}.linear_fc1", inner, inner, Split.COLUMN, bias=True),
        *linear(f"{path}.linear_fc2", out, inner, Split.ROW, bias=True),
    ]


def _qwen3_vl(vision: Config, name: str) -> list[Matrix]:
    tower = _sizes(vision, name)
    merged = tower.width * positive(vision, ("spatial_merge_size",), name) ** 2
    out = positive(vision, ("out_hidden_size",), name)
    found = _patches(
        vision, tower.width, "visual", name, bias=True, frames=positive(vision, ("temporal_patch_size",), name)
    )
    found.append(Matrix("visual.pos_embed", positive(vision, ("num_position_embeddings",), name), tower.width))
    found += _blocks(tower, "visual.blocks", gated=False, bias=True, norm_bias=True)
    found += _merger("visual.merger", merged, out, tower.width)
    for index in range(len(vision.get("deepstack_visual_indexes") or ())):
        found += _merger(f"visual.deepstack_merger_list.{index}", merged, out, merged)
    return found


def _qwen25_vl(vision: Config, hidden: int, name: str) -> list[Matrix]:
    tower = _sizes(vision, name)
    merged = tower.width * optional(vision, ("spatial_merge_size",), name, 2) ** 2
    frames = optional(vision, ("temporal_patch_size",), name, 2)
    found = _patches(vision, tower.width, "visual", name, bias=False, frames=frames)
    found += _blocks(tower, "visual.blocks", gated=True, bias=True, norm_bias=False)
    out = optional(vision, ("out_hidden_size",), name, hidden)
    return found + _merger("visual.merger", merged, out, tower.width, norm_bias=False)


def _gemma3(vision: Config, hidden: int, name: str) -> list[Matrix]:
    tower = _sizes(vision, name)
    side = positive(vision, ("image_size",), name) // positive(vision, ("patch_size",), name)
    return [
        *_patches(vision, tower.width, "vision_tower", name, bias=True),
        Matrix("vision_tower.position_embedding", side * side, tower.width),
        *_blocks(tower, "vision_tower.layers", gated=False, bias=True, norm_bias=True),
        *norm("vision_tower.post_layernorm", tower.width, bias=True),
        Matrix("multi_modal_projector.mm_input_projection", tower.width, hidden),
        *norm("multi_modal_projector.mm_soft_emb_norm", tower.width),
    ]


def _gemma4(vision: Config, hidden: int, name: str) -> list[Matrix]:
    tower = _sizes(vision, name)
    head = positive(vision, ("head_dim",), name)
    found = _patches(vision, tower.width, "vision_tower", name, bias=False)
    # One row for each place, in each of two directions.
    found.append(
        Matrix("vision_tower.position_embedding", 2 * positive(vision, ("position_embedding_size",), name), tower.width)
    )
    found += _blocks(tower, "vision_tower.layers", gated=True, bias=False, norms=4, norm_bias=False)
    for index in range(tower.depth):
        found += [
            *norm(f"vision_tower.layers.{index}.q_norm", head),
            *norm(f"vision_tower.layers.{index}.k_norm", head),
        ]
    return [*found, Matrix("embed_vision.embedding_projection", hidden, tower.width)]


def _llama4(vision: Config, hidden: int, name: str) -> list[Matrix]:
    tower = _sizes(vision, name)
    places = (positive(vision, ("image_size",), name) // positive(vision, ("patch_size",), name)) ** 2 + 1
    ratio = float(vision.get("pixel_shuffle_ratio") or 0.5)
    shuffled = int(tower.width // ratio**2)
    inner, out = positive(vision, ("projector_input_dim",), name), positive(vision, ("projector_output_dim",), name)
    return [
        *_patches(vision, tower.width, "vision_model", name, bias=False),
        Matrix("vision_model.class_embedding", tower.width, 1),
        Matrix("vision_model.positional_embedding_vlm", places, tower.width),
        *_blocks(tower, "vision_model.layers", gated=False, bias=True, norm_bias=True),
        *norm("vision_model.layernorm_pre", tower.width, bias=True),
        *norm("vision_model.layernorm_post", tower.width, bias=True),
        *linear("vision_model.vision_adapter.mlp.fc1", inner, shuffled, Split.COLUMN),
        *linear("vision_model.vision_adapter.mlp.fc2", out, inner, Split.ROW),
        *linear(
            "multi_modal_projector.linear_1", hidden, optional(vision, ("vision_output_dim",), name, out), Split.WHOLE
        ),
    ]


def _pixtral(config: Config, vision: Config, hidden: int, name: str) -> list[Matrix]:
    tower = _sizes(vision, name)
    found = [
        *_patches(vision, tower.width, "vision_tower", name, bias=False),
        *norm("vision_tower.ln_pre", tower.width),
        *_blocks(tower, "vision_tower.layers", gated=True, bias=False, norm_bias=False),
    ]
    bias = bool(config.get("multimodal_projector_bias"))
    if first(config, ("spatial_merge_size",)):
        merge = positive(config, ("spatial_merge_size",), name)
        found += norm("multi_modal_projector.norm", tower.width)
        found += linear("multi_modal_projector.patch_merger", tower.width, tower.width * merge**2, Split.WHOLE)
    found += linear("multi_modal_projector.linear_1", hidden, tower.width, Split.COLUMN, bias=bias)
    return found + linear("multi_modal_projector.linear_2", hidden, hidden, Split.ROW, bias=bias)


def _moonvit(config: Config, vision: Config, hidden: int, name: str) -> list[Matrix]:
    tower = _sizes(vision, name)
    kernel = vision.get("merge_kernel_size") or [2, 2]
    merged = tower.width * int(kernel[0]) * int(kernel[1])
    places = optional(vision, ("init_pos_emb_height",), name, 64) * optional(vision, ("init_pos_emb_width",), name, 64)
    return [
        *_patches(vision, tower.width, "vision_tower", name, bias=True),
        Matrix("vision_tower.pos_emb", places, tower.width),
        *_blocks(tower, "vision_tower.layers", gated=False, bias=True, norm_bias=True),
        *norm("vision_tower.final_layernorm", tower.width, bias=True),
        *norm("multi_modal_projector.pre_norm", tower.width, bias=True),
        *linear("multi_modal_projector.linear_1", merged, merged, Split.COLUMN, bias=True),
        *linear("multi_modal_projector.linear_2", hidden, merged, Split.ROW, bias=True),
    ]
