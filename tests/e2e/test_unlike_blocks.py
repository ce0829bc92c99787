"""P has blocks of 32 tokens, one D of 16, another of 64: tokens equal `transformers`, with and without prefix hits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.processes import INSTANCE, Part, tokens_of, until
from tests.e2e.reference import Reference

from pdkv.units import cdiv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

THEIRS = 32
SIZES = (16, 64)
NEW_TOKENS = 8
STORY = (
    "The lighthouse keeper wrote the weather down every evening, because his father had done so before him. "
    "On calm days the page stayed short; in autumn it filled with wind and names of ships. "
)
LOADED, MOVED = "pdkv:kv_load_blocks_total", "vllm:nixl_bytes_transferred_sum"


class Parts:
    """P, and a D for each of `SIZES`."""

    def __init__(self, model: str, logs: pytest.TempPathFactory) -> None:
        folder = logs.mktemp("logs")

        def part(role: str, size: int) -> Part:
            pool = ("--kv-cache-memory-bytes", "128MiB", "--block-size", str(size))
            return Part(folder / f"{role}-{size}.log", role, model, *INSTANCE, *pool)

        self.all = [part("prefill", THEIRS), *(part("decode", size) for size in SIZES)]
        self.p, *ds = (one.ready() for one in self.all)
        self.d = dict(zip(SIZES, ds, strict=True))

    def settled(self) -> bool:
        return all(one.idle() for one in self.all)

    def load(self, size: int, prompt: list[int]) -> tuple[list[int], int, int]:
        """Through P and that D: the answer's tokens, D's blocks and the bytes that were read for it."""
        d = self.d[size]
        before = d.counter(LOADED), d.counter(MOVED)
        answer = d.ask(prompt, NEW_TOKENS, kv_transfer_params=self.p.prefill(prompt))
        assert answer.headers["x-pdkv-kv"] == "loaded"
        return tokens_of(answer), int(d.counter(LOADED) - before[0]), int(d.counter(MOVED) - before[1])


@pytest.fixture(scope="module")
def parts(stand_in: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    running = Parts(stand_in, tmp_path_factory)
    yield running
    for part in running.all:
        part.end()


@pytest.mark.parametrize("size", SIZES)
def test_what_was_prefilled_in_other_blocks_goes_on(parts: Parts, stand_in_reference: Reference, size: int) -> None:
    model, unit = stand_in_reference, min(size, THEIRS)
    unit_bytes = parts.d[size].memory()["bytes_per_block"] * unit // size
    for length in (5, 31, 32, 33, 64, 100, 257):
        prompt = model.tokenize(f"{length + size} years later. " + STORY * 9)[:length]
        ours, blocks, moved = parts.load(size, prompt)
        model.assert_equal(prompt, ours, model.generate(prompt, NEW_TOKENS))
        assert blocks == cdiv(length, size)
        assert moved == cdiv(length, unit) * unit_bytes
    until(parts.settled)


@pytest.mark.parametrize("size", SIZES)
def test_behind_a_hit_only_what_is_missing_is_read(parts: Parts, stand_in_reference: Reference, size: int) -> None:
    """160 tokens are in common: ten blocks of 16, two of 64 and a part of the third."""
    model = stand_in_reference
    head = model.tokenize(f"In the beginning, {size} years ago. " + STORY * 6)[:160]
    for number, tail in enumerate(("What did he write in autumn?", "Who taught him to keep the book, and why?")):
        prompt = head + model.tokenize(tail)
        ours, blocks, _ = parts.load(size, prompt)
        model.assert_equal(prompt, ours, model.generate(prompt, NEW_TOKENS))
        assert blocks == cdiv(len(prompt), size) - (160 // size if number else 0)
    until(parts.settled)
