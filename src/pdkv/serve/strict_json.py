"""Request bodies: JSON as RFC 8259 has it, so that nothing changes its meaning on the way to an instance.

Python's parser takes more than that: NaN and Infinity (which would travel on as null, "not given"), numbers of any
length, halves of surrogate pairs that no UTF-8 can carry.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from pdkv.serve.openai import ApiError

MAX_DEPTH = 64
_LONG_NUMBER = re.compile(r"\d{19}")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class _Unfit:
    """Stands in the parsed value for a number that cannot be used, until its place is known."""

    why: str


_TO_CHECK = (dict, list, str, _Unfit)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. Raises `ApiError` 400: where it is no JSON, or what in it cannot be carried."""
    unfit: list[_Unfit] = []

    def note(why: str) -> _Unfit:
        unfit.append(_Unfit(why))
        return unfit[-1]

    def finite(digits: str) -> float | _Unfit:
        value = float(digits)
        return value if math.isfinite(value) else note(f"{digits[:40]} is beyond the numbers that can be used")

    def word(digits: str) -> int | _Unfit:
        value = int(digits) if len(digits) <= 20 else 1 << 64
        shown = digits if len(digits) <= 40 else f"{digits[:20]}... ({len(digits)} digits)"
        return value if -(1 << 63) <= value < 1 << 64 else note(f"{shown} does not fit into 64 bits")

    def constant(name: str) -> _Unfit:
        return note(f"JSON has no {name}; give a number, or leave the field out")

    try:
        text = body.decode("utf-8-sig")
        # A call for every integer would take longer than the rest; without 19 digits in a row none can be too long.
        parse_int = word if _LONG_NUMBER.search(text) else None
        value = json.loads(text, parse_constant=constant, parse_float=finite, parse_int=parse_int)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno} (character {error.pos})"
        raise _invalid(f"the request body is not JSON: {error.msg} at {where}") from None
    except UnicodeDecodeError as error:
        raise _invalid(f"the request body is not UTF-8: byte {error.start} cannot be decoded") from None
    except RecursionError:
        raise _invalid(f"the request body is nested more than {MAX_DEPTH} levels deep") from None
    if not isinstance(value, dict):
        raise _invalid(f"the request body must be a JSON object, not {_json_kind(value)}")
    if unfit or _SURROGATE_ESCAPE.search(text) or text.count("[") + text.count("{") > MAX_DEPTH:
        _check_nodes(value)
    return value


def _invalid(text: str, param: str | None = None) -> ApiError:
    return ApiError(400, text, param=param, code="invalid_json")


def _json_kind(value: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null" if value is None else "a number")


def _check_nodes(value: dict[str, Any]) -> None:
    """Raises `ApiError` for unfit numbers, for what is too deep and for text that is no Unicode, naming the place."""
    todo: list[tuple[Any, tuple[str, ...]]] = [(value, ())]
    while todo:
        node, path = todo.pop()
        if isinstance(node, str):
            if found := _SURROGATE.search(node):
                half = f"\\u{ord(found[0]):04x}"
                raise _at(path, f"{half} at character {found.start()} is half of a surrogate pair, not a character")
        elif isinstance(node, _Unfit):
            raise _at(path, node.why)
        elif len(path) == MAX_DEPTH:
            raise _invalid(f"the request body is nested more than {MAX_DEPTH} levels deep")
        elif isinstance(node, dict):
            todo += ((key, (*path, "a key")) for key in node)
            todo += ((v, (*path, k)) for k, v in node.items() if isinstance(v, _TO_CHECK))
        else:
            todo += ((v, (*path, str(i))) for i, v in enumerate(node) if isinstance(v, _TO_CHECK))


def _at(path: tuple[str, ...], text: str) -> ApiError:
    place = ".".join(path).encode(errors="replace").decode()  # a key on the way may be what is wrong
    return _invalid(f"{place}: {text}", param=place.partition(".")[0])
