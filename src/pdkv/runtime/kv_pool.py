"""The paged KV tensor, in memory that the mover can reach: on CPU shared with its process, on CUDA in ours."""

from __future__ import annotations

import math
import os

import numpy as np
import torch

from pdkv.errors import ConfigError, DoesNotFit
from pdkv.runtime.device_memory import DeviceMemory
from pdkv.runtime.geometry import Geometry
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.units import format_bytes

__all__ = ["KvPool", "SharedMemory"]


class KvPool:
    """One contiguous KV tensor: ``[num_blocks, num_layers, 2, block_size, kv_heads, head_dim]``.

    Block-major: all layers of a block lie together, so a block is one transfer descriptor of ``bytes_per_block``.
    Block 0 is the null block; nothing reads what padding writes there.

    ``memory`` is what lies under the tensor: memory that other processes can map on CPU, an address on CUDA. On CPU it
    is one file for all ``ranks`` of an instance (tensor parallel, each with its own ``kv_heads``): block ``b`` of rank
    ``r`` is at ``(r * num_blocks + b) * bytes_per_block``, and the tensor is the part of one rank.
    """

    def __init__(self, tensor: torch.Tensor, memory: SharedMemory | DeviceMemory, ranks: int = 1) -> None:
        """Wrap a contiguous tensor of the shape above; use `create` or `attach`."""
        self.tensor = tensor
        self.memory = memory
        self.ranks = ranks
        self.num_blocks, self.num_layers, _, self.block_size, self.kv_heads, self.head_dim = tensor.shape
        self.bytes_per_block = tensor[0].numel() * tensor.element_size()

    def geometry(self, heads: int) -> Geometry:
        """How the bytes of all ranks lie, of a model with so many KV heads."""
        return Geometry(
            ranks=self.ranks,
            num_blocks=self.num_blocks,
            layers=self.num_layers,
            vectors=2,
            block_size=self.block_size,
            heads=heads,
            head_bytes=self.head_dim * self.tensor.element_size(),
        )

    @classmethod
    def create(
        cls,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
        *,
        ranks: int = 1,
    ) -> KvPool:
        """Allocate a zeroed pool: rank 0's. On CPU the pages are committed as they are first written.

        ``kv_heads`` are those of one rank; on CPU the memory has room for all ``ranks``, on CUDA for this one. Raises
        ConfigError for a size below one block beside the null block, DoesNotFit when the memory is not there.
        """
        shape = (num_blocks, num_layers, 2, block_size, kv_heads, head_dim)
        if num_blocks < 2 or min(shape) < 1:
            raise ConfigError(
                f"a KV pool needs at least 2 blocks (one is the null block) and positive dimensions; asked for {shape}"
            )
        nbytes = cls.nbytes_of(shape, dtype)
        if torch.device(device).type == "cpu":
            memory = SharedMemory(ranks * nbytes)
            return cls(_part(memory, 0, shape, dtype), memory, ranks)
        try:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            torch.cuda.synchronize(device)  # no transfer may come before the zeros
        except torch.cuda.OutOfMemoryError as error:
            raise DoesNotFit(
                f"a KV pool of {num_blocks} blocks needs {format_bytes(nbytes)} on {device}, which is not free; "
                f"lower --gpu-memory-utilization or --num-gpu-blocks-override"
            ) from error
        return cls(tensor, DeviceMemory(tensor), ranks)

    @classmethod
    def attach(
        cls, fd: int, rank: int, ranks: int, shape: tuple[int, int, int, int, int, int], dtype: torch.dtype
    ) -> KvPool:
        """Rank ``rank``'s part of memory that rank 0 has made, mapped in another process. Takes ``fd`` over.

        ``shape`` is that of the tensor. Raises ValueError when the memory is not that of ``ranks`` such parts.
        """
        nbytes, there = ranks * cls.nbytes_of(shape, dtype), os.fstat(fd).st_size
        if there != nbytes:
            raise ValueError(f"a KV pool of {there} bytes; {ranks} ranks of shape {shape} have {nbytes} bytes")
        memory = SharedMemory.attach(fd, nbytes)
        return cls(_part(memory, rank, shape, dtype), memory, ranks)

    @staticmethod
    def nbytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes of one rank's tensor of that shape."""
        return math.prod(shape) * dtype.itemsize

    def close(self) -> None:
        """Let the memory go (the tensor must not be used afterwards)."""
        self.tensor = torch.empty(0)
        self.memory.close()


def _part(memory: SharedMemory, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of one rank."""
    nbytes = KvPool.nbytes_of(shape, dtype)
    return torch.from_numpy(memory.array(np.uint8, (nbytes,), rank * nbytes)).view(dtype).view(shape)
