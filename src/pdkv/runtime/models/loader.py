"""Loading a decoder from safetensors with pdkv's paged attention in it."""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from pdkv.errors import ConfigError, DoesNotFit, UnsupportedModel, in_words
from pdkv.layout.pages import check_heads, kv_heads_per_rank
from pdkv.runtime.attention import ATTENTION_NAME
from pdkv.runtime.kernels import native
from pdkv.runtime.kernels.activation import replace_gated_mlps
from pdkv.runtime.kernels.linear import pack_linears
from pdkv.runtime.kernels.norm import replace_norms
from pdkv.runtime.models.files import ModelFiles, read_header
from pdkv.runtime.models.probe import check_shards, probe
from pdkv.runtime.models.shapes import check_shapes, lacking
from pdkv.runtime.models.support import read_facts
from pdkv.runtime.ranks.group import RankGroup
from pdkv.runtime.ranks.shard import shard_model

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_VOLATILE_CONFIG = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "_attn_implementation",
    "use_cache",
)
_SAMPLES_PER_TENSOR = 8
_SAMPLE_BYTES = 512


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run through an `Executor`, with what the rest of the engine must know about it.

    Of several tensor-parallel ``ranks`` this is one's share: ``heads`` and ``kv_heads`` are those that it has, of
    ``total_kv_heads`` in all, and ``weights_bytes`` are its own.
    ``fingerprint`` (64 hex digits) is equal for equal config and weights, whatever dtype they were loaded as.
    ``weights_bytes`` is what parameters and buffers occupy on ``device``. ``tokenizer`` is None when the directory has
    none. ``eos_token_ids`` end a generation unless the request ignores them.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase | None
    config: PretrainedConfig
    name: str
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: frozenset[int]
    weights_bytes: int
    fingerprint: str
    total_kv_heads: int
    ranks: int = 1


def load_model(
    files: ModelFiles,
    device: str = "cpu",
    dtype: str = "auto",
    weight_storage: str = "auto",
    group: RankGroup | None = None,
) -> LoadedModel:
    """Load weights and tokenizer, check the model, and run it once against transformers' own attention.

    With a ``group`` every rank of it must call this; each then keeps its share, and rank 0 checks that together they
    give the same logits as the whole.

    ``dtype`` is ``auto`` (float32 on CPU, the checkpoint's on CUDA) or a key of `DTYPES`. Raises UnsupportedModel for
    what pdkv's attention cannot run, ConfigError for unreadable files, DoesNotFit when device memory is short.
    ``weight_storage`` "bf16" keeps the weights of a float32 model on CPU in half the bytes: they are rounded, the
    arithmetic is not. "auto" stores them as they are.
    """
    target = _device(device)
    config = _read_config(files)
    facts = read_facts(config, files.name)
    wanted = _dtype(dtype, target, config)
    check_shapes(files, config, facts.num_layers)
    # Several ranks load into host memory: the whole model need not fit on the device of any.
    model = _load_weights(files, config, wanted, target if group is None else torch.device("cpu"))
    _check_forward(model, files.name)
    whole = probe(model, facts, files.name)
    ranks = 1
    if group is not None:
        ranks = group.size
        check_heads(files.name, facts.heads, [whole.kv_heads], ranks)
        shard_model(model, group, whole.kv_heads, whole.head_dim, files.name)
        _to_device(model, target, files.name)
        check_shards(model, whole, facts, files.name, group)
    _use_kernels(model, target, wanted, weight_storage)
    return LoadedModel(
        model=model,
        tokenizer=_load_tokenizer(files),
        config=config,
        name=files.name,
        num_layers=facts.num_layers,
        heads=facts.heads // ranks,
        kv_heads=kv_heads_per_rank(whole.kv_heads, ranks),
        head_dim=whole.head_dim,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        dtype=wanted,
        device=target,
        eos_token_ids=_eos_token_ids(model, config),
        weights_bytes=_weights_bytes(model),
        fingerprint=fingerprint(files, config),
        total_kv_heads=whole.kv_heads,
        ranks=ranks,
    )


def _use_kernels(model: Any, device: torch.device, dtype: torch.dtype, weight_storage: str) -> None:
    """Have a float32 model on CPU run its linear layers, norms and MLPs through the C kernels, where there are some."""
    if weight_storage not in ("auto", "bf16"):
        raise ConfigError(f"weight storage {weight_storage!r} is not one of auto, bf16")
    kernels = native.load() if device.type == "cpu" and dtype == torch.float32 else None
    if kernels is not None:
        pack_linears(model, kernels, torch.bfloat16 if weight_storage == "bf16" else torch.float32)
        replace_norms(model, kernels)
        replace_gated_mlps(model, kernels)
    elif weight_storage == "bf16":
        raise ConfigError(
            f"--weight-storage bf16 is for float32 arithmetic on a CPU with a C compiler; this is {dtype} on {device}. "
            "Leave it out, or install gcc"
        )


def _device(device: str) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}; use cpu, cuda or cuda:N") from error
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported; use cpu, cuda or cuda:N")
    if target.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (target.index or 0) >= count:
            raise ConfigError(
                f"device {device!r} asked for, but this torch ({torch.__version__}) sees {count} CUDA devices; "
                f"use --device cpu or install a CUDA build of torch"
            )
        target = torch.device("cuda", target.index or 0)
    return target


def _dtype(dtype: str, device: torch.device, config: PretrainedConfig) -> torch.dtype:
    if dtype == "auto":
        stored = getattr(config.get_text_config(decoder=True), "dtype", None) or torch.float32
        return torch.float32 if device.type == "cpu" or not isinstance(stored, torch.dtype) else stored
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _read_config(files: ModelFiles) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(files.directory, local_files_only=True)
    except Exception as error:  # unknown model_type, bad JSON, bad values: whatever the config classes raise
        kind = _model_type(files)
        if kind is not None and "model type" in str(error):
            raise UnsupportedModel(f"{files.name}: transformers does not know the architecture {kind!r}") from error
        raise ConfigError(f"cannot read {files.directory / 'config.json'}: {in_words(error)}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"{files.name} holds quantised weights; pdkv loads float32, bfloat16 and float16")
    return config


def _model_type(files: ModelFiles) -> str | None:
    try:
        kind = json.loads((files.directory / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return kind if isinstance(kind, str) else None


def _load_weights(files: ModelFiles, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    hf_logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            files.directory,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # safetensors, transformers and torch each have their own
        raise ConfigError(
            f"cannot load the weights of {files.name} from {files.directory}: {in_words(error)}"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(lacking(files, config, type(model).__name__, missing))
    return _to_device(model.eval().requires_grad_(False), device, files.name)


def _to_device(model: Any, device: torch.device, name: str) -> Any:
    try:
        return model.to(device)
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise DoesNotFit(
            f"{name} needs {_weights_bytes(model)} bytes of weights; {device} has {free} of {total} free: "
            f"use a smaller dtype or model, or free the device"
        ) from error


def _load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase | None:
    if not any((files.directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(files.directory, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"cannot load the tokenizer in {files.directory}: {error}") from error
    return tokenizer


def _check_forward(model: Any, name: str) -> None:
    """The forward pass must take positions and the rows that need logits: both are how a ragged batch works."""
    accepted = inspect.signature(model.forward).parameters
    missing = [p for p in ("position_ids", "logits_to_keep") if p not in accepted]
    if missing or not model._supports_attention_backend:
        lack = f"takes no {' and no '.join(missing)}" if missing else "bypasses transformers' attention registry"
        raise UnsupportedModel(f"{name}: {type(model).__name__} {lack}: paged attention cannot be put into it")


def _eos_token_ids(model: Any, config: PretrainedConfig) -> frozenset[int]:
    """End-of-sequence ids of the generation config when it names any, else of the model config."""
    generation = getattr(model, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), getattr(config, "eos_token_id", None)):
        if value is not None:
            return frozenset(int(i) for i in (value if isinstance(value, (list, tuple)) else (value,)))
    return frozenset()


def _weights_bytes(model: Any) -> int:
    """Bytes of parameters and buffers, tied ones once."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def fingerprint(files: ModelFiles, config: PretrainedConfig) -> str:
    """sha256 hex over the config's facts and, for every stored tensor, name, dtype, shape and 8 samples of 512 bytes.

    Two checkpoints of one architecture differ in it; the same checkpoint does not, in whatever dtype it is loaded.
    """
    facts = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE_CONFIG}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for path in files.weight_files:
        header, base = read_header(path)
        with path.open("rb") as file:
            for name in sorted(header):
                entry = header[name]
                begin, end = entry["data_offsets"]
                digest.update(f"{name}{entry['dtype']}{entry['shape']}".encode())
                for i in range(_SAMPLES_PER_TENSOR):
                    file.seek(base + begin + (end - begin) * i // _SAMPLES_PER_TENSOR)
                    digest.update(file.read(min(_SAMPLE_BYTES, end - begin)))
    return digest.hexdigest()
