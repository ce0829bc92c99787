"""Replay recordings of the reference (row formats of ../shared/oracle/README.md) against pdkv.

``python tests/conformance/replay.py FILE...`` reads JSON lines, plain or gzip, prints one line per failing row with the
first difference, then ``N passed, M failed``, and exits 1 on failure (2 when a file cannot be read). A row that
cannot be understood (a truncated line, a missing field, a group or an operation of an unknown kind) is a failing one;
fields that the replay does not know are ignored.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, it finds its neighbours too
from tests.conformance.capacity import is_capacity_row, replay_capacity
from tests.conformance.replay_pool import replay_pool
from tests.conformance.replay_remote import is_remote_row, replay_remote
from tests.conformance.replay_sched import replay_schedule
from tests.conformance.rows import Row, Unreadable

_GZIP_MAGIC = b"\x1f\x8b"


def replay_row(row: Row) -> None:
    """Raises `Mismatch` for a difference, `Unreadable` for a row of no known format."""
    replay_of(row)(row)


def replay_of(row: Row) -> Callable[[Row], object]:
    """The replay for the row's format, told by the fields that only this format has."""
    if is_capacity_row(row):
        return _replay_capacity
    if is_remote_row(row):
        return replay_remote
    if "requests" in row and "steps" in row:
        return replay_schedule
    if "steps" in row and "groups" in row.get("config", {}):
        return replay_pool
    raise Unreadable(f"no known row format has the fields {sorted(row)}")


def _replay_capacity(row: Row) -> None:
    refusal = replay_capacity(row)
    if refusal is not None:
        print(f"{row.get('id', '?')}: agrees, but its config is refused: {refusal}", file=sys.stderr)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of each line that is not blank; gzip is known by its first bytes, whatever the file is called."""
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP_MAGIC
    with gzip.open(path, "rb") if packed else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line.decode("utf-8", "replace")


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of one file, all of which must be well-formed."""
    for _, line in read_lines(path):
        yield json.loads(line)


def failure_of(line: str) -> tuple[str, str] | None:
    """(row id, what is wrong) for one line, ``None`` when it agrees."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return "?", f"not a JSON object: {error}"
    if not isinstance(row, dict):
        return "?", f"not a JSON object but a {type(row).__name__}"
    name = str(row.get("id", "?"))
    try:
        replay_row(row)
    except (AssertionError, Unreadable) as error:  # a difference, or our own recount noticed one
        return name, _one_line(error)
    except KeyError as error:
        return name, f"the row has no field {error}"
    except Exception as error:  # whatever a row makes of us is that row's failure, never the end of the run
        return name, f"{type(error).__name__}: {_one_line(error)}"
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main(paths: list[str]) -> int:
    """Exit status of the command line."""
    if not paths:
        print("name at least one file of recordings: replay.py FILE...", file=sys.stderr)
        return 2
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        print(f"there is no file {', '.join(missing)}", file=sys.stderr)
        return 2
    passed = failed = 0
    for path in paths:
        try:
            for number, line in read_lines(Path(path)):
                failure = failure_of(line)
                passed += failure is None
                failed += failure is not None
                if failure is not None:
                    print(f"{path}:{number}: {failure[0]}: {failure[1]}", flush=True)
        except (OSError, EOFError, zlib.error) as error:  # a gzip file that is damaged or ends too early
            failed += 1
            print(f"{path}: cannot be read to its end: {_one_line(error)}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
