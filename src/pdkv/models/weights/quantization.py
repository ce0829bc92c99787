"""quantization_config -> which format each module is in. Raises UnsupportedModel for a method that is not sized."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from pdkv.errors import ConfigError, UnsupportedModel
from pdkv.models.fields import Config, quantization
from pdkv.models.weights.formats import MXFP4, MXFP8, NVFP4, Format, eight_bit, fp8_block, packed

# A module of the language model is called by the rest of its path here; checkpoints put one of these before it.
_PREFIXES = ("", "model.", "language_model.model.", "model.language_model.", "language_model.", "backbone.")
# The same module under other names, as ignore lists write them.
_ALIASES = (
    (".block_sparse_moe.", ".mlp."),
    (".feed_forward.", ".mlp."),
    (".ffn.", ".mlp."),
    (".attn.", ".self_attn."),
    (".mixer.", ".mlp."),
    (".shared_expert.", ".shared_experts."),
)
_BITSANDBYTES = Format(name="4 bit (bitsandbytes)", bits=4, scale="group", scale_bytes=4, group=64)
# `--quantization` of a checkpoint in 16 bits: quantized at loading.
_ONLINE = {
    "fp8": eight_bit("fp8", "tensor"),
    "fp8_per_tensor": eight_bit("fp8", "tensor"),
    "fp8_per_channel": eight_bit("fp8", "channel"),
    "fp8_per_block": fp8_block(128),
    "mxfp8": MXFP8,
    "int8_per_channel": eight_bit("int8", "channel"),
    "bitsandbytes": _BITSANDBYTES,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that ``applies`` accepts are in ``format``; ``None`` leaves them in the model's own type."""

    applies: Callable[[str], bool]
    format: Format | None


@dataclass(frozen=True, slots=True)
class Quantization:
    """The formats of a checkpoint: the first rule that accepts a module's path holds, else ``default``."""

    default: Format | None = None
    rules: tuple[Rule, ...] = ()
    method: str = "none"
    _seen: dict[str, Format | None] = field(default_factory=dict)

    def format_of(self, module: str) -> Format | None:
        """The format of a linear layer, ``None`` where it is not quantized."""
        if module not in self._seen:
            found = next((rule for rule in self.rules if rule.applies(module)), None)
            self._seen[module] = self.default if found is None else found.format
        return self._seen[module]


def read_quantization(config: Config, text: Config, name: str, *, asked: str | None = None) -> Quantization:
    """The formats of the checkpoint's linear layers. ``asked`` is ``--quantization`` for one that is not quantized.

    Raises UnsupportedModel for a method that is not sized, and ConfigError for a section that makes no sense.
    """
    section = quantization(config, text)
    inner = section.get("quantization")
    if isinstance(inner, Mapping):  # hf_quant_config.json
        section = {**section, **inner}
    if not section:
        return _online(asked, name)
    method = str(section.get("quant_method") or "").lower()
    if method in ("", "modelopt", "modelopt_mixed"):  # ModelOpt: what it did is in another field
        method = str(section.get("quant_algo") or method).lower()
    ignored = [_leave(_ignored(section))]
    layers = section.get("quantized_layers")
    if isinstance(layers, Mapping) and layers and method == "fp8":
        # DeepSeek-V4 by ModelOpt: what is listed in one format, all else as the checkpoint had it before.
        return Quantization(_of_method(section, method, name), tuple(_listed(layers, name)), method)
    if isinstance(layers, Mapping) and layers and not section.get("config_groups"):
        return Quantization(None, (*ignored, *_listed(layers, name)), method)
    if isinstance(section.get("config_groups"), Mapping) and section["config_groups"]:
        return _of_groups(section, method, ignored, name)
    found = _of_method(section, method, name)
    rules = list(ignored)
    if method == "mxfp4":  # gpt-oss: experts only
        rules.append(Rule(lambda module: ".experts" not in module, None))
    if text.get("expert_dtype") == "fp4":  # DeepSeek-V4
        rules.append(Rule(lambda module: ".mlp.experts." in module, MXFP4))
    return Quantization(found, tuple(rules), method)


def _online(asked: str | None, name: str) -> Quantization:
    if asked is None:
        return Quantization()
    if asked not in _ONLINE:
        raise UnsupportedModel(
            f"{name}: --quantization {asked} of a checkpoint that is not quantized is not sized; sized are "
            f"{', '.join(_ONLINE)}"
        )
    return Quantization(_ONLINE[asked], (_leave(["lm_head"]),), asked)


def _of_method(section: Config, method: str, name: str) -> Format:
    bits, group = section.get("bits", section.get("w_bit")), section.get("group_size", section.get("q_group_size"))
    size = int(group) if isinstance(group, int) and group > 0 else 0
    match method.removeprefix("modelopt_"):
        case "fp8" | "fbgemm_fp8" | "fp8_pb_wo" | "fp8_pc_pt":
            block = section.get("weight_block_size")
            if block:
                return fp8_block(int(block[0]))
            return eight_bit("fp8", "channel" if method == "fbgemm_fp8" else "tensor")
        case "awq" | "awq_marlin":
            return packed("awq", int(bits or 4), size, zero_points=bool(section.get("zero_point", True)))
        case "gptq" | "gptq_marlin" | "auto-round":
            return packed(method, int(bits or 4), size, zero_points=True)  # there even when they are all the same
        case "nvfp4" | "fp4" | "w4a16_nvfp4":
            return NVFP4
        case "w4a16_awq" | "nvfp4_awq":
            return packed("awq", 4, size or 128, zero_points=False)
        case "mxfp4" | "gpt_oss_mxfp4":
            return MXFP4
        case "mxfp8":
            return MXFP8
        case "mixed_precision":
            return eight_bit("fp8", "tensor")
        case "bitsandbytes":
            if section.get("load_in_8bit"):
                return eight_bit("int8 (bitsandbytes)", "channel")
            return _BITSANDBYTES
        case "w4afp8" | "w4a8_awq":
            return packed(method, 4, size or 128, zero_points=False)
    raise UnsupportedModel(
        f"{name}: weights quantized by {method or 'an unnamed method'!r} are not sized from a config; give the "
        "directory with the safetensors files, or --kv-cache-memory-bytes"
    )


def _of_groups(section: Config, method: str, ignored: list[Rule], name: str) -> Quantization:
    """compressed-tensors, and ModelOpt's section in its manner: a scheme for each list of targets."""
    rules, default = list(ignored), None
    kind = str(section.get("format") or method)
    for group in section["config_groups"].values():
        scheme = _scheme(group, str(group.get("format") or kind), name)
        targets = [str(target) for target in group.get("targets") or ["Linear"]]
        if any(target in ("Linear", "FusedMoE", "RoutedExperts") for target in targets):
            default = scheme
        named = [target for target in targets if target not in ("Linear", "FusedMoE", "RoutedExperts")]
        if named:
            rules.append(Rule(_matcher(named), scheme))
    return Quantization(default, tuple(rules), method)


def _scheme(group: Config, kind: str, name: str) -> Format | None:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return None
    bits, real = weights.get("num_bits"), weights.get("type") == "float"
    strategy, size = weights.get("strategy"), int(weights.get("group_size") or 0)
    if bits == 4 and real:
        return MXFP4 if "mxfp4" in kind or size == 32 else NVFP4
    if bits == 8 and strategy == "block":
        return fp8_block(int((weights.get("block_structure") or [128])[0]))
    if bits == 8 and (real or "pack" not in kind):
        scale = {"channel": "channel", "group": "group"}.get(str(strategy), "tensor")
        return eight_bit("fp8" if real else "int8", scale, size)  # type: ignore[arg-type]
    if isinstance(bits, int) and 2 <= bits <= 8:
        return packed(f"w{bits}a16", bits, size if size > 0 else 0, zero_points=not weights.get("symmetric", True))
    raise UnsupportedModel(f"{name}: weights of {bits} bits ({weights.get('type')}) are not sized")


def _listed(layers: Mapping[str, Any], name: str) -> list[Rule]:
    """ModelOpt's mixed precision: a format by the name of every layer."""
    by_format: dict[str, list[str]] = {}
    for module, entry in layers.items():
        by_format.setdefault(str(entry.get("quant_algo")).lower(), []).append(str(module))
    return [Rule(_matcher(names, exact=True), _of_method({}, kind, name)) for kind, names in by_format.items()]


# ----------------------------------------------------------------------------------------------------------- the names


def _ignored(section: Config) -> list[str]:
    names: list[str] = []
    for key in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "llm_int8_skip_modules"):
        value = section.get(key)
        if isinstance(value, list | tuple):
            names += [str(item) for item in value]
    return names


def _leave(patterns: list[str]) -> Rule:
    return Rule(_matcher(patterns), None)


def _matcher(patterns: Iterable[str], *, exact: bool = False) -> Callable[[str], bool]:
    """Whether a module's path is meant by any pattern: ``re:...``, a glob, a path, or a part of one.

    A fused matrix of experts stands for all of them, so that a path into one of them means it too.
    """
    plain: set[str] = set()
    expressions: list[re.Pattern[str]] = []
    globs: list[str] = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                expressions.append(re.compile(pattern[3:]))
            except re.error as error:
                raise ConfigError(
                    f"the ignore list has {pattern!r}, which is no regular expression ({error})"
                ) from error
        elif "*" in pattern:
            globs.append(_usual(pattern))
        else:
            plain.add(_within_experts(_usual(pattern)))

    def applies(module: str) -> bool:
        parents = {module.rsplit(".", cut)[0] for cut in range(1, module.count(".") + 1)} | {module}
        if parents & plain or (not exact and any(part in plain for part in module.split("."))):
            return True
        full = [prefix + module for prefix in _PREFIXES]
        return any(fnmatchcase(path, glob) for glob in globs for path in full) or any(
            expression.match(path) for expression in expressions for path in (*full, _experts_path(module))
        )

    return applies


def _usual(pattern: str) -> str:
    """A pattern without the checkpoint's prefix, in the names that matrices have here."""
    for prefix in sorted(_PREFIXES, key=len, reverse=True):
        if prefix and pattern.startswith(prefix):
            pattern = pattern.removeprefix(prefix)
            break
    pattern = f"{pattern}."
    for other, ours in _ALIASES:
        pattern = pattern.replace(other, ours)
    return pattern.removesuffix(".")


def _within_experts(pattern: str) -> str:
    return re.sub(r"(\.experts)\.\d+\..*$", r"\1", pattern)


def _experts_path(module: str) -> str:
    """What the first expert's part of a fused matrix is called in a checkpoint."""
    return "model." + module.replace(".experts.gate_up_proj", ".experts.0.gate_proj").replace(
        ".experts.down_proj", ".experts.0.down_proj"
    )
