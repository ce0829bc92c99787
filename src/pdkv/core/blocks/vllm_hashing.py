"""vLLM's four prefix-caching hashes, digest for digest (spec block-pool section 3).

vLLM hashes the tuple (parent, tokens, extra keys), serialised by pickle or canonical CBOR. Here the tokens of many
blocks are serialised at once with numpy; what stands around them is the same few bytes every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdkv.core.blocks import encoding
from pdkv.core.blocks.extra_keys import ExtraKeys
from pdkv.core.blocks.hashing import DigestFunction, HashFunction, sha256_digest
from pdkv.core.ports import Int32Array
from pdkv.errors import ConfigError

#: ``--prefix-caching-hash-algo`` of vLLM.
VLLM_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")

#: The seed of a SHA-256 chain where PYTHONHASHSEED is not set.
DEFAULT_SEED = "vllm-none-hash"

_PICKLE_OPCODES = np.frombuffer(b"JMK", dtype=np.uint8)
_PICKLE_WIDTHS = np.array([5, 3, 2], dtype=np.uint8)
_CBOR_WIDTHS = np.array([1, 2, 3, 5], dtype=np.uint8)
_USED = np.arange(5) < np.arange(6)[:, None]  # by width: which of a token's five bytes are used

_CHUNK = 1024  # blocks serialised at a time: what numpy makes of them stays in the cache
_FEW = 4  # below so many blocks plain Python is faster than numpy

Bytes2D = npt.NDArray[np.uint8]


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

    def integers(self, values: Int32Array) -> tuple[Bytes2D, npt.NDArray[np.uint8]]:
        """uint8[n, 5] and uint8[n]: each token's bytes, and how many of the five they are."""
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

    def integers(self, values: Int32Array) -> tuple[Bytes2D, npt.NDArray[np.uint8]]:
        """BININT1, BININT2 or BININT, whichever is shortest."""
        unsigned = values.astype("<i4", copy=False).view(np.uint32)  # a negative one counts as large
        kind = (unsigned < 1 << 8).view(np.int8) + (unsigned < 1 << 16).view(np.int8)
        room = np.empty((len(values), 5), dtype=np.uint8)
        room[:, 0] = _PICKLE_OPCODES[kind]
        room[:, 1:] = unsigned.view(np.uint8).reshape(-1, 4)
        return room, _PICKLE_WIDTHS[kind]

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

    def integers(self, values: Int32Array) -> tuple[Bytes2D, npt.NDArray[np.uint8]]:
        """One byte below 24, else a first byte of 24 + log2(size) and the big-endian value."""
        magnitude = np.where(values < 0, -1 - values, values)
        size = np.searchsorted(np.array([24, 1 << 8, 1 << 16]), magnitude, side="right")  # 0, 1, 2, 3: 0, 1, 2, 4 bytes
        room = np.empty((len(values), 5), dtype=np.uint8)
        room[:, 0] = np.where(size == 0, magnitude, 23 + size) + 32 * (values < 0)
        for shift, at in ((24, 1), (16, 2), (8, 3), (0, 4)):
            room[:, at] = magnitude >> shift & 0xFF
        short = (size == 1) | (size == 2)  # their bytes are the last of the four: move them to the front
        room[short, 1:3] = room[short, 3:5]
        room[size == 1, 1] = room[size == 1, 2]
        return room, _CBOR_WIDTHS[size]

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
        return _chain(form, sha256_digest, sha256_digest(form.text(seed)))
    if xxh3_128 is None:
        raise ConfigError(f"prefix caching hash {algorithm} needs the package xxhash (pip install xxhash)")
    secret = random_seed if python_hash_seed is None else python_hash_seed
    if secret is None:
        raise ConfigError(
            f"prefix caching hash {algorithm} needs a seed that nobody can guess; set PYTHONHASHSEED, the same for all "
            "instances that share content, or pass a random one"
        )
    return _chain(form, xxh3_128, xxh3_128(form.text(secret)))


class _Heads(dict[int, bytes]):
    """What stands before the parent, by the size of what stands behind it; few sizes occur."""

    def __init__(self, form: SerialForm, parent_bytes: int) -> None:
        super().__init__()
        self._form, self._parent_bytes = form, parent_bytes

    def __missing__(self, rest_bytes: int) -> bytes:
        head = self[rest_bytes] = self._form.head(self._parent_bytes, rest_bytes)
        return head


def _chain(form: SerialForm, digest: DigestFunction, none_hash: bytes) -> HashFunction:
    heads = _Heads(form, len(none_hash))  # a parent is a digest: always of the same size

    def chain(parent: bytes | None, blocks: Int32Array, extra: Mapping[int, ExtraKeys]) -> list[bytes]:
        last, hashes = parent or none_hash, []
        for rest in _behind_parent(form, blocks, extra):
            last = digest(heads[len(rest)] + last + rest)
            hashes.append(last)
        return hashes

    return chain


def _behind_parent(form: SerialForm, blocks: Int32Array, extra: Mapping[int, ExtraKeys]) -> list[bytes]:
    """Tokens and extra keys of each block, serialised."""
    if not extra:
        return _serialise(form, blocks, form.tail(None))
    plain = form.tail(None)
    contents = _serialise(form, blocks, b"")
    return [content + (form.tail(extra[row]) if row in extra else plain) for row, content in enumerate(contents)]


def _serialise(form: SerialForm, blocks: Int32Array, tail: bytes) -> list[bytes]:
    """The tokens of each block, with what stands around them, and ``tail``."""
    before, behind = form.around(blocks.shape[1])
    behind += tail
    if len(blocks) < _FEW:
        return [before + b"".join(map(form.integer, block)) + behind for block in blocks.tolist()]
    contents: list[bytes] = []
    for start in range(0, len(blocks), _CHUNK):
        contents += _serialise_chunk(form, blocks[start : start + _CHUNK], before, behind)
    return contents


def _serialise_chunk(form: SerialForm, blocks: Int32Array, before: bytes, behind: bytes) -> list[bytes]:
    count, size = blocks.shape
    first, end = len(before), len(before) + 5 * size
    room = np.empty((count, end + len(behind)), dtype=np.uint8)
    used = np.ones(room.shape, dtype=np.bool_)
    fields, widths = form.integers(blocks.reshape(-1))
    room[:, :first] = np.frombuffer(before, dtype=np.uint8)
    room[:, first:end] = fields.reshape(count, 5 * size)
    room[:, end:] = np.frombuffer(behind, dtype=np.uint8)
    used[:, first:end] = _USED[widths].reshape(count, 5 * size)
    data = room[used].tobytes()
    ends = np.cumsum(widths.reshape(count, size).sum(axis=1, dtype=np.int64) + len(before) + len(behind)).tolist()
    return [data[start:stop] for start, stop in zip([0, *ends[:-1]], ends, strict=True)]
