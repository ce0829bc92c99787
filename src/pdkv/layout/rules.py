"""Which release of vLLM the sizes agree with; its constants."""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError

KNOWN_VERSIONS = ("0.32",)


@dataclass(frozen=True, slots=True)
class VllmRules:
    """Constants of a vLLM release. Raises ConfigError for a release whose rules are not known."""

    version: str = "0.32"

    def __post_init__(self) -> None:
        if self.version not in KNOWN_VERSIONS:
            raise ConfigError(f"the rules of vLLM {self.version} are not known; known: {', '.join(KNOWN_VERSIONS)}")

    @property
    def default_block_size(self) -> int:
        """Tokens per block unless the user says otherwise (CacheConfig.DEFAULT_BLOCK_SIZE)."""
        return 16

    @property
    def null_blocks(self) -> int:
        """Blocks of a pool that never hold KV: block 0 pads block tables."""
        return 1


DEFAULT_RULES = VllmRules()
