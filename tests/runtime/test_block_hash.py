from __future__ import annotations

import sys

import numpy as np
import pytest
import xxhash

from pdkv.core.blocks.hashing import HashFunction, raw_sha256
from pdkv.core.blocks.vllm_hashing import VLLM_ALGORITHMS, vllm_hash
from pdkv.errors import ConfigError
from pdkv.runtime.block_hash import RAW_SHA256, block_hash


def digests(function: HashFunction) -> list[bytes]:
    return function(None, np.arange(32, dtype=np.int32).reshape(2, 16), {})


def test_pdkv_s_own() -> None:
    assert block_hash(RAW_SHA256) is raw_sha256


@pytest.mark.parametrize("algorithm", VLLM_ALGORITHMS)
def test_vllm_s_digests_follow_its_seed(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    expected = vllm_hash(algorithm, python_hash_seed="7", xxh3_128=xxhash.xxh3_128_digest)
    assert digests(block_hash(algorithm)) == digests(expected)
    monkeypatch.delenv("PYTHONHASHSEED")
    unseeded = digests(block_hash(algorithm))
    assert unseeded != digests(expected)
    drawn = algorithm.startswith("xxhash")  # each process its own: it is no cryptographic hash
    assert (digests(block_hash(algorithm)) != unseeded) == drawn


def test_what_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match="pip install xxhash"):
        block_hash("xxhash")
    with pytest.raises(ConfigError, match="md5"):
        block_hash("md5")
