"""Loading what only the ``serve`` extra brings."""

from __future__ import annotations

import importlib
from types import ModuleType

from pdkv.errors import ConfigError


def engine_module(name: str) -> ModuleType:
    """The module ``pdkv.serve.NAME``. Raises ConfigError, with the remedy, when a package that it needs is missing."""
    try:
        return importlib.import_module(f"pdkv.serve.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "pdkv":
            raise  # our own mistake, not the person's
        raise ConfigError(
            f"serving needs the package {error.name}, which is not installed; "
            "pip install 'torch~=2.13.0' and then 'pdkv[serve]' (a checkout: make setup)"
        ) from error
