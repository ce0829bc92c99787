"""``--kv-transfer-config`` as facts: which connector, which side, and what it does to memory (spec pd-transfer, 1).

Which connectors work with the hybrid allocator is read from vLLM 0.32's classes (subclasses of ``SupportsHMA``); that
a connector leaves it on by default is pull request 41847, which 0.21 did not have yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdkv.errors import ConfigError
from pdkv.layout.rules import VllmRules

FLAG = "--kv-transfer-config"
ROLES = ("kv_producer", "kv_consumer", "kv_both")

# Every connector that vLLM 0.32 registers -> whether it supports the hybrid allocator.
CONNECTORS = {
    "NixlConnector": True,
    "NixlPullConnector": True,
    "NixlPushConnector": True,
    "MooncakeConnector": True,
    "MooncakeStoreConnector": True,
    "MoRIIOConnector": True,
    "OffloadingConnector": True,
    "SimpleCPUOffloadConnector": True,
    "HiSparseConnector": True,
    "DecodeBenchConnector": True,
    "ExampleHiddenStatesConnector": True,
    "MultiConnector": True,
    "LMCacheConnectorV1": False,
    "LMCacheMPConnector": False,
    "FlexKVConnectorV1": False,
    "HF3FSKVConnector": False,
    "ExampleConnector": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransfer:
    """One connector. ``role`` is ``kv_producer``, ``kv_consumer`` or ``kv_both``; ``children`` those of MultiConnector.

    ``lease_s`` is how long P keeps a finished prompt that nobody renews, ``blocks_ttl_s`` how long D keeps a finished
    request in bidirectional mode. ``raw`` is the JSON that it was read from, for printing it again.
    """

    connector: str
    role: str
    buffer_device: str | None = None
    load_failure_policy: str = "fail"
    lease_s: int = 30
    bidirectional: bool = False
    blocks_ttl_s: int = 480
    children: tuple[KvTransfer, ...] = ()
    raw: str = field(default="", compare=False)

    @property
    def push(self) -> bool:
        """Whether P writes into D's blocks, so that D holds them through P's whole prefill."""
        return self.connector == "NixlPushConnector" or any(child.push for child in self.children)

    @property
    def moves_between_instances(self) -> bool:
        """Whether KV goes from a prefill to a decode instance, rather than to a store or the host."""
        return self.connector.startswith(("Nixl", "MooncakeConnector", "MoRIIO")) or any(
            child.moves_between_instances for child in self.children
        )

    @property
    def unknown(self) -> tuple[str, ...]:
        """Connectors that vLLM 0.32 does not bring."""
        own = () if self.connector in CONNECTORS else (self.connector,)
        return own + tuple(name for child in self.children for name in child.unknown)

    @property
    def without_hybrid_support(self) -> tuple[str, ...]:
        """Connectors, this one or below it, that cannot work with the hybrid allocator."""
        if self.connector == "MultiConnector":
            found = tuple(name for child in self.children for name in child.without_hybrid_support)
            return found or (() if self.children else (self.connector,))
        return () if CONNECTORS.get(self.connector, False) else (self.connector,)

    def keeps_hybrid_manager(self, rules: VllmRules) -> bool:
        """Whether vLLM leaves the hybrid allocator on when it is not told either way."""
        return rules.connectors_keep_hybrid_manager and not self.without_hybrid_support


def parse_kv_transfer(value: str | Mapping[str, Any]) -> KvTransfer:
    """The connector that a JSON text or object configures. Raises ConfigError when it cannot be one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{FLAG} is not valid JSON ({error}); quote it as one word: '{{...}}'") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{FLAG} must be a JSON object, not {value!r}")
    connector, role = value.get("kv_connector"), value.get("kv_role")
    if not isinstance(connector, str) or not connector:
        raise ConfigError(f"{FLAG} names no kv_connector; for example NixlConnector")
    if role not in ROLES:
        raise ConfigError(f"{FLAG}: kv_role is {role!r}; there are {', '.join(ROLES)}")
    extra = value.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{FLAG}: kv_connector_extra_config must be an object, not {extra!r}")
    listed = extra.get("connectors") or ()
    if not isinstance(listed, list | tuple):
        raise ConfigError(f"{FLAG}: connectors of a {connector} must be a list, not {listed!r}")
    return KvTransfer(
        connector=connector,
        role=role,
        buffer_device=_text(value, "kv_buffer_device"),
        load_failure_policy=_text(value, "kv_load_failure_policy") or "fail",
        lease_s=_seconds(extra, "kv_lease_duration", 30),
        bidirectional=extra.get("bidirectional_kv_xfer") is True,
        blocks_ttl_s=_seconds(extra, "decoder_kv_blocks_ttl", 480),
        children=tuple(parse_kv_transfer({"kv_role": role, **child}) for child in listed if isinstance(child, Mapping)),
        raw=json.dumps(value, separators=(",", ":")),
    )


def _text(config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{FLAG}: {key} must be a word, not {value!r}")
    return value


def _seconds(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError(f"{FLAG}: {key} must be a number of seconds above 0, not {value!r}")
    return int(value)
