"""A mover on a thread of the instance's process: what GPU pools get, whose memory no other process can register."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import socket
import threading
import traceback

from pdkv.errors import FenceLost
from pdkv.runtime.mover import Mover, make_transport
from pdkv.runtime.mover_channel import MoverChannel
from pdkv.runtime.transports.base import TransferMemory, Transport, TransportError
from pdkv.runtime.wire import Broken, pack

log = logging.getLogger("pdkv.control")

_END_TIMEOUT_S = 15.0  # the step under way (a slice at most) and the end of the agent take a fraction of a second
_STDERR = 2
_numbers = itertools.count(1)


class MoverThread(MoverChannel):
    """One life of a mover. The thread makes its transport, is the only one to call it, and destroys it at its end.

    The fence is the end of the transport: a NIXL agent that is destroyed has nothing under way (design 1), and
    `Transport.close` checks that it really is. A thread cannot be killed, so this fence can fail in three ways, and in
    each the memory is given up, never reused:

    - The thread is stuck in a call of NIXL's (GPU driver, network): `kill` waits `_END_TIMEOUT_S`, then raises
      `FenceLost`. The control thread ends with it, the instance fails: requests end with an error, /health says 503,
      and the pool is neither freed nor handed to another request. `pdkv serve` then ends its process: a fence again.
    - The agent's end fails or leaves the agent alive: `kill` and `reap` raise `FenceLost`, too.
    - The agent's end hangs. The bindings hold Python's lock meanwhile, so no thread of this process can notice. A
      watchdog outside Python ends the process then (exit code 1, every thread's stack on stderr).

    The watchdog is one per process (`faulthandler`): of two movers that end at the same time one may go unwatched.
    Unlike a mover process, one that crashes inside NIXL takes its instance along; peers see that as any dead peer.
    """

    def __init__(self, transport: str, agent: str, memory: TransferMemory) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self._memory = memory
        self._fenced = False
        self._patience_s = _END_TIMEOUT_S
        self._cause = "its control thread left"
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(theirs, transport, agent), name=f"pdkv-mover-{next(_numbers)}", daemon=True
        )
        self._thread.start()

    @property
    def name(self) -> str:
        return f"mover thread {self._thread.name}"

    @property
    def pid(self) -> None:
        return None

    def reap(self) -> str:
        self.kill()
        return self._cause

    def kill(self) -> None:
        """End the thread and its transport: after this nothing of it can write anywhere. Raises `FenceLost`.

        Takes `_END_TIMEOUT_S` at most, at once when it was in vain before.
        """
        self._closing.set()
        with contextlib.suppress(OSError):  # it may have ended by itself
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes it, whether it waits for a message or for room to send one
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            self._patience_s = 0.0
            raise FenceLost(
                f"the {self.name} does not end ({_END_TIMEOUT_S:.0f} s waited): transfers into this instance's KV "
                "memory may still be under way; end this process and start the instance again"
            )
        if not self._fenced:
            raise FenceLost(
                f"the {self.name} could not end its transfers ({self._cause}): they may still write to this "
                "instance's KV memory; end this process and start the instance again"
            )
        self._sock.close()

    # ------------------------------------------------------------------------------------------ the thread's own

    def _run(self, sock: socket.socket, transport_name: str, agent: str) -> None:
        with sock:
            try:
                transport = self._open(sock, transport_name, agent)
            except Exception:
                self._fenced = True  # nothing was posted yet
                self._cause = traceback.format_exc()
                log.error("the %s cannot start: %s", self.name, self._cause)
                return
            if transport is not None:
                self._work(sock, transport)
                self._end(transport)

    def _open(self, sock: socket.socket, name: str, agent: str) -> Transport | None:
        """The transport; None when it cannot start, which has then been said over the socket."""
        try:
            _enter_device(self._memory)
            return make_transport(name, agent, self._memory)
        except TransportError as error:
            self._fenced = True
            self._cause = str(error)
        try:
            sock.sendall(pack(Broken(reason=self._cause)))
        except OSError:
            log.debug("nobody waits to hear why the %s cannot start", self.name)
        return None

    def _work(self, sock: socket.socket, transport: Transport) -> None:
        """Serve until told to end. What goes wrong is kept as text: a traceback would keep the agent alive."""
        try:
            Mover(sock, transport, self._memory, closing=self._closing.is_set).run()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the control thread has closed its end
        except Exception:
            self._cause = traceback.format_exc()
            log.error("the %s failed: %s", self.name, self._cause)

    def _end(self, transport: Transport) -> None:
        faulthandler.dump_traceback_later(_END_TIMEOUT_S, exit=True, file=_STDERR)
        try:
            transport.close()
            self._fenced = True
        except Exception:
            self._cause = traceback.format_exc()
            log.error("the %s cannot end its transport: %s", self.name, self._cause)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _enter_device(memory: TransferMemory) -> None:
    """UCX copies GPU memory in the CUDA context that is current on the calling thread: make it the pool's."""
    if memory.pool.kind == "VRAM":
        import torch

        try:
            torch.cuda.set_device(memory.pool.device)
            torch.cuda.synchronize(memory.pool.device)  # the context exists now
        except RuntimeError as error:
            raise TransportError(f"the mover cannot use GPU {memory.pool.device} ({error})") from error
