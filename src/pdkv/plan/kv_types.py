"""Which types KV of a model can be kept in: those that a backend for it takes."""

from __future__ import annotations

from pdkv.errors import ConfigError
from pdkv.layout.backend_choice import default_backend
from pdkv.layout.backends import canonical_kv_dtype, check_kv_dtype
from pdkv.layout.dtypes import KV_DTYPES
from pdkv.models.spec import ModelSpec
from pdkv.plan.options import PlanOptions


def usable_types(spec: ModelSpec, options: PlanOptions) -> tuple[str, ...]:
    """Values of --kv-cache-dtype under ``options``, one spelling of each, ``auto`` first.

    The two formats of fp8 are of one size and stand for each other here, and ``auto`` for
    the types that models compute in.
    """
    found: dict[str, str] = {}
    for value in KV_DTYPES:
        if value in ("float16", "bfloat16", "float32", "fp8_e4m3", "fp8_e5m2"):
            continue
        try:
            backend = options.backend or default_backend(spec, value, options.compute, options.rules)
            resolved = value if value == "auto" else canonical_kv_dtype(value, spec, backend)
            check_kv_dtype(resolved, backend)
        except ConfigError:
            continue
        found.setdefault(resolved, value)
    return tuple(found.values())
