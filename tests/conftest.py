"""What every test may ask for: the folder of reference data, and a GPU when there is one."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Modules and collected tests stay to the end: looking through them for garbage was over a third of collecting them.
gc.set_threshold(100_000, 20, 20)


def pytest_collection_finish() -> None:
    """What has been collected is not looked through again while tests run."""
    gc.freeze()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ``../shared`` (specifications and answers recorded from vLLM); skips the test where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no reference data: {folder} does not exist on this machine")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where torch sees no CUDA device; torch is only imported if there is such a test."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    try:
        import torch

        has_gpu = torch.cuda.is_available()
    except ImportError:
        has_gpu = False
    if not has_gpu:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
