"""Two serial forms of plain values, written and never read: canonical CBOR, and pickle protocol 5 as CPython writes it.

They exist to be hashed: vLLM's block hashes are digests of these bytes. Only what such a value is made of can be
written: ``None``, ints of 32 bits, text, bytes, and tuples of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: A pickle longer than this is cut into several frames, which is not written here.
PICKLE_FRAME_BYTES = 64 * 1024

_PICKLE_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


# --------------------------------------------------------------------------------------------------------------- CBOR


def cbor_head(major: int, value: int) -> bytes:
    """Major type 0..7 with its argument, in the fewest bytes (RFC 8949 section 3)."""
    if value < 24:
        return bytes((major << 5 | value,))
    size = 1 if value < 1 << 8 else 2 if value < 1 << 16 else 4
    return bytes((major << 5 | {1: 24, 2: 25, 4: 26}[size],)) + value.to_bytes(size, "big")


def cbor(value: Any) -> bytes:
    """``value`` in canonical CBOR; tuples are arrays."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return cbor_head(0, value) if value >= 0 else cbor_head(1, -1 - value)
    if isinstance(value, bytes):
        return cbor_head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return cbor_head(3, len(text)) + text
    assert isinstance(value, tuple), f"cbor: {type(value).__name__} is not a plain value"
    return cbor_head(4, len(value)) + b"".join(map(cbor, value))


# ------------------------------------------------------------------------------------------------------------- pickle


def pickle_int(value: int) -> bytes:
    """An int of 32 bits: one or two bytes where it is not negative and fits, else four."""
    if 0 <= value < 1 << 8:
        return bytes((0x4B, value))
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    return b"J" + value.to_bytes(4, "little", signed=True)


def pickle_head(content_bytes: int) -> bytes:
    """Protocol and frame header of a pickle whose opcodes take ``content_bytes`` in all."""
    assert content_bytes < PICKLE_FRAME_BYTES, f"a block of {content_bytes} bytes does not fit one pickle frame"
    return b"\x80\x05\x95" + content_bytes.to_bytes(8, "little")


def pickle_bytes_head(size: int) -> bytes:
    """What stands before the content of a bytes object."""
    return b"C" + bytes((size,)) if size < 1 << 8 else b"B" + size.to_bytes(4, "little")


def pickle_tuple(size: int) -> tuple[bytes, bytes]:
    """What stands before and behind the items of a tuple that is not empty."""
    return (b"", _PICKLE_TUPLES[size] + b"\x94") if size < 4 else (b"(", b"t\x94")


def pickle_items(values: Iterable[Any], memo: dict[int, int]) -> bytes:
    """The opcodes of ``values``, one after the other.

    ``memo`` has the number under which each object written so far, by identity, can be repeated: the second use of a
    string object is a reference to the first, exactly as CPython has it.
    """
    return b"".join(_pickle_item(value, memo) for value in values)


def _pickle_item(value: Any, memo: dict[int, int]) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, int):
        return pickle_int(value)
    if value == () and isinstance(value, tuple):
        return b")"
    if id(value) in memo:
        number = memo[id(value)]
        return b"h" + bytes((number,)) if number < 1 << 8 else b"j" + number.to_bytes(4, "little")
    if isinstance(value, tuple):
        before, behind = pickle_tuple(len(value))
        items = before + pickle_items(value, memo) + behind
        memo[id(value)] = len(memo)
        return items
    memo[id(value)] = len(memo)
    if isinstance(value, bytes):
        return pickle_bytes_head(len(value)) + value + b"\x94"
    assert isinstance(value, str), f"pickle: {type(value).__name__} is not a plain value"
    text = value.encode("utf-8", "surrogatepass")
    head = b"\x8c" + bytes((len(text),)) if len(text) < 1 << 8 else b"X" + len(text).to_bytes(4, "little")
    return head + text + b"\x94"


def pickle(value: Any) -> bytes:
    """``value`` as ``pickle.dumps(value, protocol=5)`` of CPython writes it."""
    content = pickle_items((value,), {}) + b"."
    # below four bytes CPython leaves the frame header out
    return (pickle_head(len(content)) if len(content) >= 4 else b"\x80\x05") + content
