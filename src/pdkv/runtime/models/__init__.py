"""Real models for the engine: finding their files, converting GGUF once, loading them with paged attention.

`resolve_model` works without torch; what loads weights is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdkv.runtime.models.files import ModelFiles, resolve_model

if TYPE_CHECKING:
    from pdkv.runtime.models.loader import LoadedModel, load_model

__all__ = ["LoadedModel", "ModelFiles", "load_model", "resolve_model"]


def __getattr__(name: str) -> Any:
    if name in ("LoadedModel", "load_model"):
        from pdkv.runtime.models import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
