"""GGUF -> safetensors, once per file: ``python -m pdkv.runtime.models.convert MODEL``.

transformers reads GGUF slowly (tens of seconds for 135 M parameters) and needs twice the memory while it does; the
converted directory loads in a fraction of a second. Results live in ``$PDKV_CACHE`` (default ``~/.cache/pdkv``),
one directory per GGUF content. A file lock lets one process convert while the others wait; the directory appears by a
rename, so a half-written one is never seen.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from pdkv.errors import ConfigError
from pdkv.units import MIB, format_bytes

CONVERTER_VERSION = 1
"""Part of the cache key: raise it when what is written changes."""

_GGUF_MAGIC = b"GGUF"
_HEAD_BYTES = 4 * MIB
_SAMPLES = 64
_SAMPLE_BYTES = 64 * 1024
_FREE_SPACE_FACTOR = 9  # 4-bit weights become 32-bit ones: at most 8x, and the tokenizer

Stage = Callable[[str], None]
Converter = Callable[[Path, Path, Stage], None]


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def cache_root() -> Path:
    """``$PDKV_CACHE`` when set, else ``~/.cache/pdkv``."""
    given = os.environ.get("PDKV_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "pdkv"


def gguf_key(path: Path) -> str:
    """16 hex digits that name this GGUF's content: size, header and 64 samples (a full hash of 8 GB takes too long).

    Raises ConfigError when the file cannot be read or is no GGUF.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != _GGUF_MAGIC:
                raise ConfigError(f"{path} is not a GGUF file: it does not begin with the bytes 'GGUF'")
            file.seek(0)
            digest = hashlib.sha256(f"pdkv-gguf-{CONVERTER_VERSION}-{size}".encode())
            digest.update(file.read(_HEAD_BYTES))
            for i in range(_SAMPLES):
                file.seek(size * i // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()[:16]


def converted_directory(gguf: Path, *, convert: Converter | None = None) -> Path:
    """The safetensors directory of ``gguf``; converts it first when nobody has (a minute for 135 M parameters).

    ``convert(gguf, directory, stage)`` fills an empty directory (default: `write_safetensors`).
    Raises ConfigError when the GGUF cannot be read or the cache cannot be written.
    """
    root = cache_root() / "converted"
    target = root / f"{gguf.stem}-{gguf_key(gguf)}"
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{target.name}.lock", gguf.name):
            if not target.is_dir():
                _convert_into(gguf, target, convert or write_safetensors)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ConfigError(
            f"cannot write the converted weights of {gguf.name} to {root}: {error.strerror or error}; "
            f"{'free some space or ' if full else ''}set PDKV_CACHE to another directory"
        ) from error
    return target


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold the lock file, saying so once when another process has it. The lock ends with its holder's life."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0.2)
    except Timeout:
        _say(f"pdkv: waiting for another process that is converting {name} ...")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _convert_into(gguf: Path, target: Path, convert: Converter) -> None:
    """Convert beside ``target``, then rename. Holding the lock, any earlier partial directory is a dead one's."""
    for stale in target.parent.glob(f".{target.name}.partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    free, need = shutil.disk_usage(target.parent).free, gguf.stat().st_size * _FREE_SPACE_FACTOR
    if free < need:
        raise ConfigError(
            f"converting {gguf.name} may need {format_bytes(need)} in {target.parent}, which has {format_bytes(free)} "
            f"free; free some space or set PDKV_CACHE to another directory"
        )
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        with _progress(gguf.name) as stage:
            convert(gguf, partial, stage)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Stage]:
    """A spinner with stage and elapsed time on a terminal; one line at the start and one at the end otherwise."""
    start = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(file=sys.stderr)) as progress:
            task = progress.add_task(f"converting {name}")
            yield lambda text: progress.update(task, description=f"converting {name} (once): {text}")
    else:
        _say(f"pdkv: converting {name} to safetensors (once, about a minute) ...")
        yield lambda text: None
    _say(f"pdkv: converted {name} in {time.monotonic() - start:.0f} s")


def write_safetensors(gguf: Path, directory: Path, stage: Stage) -> None:
    """Dequantise ``gguf`` to float32 and save model and tokenizer (with its chat template) into ``directory``.

    Raises ConfigError when transformers cannot read the file (truncated, or an architecture it does not know).
    """
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"reading GGUF needs {' and '.join(missing)}; run: pip install 'pdkv[serve]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its GGUF reader draws a bar of its own over ours
            stage("reading the tokenizer")
            tokenizer = AutoTokenizer.from_pretrained(**source)
            stage("dequantising the weights")
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except Exception as error:  # the readers raise whatever the bytes lead them to
        raise ConfigError(
            f"cannot read {gguf} as GGUF ({type(error).__name__}: {error}); the file may be truncated, or its "
            f"architecture unknown to this transformers: download it again or use a safetensors directory"
        ) from error
    # The weights are plain float32 now, but transformers still marks the model as quantised and refuses to save it.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    stage("writing safetensors")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main(arguments: list[str] | None = None) -> int:
    """Convert one model (a catalogue name or a .gguf path) and print the directory. Returns the exit code."""
    from pdkv.errors import PdkvError
    from pdkv.runtime.models.files import resolve_model

    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1:
        _say("usage: python -m pdkv.runtime.models.convert MODEL   (smollm2, or a .gguf file)")
        return 2
    try:
        sys.stdout.write(f"{resolve_model(given[0]).directory}\n")
    except PdkvError as error:
        _say(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
