"""Compile the C files beside this one for this machine, once: ``python -m pdkv.runtime.kernels.build``.

The library lives in ``$PDKV_CACHE/kernels`` under a name made from source, flags, compiler and CPU, so that a change of
any of them makes a new one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pdkv.errors import ConfigError
from pdkv.runtime.models.convert import cache_root

_HERE = Path(__file__).parent
_TIMEOUT_S = 300


def find_compiler() -> str | None:
    """``$CC`` when set, else gcc, clang or cc, whichever is there first."""
    given = os.environ.get("CC")
    for name in [given] if given else ["gcc", "clang", "cc"]:
        found = shutil.which(name)
        if found:
            return found
    return None


def flags() -> list[str]:
    """Code for exactly this CPU; exceptions of IEEE arithmetic (NaN, infinity) stay as they are."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return ["-std=gnu11", "-O3", native, "-fno-math-errno", "-pthread", "-shared", "-fPIC"]


def library_path(compiler: str) -> Path:
    """Where the library for this source, compiler and CPU is, or will be."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    digest = hashlib.sha256()
    files = [path.read_bytes() for path in sorted([*_HERE.glob("*.h"), *_HERE.glob("*.c")])]
    for part in (*files, " ".join(flags()).encode(), version, _cpu().encode()):
        digest.update(hashlib.sha256(part).digest())
    return cache_root() / "kernels" / f"pdkv-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """The compiled library; compiles it (seconds) when it is not there yet.

    Raises ConfigError when there is no compiler, it fails, or the cache cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError("no C compiler (gcc or clang) found; install one, or set CC, for faster decoding on CPU")
    try:
        target = library_path(compiler)
        if target.is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as directory:
            made = Path(directory) / target.name
            command = [compiler, *flags(), "-o", str(made), *map(str, sorted(_HERE.glob("*.c"))), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            if done.returncode != 0:
                raise ConfigError(f"{' '.join(command)} failed:\n{done.stderr.strip()[:2000]}")
            made.replace(target)  # others see the whole file or none
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"cannot build the CPU kernels in {cache_root()}: {error}") from error
    return target


def _cpu() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def main() -> int:
    """Build and say where; without a compiler say what is lost, which is no failure of the installation."""
    try:
        sys.stdout.write(f"CPU kernels: {build()}\n")
    except ConfigError as error:
        sys.stderr.write(f"CPU kernels were not built, decoding will be slower: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
