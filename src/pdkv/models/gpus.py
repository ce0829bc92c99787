"""The devices that pdkv knows (``catalog/gpus.toml``): memory as the driver gives it, rates, links, with sources."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import msgspec

from pdkv.errors import ConfigError
from pdkv.units import MIB

# Words of a device's full name that tell nothing apart.
_NOISE = frozenset({"nvidia", "amd", "intel", "geforce", "instinct", "tesla", "huawei", "google", "cloud", "gpu"})
# What nvidia-smi and its kind print, over what the runtime gives: 81,559 to 81,090 MiB (H100), 143,771 to 143,156
# (H200), 183,359 to 182,642 (B200), 97,871 to 96,768 (GH200); a datasheet's size is further off.
_RUNTIME_SHARE = {"runtime": 1.0, "management": 0.9945, "datasheet": 0.985}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device. Rates are 10^9 bytes a second and dense 10^12 operations a second; see the head of gpus.toml."""

    name: str
    aliases: tuple[str, ...]
    vendor: str
    memory_mib: int
    memory_from: str
    memory_source: str
    bandwidth_gb_s: float
    tflops: dict[str, float]
    link: str
    link_gb_s: float
    pcie: str
    compute: str
    processors: int
    spec_source: str

    @property
    def total_bytes(self) -> int:
        """The memory that the runtime gives to a program: what ``--gpu-memory-utilization`` is a share of.

        Read off a device where ``memory_from`` is ``runtime``, else the printed size less what a driver keeps.
        """
        return int(self.memory_mib * _RUNTIME_SHARE[self.memory_from]) * MIB

    @property
    def measured(self) -> bool:
        """Whether ``total_bytes`` was read off a device."""
        return self.memory_from == "runtime"


class _File(msgspec.Struct):
    gpu: list[Gpu]


@cache
def gpus() -> tuple[Gpu, ...]:
    """All known devices, in the order of the catalogue."""
    text = files("pdkv.models.catalog").joinpath("gpus.toml").read_text(encoding="utf-8")
    return tuple(msgspec.convert(tomllib.loads(text), _File).gpu)


def find_gpu(name: str) -> Gpu:
    """The device called ``name``: case, hyphens, vendor words and a memory size that goes without saying do not count.

    Raises ConfigError with the nearest names when there is none.
    """
    wanted = _words(name)
    known = _index()
    if wanted in known:
        return known[wanted]
    shown = {"".join(key): gpu.name for key, gpu in known.items()}
    near = difflib.get_close_matches("".join(wanted), shown, n=6, cutoff=0.5)
    names = list(dict.fromkeys(shown[key] for key in near))[:4] or [gpu.name for gpu in gpus()]
    raise ConfigError(
        f"--gpu {name}: no such device in the catalogue; {'near it are' if near else 'there are'} {', '.join(names)}. "
        "Or give --gpu-memory-bytes (what torch.cuda.mem_get_info calls total)"
    )


@cache
def _index() -> dict[tuple[str, ...], Gpu]:
    found: dict[tuple[str, ...], Gpu] = {}
    for gpu in gpus():
        for name in (gpu.name, *gpu.aliases):
            found.setdefault(_words(name), gpu)
    return found


def _words(name: str) -> tuple[str, ...]:
    """The words that tell devices apart, sorted: ``NVIDIA A100-SXM4-80GB`` and ``a100 80gb sxm4`` are one."""
    parts = re.findall(r"[a-z0-9]+", name.lower())
    words = "".join(re.sub(r"^(sxm|pcie)\d*$", r"\1", part) + " " for part in parts if part not in _NOISE)
    words = re.sub(r"\b(\d+) (gb|gib)\b", r"\1gb", words).replace("gib", "gb")
    words = re.sub(r"\b(rtx|gaudi|tpu|ascend) ?(?=\w)", r"\1 ", words)
    return tuple(sorted(words.split()))
