"""Which blocks of one side belong to which of the other."""

from __future__ import annotations

import numpy as np

from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.ports import Int32Array
from pdkv.core.transfer.messages import Grant, WriteGrant


def pair_blocks(
    manager: KVCacheManager, key: str, grant: Grant | WriteGrant, tokens: int, there: int
) -> tuple[Int32Array, Int32Array]:
    """int32[n] blocks of the grant and of owner ``key`` here, of all groups, that hold the same tokens' KV.

    What is needed to go on behind ``tokens`` tokens, without that of the first ``there``, a multiple of every block
    size.
    """
    remote, local, at = [], [], 0
    wanted = manager.peer_spans(tokens, there)
    granted = manager.peer_spans(grant.num_tokens, grant.first_token if isinstance(grant, WriteGrant) else 0)
    for group, ((first, stop), (start, end)) in enumerate(zip(wanted, granted, strict=True)):
        remote.append(np.asarray(grant.block_ids[at + first - start : at + stop - start], dtype=np.int32))
        local.append(manager.blocks_of(key, group)[first:stop])
        at += end - start
    return np.concatenate(remote), np.concatenate(local)
