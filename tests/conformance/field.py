"""Numbers that running deployments printed, recomputed: any file in the format of startup_observations.jsonl.

    python -m tests.conformance.field FILE [FILE ...]

Prints one line for each failing row, then ``N passed, M failed``; exit status 1 when one failed, 2 when a file cannot
be read. A row passes when every number of its ``check`` that can be recomputed is equal; one whose status is ``exact``
must be recomputable. What a row does not give (a token count, a model that nobody knows) is not checked, and rows that
hold nothing to check are counted on a line of their own.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.field_rows import Row, start_of

from pdkv.errors import PdkvError
from pdkv.explain.budget import left_of_requested
from pdkv.explain.recompute import Sizing, Verdict, judge, sizings
from pdkv.explain.report import Recomputed
from pdkv.explain.start import Start
from pdkv.logs.printed import Printed
from pdkv.units import GIB

_MUST = ("exact", "exact_with_min_rank", "exact_rate_inferred")


class Differs(AssertionError):
    """The first number in which ours and the row differ."""


class NothingToCheck(Exception):
    """The row has no number that can be recomputed, and none has to be."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row with what was recomputed for it; ``verdict`` is ``None`` for a model that is not known."""

    row: Row
    start: Start

    @property
    def verdict(self) -> Verdict | None:
        return self.start.verdict

    def facts(self) -> Recomputed | None:
        return None if self.verdict is None else self.verdict.facts()

    def sizing(self) -> Sizing | None:
        return None if self.verdict is None else self.verdict.sizing


Check = Callable[[Case, Any], Any]
"""Ours for the expected value of one key of ``check``; `_SKIP` where the row does not give what it takes."""
_SKIP = object()


def _fact(name: str) -> Check:
    def check(case: Case, _expected: Any) -> Any:
        facts = case.facts()
        return _SKIP if facts is None else getattr(facts, name)

    return check


def _kv_groups(case: Case, _expected: Any) -> Any:
    facts = case.facts()
    return _SKIP if facts is None else len(facts.groups)


def _layers_per_group(case: Case, _expected: Any) -> Any:
    facts = case.facts()
    return _SKIP if facts is None else max(group.layers for group in facts.groups)


def _bytes_per_token(case: Case, _expected: Any) -> Any:
    """Of one group that keeps every token; more groups have no one rate."""
    facts = case.facts()
    if facts is None or len(facts.groups) != 1:
        return _SKIP
    return facts.bytes_per_block // facts.block_size


def _blocks_logged(case: Case, expected: int) -> Any:
    facts = case.facts()
    if facts is None:
        return _SKIP
    return expected if facts.num_blocks_low <= expected <= facts.num_blocks_high else facts.num_blocks


def _blocks_from(size: Printed | None, case: Case) -> Any:
    sizing = case.sizing()
    if sizing is None or size is None:
        return _SKIP
    low, high = sizing.blocks_between([size] * len(sizing.layouts)) or (0, 0)
    return [low, high]


def _blocks_from_logged(case: Case, _expected: Any) -> Any:
    return _blocks_from(case.start.log.ranks[0].available_kv, case)


def _blocks_from_min_rank(case: Case, expected: list[int]) -> Any:
    """The terms of the worst rank allow what the row says; rows add up the roundings of more terms than we need."""
    sizes = [left_of_requested(rank, with_graphs=False) for rank in case.start.log.ranks]
    known = [size for size in sizes if size is not None]
    ours = _blocks_from(min(known, key=lambda size: size.bytes), case) if known else _SKIP
    if ours is _SKIP:
        return _SKIP
    return expected if expected[0] <= ours[0] <= ours[1] <= expected[1] else ours


def _tokens_from(case: Case, expected: Any) -> Any:
    """By the release's way of counting; a row without a release may be of any whose rules agree with what it prints."""
    sizing = case.sizing()
    blocks = _blocks_from(case.start.log.ranks[0].available_kv, case)
    if sizing is None or blocks is _SKIP:
        return _SKIP
    found = []
    for other in sizings(sizing.spec, sizing.settings):
        verdict = judge(other, case.start.available, case.start.engine)
        if verdict is not None and verdict.agrees is not False:
            found.append([other.capacity(count).kv_cache_size_tokens for count in blocks])
    return expected if expected in found else [sizing.capacity(count).kv_cache_size_tokens for count in blocks]


def _rounded_concurrency(case: Case, _expected: Any) -> Any:
    facts = case.facts()
    return _SKIP if facts is None else round(facts.max_concurrency, 2)


def _concurrency_from_available(case: Case, expected: float) -> Any:
    sizing = case.sizing()
    blocks = _blocks_from(case.start.log.ranks[0].available_kv, case)
    if sizing is None or blocks is _SKIP:
        return _SKIP
    low, high = (round(sizing.capacity(count).max_concurrency, 2) for count in blocks)
    return expected if low <= expected <= high else [low, high]


def _concurrency_from_tokens(case: Case, _expected: Any) -> Any:
    tokens, length = case.row.get("kv_cache_size_tokens"), case.row.get("max_model_len")
    blocks = case.row.get("num_gpu_blocks")
    if tokens is None and isinstance(blocks, int) and length:
        facts = case.facts()
        return _SKIP if facts is None else round(blocks * facts.block_size / length, 2)
    return round(tokens / length, 2) if isinstance(tokens, int) and length else _SKIP


def _true_tokens(case: Case, _expected: Any) -> Any:
    facts = case.facts()
    return _SKIP if facts is None else int(facts.max_concurrency * facts.max_model_len)


def _tokens_predicted(case: Case, _expected: Any) -> Any:
    """Of the model; or of blocks and blocks a request, where a row gives those."""
    facts = case.facts()
    if facts is not None:
        return facts.kv_cache_size_tokens
    blocks = case.row.get("num_gpu_blocks") or case.row["check"].get("num_blocks")
    per_request, length = _last_number(case.row["check"].get("blocks_per_request")), case.row.get("max_model_len")
    return int(blocks / per_request * length) if blocks and per_request and length else _SKIP


def _blocks_per_request(case: Case, expected: Any) -> Any:
    facts = case.facts()
    if facts is not None:
        return facts.blocks_per_max_len_request if isinstance(expected, int) else _SKIP
    blocks, times = case.row.get("num_gpu_blocks"), case.row.get("max_concurrency")
    per_request = _last_number(expected)
    if not blocks or not times or not per_request:
        return _SKIP
    return expected if round(blocks / per_request, 2) == times else round(blocks / times)


def _last_number(value: Any) -> int | None:
    found = re.findall(r"\d+", str(value or ""))
    return int(found[-1]) if found else None


def _needed(case: Case, expected: float) -> Any:
    facts = case.facts()
    if facts is None:
        return _SKIP
    # As the message says it: without the null block, which newer releases keep back on top.
    return _as_rounded(facts.bytes_per_block * facts.blocks_per_max_len_request / GIB, expected)


def _as_rounded(ours: float, expected: float) -> float:
    """Ours with the decimals of the row, so that a third decimal counts where the row has one."""
    return round(ours, len(repr(expected).partition(".")[2]))


def _estimated_range(case: Case, expected: list[int]) -> Any:
    """The longest request for the least and the most memory that is printed alike."""
    sizing, size = case.sizing(), case.start.log.ranks[0].available_kv
    if sizing is None or size is None:
        return _SKIP
    low, high = sizing.blocks_between([size] * len(sizing.layouts)) or (0, 0)
    ours = [sizing.capacity(count).estimated_max_model_len for count in (low, high)]
    # Rows state it in whole blocks, give or take the null block that newer releases keep back.
    block = max(group.block_size for layout in sizing.layouts for group in layout.groups)
    near = all(abs(one - other) <= block for one, other in zip(ours, expected, strict=True))
    printed = case.row.get("estimated_max_model_len")
    return expected if near and (printed is None or ours[0] <= printed <= ours[1] + block) else ours


def _num_blocks_range(case: Case, expected: list[int]) -> Any:
    facts = case.facts()
    if facts is None:
        return _SKIP
    ours = [facts.num_blocks_low, facts.num_blocks_high]
    return expected if expected[0] <= ours[0] <= ours[1] <= expected[1] else ours


def _usable(case: Case, _expected: Any) -> Any:
    blocks = case.row.get("num_gpu_blocks")
    return blocks - 1 if isinstance(blocks, int) else _SKIP


def _segments(case: Case, _expected: Any) -> Any:
    check = case.row["check"]
    return check["usable_blocks"] // check["blocks_per_3584_token_segment"]


def _cached_tokens(case: Case, _expected: Any) -> Any:
    return case.row["check"]["cached_segments"] * 3584


def _share(case: Case, _expected: Any) -> Any:
    blocks, held = case.row.get("num_gpu_blocks"), case.row["check"].get("one_36k_request_blocks")
    return round(held / (blocks - 1), 3) if blocks and held else _SKIP


def _predicted_available(case: Case, expected: float) -> Any:
    """What the terms leave of the requested memory: the logged figure lies within their roundings."""
    left = left_of_requested(case.start.log.ranks[0], with_graphs=False)
    if left is None:
        return _SKIP
    logged = case.row.get("available_kv_gib_logged")
    if logged is not None and not left.low_bytes <= round(logged * GIB) <= left.high_bytes:
        return round(left.bytes / GIB, 2)
    return expected if abs(left.bytes / GIB - expected) <= 0.0101 else round(left.bytes / GIB, 2)


def _does_not_fit(case: Case, expected: str) -> Any:
    size = case.start.log.ranks[0].available_kv
    if not expected.startswith("does not fit") or size is None:
        return _SKIP
    facts = case.facts()
    if size.high_bytes > 0 and facts is None:
        return _SKIP
    return expected if size.high_bytes <= 0 or (facts is not None and not facts.fits) else "fits"


def _wrong_line(case: Case, _expected: Any) -> Any:
    times, length = case.row.get("max_concurrency"), case.row.get("max_model_len")
    return _SKIP if times is None else int(times * length)


def _derived(case: Case, expected: dict[str, Any]) -> Any:
    """The table of groups that a row derives: every entry that a sizing has."""
    facts = case.facts()
    if facts is None:
        return _SKIP
    windows = [group for group in facts.groups if group.window is not None]
    full = [group for group in facts.groups if group.window is None]
    ours: dict[str, Any] = {
        "sliding_layers": sum(group.layers for group in windows),
        "full_layers": sum(group.layers for group in full),
        "sliding_window": windows[0].window if windows else None,
        "kv_groups": len(facts.groups),
        "sliding_block": windows[0].block_size if windows else None,
        "full_block": full[0].block_size if full else None,
        "bytes_per_block": facts.bytes_per_block,
        "sliding_blocks_per_group": windows[0].blocks_per_max_len_request if windows else None,
        "blocks_per_request": facts.blocks_per_max_len_request,
        "num_blocks": _blocks_logged(case, expected.get("num_blocks", facts.num_blocks)),
        "blocks_from_logged": _blocks_from_logged(case, None),
    }
    return {name: ours.get(name, value) for name, value in expected.items()}


_CHECKS: dict[str, Check] = {
    "bytes_per_block": _fact("bytes_per_block"),
    "bytes_per_token_per_rank": _bytes_per_token,
    "kv_groups": _kv_groups,
    "layers_per_group": _layers_per_group,
    "blocks_logged": _blocks_logged,
    "num_blocks_range": _num_blocks_range,
    "blocks_from_logged_avail": _blocks_from_logged,
    "blocks_from_min_rank": _blocks_from_min_rank,
    "tokens_from_logged_avail": _tokens_from,
    "tokens_from_avail": _tokens_from,
    "tokens_if_logged_avail": lambda case, expected: _within(_tokens_from(case, None), expected),
    "tokens_predicted": _tokens_predicted,
    "concurrency_predicted": _rounded_concurrency,
    "concurrency_from_avail": _concurrency_from_available,
    "concurrency_from_tokens": _concurrency_from_tokens,
    "concurrency_times_len": _wrong_line,
    "blocks_per_max_len_request": _fact("blocks_per_max_len_request"),
    "blocks_per_request": _blocks_per_request,
    "true_capacity_tokens_at_max_len": _true_tokens,
    "needed_gib_predicted": _needed,
    "estimated_max_len_range": _estimated_range,
    "usable_blocks": _usable,
    "cached_segments": _segments,
    "cached_conversation_tokens": _cached_tokens,
    "share": _share,
    "predicted_available_gib": _predicted_available,
    "expected": _does_not_fit,
    "derived": _derived,
}


def _within(ours: Any, expected: Any) -> Any:
    if ours is _SKIP:
        return _SKIP
    return expected if ours[0] <= expected <= ours[1] else ours


def check_row(row: Row) -> None:
    """Recompute a row. Raises Differs, or NothingToCheck when no number of it can be recomputed and none must be."""
    check = row.get("check")
    if not isinstance(check, dict) or not isinstance(row.get("model"), str) or "id" not in row:
        raise Differs("not a row of startup observations: it needs id, model and check")
    case = Case(row, start_of(row))
    checked = 0
    for key, compare in _CHECKS.items():
        if key in check:
            ours = compare(case, check[key])
            if ours is _SKIP:
                continue
            checked += 1
            if ours != check[key]:
                raise Differs(f"{key}: ours {ours!r}, reference {check[key]!r}")
    must = check.get("status") in _MUST
    if case.start.agrees is False and must:
        raise Differs(f"what was printed is not what {row['model']} gives: {case.facts()}")
    if checked or case.start.agrees:
        return
    if must:
        raise Differs(case.start.trouble or f"nothing could be recomputed: the model {row['model']!r} is not known")
    raise NothingToCheck


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, plain or gzip. Raises OSError and ValueError as the file is."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def main(paths: list[str]) -> int:
    """Check every row of every file; the exit status."""
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    passed = failed = empty = 0
    for path in paths:
        try:
            for found in read_rows(Path(path)):
                row = found if isinstance(found, dict) else {}
                try:
                    check_row(row)
                    passed += 1
                except NothingToCheck:
                    empty += 1
                except (Differs, PdkvError, KeyError, TypeError, ZeroDivisionError) as error:
                    failed += 1
                    print(f"{row.get('id', '?')} {row.get('model', '?')}: {type(error).__name__}: {error}")
        except (OSError, ValueError) as error:
            print(f"cannot read {path}: {error}", file=sys.stderr)
            return 2
    if empty:
        print(f"{empty} rows hold nothing that can be recomputed")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
