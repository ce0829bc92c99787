"""Greedy tokens through P, D and the router equal `transformers` generate, in fp32, however the KV came about.

Every part is a process of its own that `pdkv serve` started, the requests are HTTP, KV moves by NIXL where there is a
wheel. P computes 128 tokens a step at most, so longer prompts are prefilled in chunks.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.e2e.processes import INSTANCE, Part, answer_to, tokens_of, until
from tests.e2e.reference import Reference
from tests.nixl_here import HAS_NIXL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NEW_TOKENS = 8
BLOCK = 16
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 127, 128, 160, 200, 257, 384, 600)
STORY = (
    "The lighthouse keeper wrote the weather down every evening, because his father had done so before him. "
    "On calm days the page stayed short; in autumn it filled with wind and names of ships. "
)
Expected = list[tuple[list[int], list[int]]]


class Parts:
    """P, D, a second D with a pool of 33 blocks, and the router in front of P and D."""

    def __init__(self, logs: pytest.TempPathFactory) -> None:
        folder = logs.mktemp("logs")
        pool = ("--kv-cache-memory-bytes", "256MiB", "--max-num-batched-tokens", "128")
        small = ("--num-gpu-blocks-override", "34", "--max-num-batched-tokens", "48", "--max-num-seqs", "8")
        options = {
            "prefill": ("prefill", "smollm2", *INSTANCE, *pool),
            "decode": ("decode", "smollm2", *INSTANCE, *pool),
            "small": ("decode", "smollm2", *INSTANCE, *small, "--max-model-len", "320"),
        }
        self.all = [Part(folder / f"{name}.log", *arguments) for name, arguments in options.items()]  # all load at once
        self.p, self.d, self.small = (part.ready() for part in self.all)
        urls = ("--prefill", self.p.url, "--decode", self.d.url)
        self.all.append(Part(folder / "router.log", "router", "--port", "0", *urls))
        self.router = self.all[-1].ready()

    def settled(self) -> bool:
        """Nobody holds a block."""
        return all(part.idle() for part in (self.p, self.d, self.small))


@pytest.fixture(scope="module")
def parts(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    running = Parts(tmp_path_factory)
    yield running
    for part in running.all:
        part.end()


@pytest.fixture(scope="module")
def expected(reference: Reference) -> Expected:
    """20 prompts that share no block, with transformers' continuations."""
    prompts = []
    for index, length in enumerate(LENGTHS):
        prompts.append(reference.tokenize(f"{index + 3} years later. " + STORY * (length // 20 + 1))[:length])
    assert len({tuple(prompt[:BLOCK]) for prompt in prompts}) == len(LENGTHS)
    return [(prompt, reference.generate(prompt, NEW_TOKENS)) for prompt in prompts]


def blocks(prompt: list[int]) -> int:
    return -(-len(prompt) // BLOCK)


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_twenty_prompts_through_the_router(parts: Parts, reference: Reference, expected: Expected) -> None:
    assert f"transport={'nixl' if HAS_NIXL else 'shm'}" in parts.d.ready_line
    for prompt, theirs in expected:
        before = parts.d.counter("pdkv:kv_load_blocks_total")
        answer = parts.router.ask(prompt, NEW_TOKENS)
        assert answer.headers["x-pdkv-prefill"] == "remote"
        assert parts.d.counter("pdkv:kv_load_blocks_total") - before == blocks(prompt), "its KV came from P"
        assert answer.json()["choices"][0]["prompt_token_ids"] == prompt
        reference.assert_equal(prompt, tokens_of(answer), theirs)
    until(parts.settled)


def test_again_with_prefix_hits_on_both_sides(parts: Parts, reference: Reference, expected: Expected) -> None:
    before = parts.d.counter("pdkv:kv_load_blocks_total")
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda one: parts.router.ask(one[0], NEW_TOKENS), expected))
    loaded = parts.d.counter("pdkv:kv_load_blocks_total") - before
    assert loaded == len(expected), "of each, D held everything but the last block"
    for answer, (prompt, theirs) in zip(answers, expected, strict=True):
        assert cached(answer) == (len(prompt) - 1) // BLOCK * BLOCK
        reference.assert_equal(prompt, tokens_of(answer), theirs)
    until(parts.settled)


def test_sixteen_at_once_equal_one_at_a_time(parts: Parts, reference: Reference, expected: Expected) -> None:
    """Computed afresh (another salt), so that chunks of some prompts share steps with whole ones and with decodes."""
    chosen = expected[-16:]
    with ThreadPoolExecutor(len(chosen)) as pool:
        answers = list(pool.map(lambda one: parts.router.ask(one[0], NEW_TOKENS, cache_salt="batch"), chosen))
    for answer, (prompt, theirs) in zip(answers, chosen, strict=True):
        assert cached(answer) == 0
        reference.assert_equal(prompt, tokens_of(answer), theirs)
    until(parts.settled)


def test_after_a_forced_preemption(parts: Parts, reference: Reference) -> None:
    """Four prompts of 8 blocks fill D's 33; their growth preempts some, which D then computes itself, in chunks."""
    count = 12
    prompts = [reference.tokenize(f"{name} came ashore. " + STORY * 5)[:128] for name in ("Ada", "Bo", "Cy", "Di")]
    leases = [parts.p.prefill(prompt) for prompt in prompts]
    parts.small.signal(signal.SIGSTOP)  # until all have asked: the first may not grow before the last is admitted
    try:
        sent = [
            parts.small.send(prompt, count, kv_transfer_params=lease)
            for prompt, lease in zip(prompts, leases, strict=True)
        ]
    finally:
        parts.small.signal(signal.SIGCONT)
    answers = [tokens_of(answer_to(one)) for one in sent]
    assert parts.small.counter("pdkv:kv_load_blocks_total") == 4 * 8
    assert parts.small.counter("vllm:num_preemptions_total") > 0, "the pool was meant to be too small"
    for prompt, ours in zip(prompts, answers, strict=True):
        reference.assert_equal(prompt, ours, reference.generate(prompt, count))
    until(parts.settled)


def test_a_shared_prefix_moves_only_what_d_lacks(parts: Parts, reference: Reference) -> None:
    head = reference.tokenize("In the shared beginning. " + STORY * 6)[:160]
    moved = []
    for tail in ("What did he write in autumn?", "Who taught him to keep the book, and why?"):
        prompt = head + reference.tokenize(tail)
        before = [parts.d.counter(name) for name in ("pdkv:kv_load_blocks_total", "vllm:nixl_bytes_transferred_sum")]
        ours = tokens_of(parts.router.ask(prompt, NEW_TOKENS))
        after = [parts.d.counter(name) for name in ("pdkv:kv_load_blocks_total", "vllm:nixl_bytes_transferred_sum")]
        moved.append((blocks(prompt), after[0] - before[0]))
        assert after[1] - before[1] == moved[-1][1] * parts.d.memory()["bytes_per_block"]
        reference.assert_equal(prompt, ours, reference.generate(prompt, NEW_TOKENS))
    assert [loaded for _, loaded in moved] == [moved[0][0], moved[1][0] - len(head) // BLOCK]
    until(parts.settled)


def test_text_is_tokenised_as_transformers_does(parts: Parts, reference: Reference) -> None:
    text = "Zürich liegt in der Schweiz. 🧪 def f(n):\n    return n"
    choice = parts.router.ask(text, 4).json()["choices"][0]
    assert choice["prompt_token_ids"] == reference.tokenize(text)
