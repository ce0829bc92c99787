"""Whether this environment has a NIXL wheel."""

from __future__ import annotations

import importlib.util

import pytest

HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13", "nixl"))
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="no NIXL wheel is installed")
