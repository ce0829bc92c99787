"""A KV pool in GPU memory as the mover sees it: an address on a device, which no other process can inherit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdkv.runtime.wire import MemoryKind

if TYPE_CHECKING:
    import torch


class DeviceMemory:
    """The memory of a contiguous CUDA tensor: ``nbytes`` at ``address`` of GPU ``device`` (CUDA's index).

    It holds the tensor until ``close()``, so that memory which a transfer may still write to is not given to another.
    """

    kind: MemoryKind = "VRAM"

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.is_cuda, "the KV pool is not on a GPU"
        assert tensor.is_contiguous(), "the KV pool is not contiguous"
        self.address: int = tensor.data_ptr()
        self.nbytes: int = tensor.numel() * tensor.element_size()
        self.device: int = tensor.get_device()
        self._owner: torch.Tensor | None = tensor

    def close(self) -> None:
        """Let go of the tensor; the address must not be used afterwards."""
        self._owner = None
