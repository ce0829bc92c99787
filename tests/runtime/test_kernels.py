"""The C kernels against torch: packed linear layers, paged decode attention, building and its absence."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.tiny import HandEngine, make_executor, save_tiny

from pdkv.errors import ConfigError
from pdkv.runtime.attention import STEP_KWARG, cacheless_step
from pdkv.runtime.kernels import build, native
from pdkv.runtime.kernels.activation import replace_gated_mlps
from pdkv.runtime.kernels.linear import PackedLinear, pack_linears
from pdkv.runtime.kernels.norm import replace_norms
from pdkv.runtime.kernels.pages import Arena, room
from pdkv.runtime.models import load_model
from pdkv.runtime.sampler import SamplingParams

kernels = native.load()
needs_kernels = pytest.mark.skipif(kernels is None, reason="no C compiler here")


@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 13, 32, 129])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 8), (17, 33), (100, 576), (48, 1536), (40, 3201)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_is_linear(rows: int, n: int, k: int, bias: bool) -> None:
    assert kernels is not None
    torch.manual_seed(rows * n * k)
    layer = torch.nn.Linear(k, n, bias=bias)
    x = torch.randn(rows, k)
    with torch.inference_mode():
        got = PackedLinear(layer, kernels, torch.float32)(x)
        torch.testing.assert_close(got, layer(x), rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("rows", [1, 4, 8, 12, 13, 40])
def test_bf16_storage_only_rounds_the_weights(rows: int) -> None:
    """Arithmetic stays fp32: the result is that of the rounded weights, not of rounded inputs."""
    assert kernels is not None
    torch.manual_seed(rows)
    layer = torch.nn.Linear(301, 77, bias=True)
    x = torch.randn(2, rows, 301)
    with torch.inference_mode():
        got = PackedLinear(layer, kernels, torch.bfloat16)(x)
        rounded = F.linear(x, layer.weight.bfloat16().float(), layer.bias)
    assert got.shape == (2, rows, 77)
    torch.testing.assert_close(got, rounded, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_rows_beside_it(storage: torch.dtype) -> None:
    """Bit by bit, from three rows on: tiles and blocks change with their number, the order of additions does not."""
    assert kernels is not None
    torch.manual_seed(0)
    packed = PackedLinear(torch.nn.Linear(1000, 70), kernels, storage)
    x = torch.randn(500, 1000)
    with torch.inference_mode():
        whole = packed(x)
        for rows in (3, 8, 9, 13, 65, 66, 129, 457):
            assert torch.equal(packed(x[:rows]), whole[:rows])


@needs_kernels
def test_packed_linear_takes_no_rows_and_strided_rows() -> None:
    assert kernels is not None
    layer = torch.nn.Linear(24, 20)
    packed = PackedLinear(layer, kernels, torch.float32)
    with torch.inference_mode():
        assert packed(torch.randn(0, 24)).shape == (0, 20)
        x = torch.randn(24, 9).t()
        torch.testing.assert_close(packed(x), layer(x), rtol=1e-5, atol=1e-5)


@needs_kernels
def test_pack_linears_replaces_all_of_them_and_the_embedding_tied_to_one() -> None:
    assert kernels is not None
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(50, 32),
            "block": torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 32)),
            "head": torch.nn.Linear(32, 50, bias=False),
        }
    )
    model["head"].weight = model["embed"].weight
    before = sum(p.numel() for p in model.parameters())
    ids = torch.tensor([1, 7, 49])
    with torch.inference_mode():
        expected = model["head"](model["block"](model["embed"](ids)))
        assert pack_linears(model, kernels, torch.float32) == 3
        got = model["head"](model["block"](model["embed"](ids)))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    held = {buffer.data_ptr(): buffer.numel() for buffer in model.buffers()}
    assert sum(held.values()) < before + 32 * kernels.panel_columns  # the tied weight is there once


def test_an_arena_hands_out_disjoint_aligned_tensors_and_no_more_than_it_has() -> None:
    arena = Arena(room(12) + room(4096) + room(2))
    tensors = [arena.empty((3,), torch.float32), arena.empty((4, 512), torch.bfloat16), arena.empty((1,), torch.int16)]
    with pytest.raises(ValueError, match="are left of the arena"):
        arena.empty((40,), torch.float32)
    del arena  # the tensors keep the memory
    for value, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(value + 1)
    assert [set(tensor.flatten().tolist()) for tensor in tensors] == [{1}, {2}, {3}]
    assert tensors[0].data_ptr() % (2 << 20) == 0


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 32, 1), (8, 1, 128, 32), (6, 2, 80, 8), (2, 1, 256, 16), (4, 2, 96, 128), (1, 1, 512, 4)],
)
@pytest.mark.parametrize("rows", [1, 3, 11])
def test_decode_attention_is_sdpa(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int, rows: int
) -> None:
    assert kernels is not None
    assert kernels.can_attend(heads, kv_heads, dim, dtype)
    torch.manual_seed(heads * dim + rows)
    lengths = torch.randint(1, 300, (rows,), dtype=torch.int32)
    lengths[0] = 1
    width = int(-(-lengths.max() // block_size))
    pool = torch.randn(rows * width + 1, 2, 2, block_size, kv_heads, dim).to(dtype)
    layer = pool[:, 1]
    tables = (torch.randperm(rows * width)[: rows * width].reshape(rows, width) + 1).to(torch.int32)
    # A flat batch in which the decoding tokens come in another order than the rows, with others between them.
    tokens = torch.randperm(rows + 4)[:rows].to(torch.int32)
    query = torch.randn(heads, rows + 4, dim).transpose(0, 1)
    out = torch.full((rows + 4, heads, dim), 7.0)
    order = torch.randperm(rows).to(torch.int32)

    kernels.decode_attention(query, out, layer, tables, order, tokens, lengths, 0.3)

    for i in range(rows):
        length, table = int(lengths[i]), tables[int(order[i])].long()
        key, value = (
            layer[table, plane].reshape(-1, kv_heads, dim)[:length].float().transpose(0, 1) for plane in (0, 1)
        )
        expected = F.scaled_dot_product_attention(
            query[int(tokens[i])].unsqueeze(1), key, value, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[int(tokens[i])], expected[:, 0], rtol=2e-5, atol=2e-5)
    others = [t for t in range(rows + 4) if t not in tokens.tolist()]
    assert bool((out[others] == 7).all())


@needs_kernels
def test_decode_attention_reads_nothing_beyond_the_context() -> None:
    assert kernels is not None
    pool = torch.full((3, 2, 16, 1, 64), float("nan"))
    pool[1] = torch.randn(2, 16, 1, 64)
    pool[2, :, :5] = torch.randn(2, 5, 1, 64)
    query, out = torch.randn(1, 4, 64), torch.empty(1, 4, 64)
    one = torch.zeros(1, dtype=torch.int32)
    tables = torch.tensor([[1, 2, 0]], dtype=torch.int32)
    kernels.decode_attention(query, out, pool, tables, one, one, torch.tensor([21], dtype=torch.int32), 0.125)
    assert bool(out.isfinite().all())


@needs_kernels
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_decode_attention_with_small_and_huge_scores(size: float) -> None:
    assert kernels is not None
    torch.manual_seed(0)
    pool = torch.randn(5, 2, 16, 1, 64) * size
    query, out = torch.randn(1, 3, 64), torch.empty(1, 3, 64)
    one = torch.zeros(1, dtype=torch.int32)
    tables = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    kernels.decode_attention(query, out, pool, tables, one, one, torch.tensor([64], dtype=torch.int32), 1.0)
    key, value = (pool[1:, plane].reshape(1, 64, 64).double() for plane in (0, 1))
    expected = F.scaled_dot_product_attention(query.transpose(0, 1).double(), key, value, scale=1.0, enable_gqa=True)
    torch.testing.assert_close(out[0].double(), expected[:, 0], rtol=1e-4, atol=1e-4 * size)


@needs_kernels
def test_a_nan_in_the_context_is_not_hidden() -> None:
    assert kernels is not None
    pool = torch.randn(2, 2, 16, 1, 64)
    pool[1, 0, 3] = float("nan")
    query, out = torch.randn(1, 2, 64), torch.empty(1, 2, 64)
    one = torch.zeros(1, dtype=torch.int32)
    tables = torch.tensor([[1]], dtype=torch.int32)
    kernels.decode_attention(query, out, pool, tables, one, one, torch.tensor([9], dtype=torch.int32), 0.125)
    assert bool(out.isnan().all())


@needs_kernels
def test_what_decode_attention_does_not_serve() -> None:
    assert kernels is not None
    assert not kernels.can_attend(8, 8, 100, torch.float32)  # no whole vectors
    assert not kernels.can_attend(8, 8, 1024, torch.float32)
    assert not kernels.can_attend(64, 1, 64, torch.float32)
    assert not kernels.can_attend(8, 8, 64, torch.float16)


@needs_kernels
@pytest.mark.parametrize("dim", [1, 7, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 3, 64, 200])
def test_rms_norm(rows: int, dim: int) -> None:
    assert kernels is not None
    x, weight = torch.randn(rows, dim) * 3, torch.randn(dim)
    expected = F.rms_norm(x, (dim,), weight, 1e-5)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-5)


class GoodRMSNorm(torch.nn.Module):
    def __init__(self, offset: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(48))
        self.offset, self.variance_epsilon = offset, 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (48,), self.offset + self.weight, self.variance_epsilon)


@needs_kernels
def test_only_norms_with_the_same_result_are_replaced() -> None:
    assert kernels is not None
    model = torch.nn.ModuleDict({"plain": GoodRMSNorm(0.0), "gemma": GoodRMSNorm(1.0), "layer": torch.nn.LayerNorm(48)})
    x = torch.randn(2, 3, 48)
    with torch.inference_mode():
        expected = model["plain"](x)
        assert replace_norms(model, kernels) == 1
        torch.testing.assert_close(model["plain"](x), expected, rtol=1e-5, atol=1e-5)
    assert isinstance(model["gemma"], GoodRMSNorm)


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 9])
def test_write_kv_puts_every_token_into_its_slot(tokens: int) -> None:
    assert kernels is not None
    pool = torch.zeros(5, 2, 2, 4, 3, 32)
    layer = pool[:, 1]
    slots = torch.randperm(20)[:tokens]
    blocks, offsets = slots // 4, slots % 4
    key, value = torch.randn(tokens, 3, 32).transpose(0, 1), torch.randn(3, tokens, 32)
    kernels.write_kv(key, value, layer, blocks, offsets)
    expected = torch.zeros_like(pool)
    expected[:, 1, 0].index_put_((blocks, offsets), key.transpose(0, 1))
    expected[:, 1, 1].index_put_((blocks, offsets), value.transpose(0, 1))
    assert torch.equal(pool, expected)


@needs_kernels
def test_two_threads_may_use_the_kernels_at_once() -> None:
    """One of them gets the workers, the other works alone; both are right."""
    assert kernels is not None
    layer = torch.nn.Linear(128, 256)
    packed = PackedLinear(layer, kernels, torch.float32)
    x = torch.randn(16, 128)
    with torch.inference_mode():
        expected = layer(x)

    def work() -> float:
        with torch.inference_mode():
            return max(float((packed(x) - expected).abs().max()) for _ in range(300))

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with ThreadPoolExecutor(3) as threads:
            assert max(threads.map(lambda _: work(), range(3))) < 1e-4
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_the_kernels_work_in_a_forked_child() -> None:
    """Worker threads do not survive a fork; new ones are started."""
    assert kernels is not None
    x, weight = torch.randn(64, 256), kernels.pack(torch.randn(512, 256), torch.float32)
    expected = kernels.linear(x, weight, None, 512)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(kernels.linear(x, weight, None, 512), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_kernels
def test_build_finds_what_it_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDKV_CACHE", str(tmp_path))
    first = build.build()
    stamp = first.stat().st_mtime_ns
    assert first.is_relative_to(tmp_path)
    assert build.build() == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_build_without_a_compiler_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDKV_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    with pytest.raises(ConfigError, match="install one"):
        build.build()
    assert build.main() == 0  # an installation goes on without


def test_build_with_a_failing_compiler_shows_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'cannot compile today' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PDKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(ConfigError, match="cannot compile today"):
        build.build()


def test_without_kernels_a_model_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compiler: torch alone, the same answers; bf16 storage is refused with what to do."""
    files = save_tiny("qwen3", tmp_path)

    def tokens() -> list[int]:
        engine = HandEngine(make_executor(load_model(files)))
        engine.add("a", list(range(3, 40)), SamplingParams(temperature=0), min_tokens=9, stop_token_ids=frozenset({2}))
        engine.step({"a": 37})
        for _ in range(8):
            engine.step({"a": 1})
        return engine.tokens["a"]

    expected = tokens()
    monkeypatch.setattr(native, "load", lambda: None)
    assert tokens() == expected
    with pytest.raises(ConfigError, match="install gcc"):
        load_model(files, weight_storage="bf16")


@needs_kernels
def test_bf16_storage_halves_the_weights_and_stays_close(tmp_path: Path) -> None:
    files = save_tiny("llama", tmp_path)
    plain, stored = load_model(files), load_model(files, weight_storage="bf16")
    assert stored.weights_bytes < 0.6 * plain.weights_bytes
    ids = torch.arange(3, 60)[None]
    step = cacheless_step([57], torch.device("cpu"))
    with torch.inference_mode():
        a, b = (
            m.model(ids, position_ids=step.position_ids, use_cache=False, **{STEP_KWARG: step}).logits
            for m in (plain, stored)
        )
    assert float((a - b).norm() / a.norm()) < 0.03


@needs_kernels
@pytest.mark.parametrize("count", [1, 5, 16, 33, 16384, 50_001])
def test_silu_mul(count: int) -> None:
    assert kernels is not None
    torch.manual_seed(count)
    gate, up = torch.randn(count) * 20, torch.randn(count)
    gate[0] = -200.0
    expected = F.silu(gate.double()) * up.double()
    kernels.silu_mul(gate, up)
    torch.testing.assert_close(gate.double(), expected, rtol=1e-6, atol=1e-12)


@needs_kernels
def test_silu_mul_keeps_nan_and_infinity() -> None:
    assert kernels is not None
    gate = torch.tensor([float("nan"), float("inf"), 0.0, -0.0])
    kernels.silu_mul(gate, torch.ones(4))
    assert bool(gate[0].isnan())
    assert gate[1:].tolist() == [float("inf"), 0.0, 0.0]


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
def test_only_gated_mlps_with_the_same_result_are_replaced(bias: bool) -> None:
    assert kernels is not None
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    class Doubled(LlamaMLP):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=72, mlp_bias=bias)
    relu = LlamaConfig(hidden_size=32, intermediate_size=72, hidden_act="relu")
    model = torch.nn.ModuleDict({"plain": LlamaMLP(config), "doubled": Doubled(config), "relu": LlamaMLP(relu)})
    x = torch.randn(5, 32)
    with torch.inference_mode():
        before, kept = model["plain"](x), x.clone()
        pack_linears(model, kernels, torch.float32)
        assert replace_gated_mlps(model, kernels) == 1
        torch.testing.assert_close(model["plain"](x), before, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, kept)
    assert type(model["doubled"]) is Doubled
    assert isinstance(model["relu"], LlamaMLP)
