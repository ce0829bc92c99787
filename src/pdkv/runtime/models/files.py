"""From what a person typed to a directory of safetensors: catalogue name, directory, GGUF file or hub id."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError, in_words
from pdkv.runtime.models.catalogue import CATALOGUE, find_gguf
from pdkv.units import format_bytes

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_HUB_TIMEOUT_S = 5
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk. ``name`` is what the API calls it, ``directory`` holds config, tokenizer and safetensors."""

    name: str
    directory: Path

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors files, by name."""
        return sorted(self.directory.glob("*.safetensors"))


def resolve_model(ref: str) -> ModelFiles:
    """The files behind ``ref``; a GGUF is converted first (once), a hub id downloaded.

    Raises ConfigError for what is neither, is incomplete, or cannot be fetched; the text says what to do.
    """
    # Imported here so that `python -m pdkv.runtime.models.convert` does not find itself already imported.
    from pdkv.runtime.models.convert import converted_directory

    path = Path(ref).expanduser()
    if ref in CATALOGUE:
        files = ModelFiles(ref, converted_directory(find_gguf(CATALOGUE[ref])))
    elif path.is_dir():
        files = ModelFiles(path.resolve().name, path.resolve())
    elif path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"no such GGUF file: {path}")
        files = ModelFiles(path.stem, converted_directory(path.resolve()))
    elif _HUB_ID.match(ref):
        files = ModelFiles(ref, _download(ref))
    else:
        known = ", ".join(sorted(CATALOGUE))
        raise ConfigError(
            f"unknown model {ref!r}: it is no known name ({known}), no directory, no .gguf file and no hub id "
            f"(owner/name)"
        )
    _check_directory(files)
    return files


def _download(ref: str) -> Path:
    """The hub's snapshot: a whole local copy, else downloaded, else a ConfigError (in seconds)."""
    from huggingface_hub import snapshot_download

    try:
        local = Path(snapshot_download(ref, allow_patterns=list(_HUB_FILES), local_files_only=True))
        _check_directory(ModelFiles(ref, local))
        return local
    except Exception:  # not there, or only part of it: fetch
        pass
    try:
        return Path(snapshot_download(ref, allow_patterns=list(_HUB_FILES), etag_timeout=_HUB_TIMEOUT_S))
    except Exception as error:  # offline, unknown, gated: one answer for the person
        raise ConfigError(
            f"model {ref!r} is not in the local Hugging Face cache and could not be downloaded "
            f"({in_words(error)}); check the name and the network (HF_TOKEN for gated models), or pass a local "
            "directory, a .gguf file or 'smollm2'"
        ) from error


def _check_directory(files: ModelFiles) -> None:
    """Refuse, before torch sees them, directories without config or safetensors and weight files that are cut short."""
    directory = files.directory
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} is not a model directory: it has no config.json")
    if not files.weight_files:
        raise ConfigError(
            f"{directory} has no *.safetensors weights; pickled weights (.bin, .pt) are not loaded, because unpickling "
            f"runs code: convert them with safetensors first"
        )
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"cannot read {index}: {error}") from error
        missing = sorted(shard for shard in shards if not (directory / shard).is_file())
        if missing:
            raise ConfigError(
                f"{directory} lacks {len(missing)} of {len(shards)} weight files named by {index.name} "
                f"(first: {missing[0]}); download them again"
            )
    for path in files.weight_files:
        read_header(path)


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """A safetensors file's header (tensor name -> dtype, shape, data_offsets) and where its data begins, in bytes.

    Raises ConfigError when the file is unreadable or its size is not what the header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise ConfigError(f"{path} is not a safetensors file, or cut short ({format_bytes(size)} on disk)")
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            ends = [int(entry["data_offsets"][1]) for entry in header.values()]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        raise ConfigError(
            f"{path} is cut short or damaged: its header describes {expected} bytes, the file has {size}; "
            f"download or convert it again"
        )
    return header, 8 + header_bytes
