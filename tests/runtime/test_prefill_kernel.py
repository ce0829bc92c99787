"""The C kernel of prefill attention against torch's attention in float64: sizes, contexts, padding, storage, NaN."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.tiny import HandEngine, load_tiny, make_executor

from pdkv.runtime.kernels import native
from pdkv.runtime.sampler import SamplingParams

kernels = native.load()
pytestmark = pytest.mark.skipif(kernels is None, reason="no C compiler here")


@dataclass
class Chunks:
    """Chunks of several rows in one flat batch, in which other tokens stand between them; a pool of NaN elsewhere."""

    query: torch.Tensor
    layer: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    contexts: torch.Tensor
    scale: float

    def run(self) -> torch.Tensor:
        """The flat batch's results, 7 where no chunk is."""
        assert kernels is not None
        out = torch.full(self.query.shape, 7.0)
        where = (self.tables, self.rows, self.starts, self.counts, self.contexts)
        kernels.prefill_attention(self.query, out, self.layer, *where, self.scale)
        return out

    def expected(self, i: int) -> torch.Tensor:
        """Chunk i's results [count, heads, dim] by torch, in float64 from the stored K and V."""
        _, _, _, kv_heads, dim = self.layer.shape
        start, count, context = (int(of[i]) for of in (self.starts, self.counts, self.contexts))
        table = self.tables[int(self.rows[i])].long()
        key, value = (
            self.layer[table, plane].reshape(-1, kv_heads, dim)[:context].transpose(0, 1).double() for plane in (0, 1)
        )
        mask = torch.ones(count, context, dtype=torch.bool).tril_(context - count)
        query = self.query[start : start + count].transpose(0, 1).double()
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=self.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def check(self) -> None:
        """Every chunk is right to fp32's rounding, and nothing else was written."""
        out = self.run()
        covered = torch.zeros(len(out), dtype=torch.bool)
        for i, (start, count) in enumerate(zip(self.starts.tolist(), self.counts.tolist(), strict=True)):
            got = out[start : start + count].double()
            torch.testing.assert_close(got, self.expected(i), rtol=1e-5, atol=1e-5)
            covered[start : start + count] = True
        assert bool((out[~covered] == 7).all())


def make_chunks(
    chunks: list[tuple[int, int]],
    *,
    heads: int = 9,
    kv_heads: int = 3,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Chunks:
    """``chunks`` are (new tokens, context with them), with blocks and rows shuffled and a token between two chunks."""
    torch.manual_seed(sum(context for _, context in chunks) + heads * dim)
    widths = [-(-context // block_size) for _, context in chunks]
    blocks = torch.randperm(sum(widths)) + 1
    pool = torch.full((len(blocks) + 1, 2, 2, block_size, kv_heads, dim), float("nan"), dtype=dtype)
    order = torch.randperm(len(chunks))
    tables = torch.zeros(len(chunks), max(widths) + 1, dtype=torch.int32)
    counts = torch.tensor([count for count, _ in chunks], dtype=torch.int32)
    taken = 0
    for i, (_, context) in enumerate(chunks):
        mine = blocks[taken : taken + widths[i]]
        taken += widths[i]
        tables[order[i], : widths[i]] = mine.to(torch.int32)
        slots = torch.arange(context)
        for plane in (0, 1):
            pool[mine[slots // block_size], 1, plane, slots % block_size] = torch.randn(context, kv_heads, dim).to(
                dtype
            )
    starts = (counts + 1).cumsum(0) - counts
    query = torch.randn(heads, int(counts.sum()) + len(chunks) + 1, dim).transpose(0, 1)
    return Chunks(
        query=query,
        layer=pool[:, 1],
        tables=tables,
        rows=order.to(torch.int32),
        starts=starts.to(torch.int32),
        counts=counts,
        contexts=torch.tensor([context for _, context in chunks], dtype=torch.int32),
        scale=1.6 * dim**-0.5,
    )


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 15, 16, 17, 31, 63, 127, 128, 129, 300, 511, 1025, 2100])
def test_a_whole_prompt(tokens: int) -> None:
    make_chunks([(tokens, tokens)]).check()


@pytest.mark.parametrize(
    ("count", "context"), [(1, 2), (2, 300), (5, 128), (16, 129), (100, 257), (130, 1000), (8, 2100)]
)
def test_a_chunk_behind_a_context(count: int, context: int) -> None:
    make_chunks([(count, context)]).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 128, 144, 256, 512])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (9, 3), (5, 1), (8, 1), (32, 1)])
def test_head_sizes_and_groups(dtype: torch.dtype, dim: int, heads: int, kv_heads: int) -> None:
    make_chunks([(70, 150)], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype).check()


@pytest.mark.parametrize("group", range(1, 9))
def test_every_group_size(group: int) -> None:
    make_chunks([(203, 203)], heads=2 * group, kv_heads=2).check()


@pytest.mark.parametrize("group", [25, 32])
def test_few_tokens_of_a_group_larger_than_a_strip(group: int) -> None:
    """A piece of one token is not cut any further, however few pieces there are."""
    make_chunks([(2, 2), (1, 40)], heads=group, kv_heads=1).check()


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32, 128])
def test_block_sizes(block_size: int) -> None:
    make_chunks([(50, 290)], block_size=block_size).check()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_several_chunks_of_one_batch(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        make_chunks([(2, 2), (300, 300), (3, 700), (65, 66), (129, 400), (17, 17)]).check()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_small_and_huge_scores(size: float) -> None:
    """Weights that differ by hundreds of powers of two: what is negligible is 0, nothing overflows."""
    chunks = make_chunks([(150, 400)])
    chunks.layer[:, 0] *= size
    got, expected = chunks.run()[1:151].double(), chunks.expected(0)
    assert bool(got.isfinite().all())
    # fp32 scores of this size are themselves off by `size` * 1e-6, which changes a weight by as much.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=max(1e-5, 2e-6 * size))


def test_a_later_maximum_shrinks_what_was_summed_before() -> None:
    """Scores that grow with the position: every tile of keys brings a new maximum."""
    chunks = make_chunks([(600, 600)])
    growth = torch.zeros(chunks.layer.shape[0] * 16)
    chunks.query.fill_(1.0)
    table = chunks.tables[0].long()
    growth = torch.arange(len(table) * 16, dtype=torch.float32).view(-1, 16, 1, 1) / 300
    chunks.layer[table, 0] = chunks.layer[table, 0] * 0.1 + growth[: len(table)]
    chunks.check()


def test_a_nan_in_the_context_is_not_hidden() -> None:
    """It reaches those that see it, and no other row."""
    chunks = make_chunks([(40, 300), (40, 300)])
    chunks.layer[chunks.tables[int(chunks.rows[0])].long()[3], 0, 5] = float("nan")
    out = chunks.run()
    assert bool(out[1:41].isnan().all())
    torch.testing.assert_close(out[42:82].double(), chunks.expected(1), rtol=1e-5, atol=1e-5)


def test_a_model_prefills_through_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one piece, in uneven chunks and by torch alone: the same tokens, and the kernel was really asked."""
    assert kernels is not None
    model = load_tiny("qwen3", tmp_path)
    asked: list[int] = []
    plain = native.Native.prefill_attention

    def counting(*arguments: object) -> None:
        asked.append(1)
        plain(*arguments)

    monkeypatch.setattr(native.Native, "prefill_attention", counting)

    def tokens(chunks: list[int]) -> list[int]:
        engine = HandEngine(make_executor(model))
        prompt = [3 + i * 7 % 90 for i in range(sum(chunks))]
        engine.add("a", prompt, SamplingParams(temperature=0), min_tokens=9, stop_token_ids=frozenset({2}))
        for chunk in [*chunks, *[1] * 8]:
            engine.step({"a": chunk})
        return engine.tokens["a"]

    whole = tokens([101])
    assert len(asked) == model.num_layers
    assert tokens([33, 2, 1, 65]) == whole
    assert len(asked) == 4 * model.num_layers
    monkeypatch.setattr(native, "load", lambda: None)
    assert tokens([101]) == whole
    assert len(asked) == 4 * model.num_layers
