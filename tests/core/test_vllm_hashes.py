"""vLLM's four block hashes: its digests bit for bit, from int32 arrays.

What vLLM itself says is recorded here; with VLLM_PYTHON set to a Python that has vLLM 0.32, its own functions are asked
again, on random content with every kind of extra key.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle  # the twin that the encoder is compared with; only written, never read
import subprocess
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.core.blocks import encoding
from pdkv.core.blocks.extra_keys import ContentKeys, MultimodalItem
from pdkv.core.blocks.hashing import HashChain, HashFunction, extend_hashes, raw_hash
from pdkv.core.blocks.vllm_hashing import VLLM_ALGORITHMS, vllm_hash
from pdkv.errors import ConfigError

# Runs under vLLM's Python: hashes every case of the list on stdin by vLLM's own request hasher.
PEER = """
import json, os, sys
from types import SimpleNamespace as Named
import torch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
for case in json.load(sys.stdin):
    function = get_hash_fn_by_name(case["algorithm"])
    os.environ.pop("PYTHONHASHSEED", None)
    if case["seed"] is not None:
        os.environ["PYTHONHASHSEED"] = case["seed"]
    init_none_hash(function)
    features = [
        Named(identifier=i, mm_position=Named(offset=o, length=n)) for i, o, n in case["multimodal"]
    ]
    lora = case["lora"] and Named(lora_name=case["lora"][0], lora_path=case["lora"][1])
    embeds = case["embeds"] and torch.tensor(case["embeds"], dtype=torch.float32)
    request = Named(
        block_hashes=[], num_tokens=len(case["tokens"]), all_token_ids=case["tokens"], mm_features=features,
        lora_request=lora, cache_salt=case["salt"], prompt_embeds=embeds, _prompt_embeds_per_block_hashes={},
    )
    print("digests", *(h.hex() for h in get_request_block_hasher(case["block_size"], function)(request)))
"""

Case = dict[str, Any]


def case_of(algorithm: str, tokens: list[int], **more: Any) -> Case:
    """A case in the form that `PEER` reads."""
    defaults: Case = {
        "seed": None, "block_size": 16, "multimodal": [], "lora": None, "salt": None, "embeds": None,
    }  # fmt: skip
    return json.loads(json.dumps({"algorithm": algorithm, "tokens": tokens} | defaults | more))


def function_of(case: Case) -> HashFunction:
    """The hash function of a case; skips where it needs xxhash and there is none."""
    digest = None
    if case["algorithm"].startswith("xxhash"):
        digest = pytest.importorskip("xxhash").xxh3_128_digest
    return vllm_hash(case["algorithm"], python_hash_seed=case["seed"], xxh3_128=digest)


def ours(case: Case, cuts: tuple[int, ...] = ()) -> list[str]:
    """Digests by pdkv, the tokens given in pieces that end at ``cuts``."""
    embeds = np.asarray(case["embeds"], dtype=np.float32) if case["embeds"] else None
    content = ContentKeys(
        cache_salt=case["salt"],
        lora=tuple(case["lora"]) if case["lora"] else None,
        multimodal=tuple(MultimodalItem(*item) for item in case["multimodal"]),
        prompt_embeds=embeds,
    )
    function, tokens, hashes = function_of(case), np.asarray(case["tokens"], dtype=np.int32), HashChain()
    for cut in (*cuts, len(tokens)):
        extend_hashes(hashes, tokens[:cut], case["block_size"], function, content)
    return [digest.hex() for digest in hashes]


# ----------------------------------------------------------------------------------------------------------- recorded

FIRST_TWO = list(range(32))
RICH = {
    "lora": ["a", "/adapters/a"], "multimodal": [["img0", 3, 9], ["img1", 12, 10]], "salt": "s", "seed": "0",
    "embeds": [[float(i), 1.5] for i in range(32)],
}  # fmt: skip

RECORDED = [
    pytest.param(
        case_of("sha256_cbor", FIRST_TWO),
        [
            "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749",
            "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c",
        ],
        id="cbor",
    ),
    pytest.param(
        case_of("sha256_cbor", FIRST_TWO[:16], salt="s"),
        ["67e9f72522b34138a0f4be0e3a68d9d49b1e50aea0af7762f6170ad7eebbdeaf"],
        id="cbor-salt",
    ),
    pytest.param(
        case_of("sha256", FIRST_TWO),
        [
            "fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798",
            "8be7aaa33831156d316f1f463ae57e643deb63f42e633e2d631df88815cc4629",
        ],
        id="pickle",
    ),
    pytest.param(
        case_of("sha256", [70_000, *range(250, 281)], **RICH),
        [
            "1d81c1105bbac0a173bce3b7cde5725e268c2126bb2eae522a038098f8531f06",
            "c75b88623c1f4e815c3e8986b6882f2c5a36b535b54725ba3cbcb15c2630e6df",
        ],
        id="sha256-rich",
    ),
    pytest.param(
        case_of("sha256_cbor", [70_000, *range(250, 281)], **RICH),
        [
            "a8b8af46219fd032ac26e3319200dc46cba11a2af07f1edf4f433eacb4ffdc1a",
            "f11c79ab7e37cf9527a1af1b1950b7e0dacb0d7fff6aafbbfee6cffcb86ace12",
        ],
        id="sha256_cbor-rich",
    ),
    pytest.param(
        case_of("xxhash", FIRST_TWO, seed="0"),
        [
            "8ef953407c0da43eacbb3639ed2bff4d",
            "5a51cc5ac3a4b1f7d5efd012fb00201a",
        ],
        id="xxhash-plain",
    ),
    pytest.param(
        case_of("xxhash", [70_000, *range(250, 281)], **RICH),
        [
            "e23098a85837ab27867b7319bb90294d",
            "155e559f90cb51615fc884c1f51e77d5",
        ],
        id="xxhash-rich",
    ),
    pytest.param(
        case_of("xxhash_cbor", FIRST_TWO, seed="0"),
        [
            "209f5d549fc07c8e39d823615ede61ce",
            "03888914ee75b87e89df867a21beb72b",
        ],
        id="xxhash_cbor-plain",
    ),
    pytest.param(
        case_of("xxhash_cbor", [70_000, *range(250, 281)], **RICH),
        [
            "521ed22ee0e565a0ebcf8ae631e943b0",
            "658f301751dd7337302a381ca101e43e",
        ],
        id="xxhash_cbor-rich",
    ),
]


@pytest.mark.parametrize(("case", "digests"), RECORDED)
def test_recorded_digests(case: Case, digests: list[str]) -> None:
    assert ours(case) == digests


def random_cases(count: int) -> list[Case]:
    """Content of every kind, tokens of every width."""
    rng, cases = np.random.default_rng(32), []
    for number in range(count):
        block_size = int(rng.choice([1, 2, 3, 4, 16, 16, 23, 24, 64, 256, 300]))
        length = int(rng.integers(0, 7)) * block_size + int(rng.integers(0, block_size))
        limit = int(rng.choice([20, 300, 70_000, 2**31 - 1]))
        offsets = sorted(rng.choice(max(length, 8), 4, replace=False).tolist())
        items = [[f"item{rng.integers(3)}", a, max((b - a) * 2 // 3, 1)] for a, b in itertools.pairwise(offsets)]
        cases.append(
            case_of(
                VLLM_ALGORITHMS[number % 4],
                rng.integers(0, limit, length).tolist(),
                seed=None if number % 4 < 2 and rng.random() < 0.5 else str(rng.integers(100)),
                block_size=block_size,
                multimodal=items if rng.random() < 0.4 else [],
                lora=["sql", "/adapters/" + "long" * int(rng.integers(100))] if rng.random() < 0.3 else None,
                salt="salt" if rng.random() < 0.3 else None,
                embeds=rng.random((length, 3)).tolist() if rng.random() < 0.2 and length else None,
            )
        )
    return cases


@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names a Python that has vLLM 0.32")
@pytest.mark.slow
def test_equal_to_vllm_itself() -> None:
    cases = random_cases(200) + [param.values[0] for param in RECORDED]
    done = subprocess.run(
        [os.environ["VLLM_PYTHON"], "-c", PEER],
        input=json.dumps(cases), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("digests")]
    for case, theirs in zip(cases, answers, strict=True):
        assert ours(case) == theirs, case


# ---------------------------------------------------------------------------------------------------- without the peer

TOKENS = st.one_of(st.integers(0, 30), st.integers(0, 300), st.integers(0, 70_000), st.integers(-(2**31), 2**31 - 1))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(TOKENS, max_size=80), st.integers(1, 20), st.sampled_from(VLLM_ALGORITHMS[:2]), st.booleans())
def test_one_by_one_in_plain_python_or_many_at_once(
    tokens: list[int], block_size: int, algorithm: str, salted: bool
) -> None:
    case = case_of(algorithm, tokens, block_size=block_size, salt="s" if salted else None)
    assert ours(case, cuts=tuple(range(0, len(tokens), block_size))) == ours(case)


PLAIN = st.recursive(
    st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1), st.text(max_size=300), st.binary(max_size=300)),
    lambda inner: st.lists(inner, max_size=6).map(tuple),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(PLAIN)
def test_pickle_as_cpython_writes_it(value: Any) -> None:
    repeated = ("tag", value, "tag", value)
    for one in (value, repeated):
        assert encoding.pickle(one) == pickle.dumps(one, protocol=5)


def test_many_chunks() -> None:
    case = case_of("sha256", np.random.default_rng(3).integers(0, 200_000, 16 * 2100).tolist())
    assert ours(case) == ours(case, cuts=(16 * 700, 16 * 1024, 16 * 1025 + 3, 16 * 2099))


def test_seeds() -> None:
    block = np.zeros((1, 4), dtype=np.int32)
    plain = vllm_hash("sha256")(None, block, {})
    assert vllm_hash("sha256", python_hash_seed="vllm-none-hash")(None, block, {}) == plain
    assert vllm_hash("sha256", python_hash_seed="0")(None, block, {}) != plain
    assert vllm_hash("sha256", random_seed="not for this one")(None, block, {}) == plain
    with pytest.raises(ConfigError, match=r"xxhash_cbor needs the package xxhash"):
        vllm_hash("xxhash_cbor", python_hash_seed="0")
    with pytest.raises(ConfigError, match=r"seed that nobody can guess; set PYTHONHASHSEED"):
        vllm_hash("xxhash", xxh3_128=lambda data: data[:16])
    with pytest.raises(ConfigError, match=r"'md5' is unknown; use one of sha256, sha256_cbor, xxhash, xxhash_cbor"):
        vllm_hash("md5")


def test_a_random_seed_is_used_where_nothing_else_is_set() -> None:
    xxh3 = pytest.importorskip("xxhash").xxh3_128_digest
    block = np.zeros((1, 4), dtype=np.int32)
    a, b = (vllm_hash("xxhash", random_seed=seed, xxh3_128=xxh3)(None, block, {}) for seed in ("aa", "bb"))
    assert a != b
    assert vllm_hash("xxhash", python_hash_seed="aa", random_seed="bb", xxh3_128=xxh3)(None, block, {}) == a


def test_raw_hash_separates_extra_keys() -> None:
    block, function = np.zeros((1, 4), dtype=np.int32), raw_hash(lambda data: data, b"none")
    lone = [("cache_salt", "a"), ("lora", "a", "b"), ("lora", "ab", ""), ("mm", "a", 1), ("mm", "a", -1)]
    keys = [(), *((key,) for key in lone)]
    digests = [function(None, block, {0: key} if key else {})[0] for key in keys]
    assert len(set(digests)) == len(keys)
    assert all(digest.startswith(b"none" + bytes(16)) for digest in digests)
