"""config.json -> all matrices of a model, in the parts that pipeline stages are made of."""

from __future__ import annotations

from dataclasses import replace

from pdkv.models.defaults import family, with_defaults
from pdkv.models.fields import HIDDEN, Config, positive, text_config
from pdkv.models.latent import is_v4
from pdkv.models.spec import LayerKind, LayerSpec, ModelSpec
from pdkv.models.weights.attention import attention_matrices
from pdkv.models.weights.feed_forward import feed_forward_matrices, per_layer_inputs
from pdkv.models.weights.matrices import Matrix, Part, Split, linear, norm
from pdkv.models.weights.state import state_matrices
from pdkv.models.weights.towers import tower_matrices
from pdkv.models.weights.traits import Traits, traits_of

_NORM_NAMES = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
# Families with one block per layer (a mixer or a feed-forward layer), so with one norm.
_ONE_BLOCK = ("nemotron_h",)


def model_parts(config: Config, spec: ModelSpec, *, draft_layers: int = 0) -> tuple[Part, ...]:
    """The parts of the model that ``config`` describes and ``spec`` was read from.

    In order: ``before`` (vision tower, embeddings), every decoder layer, ``after`` (last norm, output layer), and for
    ``draft_layers`` above 0 so many multi-token-prediction layers (``draft``). Raises UnsupportedModel for a family
    whose weights are not counted, ConfigError for a config that lacks what is needed.
    """
    text = text_config(config)
    text, _ = with_defaults(text, family(config, text))
    if is_v4(text):
        text = {**text, "model_type": "deepseek_v4"}  # by its fields; the type has other names
    traits = traits_of(str(text["model_type"]), spec.name)
    hidden = positive(text, HIDDEN, spec.name)
    vocabulary = positive(text, ("vocab_size", "padded_vocab_size"), spec.name)
    before = [*tower_matrices(config, text, spec.name), Matrix("embed_tokens", vocabulary, hidden, Split.VOCAB)]
    if inputs := per_layer_inputs(text):
        width = inputs * spec.decoder_layers
        rows = positive(text, ("vocab_size_per_layer_input", "vocab_size"), spec.name)
        before.append(Matrix("embed_tokens_per_layer", rows, width, Split.VOCAB))
        before += [Matrix("per_layer_model_projection", width, hidden), *norm("per_layer_projection_norm", inputs)]
    by_layer: dict[int, list[LayerSpec]] = {}
    for cache in spec.layers:
        by_layer.setdefault(cache.layer, []).append(cache)
    owners = dict(spec.shared_layers)
    parts = [Part("before", tuple(before))]
    for index in range(spec.decoder_layers):
        caches = by_layer.get(index) or by_layer.get(owners.get(index, -1), [])
        parts.append(Part("layer", tuple(_layer(text, index, caches, traits, spec.name)), index))
    after = _after(config, text, hidden, vocabulary, traits, spec.name)
    parts.append(Part("after", tuple(after)))
    if draft_layers:
        last = spec.decoder_layers - 1
        parts.append(Part("draft", tuple(_drafts(text, draft_layers, by_layer.get(last, []), last, traits, spec.name))))
    return tuple(parts)


def _after(config: Config, text: Config, hidden: int, vocabulary: int, traits: Traits, name: str) -> list[Matrix]:
    found = norm("norm", hidden, bias=traits.norm_bias) if traits.norms else []
    if text.get("model_type") == "deepseek_v4":
        streams = positive(text, ("hc_mult",), name)
        found.append(Matrix("hc_head.fn", streams, streams * hidden, dtype="float32"))
        found.append(Matrix("hc_head.base", streams + 1, 1, dtype="float32"))
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if not (traits.tied if tied is None else tied):
        found.append(Matrix("lm_head", vocabulary, hidden, Split.VOCAB))
        if traits.lm_head_bias or text.get("lm_head_bias"):
            found.append(Matrix("lm_head.bias", vocabulary, 1, Split.VOCAB))
    return found


def _layer(text: Config, index: int, caches: list[LayerSpec], traits: Traits, name: str) -> list[Matrix]:
    """One decoder layer: what mixes tokens, the feed-forward layer, norms."""
    path, kind, hidden = f"layers.{index}", str(text["model_type"]), positive(text, HIDDEN, name)
    found: list[Matrix] = []
    for cache in caches:
        if cache.state is not None:
            found += state_matrices(text, cache.state, path, name)
        elif cache.part == ("window" if kind == "deepseek_v4" else "attn"):
            found += attention_matrices(text, cache, traits, f"{path}.self_attn", name)
    if kind in _ONE_BLOCK:
        if not caches:
            found += _single_feed_forward(text, index, traits, path, name)
        return found + norm(f"{path}.norm", hidden)
    found += feed_forward_matrices(text, index, traits, path, name)
    if kind == "deepseek_v4":
        found += _streams(text, path, hidden, name)
    skipped = kind == "nemotron-nas" and not caches
    norms = 4 if text.get("use_post_norm") else traits.norms
    for which in _NORM_NAMES[1 if skipped else 0 : norms]:
        found += norm(f"{path}.{which}", hidden, bias=traits.norm_bias)
    return found


def _single_feed_forward(text: Config, index: int, traits: Traits, path: str, name: str) -> list[Matrix]:
    """Nemotron-H: a layer that is a feed-forward layer and nothing else, without gates."""
    listed = text.get("layers_block_type") or [
        {"E": "moe", "-": "mlp"}.get(letter, "") for letter in str(text.get("hybrid_override_pattern") or "")
    ]
    plain = Traits(gated=False, mlp_bias=traits.mlp_bias)
    without = {} if index < len(listed) and listed[index] == "moe" else {"n_routed_experts": None, "num_experts": None}
    return feed_forward_matrices({**text, **without}, index, plain, path, name)


def _streams(text: Config, path: str, hidden: int, name: str) -> list[Matrix]:
    """DeepSeek-V4: residual streams are mixed around attention and around the feed-forward layer."""
    streams = positive(text, ("hc_mult",), name)
    mixes = streams * (streams + 2)
    found = []
    for where in ("attn_hc", "ffn_hc"):
        found.append(Matrix(f"{path}.{where}.fn", mixes, streams * hidden, dtype="float32"))
        found.append(Matrix(f"{path}.{where}.base", mixes + 3, 1, dtype="float32"))
    return found


def _drafts(text: Config, count: int, caches: list[LayerSpec], last: int, traits: Traits, name: str) -> list[Matrix]:
    """Layers like the last one, each with a projection of two hidden states into one (DeepSeek-V3's MTP modules)."""
    hidden = positive(text, HIDDEN, name)
    found: list[Matrix] = []
    attending = [cache for cache in caches if cache.kind is not LayerKind.MAMBA]
    for number in range(count):
        path = f"mtp.{number}"
        found += linear(f"{path}.eh_proj", hidden, 2 * hidden, Split.WHOLE)
        for which in ("enorm", "hnorm", "shared_head.norm"):
            found += norm(f"{path}.{which}", hidden)
        for matrix in _layer(text, last, attending, traits, name):
            name_here, fused = (at.replace(f"layers.{last}", path) for at in (matrix.name, matrix.fused))
            found.append(replace(matrix, name=name_here, fused=fused))
    return found
