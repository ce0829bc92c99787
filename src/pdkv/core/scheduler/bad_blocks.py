"""KV that was to be read into certain blocks and is not there: who has to do without it (spec scheduler 5)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pdkv.core.blocks.groups import FullGroup
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.blocks.tables import without_null
from pdkv.core.config import EngineConfig
from pdkv.core.ports import Int32Array
from pdkv.core.scheduler.request import Request, Status
from pdkv.core.scheduler.roster import Roster
from pdkv.core.scheduler.running import PlanRows
from pdkv.errors import ConfigError
from pdkv.units import cdiv


@dataclass(frozen=True, slots=True)
class _Hurt:
    """``request`` counted ``computed`` tokens as there; its block of entry ``first`` is the first bad one.

    ``own`` is the first bad one that no request before it has too. In the reference such a request computes the block
    again for both; but if that takes it several steps, the other goes on with bad KV meanwhile (not in `strict`).
    """

    request: Request
    computed: int
    first: int
    own: int | None


class BadBlocks:
    """Cuts back what requests count as computed, to the first bad block; by policy they go on from there or end."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager, roster: Roster) -> None:
        self._config = config
        self._manager = manager
        self._roster = roster
        self._strict = config.transfer.bad_blocks_hurt_all
        self._fails = config.transfer.load_failure == "fail"

    def take(self, blocks: tuple[int, ...], rows: PlanRows) -> list[Request]:
        """``blocks``, ids of the pool, were found bad when plan ``rows`` ran. Returns requests that are to end.

        What the plan, and those after it, have computed for requests that ran on bad blocks counts for nothing. Raises
        `ConfigError` for models of several groups, as the reference does; and, `strict`, for those that give blocks
        back while a request runs: what would have to be computed again looks at some that are gone.
        """
        self._check_groups(blocks)
        bad = np.unique(np.asarray(blocks, dtype=np.int32))
        loads = [one for one in self._roster.holding if one.status in (Status.LOADING, Status.LOADED)]
        loading = list(self._hurt(loads, bad, {}))
        given = dict(zip(rows.sequence.tolist(), rows.tokens.tolist(), strict=True))
        running = list(self._hurt(self._roster.running, bad, given))
        if self._strict:
            self._manager.forget_behind(without_null(bad))
        for hurt in loading:
            self._cut_load(hurt)
        for hurt in running:
            self._cut_running(hurt)
        if not self._fails:
            return []
        return [hurt.request for hurt in (*loading, *running) if not hurt.request.new.produce]

    def _check_groups(self, blocks: tuple[int, ...]) -> None:
        groups = self._config.groups
        if len(groups) > 1:
            raise ConfigError(
                f"blocks {list(blocks)} are reported as not loaded, and the model has {len(groups)} KV groups, whose "
                "blocks such a report does not tell apart. Report that the whole load failed (ReadEnded)"
            )
        if self._strict and not isinstance(groups[0], FullGroup):
            raise ConfigError(
                f"blocks {list(blocks)} are reported as not loaded, and of a {type(groups[0]).__name__} what lies in "
                "front of them is given back, so nothing can be computed again from there. Report that the whole load "
                "failed (ReadEnded)"
            )

    def _hurt(self, requests: Iterable[Request], bad: Int32Array, given: dict[int, int]) -> Iterable[_Hurt]:
        """``given``: tokens of the plan by request, under the number that a request has lost if it was disowned since.

        What such a plan computes does not count as computed in the first place.
        """
        marked: set[int] = set()
        for request in requests:
            computed = request.num_computed - given.get(request.sequence, 0)
            held = self._manager.blocks_of(request.request_id)[: cdiv(computed, self._manager.block_size)]
            entries = np.flatnonzero(np.isin(held, bad)).tolist()
            if entries:
                own = next((entry for entry in entries if int(held[entry]) not in marked), None)
                marked.update(held[entries].tolist())
                yield _Hurt(request, computed, entries[0], own)

    def _cut_load(self, hurt: _Hurt) -> None:
        """What has been loaded in front of the bad block is used, unless the load as a whole fails in the end."""
        request = hurt.request
        request.num_computed = self._kept(hurt)
        request.wait_cause = (
            f"a part of its KV did not arrive; from token {request.num_computed} on it is computed here"
        )
        if self._strict or request.status is Status.LOADED:
            self._manager.forget_from(request, request.num_computed)
        if request.status is Status.LOADED and not request.num_computed:
            self._roster.start_over(request, "its KV did not arrive; to be computed here")

    def _cut_running(self, hurt: _Hurt) -> None:
        request = hurt.request
        request.num_computed = self._kept(hurt)
        self._roster.running.disown(request)
        if self._strict:
            self._manager.forget_from(request, request.num_computed)
        elif self._fails and hurt.own is not None:
            behind = self._manager.blocks_of(request.request_id)[hurt.own :]
            self._manager.pool.unregister(without_null(behind.copy()))

    def _kept(self, hurt: _Hurt) -> int:
        if self._strict:
            return hurt.first * self._manager.block_size
        return hurt.computed if hurt.own is None else hurt.own * self._manager.block_size
