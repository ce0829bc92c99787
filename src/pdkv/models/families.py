"""config.json -> ModelSpec, read by its fields rather than by a list of architectures.

Every decoder layer is asked what it keeps: K and V heads (`attention_plan` says how far back they reach), a latent
(`latent`), a recurrent state (`recurrent`), or nothing. What the fields leave open is assumed with a warning where vLLM
assumes it too, and refused where it does not: a wrong number would be worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.models.attention_plan import FULL, Reach, attention_plan
from pdkv.models.defaults import UNREAD, family, plain_attention_warning, with_defaults
from pdkv.models.drafts import draft_layers
from pdkv.models.fields import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MOST_LAYERS,
    Config,
    checkpoint_dtype,
    checkpoint_kv_dtype,
    first,
    max_context,
    optional,
    positive,
    reading,
    served_context,
    text_config,
)
from pdkv.models.latent import is_latent, is_v4, latent_layer, latent_warnings, v4_layer
from pdkv.models.recurrent import has_state, layer_roles, read_state
from pdkv.models.spec import LayerKind, LayerSpec, ModelSpec

# Fields that change what is kept in a way that is not read: a model with one of them is refused.
_NOT_SIZED = {
    "lru_width": "a recurrent layer of the RG-LRU kind",
    "compressor_ratio": "compressed attention of an unknown kind",
    "index_kpool": "an indexer that pools keys (GLM-5.3-Flash)",
    "sconv_kernel_size": "attention over convolved keys",
    "sink_len": "attention with stored sink tokens",
}


@dataclass(frozen=True, slots=True)
class _Heads:
    """K and V of one attention layer."""

    kv_heads: int
    head_dim: int
    head_dim_v: int


def spec_from_config(config: Config, *, name: str) -> ModelSpec:
    """The ModelSpec of a Hugging Face ``config.json``; ``name`` is only shown.

    Raises UnsupportedModel, naming what is not sized, and ConfigError for a config that lacks a field that is needed or
    holds one that cannot be.
    """
    with reading(name):
        return _read(config, name)


def _read(config: Config, name: str) -> ModelSpec:
    text = text_config(config)
    text, remarks = with_defaults(text, family(config, text))
    _refuse_unknown(text, name)
    warnings = list(remarks)
    layers, count, shared = _layers(config, text, name, warnings)
    if not layers:
        warnings.append("no layer keeps KV: the pool has one block, the null block")
    kv_dtype, remark = checkpoint_kv_dtype(config, text)
    architectures = config.get("architectures") or text.get("architectures") or ["unknown"]
    return ModelSpec(
        name=name,
        architecture=str(architectures[0]),
        layers=tuple(layers),
        attention_heads=_attention_heads(text, name),
        max_model_len=max_context(text, name=name),
        dtype=checkpoint_dtype(config, text),
        kv_dtype=kv_dtype,
        num_layers=count,
        shared_layers=tuple(shared.items()),
        draft_layers=draft_layers(text, layers, count, name=name),
        served_model_len=served_context(text),
        heads=_model_heads(text, name),
        warnings=tuple(warnings) if remark is None else (*warnings, remark),
    )


def _refuse_unknown(text: Config, name: str) -> None:
    stated = first(text, LAYERS)
    if isinstance(stated, int) and stated > MOST_LAYERS:
        raise ConfigError(
            f"{name}: {stated} layers; no model has more than {MOST_LAYERS}, so this is no model's config"
        )
    if text.get("is_encoder_decoder"):
        raise UnsupportedModel(
            f"{name}: an encoder-decoder model: how long its cross attention is depends on the encoder's input, which "
            "its config does not bound"
        )
    for kind, what in UNREAD.items():
        if str(text["model_type"]).startswith(kind):
            raise UnsupportedModel(f"{name}: {what} (model type {text['model_type']}) is not sized")
    for mark, what in _NOT_SIZED.items():
        if text.get(mark):
            raise UnsupportedModel(f"{name}: {what} ({mark} {text[mark]!r}) is not sized")


def _layers(
    config: Config, text: Config, name: str, warnings: list[str]
) -> tuple[list[LayerSpec], int, dict[int, int]]:
    """All caches in vLLM's order, how many decoder layers there are, and which layers read another's KV."""
    if has_state(text):
        return _hybrid_layers(config, text, name, warnings)
    count = positive(text, LAYERS, name)
    if is_v4(text):
        return [part for index in range(count) for part in v4_layer(text, index, name=name)], count, {}
    if is_latent(text):
        warnings.extend(latent_warnings(text))
        return [part for index in range(count) for part in latent_layer(text, index, name=name)], count, {}
    warnings.extend(plain_attention_warning(str(text["model_type"])))
    plan, remarks = attention_plan(text, count, name=name)
    warnings.extend(remarks)
    shared = _shared_layers(text, plan)
    heads = [_heads(text, index, reach, name) for index, reach in enumerate(plan)]
    layers = [
        _attention(index, reach, kept)
        for index, (reach, kept) in enumerate(zip(plan, heads, strict=True))
        if kept is not None and index not in shared
    ]
    return layers, count, shared


def _hybrid_layers(
    config: Config, text: Config, name: str, warnings: list[str]
) -> tuple[list[LayerSpec], int, dict[int, int]]:
    """Models in which some layers keep a recurrent state."""
    roles = layer_roles(text, name=name)
    stated = first(text, LAYERS)
    if isinstance(stated, int) and stated != len(roles):
        if text.get("layers_block_type") is None:
            raise ConfigError(f"{name}: {stated} layers, and a list of layer kinds for {len(roles)}")
        warnings.append(f"num_hidden_layers is {stated}, layers_block_type has {len(roles)} entries: the list holds")
    state = read_state(config, text, name=name) if any(keeps for _, keeps in roles) else None
    if text.get("attn_type_list") and state is not None and state.conv_rows == 0:
        warnings.append(
            "linear attention by attn_type_list: vLLM 0.32 serves no such model, so this was checked nowhere"
        )
    plan: list[Reach] = [FULL] * len(roles)
    if not is_latent(text) and any(attends for attends, _ in roles):
        warnings.extend(plain_attention_warning(str(text["model_type"])))
        plan, remarks = attention_plan(text, len(roles), name=name)
        warnings.extend(remarks)
    found: list[LayerSpec] = []
    for index, (attends, keeps) in enumerate(roles):
        if attends and is_latent(text):
            found += latent_layer(text, index, name=name)
        elif attends and (heads := _heads(text, index, plan[index], name)) is not None:
            found.append(_attention(index, plan[index], heads))
        if keeps:
            found.append(LayerSpec(LayerKind.MAMBA, 0, 0, 0, layer=index, part="state", state=state))
    if "hybrid" in (text.get("layers_block_type") or ()):
        # Attention blocks that layers share are built before the layers.
        found.sort(key=lambda layer: layer.state is not None)
    return found, len(roles), {}


def _attention(index: int, reach: Reach, heads: _Heads) -> LayerSpec:
    return LayerSpec(reach.kind, heads.kv_heads, heads.head_dim, heads.head_dim_v, reach=reach.tokens, layer=index)


def _shared_layers(text: Config, plan: list[Reach]) -> dict[int, int]:
    """The last ``num_kv_shared_layers`` layers read the KV of the last layer of their own kind before them."""
    count = text.get("num_kv_shared_layers") or 0
    start = len(plan) - int(count)
    if not 0 < start < len(plan):
        return {}
    owners = {reach.kind: index for index, reach in enumerate(plan[:start])}
    return {index: owners[plan[index].kind] for index in range(start, len(plan)) if plan[index].kind in owners}


# ---------------------------------------------------------------------------------------------------------- heads


def _attention_heads(text: Config, name: str) -> int:
    if first(text, HEADS) is None and has_state(text):
        return 0  # a model without attention
    return positive(text, HEADS, name)


def _model_heads(text: Config, name: str) -> tuple[int, int] | None:
    """KV heads and head size as the config states them; ``None`` where layers are described one by one."""
    heads = first(text, HEADS)
    if (
        not isinstance(heads, int)
        or is_latent(text)
        or text.get("block_configs")
        or isinstance(first(text, KV_HEADS), list)
    ):
        return None
    if text.get("kv_lora_rank") is not None:  # expanded: transformers calls the rotated part the head size
        return _kv_heads(text, 0, heads, name), positive(text, ("qk_rope_head_dim",), name)
    # Where kinds of layers differ in head size, vLLM takes the largest.
    return _kv_heads(text, 0, heads, name), max(_head_dim(text, heads, name), text.get("global_head_dim") or 0)


def _heads(text: Config, index: int, reach: Reach, name: str) -> _Heads | None:
    """K and V heads of one layer; ``None`` when the layer has no attention."""
    if text.get("block_configs"):
        return _block_config_heads(text, index, name)
    heads = positive(text, HEADS, name)
    if text.get("kv_lora_rank") is not None:  # expanded: `latent.is_latent` has seen that it is no latent
        dim = positive(text, ("qk_nope_head_dim",), name) + positive(text, ("qk_rope_head_dim",), name)
        return _Heads(heads, dim, dim)
    dim = _head_dim(text, heads, name)
    kv_heads = _kv_heads(text, index, heads, name)
    sliding = reach.kind is LayerKind.SLIDING_WINDOW
    if text.get("global_head_dim") and not sliding:
        dim = positive(text, ("global_head_dim",), name)
        if text.get("num_global_key_value_heads") and text.get("attention_k_eq_v", True):
            kv_heads = positive(text, ("num_global_key_value_heads",), name)
    other = text.get("attention_other_setting")
    if isinstance(other, Mapping) and other.get("attention_type") == _type_of(text, index):
        kv_heads = positive(other, ("num_attention_groups", "num_key_value_heads"), name)
        dim = optional(other, ("head_dim",), name, dim)
    value_dim = optional(text, ("v_head_dim",), name, dim) if text.get("head_dim") else dim
    if sliding and text.get("swa_num_key_value_heads"):
        kv_heads = positive(text, ("swa_num_key_value_heads",), name)
        dim = optional(text, ("swa_head_dim",), name, dim)
        value_dim = optional(text, ("swa_v_head_dim",), name, dim)
    return _Heads(kv_heads, dim, value_dim)


def _type_of(text: Config, index: int) -> Any:
    types = text.get("layer_types") or ()
    return types[index] if index < len(types) else None


def _block_config_heads(text: Config, index: int, name: str) -> _Heads | None:
    """Nemotron's searched models say per layer how many query heads share a KV head, or that there is no attention."""
    blocks = text["block_configs"]
    if index >= len(blocks):
        raise ConfigError(f"{name}: block_configs has {len(blocks)} entries, and there is a layer {index}")
    attention = blocks[index].get("attention") or {}
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return None
    heads = positive(text, HEADS, name)
    dim = _head_dim(text, heads, name)
    return _Heads(heads // positive(attention, ("n_heads_in_group",), name), dim, dim)


def _kv_heads(text: Config, index: int, heads: int, name: str) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1  # Falcon 7B, StarCoder: one KV head, not in a field of its own
    found = first(text, KV_HEADS)
    nested = text.get("attn_config")
    if found is None and isinstance(nested, Mapping) and nested.get("kv_n_heads"):
        return positive(nested, ("kv_n_heads",), name)  # DBRX, MPT
    if isinstance(found, list):
        if index >= len(found):
            raise ConfigError(f"{name}: num_key_value_heads has {len(found)} entries, and there is a layer {index}")
        found = found[index]
        heads = _listed(text, ("num_query_heads", *HEADS), index, heads)
        return positive({"num_key_value_heads": found}, ("num_key_value_heads",), name)
    kv_heads = heads if found is None else positive(text, KV_HEADS, name)
    if heads % kv_heads:
        raise ConfigError(f"{name}: {heads} attention heads do not divide into {kv_heads} KV heads")
    return kv_heads


def _listed(text: Config, keys: tuple[str, ...], index: int, default: int) -> int:
    value = first(text, keys)
    return int(value[index]) if isinstance(value, list) and index < len(value) else default


def _head_dim(text: Config, heads: int, name: str) -> int:
    for key in ("head_dim", "attention_head_dim", "kv_channels", "hidden_size_per_head"):
        if text.get(key):
            return positive(text, (key,), name)
    hidden = positive(text, HIDDEN, name)
    if hidden % heads:
        raise ConfigError(f"{name}: hidden_size {hidden} does not divide by {heads} heads, and there is no head_dim")
    return hidden // heads
