"""What `pdkv explain` answers, as `--json` prints it. Bytes are integers; ``null`` is "the source does not say"."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Severity(enum.StrEnum):
    """How much a finding matters: an error stops or breaks something, a warning costs memory or misleads."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing worth knowing. ``bytes`` is what it costs or holds on one GPU, ``effect`` what to do or expect."""

    id: str
    text: str
    severity: Severity = Severity.INFO
    bytes: int | None = None
    effect: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Layers that share block tables, like ``kv.groups`` of a plan."""

    kind: str
    layers: int
    block_size: int
    page_bytes: int
    window: int | None
    blocks_per_max_len_request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """Capacity by the rules of the release, on the bottleneck rank.

    ``num_blocks`` is what agrees with everything printed; where several counts do, the largest of ``num_blocks_low`` to
    ``num_blocks_high`` (the printed memory is rounded). ``kv_cache_size_tokens`` and ``max_concurrency`` are what the
    release prints for it; ``capacity_tokens`` is what requests of the full length really can hold, the null block left
    out. ``assumed`` names what the source did not say and was chosen because it alone reproduces the printed numbers.
    """

    num_blocks: int
    num_blocks_low: int
    num_blocks_high: int
    usable_blocks: int
    kv_cache_size_tokens: int
    max_concurrency: float
    max_model_len: int
    bytes_per_block: int
    block_size: int
    blocks_per_max_len_request: int
    needed_bytes: int
    estimated_max_model_len: int
    capacity_tokens: int
    fits: bool
    groups: tuple[GroupShape, ...]
    dtype: str
    rules: str
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One start of vLLM. ``agrees`` is ``null`` where there is nothing to compare."""

    source: str
    observed: dict[str, Any]
    recomputed: Recomputed | None
    agrees: bool | None
    findings: tuple[Finding, ...]
