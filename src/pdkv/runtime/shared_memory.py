"""Memory that two processes can map: an anonymous file (memfd) that cannot shrink under a reader."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.errors import DoesNotFit
from pdkv.runtime.wire import MemoryKind
from pdkv.units import format_bytes

_F_ADD_SEALS = 1033  # fcntl.F_ADD_SEALS and friends are missing from Python's fcntl on some builds
_F_GET_SEALS = 1034
_F_SEAL_SEAL = 1
_F_SEAL_SHRINK = 2
_F_SEAL_GROW = 4


class SharedMemory:
    """``nbytes`` bytes of zeroed memory behind a file descriptor that a child process can inherit.

    The size is sealed: a process that maps it can never be killed by SIGBUS because another one truncated it.
    ``fd`` is close-on-exec (pass it with ``pass_fds``), ``address`` is where it is mapped in this process.
    ``kind`` and ``device`` say that it is host memory. Raises `DoesNotFit` when the kernel refuses the size.
    """

    kind: MemoryKind = "DRAM"
    device = 0

    def __init__(self, nbytes: int, name: str = "pdkv") -> None:
        if nbytes <= 0:
            raise ValueError(f"shared memory of {nbytes} bytes")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
            self._map(fd, nbytes, writable=True)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise DoesNotFit(
                f"cannot map {format_bytes(nbytes)} of shared memory ({error}); ask for a smaller KV pool"
            ) from error

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, writable: bool = True) -> SharedMemory:
        """Map memory another process made. Takes the descriptor over: ``close()`` closes it.

        Raises ``ValueError`` when the file is smaller than ``nbytes`` or could still shrink.
        """
        size = os.fstat(fd).st_size
        if size < nbytes or nbytes <= 0:
            raise ValueError(f"shared memory has {size} bytes, {nbytes} were announced")
        if not fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
            raise ValueError("shared memory is not sealed against shrinking")
        memory = cls.__new__(cls)
        memory._map(fd, nbytes, writable=writable)
        return memory

    def _map(self, fd: int, nbytes: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapping: mmap.mmap | None = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=protection)
        self.fd = fd
        self.nbytes = nbytes
        self.address: int = np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data

    def array(self, dtype: npt.DTypeLike, shape: tuple[int, ...] | int, offset_bytes: int = 0) -> npt.NDArray[Any]:
        """What lies at ``offset_bytes`` as an array of ``dtype`` and ``shape``; a view, valid after ``close()``, too.

        Raises ``ValueError`` when the memory ends before it.
        """
        if self._mapping is None:
            raise ValueError("shared memory is closed")
        count = math.prod(shape) if isinstance(shape, tuple) else shape
        return np.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset_bytes).reshape(shape)

    def close(self) -> None:
        """Close the descriptor and unmap; while arrays on it live, the memory itself stays until the last is gone."""
        if self._mapping is None:
            return
        mapping, self._mapping = self._mapping, None
        os.close(self.fd)
        try:
            mapping.close()
        except BufferError:
            pass  # views are alive: the mapping goes with the last of them
