"""Tiny random decoders on disk, and a hand-driven engine around an `Executor`, for the runtime tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pdkv.core.ports import Batch
from pdkv.runtime.executor import Executor, StepResult
from pdkv.runtime.kv_pool import KvPool
from pdkv.runtime.models import LoadedModel, ModelFiles, load_model

BLOCK_SIZE = 4
torch.set_num_threads(1)  # on tiny tensors a second thread only waits, for seconds when other tests run beside
_SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "qwen3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "layer_types": ["full_attention"] * 3,
    },
    "granite": {"num_attention_heads": 4, "num_key_value_heads": 1, "logits_scaling": 3.0, "attention_multiplier": 0.2},
}


def save_tiny(kind: str, directory: Path, *, seed: int = 0, **changes: Any) -> ModelFiles:
    """Write a random three-layer model of this family (float32, vocabulary of 97) and return its files."""
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 97}
    values = {"max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**sizes, **values, **_SIZES.get(kind, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # the standard 0.02 makes near-uniform logits, in which nothing can be told apart
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    model.save_pretrained(directory)
    return ModelFiles(directory.name, directory)


def load_tiny(kind: str, directory: Path, **changes: Any) -> LoadedModel:
    """`save_tiny` and load on the CPU in float32."""
    return load_model(save_tiny(kind, directory, **changes))


def reference(model: LoadedModel, directory: Path) -> Any:
    """The same weights as plain transformers runs them."""
    del model
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()


def make_executor(model: LoadedModel, num_blocks: int = 128, block_size: int = BLOCK_SIZE) -> Executor:
    """An executor on a pool whose free blocks hold NaN: reading one shows at once."""
    pool = KvPool.create(num_blocks, model.num_layers, block_size, model.kv_heads, model.head_dim, model.dtype)
    pool.tensor[1:].fill_(float("nan"))
    return Executor(model, pool)


class HandEngine:
    """Rows with shuffled block tables, scheduled by the test: tokens, positions and blocks of each request."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        """All blocks but the null block are free, in random order."""
        self.executor = executor
        self.free = [int(b) for b in np.random.default_rng(seed).permutation(executor.pool.num_blocks - 1) + 1]
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}

    def add(self, request_id: str, prompt: list[int], sampling: Any, **options: Any) -> None:
        """Start a request."""
        self.executor.add_request(request_id, np.asarray(prompt, np.int32), sampling, **options)
        self.tokens[request_id] = list(prompt)
        self.computed[request_id] = 0
        self.blocks[request_id] = []

    def preempt(self, request_id: str) -> None:
        """Lose the KV: everything must be computed again, in other blocks."""
        self.free += self.blocks[request_id]
        self.blocks[request_id] = []
        self.computed[request_id] = 0

    def batch(self, rows: dict[str, int], *, pending: bool = False) -> Batch:
        """A batch of ``rows[id]`` tokens each; ``pending`` hides a last token that the executor itself sampled."""
        flat: list[int] = []
        for request_id, count in rows.items():
            begin = self.computed[request_id]
            flat += self.tokens[request_id][begin : begin + count]
            while len(self.blocks[request_id]) * self.executor.pool.block_size < begin + count:
                self.blocks[request_id].append(self.free.pop())
        width = max(len(self.blocks[i]) for i in rows)
        tables = np.zeros((len(rows), width), np.int32)
        for i, request_id in enumerate(rows):
            tables[i, : len(self.blocks[request_id])] = self.blocks[request_id]
        scheduled = np.asarray(list(rows.values()), np.int32)
        computed = np.asarray([self.computed[i] for i in rows], np.int32)
        known = np.asarray([len(self.tokens[i]) for i in rows], np.int32)
        tokens = np.asarray(flat, np.int32)
        hidden = np.full(len(rows), pending)
        if pending:
            tokens[np.cumsum(scheduled) - 1] = 0
        return Batch(tuple(rows), scheduled, computed, tokens, hidden, tables, computed + scheduled == known)

    def step(self, rows: dict[str, int], *, pending: bool = False) -> StepResult:
        """Execute such a batch and take in its tokens."""
        batch = self.batch(rows, pending=pending)
        result = self.executor.execute(batch)
        for i, (request_id, count) in enumerate(rows.items()):
            self.computed[request_id] += count
            if batch.samples[i]:
                self.tokens[request_id].append(int(result.outputs.tokens[i]))
        return result

    def left(self, request_id: str) -> int:
        """Known tokens that are not computed yet."""
        return len(self.tokens[request_id]) - self.computed[request_id]
