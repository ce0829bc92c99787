"""NIXL's Python API as it is found here, and the plain descriptors that pdkv hands to it."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.runtime.transports.base import Int64Array, TransportError

_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")

Descriptors = npt.NDArray[np.uint64]  # [n, 3]: address, length in bytes, device

NO_DESCRIPTORS: Descriptors = np.empty((0, 3), dtype=np.uint64)


def import_nixl() -> Any:
    """The module of the first wheel that can be imported. Raises `TransportError` when there is none."""
    errors = []
    for module in _MODULES:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            errors.append(f"{module}: {error}")
    raise TransportError(f"NIXL cannot be imported ({'; '.join(errors)})")


def descriptors(addresses: Int64Array, lengths: Int64Array | int, device: int = 0) -> Descriptors:
    """One descriptor for each address."""
    out = np.empty((len(addresses), 3), dtype=np.uint64)
    out[:, 0], out[:, 1], out[:, 2] = addresses, lengths, device
    return out


def text(name: bytes | str) -> str:
    """An agent's name; NIXL gives it as either."""
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name
