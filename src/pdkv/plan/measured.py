"""The few numbers of a budget that no formula gives: what was read off start-up logs, and from which.

``benchmarks/plan_accuracy.py`` derives them again without each model in turn and prints what the estimate is then off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdkv.layout.rules import VllmRules
from pdkv.units import GIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes that a process holds outside PyTorch's allocator after the profile run, and those of CUDA graphs.

    ``alone`` is one GPU: loaded kernels, cuBLAS (0.13 GiB up to 0.17, 0.25 GiB in 0.19). ``tensor_parallel`` comes on
    top of it: NCCL's channels and buffers for all-reduce, of a size that does not depend on the model (0.41 GiB up to
    0.16; 1.8 to 1.9 GiB in 0.19, which adds FlashInfer's workspaces where GPUs have NVLink). ``pipeline_only`` is all
    of a stage without tensor parallelism. ``per_graph`` is one captured CUDA graph (29 logs of 0.19: 0.65 to 1.79 GiB
    for 102 of them). ``before_alone`` and ``before_parallel`` are held before vLLM looks how much is free: the CUDA
    context, and NCCL (0.51 GiB on one GPU; 1.43 to 2.07 GiB on several).
    """

    alone: int
    tensor_parallel: int
    pipeline_only: int
    per_graph: int
    before_alone: int = int(0.51 * GIB)
    before_parallel: int = int(2.07 * GIB)

    def before_start(self, ranks: int) -> int:
        """Bytes that a process holds when vLLM checks that what it was told to take is free."""
        return self.before_parallel if ranks > 1 else self.before_alone

    def non_torch(self, tensor_parallel: int, pipeline_parallel: int) -> int:
        """Bytes outside PyTorch's allocator on one rank."""
        if tensor_parallel > 1:
            return self.alone + self.tensor_parallel
        return self.alone if pipeline_parallel == 1 else self.pipeline_only


_UP_TO_017 = Measured(
    alone=int(0.13 * GIB), tensor_parallel=int(0.415 * GIB), pipeline_only=int(0.07 * GIB), per_graph=10 * MIB
)
_SINCE_018 = Measured(
    alone=int(0.25 * GIB), tensor_parallel=int(1.84 * GIB), pipeline_only=int(0.07 * GIB), per_graph=10 * MIB
)


def measured(rules: VllmRules, *, fast_link: bool = True) -> Measured:
    """The measurements that hold for a release. ``fast_link``: the GPUs have NVLink, or nothing says otherwise."""
    if not rules.has_flashinfer_all_reduce:
        return _UP_TO_017
    if not fast_link:
        return replace(_SINCE_018, tensor_parallel=_UP_TO_017.tensor_parallel)
    return _SINCE_018
