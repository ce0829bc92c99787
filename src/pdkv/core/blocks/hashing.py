"""Hashes of full blocks: each covers its tokens and, by chaining, everything before them (spec block-pool section 3).

A `HashFunction` hashes many blocks of one sequence in one call, from an int32 array: pdkv's own are here, those that
give vLLM's digests in `pdkv.core.blocks.vllm_hashing`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from pdkv.core.blocks.encoding import cbor
from pdkv.core.blocks.extra_keys import ContentKeys, ExtraKeys, ExtraKeySource
from pdkv.core.ports import Int32Array

#: Bytes to their digest, e.g. `xxhash.xxh3_128_digest`, which the core does not import but is given.
DigestFunction = Callable[[bytes], bytes]

NO_EXTRA: Mapping[int, ExtraKeys] = {}

_LITTLE_INT32 = np.dtype("<i4")
_CHUNK = 1024  # blocks made bytes at a time: the next ones take the memory of the last ones, which is in the cache


@cache
def _content_type(block_size: int) -> np.dtype[Any]:
    """A block's tokens as one value."""
    return np.dtype(f"V{_LITTLE_INT32.itemsize * block_size}")


class HashFunction(Protocol):
    """Digests of ``blocks`` int32[n, block size], each chained to the one before and the first one to ``parent``.

    ``parent`` is ``None`` at the start of a sequence. ``extra`` has the extra keys of those rows that have any.
    Returns n digests.
    """

    def __call__(self, parent: bytes | None, blocks: Int32Array, extra: Mapping[int, ExtraKeys]) -> list[bytes]: ...


# -------------------------------------------------------------------------------------------------- pdkv's own hashes

#: The parent of a sequence's first block under `raw_sha256`; fixed, so that separate processes agree.
NONE_HASH = hashlib.sha256(b"pdkv-none-hash").digest()

_FRESH_SHA256 = hashlib.sha256()


def sha256_digest(data: bytes) -> bytes:
    """SHA-256 of ``data``. Copying a fresh state costs half of what OpenSSL takes to look the algorithm up anew."""
    state = _FRESH_SHA256.copy()
    state.update(data)
    return state.digest()


def raw_hash(digest: DigestFunction, none_hash: bytes) -> HashFunction:
    """A hash over parent, little-endian int32 tokens and extra keys, their bytes fed to ``digest`` as they are."""

    def link(last: bytes, contents: list[bytes]) -> list[bytes]:
        return [last := digest(last + content) for content in contents]

    return _raw_hash(link, none_hash)


def _raw_hash(link: Callable[[bytes, list[bytes]], list[bytes]], none_hash: bytes) -> HashFunction:
    """`raw_hash` with ``link`` for all contents of a call: digests, each of the one before and the content after it."""

    def chain(parent: bytes | None, blocks: Int32Array, extra: Mapping[int, ExtraKeys]) -> list[bytes]:
        tokens = np.ascontiguousarray(blocks, dtype=_LITTLE_INT32).view(_content_type(blocks.shape[1])).ravel()
        last, digests = parent or none_hash, []
        for first in range(0, len(tokens), _CHUNK):
            contents: list[bytes] = tokens[first : first + _CHUNK].tolist()
            if extra:
                contents = [
                    content + cbor(extra[row]) if row in extra else content
                    for row, content in enumerate(contents, first)
                ]
            digests += link(last, contents)
            last = digests[-1]
        return digests

    return chain


def _link_sha256(last: bytes, contents: list[bytes]) -> list[bytes]:
    """As with `sha256_digest`, an eighth faster: without a call and a longer content for each."""
    fresh, digests = _FRESH_SHA256.copy, []
    for content in contents:
        state = fresh()
        state.update(last)
        state.update(content)
        last = state.digest()
        digests.append(last)
    return digests


#: pdkv's own default (design 6.6): SHA-256 over parent, little-endian int32 tokens and, as CBOR, extra keys.
raw_sha256 = _raw_hash(_link_sha256, NONE_HASH)


@cache
def _digest_type(digest_bytes: int) -> np.dtype[Any]:
    """A digest as one value."""
    return np.dtype(f"V{digest_bytes}")


_NO_DIGESTS = np.empty(0, dtype="V1")


class HashChain(Sequence[bytes]):
    """The hashes of one sequence, one digest a unit, side by side in an array that grows by a quarter.

    Reads like a list of bytes. A slice is a view of the same memory, which stays as it is while the chain grows.
    """

    __slots__ = ("_digests", "_len")

    def __init__(self, digests: npt.NDArray[Any] = _NO_DIGESTS) -> None:
        self._digests = digests  # what is beyond the length is room
        self._len = len(digests)

    def __len__(self) -> int:
        return self._len

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> HashChain: ...
    def __getitem__(self, index: int | slice) -> bytes | HashChain:
        if isinstance(index, slice):
            return HashChain(self._digests[: self._len][index])
        if index < 0:
            index += self._len
        if not 0 <= index < self._len:
            raise IndexError(f"hash {index} of {self._len}")
        return self.item(index)

    def item(self, index: int) -> bytes:
        """Hash ``index``, which there is: for loops over many chains."""
        digest: bytes = self._digests.item(index)
        return digest

    def extend(self, digests: Sequence[bytes]) -> None:
        """Append ``digests``, all of one size."""
        if not digests:
            return
        end = self._len + len(digests)
        self._make_room(end, len(digests[0]))
        if len(digests) == 1:
            self._digests[self._len] = digests[0]
        else:
            self._digests[self._len : end] = np.frombuffer(b"".join(digests), dtype=self._digests.dtype)
        self._len = end

    def _make_room(self, length: int, digest_bytes: int) -> None:
        if length > len(self._digests):
            grown = np.empty(length + length // 4 + 4, dtype=_digest_type(digest_bytes))
            grown[: self._len] = self._digests[: self._len]
            self._digests = grown

    def copy(self, first: int, last: int) -> HashChain:
        """Hashes ``first:last`` as a chain of its own."""
        return HashChain(self._digests[first:last].copy())

    def extend_from(self, other: HashChain, first: int, last: int) -> None:
        """Append hashes ``first:last`` of ``other``, of the same size."""
        self._make_room(self._len + last - first, self._digests.itemsize)
        self._digests[self._len : self._len + last - first] = other._digests[first:last]
        self._len += last - first

    @property
    def grows(self) -> bool:
        """Whether its memory is its own: not a view of another chain's, which stays as it is."""
        return self._digests.base is None


def extend_hashes(
    hashes: HashChain,
    tokens: Int32Array,
    block_size: int,
    function: HashFunction,
    extra: ExtraKeySource | str | None = None,
) -> None:
    """Append to ``hashes`` those of the blocks that ``tokens`` (the whole sequence) fill since the last call.

    ``extra`` says what the KV depends on besides tokens; a string is a cache salt and nothing else.
    """
    first, last = len(hashes), len(tokens) // block_size
    if first >= last:
        return
    keys = NO_EXTRA
    if extra:
        source = ContentKeys(cache_salt=extra) if isinstance(extra, str) else extra
        if not source.empty:
            starts = range(first * block_size, last * block_size, block_size)
            keys = {row: found for row, start in enumerate(starts) if (found := source.of(start, start + block_size))}
    blocks = tokens[first * block_size : last * block_size].reshape(-1, block_size)
    hashes.extend(function(hashes.item(first - 1) if first else None, blocks, keys))
