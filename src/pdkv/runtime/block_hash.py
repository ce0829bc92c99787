"""Which hash names the blocks of the prefix cache: the core is given it, for it reads no environment and no chance."""

from __future__ import annotations

import importlib
import os
import secrets

from pdkv.core.blocks.hashing import DigestFunction, HashFunction, raw_sha256
from pdkv.core.blocks.vllm_hashing import vllm_hash

RAW_SHA256 = "raw_sha256"


def block_hash(algorithm: str) -> HashFunction:
    """pdkv's own ``raw_sha256``, or one of vLLM's four, seeded by PYTHONHASHSEED, else by chance (xxhash).

    Instances need not agree: a peer's blocks are known by their lease, never by a hash. Raises `ConfigError` for an
    unknown name and where the package xxhash is missing.
    """
    if algorithm == RAW_SHA256:
        return raw_sha256
    seed = os.environ.get("PYTHONHASHSEED")
    return vllm_hash(algorithm, python_hash_seed=seed, random_seed=secrets.token_hex(32), xxh3_128=_xxh3_128())


def _xxh3_128() -> DigestFunction | None:
    try:
        digest: DigestFunction = importlib.import_module("xxhash").xxh3_128_digest
    except ModuleNotFoundError:
        return None
    return digest
