"""vLLM's four prefix-caching hashes, digest for digest (spec block-pool section 3).

vLLM hashes the tuple (parent, tokens, extra keys), serialised by pickle or canonical CBOR. Here the tokens of many
blocks are serialised at once with numpy; what stands around them is the same few bytes every time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pdkv.core.blocks import encoding
from pdkv.core.blocks.extra_keys import ExtraKeys
from pdkv.core.blocks.hashing import DigestFunction, HashFunction, sha256_digest
from pdkv.core.ports import Int32Array, Int64Array
from pdkv.errors import ConfigError

#: ``--prefix-caching-hash-algo`` of vLLM.
VLLM_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")

#: The seed of a SHA-256 chain where PYTHONHASHSEED is not set.
DEFAULT_SEED = "vllm-none-hash"

_PICKLE_OPCODES = np.frombuffer(b"JMK", dtype=np.uint8)
_PICKLE_WIDTHS = np.array([5, 3, 2])
_CBOR_WIDTHS = np.array([1, 2, 3, 5])

_CHUNK = 2048  # blocks serialised at a time: what numpy makes of them stays in the cache
_FEW = 4  # below so many blocks plain Python is faster than numpy

Bytes = npt.NDArray[np.uint8]
Value = TypeVar("Value")

#: The digests of a chain, given the one before it (always of the same size) and what stands behind each parent.
Link = Callable[[bytes, Iterable[bytes]], list[bytes]]


class SerialForm(Protocol):
    """How (parent, tokens, extra keys) becomes bytes: head, parent, tokens, tail."""

    def text(self, value: str) -> bytes:
        """A lone string."""
        ...

    def head(self, parent_bytes: int, rest_bytes: int) -> bytes:
        """What stands before the parent, given the size of the parent and of all behind it."""
        ...

    def around(self, block_size: int) -> tuple[bytes, bytes]:
        """What stands before the first and behind the last token."""
        ...

    def integer(self, value: int) -> bytes:
        """One token."""
        ...

    def integers(self, values: Int32Array) -> tuple[Bytes, Bytes, Int64Array]:
        """uint8[n], uint8[n, 4] and int64[n]: each token's first byte, those behind it, and how many count in all."""
        ...

    def tail(self, extra: ExtraKeys | None) -> bytes:
        """The extra keys and the end."""
        ...


class PickleForm:
    """``pickle.dumps(value, protocol=5)`` of CPython."""

    def text(self, value: str) -> bytes:
        """A lone string."""
        return encoding.pickle(value)

    def head(self, parent_bytes: int, rest_bytes: int) -> bytes:
        """Protocol, frame and the parent's opcode."""
        opcode = encoding.pickle_bytes_head(parent_bytes)
        return encoding.pickle_head(len(opcode) + parent_bytes + rest_bytes) + opcode

    def around(self, block_size: int) -> tuple[bytes, bytes]:
        """The parent is memorised, then the tuple opens; it closes behind the tokens."""
        before, behind = encoding.pickle_tuple(block_size)
        return b"\x94" + before, behind

    def integer(self, value: int) -> bytes:
        """One token."""
        return encoding.pickle_int(value)

    def integers(self, values: Int32Array) -> tuple[Bytes, Bytes, Int64Array]:
        """BININT1, BININT2 or BININT, whichever is shortest."""
        unsigned = values.view(np.uint32)  # a negative one counts as large
        kind = (unsigned < 1 << 8).view(np.int8) + (unsigned < 1 << 16).view(np.int8)
        return _PICKLE_OPCODES[kind], values.view(np.uint8).reshape(-1, 4), _PICKLE_WIDTHS[kind]

    def tail(self, extra: ExtraKeys | None) -> bytes:
        """Parent and tokens have taken numbers 0 and 1 of the memo."""
        return encoding.pickle_items((extra,), {0: 0, 1: 1}) + b"\x87\x94."


class CborForm:
    """Canonical CBOR: an array of byte string, array of ints, and extra keys or null."""

    def text(self, value: str) -> bytes:
        """A lone string."""
        return encoding.cbor(value)

    def head(self, parent_bytes: int, rest_bytes: int) -> bytes:
        """An array of three, and the parent's size."""
        return encoding.cbor_head(4, 3) + encoding.cbor_head(2, parent_bytes)

    def around(self, block_size: int) -> tuple[bytes, bytes]:
        """An array knows its length, so nothing closes it."""
        return encoding.cbor_head(4, block_size), b""

    def integer(self, value: int) -> bytes:
        """One token."""
        return encoding.cbor(value)

    def integers(self, values: Int32Array) -> tuple[Bytes, Bytes, Int64Array]:
        """One byte below 24, else a first byte of 24 + log2(size) and the big-endian value."""
        magnitude = np.where(values < 0, -1 - values, values)
        kind = np.searchsorted(np.array([24, 1 << 8, 1 << 16]), magnitude, side="right")  # 0, 1, 2 or 4 bytes follow
        first = np.where(kind == 0, magnitude, 23 + kind) + 32 * (values < 0)
        widths = _CBOR_WIDTHS[kind]
        following = (magnitude << 8 * (5 - widths)).astype(">u4")  # the highest bytes are those that count
        return first.astype(np.uint8), following.view(np.uint8).reshape(-1, 4), widths

    def tail(self, extra: ExtraKeys | None) -> bytes:
        """Extra keys or null."""
        return encoding.cbor(extra)


# -------------------------------------------------------------------------------------------------------- the chains


def vllm_hash(
    algorithm: str,
    *,
    python_hash_seed: str | None = None,
    random_seed: str | None = None,
    xxh3_128: DigestFunction | None = None,
) -> HashFunction:
    """The hash that vLLM calls ``algorithm``.

    ``python_hash_seed`` is the value of PYTHONHASHSEED, ``None`` where it is not set. ``random_seed`` is what the
    caller has drawn for this process (vLLM: 32 random bytes as hex); only the xxhash algorithms use it, and only
    without PYTHONHASHSEED. ``xxh3_128`` is `xxhash.xxh3_128_digest`. Raises `ConfigError` where one is missing.
    """
    if algorithm not in VLLM_ALGORITHMS:
        raise ConfigError(f"prefix caching hash {algorithm!r} is unknown; use one of {', '.join(VLLM_ALGORITHMS)}")
    form: SerialForm = CborForm() if algorithm.endswith("_cbor") else PickleForm()
    if algorithm.startswith("sha256"):
        seed = DEFAULT_SEED if python_hash_seed is None else python_hash_seed
        none_hash = sha256_digest(form.text(seed))
        return _chain(form, _link_sha256(form, len(none_hash)), none_hash)
    if xxh3_128 is None:
        raise ConfigError(f"prefix caching hash {algorithm} needs the package xxhash (pip install xxhash)")
    secret = random_seed if python_hash_seed is None else python_hash_seed
    if secret is None:
        raise ConfigError(
            f"prefix caching hash {algorithm} needs a seed that nobody can guess; set PYTHONHASHSEED, the same for all "
            "instances that share content, or pass a random one"
        )
    none_hash = xxh3_128(form.text(secret))
    return _chain(form, _link(form, xxh3_128, len(none_hash)), none_hash)


class _BySize(dict[int, Value]):
    """What goes with what stands behind the parent, by the size of that; few sizes occur."""

    def __init__(self, make: Callable[[int], Value]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, rest_bytes: int) -> Value:
        value = self[rest_bytes] = self._make(rest_bytes)
        return value


def _chain(form: SerialForm, link: Link, none_hash: bytes) -> HashFunction:
    def hashes(parent: bytes | None, blocks: Int32Array, extra: Mapping[int, ExtraKeys]) -> list[bytes]:
        return link(parent or none_hash, _behind_parent(form, blocks, extra))

    return hashes


def _link(form: SerialForm, digest: DigestFunction, parent_bytes: int) -> Link:
    heads = _BySize(lambda rest_bytes: form.head(parent_bytes, rest_bytes))

    def link(last: bytes, rests: Iterable[bytes]) -> list[bytes]:
        return [last := digest(heads[len(rest)] + last + rest) for rest in rests]

    return link


def _link_sha256(form: SerialForm, parent_bytes: int) -> Link:
    """`_link` with SHA-256, from states that know the head: a sixth faster, as `hashing.raw_sha256` is."""
    fresh = _BySize(lambda rest_bytes: hashlib.sha256(form.head(parent_bytes, rest_bytes)).copy)

    def link(last: bytes, rests: Iterable[bytes]) -> list[bytes]:
        digests = []
        for rest in rests:
            state = fresh[len(rest)]()
            state.update(last)
            state.update(rest)
            last = state.digest()
            digests.append(last)
        return digests

    return link


def _behind_parent(form: SerialForm, blocks: Int32Array, extra: Mapping[int, ExtraKeys]) -> Iterable[bytes]:
    """Tokens and extra keys of each block, serialised."""
    if not extra:
        return _serialise(form, blocks, form.tail(None))
    plain = form.tail(None)
    contents = _serialise(form, blocks, b"")
    return [content + (form.tail(extra[row]) if row in extra else plain) for row, content in enumerate(contents)]


def _serialise(form: SerialForm, blocks: Int32Array, tail: bytes) -> Iterable[bytes]:
    """The tokens of each block, with what stands around them, and ``tail``."""
    before, behind = form.around(blocks.shape[1])
    behind += tail
    if len(blocks) < _FEW:
        return [before + b"".join(map(form.integer, block)) + behind for block in blocks.tolist()]
    chunks = (blocks[start : start + _CHUNK] for start in range(0, len(blocks), _CHUNK))
    return chain.from_iterable(_serialise_chunk(form, chunk, before, behind) for chunk in chunks)


def _serialise_chunk(form: SerialForm, blocks: Int32Array, before: bytes, behind: bytes) -> list[bytes]:
    count, size = blocks.shape
    first, following, widths = form.integers(np.ascontiguousarray(blocks, dtype="<i4").reshape(-1))
    token_ends, around = widths.cumsum(), len(before) + len(behind)
    shifts = np.arange(count) * around  # what stands around the tokens of the blocks in front
    ends = token_ends[size - 1 :: size] + shifts + around
    starts = token_ends - widths + np.repeat(shifts + len(before), size)
    data = np.empty(ends.item(-1) + 4, dtype=np.uint8)
    # All bytes are written, the last ones of each token first: those that do not count lie where a later token has one
    # of its first, or where something stands around the tokens, and are written over by that.
    for at in (3, 2, 1, 0):
        data[at + 1 :][starts] = following[:, at]
    data[starts] = first
    for at, byte in enumerate(before):
        data[at:][starts[::size] - len(before)] = byte
    for at, byte in enumerate(behind):
        data[at:][ends - len(behind)] = byte
    everything, stops = data.tobytes(), ends.tolist()
    return [everything[start:stop] for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
