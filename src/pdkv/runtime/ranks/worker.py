"""A tensor-parallel rank other than 0: ``python -m pdkv.runtime.ranks.worker FD PARENT_PID``.

It follows what rank 0 says over the inherited socket ``FD``: loads its share of the model, measures its memory, takes
its part of the KV pool, and then runs every batch that rank 0 runs. It decides nothing, samples nothing, talks to no
one else but the ranks' collectives, and dies with its parent.
"""

from __future__ import annotations

import gc
import logging
import socket
import sys
from pathlib import Path
from typing import TypeVar

from pdkv.errors import PdkvError, RankFailed
from pdkv.runtime.parent_death import die_with_parent, leave_stops_to_the_parent
from pdkv.runtime.ranks.messages import (
    Begin,
    Here,
    Inbox,
    MakePool,
    Measured,
    Profile,
    Step,
    ToRank,
    batch_of,
    failure,
)
from pdkv.runtime.wire import pack

Message = TypeVar("Message", bound=ToRank)


class _RankZeroLeft(Exception):
    """Rank 0 closed its side: there is nothing more to do."""


class _Conversation:
    """What rank 0 says, in the order that both sides know."""

    def __init__(self, sock: socket.socket) -> None:
        self.inbox = Inbox(sock)
        self._messages = self.inbox.messages()

    def next(self, kind: type[Message]) -> Message:
        """The next message, which must be of ``kind``."""
        message = next(self._messages, None)
        if message is None:
            raise _RankZeroLeft
        assert isinstance(message, kind), f"rank 0 said {type(message).__name__}, not {kind.__name__}"
        return message


def _work(sock: socket.socket, talk: _Conversation, begin: Begin) -> None:
    """From the weights to the last step."""
    import torch

    from pdkv.runtime.kv_pool import KvPool
    from pdkv.runtime.models.files import ModelFiles
    from pdkv.runtime.models.loader import load_model
    from pdkv.runtime.profiler import MemoryBaseline, ProfileLimits, determine_available_memory
    from pdkv.runtime.ranks.group import RankGroup
    from pdkv.runtime.runner import Runner

    torch.set_num_threads(begin.threads)
    device = torch.device(begin.device)
    on_cpu = device.type == "cpu"
    baseline = (
        MemoryBaseline(device, begin.total_bytes, begin.free_bytes) if on_cpu else MemoryBaseline.take(begin.device)
    )
    rendezvous = Path(begin.rendezvous)
    group = RankGroup(begin.rank, begin.ranks, rendezvous, device, lambda: sock.sendall(pack(Here())))
    files = ModelFiles(begin.model_name, Path(begin.directory))
    model = load_model(files, begin.device, begin.dtype, begin.weight_storage, group)

    profile = talk.next(Profile)
    measured = determine_available_memory(
        model,
        baseline,
        ProfileLimits(
            max_num_batched_tokens=profile.max_num_batched_tokens,
            max_num_seqs=profile.max_num_seqs,
            max_model_len=profile.max_model_len,
            block_size=profile.block_size,
            bytes_per_block=profile.bytes_per_block,
        ),
        gpu_memory_utilization=profile.gpu_memory_utilization,
        kv_cache_memory_bytes=profile.kv_cache_memory_bytes,
        share=profile.share,
        ranks_here=begin.ranks if on_cpu else 1,
    )
    sock.sendall(pack(Measured(available_kv_bytes=measured.available_kv_bytes)))

    shape = talk.next(MakePool).shape
    if on_cpu:
        (descriptor,) = talk.inbox.descriptors
        pool = KvPool.attach(descriptor, begin.rank, begin.ranks, shape, model.dtype)
    else:
        pool = KvPool.create(*shape[:2], *shape[3:], model.dtype, begin.device, ranks=begin.ranks)
    runner = Runner(model, pool)
    gc.collect()
    gc.freeze()  # what was loaded stays: no garbage collection need walk it
    while True:
        runner.forward(batch_of(talk.next(Step)))


def main(argv: list[str]) -> int:
    """Entry point of the process; exit code 2 for what rank 0 tells the person, 0 when rank 0 has closed its side."""
    die_with_parent(int(argv[2]))
    leave_stops_to_the_parent()
    sock = socket.socket(fileno=int(argv[1]))
    talk = _Conversation(sock)
    try:
        begin = talk.next(Begin)
        logging.basicConfig(
            level=logging.DEBUG if begin.debug else logging.INFO,
            format=f"%(asctime)s %(levelname)s rank {begin.rank} %(name)s: %(message)s",
        )
        _work(sock, talk, begin)
    except _RankZeroLeft:
        return 0
    except RankFailed as error:  # rank 0 knows, or is the one that has failed
        sys.stderr.write(f"{error}\n")
        return 1
    except PdkvError as error:
        sys.stderr.write(f"{error}\n")
        sock.sendall(pack(failure(error)))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
