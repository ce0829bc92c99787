"""The paged KV tensor, in memory that the mover can reach: on CPU shared with its process, on CUDA in ours."""

from __future__ import annotations

import numpy as np
import torch

from pdkv.errors import ConfigError, DoesNotFit
from pdkv.runtime.device_memory import DeviceMemory
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.units import format_bytes

__all__ = ["KvPool", "SharedMemory"]


class KvPool:
    """One contiguous KV tensor: ``[num_blocks, num_layers, 2, block_size, kv_heads, head_dim]``.

    Block-major: all layers of a block lie together, so a block is one transfer descriptor of ``bytes_per_block`` at
    ``block_id * bytes_per_block``. Block 0 is the null block; nothing reads what padding writes there.
    ``memory`` is what lies under the tensor: memory that other processes can map on CPU, an address on CUDA.
    """

    def __init__(self, tensor: torch.Tensor, memory: SharedMemory | DeviceMemory) -> None:
        """Wrap a zeroed contiguous tensor of the shape above; use `create`."""
        self.tensor = tensor
        self.memory = memory
        self.num_blocks, self.num_layers, _, self.block_size, self.kv_heads, self.head_dim = tensor.shape
        self.bytes_per_block = tensor[0].numel() * tensor.element_size()

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
    ) -> KvPool:
        """Allocate a zeroed pool. On CPU the pages are committed as they are first written.

        Raises ConfigError for a size below one block beside the null block, DoesNotFit when the memory is not there.
        """
        shape = (num_blocks, num_layers, 2, block_size, kv_heads, head_dim)
        if num_blocks < 2 or min(shape) < 1:
            raise ConfigError(
                f"a KV pool needs at least 2 blocks (one is the null block) and positive dimensions; asked for {shape}"
            )
        nbytes = num_blocks * num_layers * 2 * block_size * kv_heads * head_dim * dtype.itemsize
        if torch.device(device).type == "cpu":
            memory = SharedMemory(nbytes)
            flat = torch.from_numpy(memory.array(np.uint8, (nbytes,)))
            return cls(flat.view(dtype).view(shape), memory)
        try:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            torch.cuda.synchronize(device)  # no transfer may come before the zeros
        except torch.cuda.OutOfMemoryError as error:
            raise DoesNotFit(
                f"a KV pool of {num_blocks} blocks needs {format_bytes(nbytes)} on {device}, which is not free; "
                f"lower --gpu-memory-utilization or --num-gpu-blocks-override"
            ) from error
        return cls(tensor, DeviceMemory(tensor))

    def close(self) -> None:
        """Let the memory go (the tensor must not be used afterwards)."""
        self.tensor = torch.empty(0)
        self.memory.close()
