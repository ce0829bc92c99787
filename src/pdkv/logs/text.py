"""Bytes of a log -> the few lines that matter, streamed: memory does not grow with the log.

A log passes through many hands before a person has it: colours of a terminal, prefixes of docker and Kubernetes, JSON
around every line, carriage returns of progress bars, compression. All of that is taken off here.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import IO

import msgspec

from pdkv.errors import ConfigError

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 16
"""What is kept of one line. vLLM's longest, the engine's configuration, has about 8 KiB."""

_ANSI = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_WRAPPERS = ("log", "message", "msg", "textPayload", "line", "body", "MESSAGE")
_GZIP_MAGIC = b"\x1f\x8b"


def matching_lines(stream: IO[bytes], anchors: Sequence[str]) -> Iterator[str]:
    """Lines of ``stream`` that hold one of ``anchors``, in order, without colours and wrappers.

    Others are never decoded or split, so a gigabyte of them costs a search. A line longer than MAX_LINE_BYTES is cut.
    Raises ConfigError for compressed data that is broken.
    """
    wanted = [anchor.encode() for anchor in anchors]
    for chunk in _whole_lines(_decoded(stream)):
        if b"\x1b" in chunk:
            chunk = _ANSI.sub(b"", chunk)
        starts = sorted({_line_start(chunk, at) for anchor in wanted for at in _found(chunk, anchor)})
        for start in starts:
            line = chunk[start : _line_end(chunk, start)][:MAX_LINE_BYTES].decode("utf-8", "replace")
            yield from _unwrapped(line)


def _found(chunk: bytes, anchor: bytes) -> Iterator[int]:
    """Where ``anchor`` is, once per line: the rest of a line is read with it."""
    at = chunk.find(anchor)
    while at >= 0:
        yield at
        at = chunk.find(anchor, _line_end(chunk, at))


def _line_start(chunk: bytes, at: int) -> int:
    return max(chunk.rfind(b"\n", 0, at), chunk.rfind(b"\r", max(0, at - MAX_LINE_BYTES), at)) + 1


def _line_end(chunk: bytes, at: int) -> int:
    newline = chunk.find(b"\n", at)
    end = len(chunk) if newline < 0 else newline
    carriage = chunk.find(b"\r", at, end)
    return end if carriage < 0 else carriage


def _whole_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes cut at line ends. What a line has beyond MAX_LINE_BYTES is dropped."""
    rest = b""
    for chunk in chunks:
        cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r"))
        if cut < 0:
            rest = (rest + chunk)[:MAX_LINE_BYTES] if len(rest) < MAX_LINE_BYTES else rest
            continue
        yield rest + chunk[: cut + 1]
        rest = chunk[cut + 1 :][:MAX_LINE_BYTES]
    if rest:
        yield rest


def _decoded(stream: IO[bytes]) -> Iterator[bytes]:
    """UTF-8 bytes of a stream that may be gzip, or UTF-16 as PowerShell writes it."""
    head = stream.read(CHUNK_BYTES)
    if head.startswith(_GZIP_MAGIC):
        yield from _gunzipped(head, stream)
        return
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        decoder = codecs.getincrementaldecoder("utf-16")("replace")
        while head:
            yield decoder.decode(head).encode("utf-8", "replace")
            head = stream.read(CHUNK_BYTES)
        return
    while head:
        yield head
        head = stream.read(CHUNK_BYTES)


def _gunzipped(head: bytes, stream: IO[bytes]) -> Iterator[bytes]:
    """What a gzip stream of one or more members holds, a bounded piece at a time."""
    unpacker = zlib.decompressobj(wbits=31)
    packed = head
    try:
        while packed:
            yield unpacker.decompress(packed, CHUNK_BYTES)
            packed = unpacker.unconsumed_tail
            if unpacker.eof:
                packed = unpacker.unused_data or stream.read(CHUNK_BYTES)
                unpacker = zlib.decompressobj(wbits=31)
            packed = packed or stream.read(CHUNK_BYTES)
    except zlib.error as error:
        raise ConfigError(f"the log begins as gzip data, but is broken ({error}); unpack it and try again") from error


def _unwrapped(line: str) -> Iterator[str]:
    """The text of a line that a log collector put into JSON; other lines as they are."""
    stripped = line.strip()
    # docker compose and kubectl put a name before the JSON, so the object may start later.
    opening = stripped.find("{")
    if opening >= 0 and stripped.endswith("}"):
        try:
            fields = msgspec.json.decode(stripped[opening:])
        except (msgspec.DecodeError, RecursionError, ValueError):
            fields = None
        if isinstance(fields, dict):
            for key in _WRAPPERS:
                text = fields.get(key)
                if isinstance(text, str):
                    yield from _ANSI.sub(b"", text.encode("utf-8", "replace")).decode("utf-8", "replace").splitlines()
                    return
    yield stripped
