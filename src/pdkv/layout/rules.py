"""Which release of vLLM the sizes agree with: 0.32, recorded to the block, and what older releases did differently.

The older rules serve to read logs of running deployments; those before 0.8 are the V0 engine's. They come from vLLM's
public change history, named at each property, and from field logs (0.19); a change that was merged between two releases
is put to the later one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError

OLDEST, NEWEST = (0, 6), (0, 32)


def _parts(version: str) -> tuple[int, int]:
    numbers = version.removeprefix("v").split(".")
    return int(numbers[0]), int(numbers[1])


@dataclass(frozen=True, slots=True)
class VllmRules:
    """The rules of a vLLM release, ``major.minor`` (whatever follows is ignored).

    Raises ConfigError for a release whose rules are not known.
    """

    version: str = "0.32"

    def __post_init__(self) -> None:
        try:
            known = OLDEST <= _parts(self.version) <= NEWEST
        except (ValueError, IndexError):
            known = False
        if not known:
            raise ConfigError(
                f"the rules of vLLM {self.version} are not known; known are 0.{OLDEST[1]} to 0.{NEWEST[1]}"
            )

    def _since(self, version: str) -> bool:
        return _parts(self.version) >= _parts(version)

    @property
    def default_block_size(self) -> int:
        """Tokens per block unless the user says otherwise (CacheConfig.DEFAULT_BLOCK_SIZE)."""
        return 16

    @property
    def null_blocks(self) -> int:
        """Blocks of a pool that never hold KV: block 0 pads block tables. The V0 engine kept none back."""
        return 1 if self._since("0.8") else 0

    @property
    def has_hybrid_manager(self) -> bool:
        """Whether windows and chunks get groups of their own (pull request 17996); before, they were kept in full."""
        return self._since("0.9")

    @property
    def group_size_stretch(self) -> float:
        """Groups take the size of the largest kind of layer while that is below so many times the smallest.

        1.5 since pull request 36684, 1.25 since 29303; before, groups always had the smallest kind's size.
        """
        if self._since("0.18"):
            return 1.5
        return 1.25 if self._since("0.12") else 1.0

    @property
    def joins_caches_that_merge(self) -> bool:
        """Whether layers whose caches differ in a reconcilable way share a bucket (there in 0.27)."""
        return self._since("0.27")

    @property
    def check_keeps_null_block(self) -> bool:
        """Whether the fit check leaves out the null block: an exact fit is a block short (pull request 47272)."""
        return self._since("0.26")

    @property
    def reserves_every_batch_in_flight(self) -> bool:
        """Whether windows reserve a batch for every step in flight, rather than one (pull request 47728)."""
        return self._since("0.26")

    @property
    def tokens_follow_concurrency(self) -> bool:
        """Whether the reported tokens are concurrency times length (issue 40691).

        Before, they were the blocks divided evenly among the groups, times the smallest block size.
        """
        return self._since("0.21")

    @property
    def blocks_follow_backend(self) -> bool:
        """Whether a latent model gets the blocks of the backend that serves it, rather than 64 tokens (128 on SM100).

        0.11 prints "Forcing kv cache block size to 64 for FlashMLA backend"; the logs of 0.19 have blocks of 16.
        """
        return self._since("0.19")

    @property
    def default_utilization(self) -> float:
        """Share of a GPU's memory that is used unless the user says otherwise (pull request 38284)."""
        return 0.92 if self._since("0.21") else 0.9

    @property
    def connectors_keep_hybrid_manager(self) -> bool:
        """Whether a KV connector that supports the hybrid manager leaves it on by default (pull request 41847).

        Before, any connector switched it off unless it was asked for (0.21 was seen to, issue 49537).
        """
        return self._since("0.22")

    @property
    def subtracts_graph_estimate(self) -> bool:
        """Whether estimated CUDA graphs are taken off the KV budget by default (spec memory-profile, section 11)."""
        return self._since("0.21")

    @property
    def samples_by_triton(self) -> bool:
        """Whether top-k and top-p are found without sorting the logits: activations fell by 60 % (field logs)."""
        return self._since("0.17")

    @property
    def has_flashinfer_all_reduce(self) -> bool:
        """Whether tensor parallelism keeps FlashInfer's workspaces too (there in the logs of 0.19, not in 0.17's)."""
        return self._since("0.18")

    @property
    def runs_on_v2_runner(self) -> bool:
        """Whether model runner V2 serves dense models by default (pull request 44443, merged before 0.28)."""
        return self._since("0.28")

    @property
    def budget_is_measured(self) -> bool:
        """Whether memory budgets were compared with start-up logs of this release or one that works alike."""
        return self._since("0.10") and not self._since("0.21")


DEFAULT_RULES = VllmRules()
