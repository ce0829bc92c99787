"""Greedy tokens through P and D equal `transformers` generate, in fp32, however the KV came about.

A near-tie (the reference's two best logits closer than 1e-3) may go either way in floating point: it is reported with
both logits, and the comparison of that prompt ends there.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.e2e.harness import decode, idle_blocks, instance, prefill

from pdkv.core.ports import LoadFinished, Preempted
from pdkv.runtime.instance import Instance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NEW_TOKENS = 8
TIE = 1e-3
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 127, 128, 160, 200, 257, 384, 600)
STORY = (
    "The lighthouse keeper wrote the weather down every evening, because his father had done so before him. "
    "On calm days the page stayed short; in autumn it filled with wind and names of ships. "
)


def make_prompts(tokenizer: object) -> list[list[int]]:
    """20 prompts of the given lengths, all different from their first token on."""
    prompts = []
    for index, length in enumerate(LENGTHS):
        text = f"{index + 3} years later. " + STORY * (length // 20 + 1)
        prompts.append(tokenizer(text)["input_ids"][:length])  # type: ignore[operator]
    return prompts


class Reference:
    """transformers' own model on the same weights, with its own attention and cache."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def generate(self, prompt: list[int], count: int = NEW_TOKENS) -> list[int]:
        """Greedy tokens, end of text ignored."""
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()

    def top_two(self, prefix: list[int]) -> tuple[float, float]:
        """The two best next-token logits."""
        with torch.inference_mode():
            best = self.model(torch.tensor([prefix])).logits[0, -1].topk(2).values
        return float(best[0]), float(best[1])

    def assert_equal(self, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
        """Token for token, near-ties reported."""
        assert len(ours) == len(theirs)
        for position, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if our == their:
                continue
            first, second = self.top_two(prompt + theirs[:position])
            if first - second < TIE:
                warnings.warn(
                    f"near-tie: prompt of {len(prompt)} tokens, output {position}: logits {first:.6f} and "
                    f"{second:.6f}; ours {our}, transformers {their}",
                    stacklevel=2,
                )
                return
            raise AssertionError(
                f"prompt of {len(prompt)} tokens, output {position}: ours {our}, transformers {their} "
                f"(logits {first:.6f} > {second:.6f})"
            )


@pytest.fixture(scope="module")
def pair(smollm2: str, transport: str) -> Iterator[tuple[Instance, Instance]]:
    producer = instance("prefill", smollm2, transport=transport)
    consumer = instance("decode", smollm2, transport=transport)
    yield producer, consumer
    consumer.close()
    producer.close()


@pytest.fixture(scope="session")
def reference(smollm2: str) -> Reference:
    return Reference(smollm2)


@pytest.fixture(scope="session")
def expected(smollm2: str, reference: Reference) -> list[tuple[list[int], list[int]]]:
    """Prompts with transformers' continuations."""
    from transformers import AutoTokenizer

    prompts = make_prompts(AutoTokenizer.from_pretrained(smollm2))
    return [(prompt, reference.generate(prompt)) for prompt in prompts]


def settle(producer: Instance, consumer: Instance) -> None:
    """DONE has reached P and every block is idle on both sides."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if all(idle_blocks(side) == side.info.num_blocks - 1 for side in (producer, consumer)):
            return
        time.sleep(0.05)
    raise AssertionError(f"blocks are still held: P {producer.memory()}, D {consumer.memory()}")


@pytest.fixture(scope="module")
def chosen(expected: list[tuple[list[int], list[int]]], whole: bool) -> list[tuple[list[int], list[int]]]:
    """All prompts, or every fourth."""
    return expected if whole else expected[1::4]


def test_twenty_prompts_through_p_and_d(pair, reference, chosen) -> None:
    producer, consumer = pair
    for index, (prompt, theirs) in enumerate(chosen):
        source = prefill(producer, f"p{index}", prompt)
        flight = decode(consumer, f"d{index}", prompt, source, NEW_TOKENS).wait()
        assert len(flight.of(LoadFinished)) == 1, "the KV must have come from P"
        reference.assert_equal(prompt, flight.tokens, theirs)
    settle(producer, consumer)


def test_again_with_prefix_hits_on_both_sides(pair, reference, chosen) -> None:
    producer, consumer = pair
    size = consumer.info.block_size
    for index, (prompt, theirs) in enumerate(chosen[1::2]):
        source = prefill(producer, f"again-p{index}", prompt)
        assert source.cached_tokens == (len(prompt) - 1) // size * size
        flight = decode(consumer, f"again-d{index}", prompt, source, NEW_TOKENS).wait()
        (loaded,) = flight.of(LoadFinished)
        assert loaded.blocks == 1, "everything but the last block was cached on D"
        reference.assert_equal(prompt, flight.tokens, theirs)
    settle(producer, consumer)


def test_sixteen_at_once_equal_one_at_a_time(pair, reference, expected, whole) -> None:
    if not whole:
        pytest.skip("proved over the other transport")
    producer, consumer = pair
    chosen = expected[-16:]
    sources = [prefill(producer, f"batch-p{index}", prompt) for index, (prompt, _) in enumerate(chosen)]
    flights = [
        decode(consumer, f"batch-d{index}", prompt, source, NEW_TOKENS)
        for index, ((prompt, _), source) in enumerate(zip(chosen, sources, strict=True))
    ]
    for flight, (prompt, theirs) in zip(flights, chosen, strict=True):
        reference.assert_equal(prompt, flight.wait().tokens, theirs)
    settle(producer, consumer)


def test_chunked_prefill_and_forced_preemption(smollm2: str, transport: str, reference, pair, whole) -> None:
    """Four prompts fill D's pool to the last block but one; their growth preempts some, which D computes in chunks."""
    if not whole:
        pytest.skip("proved over the other transport")
    tokenizer = pair[0].model.tokenizer
    prompts = [tokenizer(f"{name} came ashore. " + STORY * 5)["input_ids"][:128] for name in ("Ada", "Bo", "Cy", "Di")]
    small = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "transport": transport}
    producer = instance("prefill", smollm2, **small)
    consumer = instance("decode", smollm2, num_gpu_blocks_override=1 + 4 * 8 + 1, max_model_len=160, **small)
    try:
        sources = [prefill(producer, f"p{index}", prompt) for index, prompt in enumerate(prompts)]
        flights = [
            decode(consumer, f"d{index}", prompt, source, NEW_TOKENS)
            for index, (prompt, source) in enumerate(zip(prompts, sources, strict=True))
        ]
        for flight, prompt in zip(flights, prompts, strict=True):
            reference.assert_equal(prompt, flight.wait().tokens, reference.generate(prompt))
        assert any(flight.of(Preempted) for flight in flights), "the pool was meant to be too small"
        settle(producer, consumer)
    finally:
        consumer.close()
        producer.close()


def test_shared_prefix_moves_only_what_d_lacks(pair, reference) -> None:
    producer, consumer = pair
    tokenizer = producer.model.tokenizer
    head = tokenizer("In the shared beginning. " + STORY * 6)["input_ids"][:160]
    moved = []
    for index, tail in enumerate(("What did he write in autumn?", "Who taught him to keep the book, and why?")):
        prompt = head + tokenizer(tail)["input_ids"]
        flight = decode(consumer, f"sd{index}", prompt, prefill(producer, f"sp{index}", prompt), 8).wait()
        (loaded,) = flight.of(LoadFinished)
        assert loaded.moved_bytes == loaded.blocks * consumer.info.bytes_per_block
        moved.append((len(prompt), loaded.blocks))
        reference.assert_equal(prompt, flight.tokens, reference.generate(prompt, 8))
    assert moved[0][1] == -(-moved[0][0] // 16)
    assert moved[1][1] == -(-moved[1][0] // 16) - len(head) // 16
    settle(producer, consumer)
