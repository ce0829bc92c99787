"""How the bytes of a KV pool lie in its memory: what two instances must know of each other to move KV between them."""

from __future__ import annotations

from typing import Annotated

import msgspec

_MAX_POOL_BYTES = 1 << 62  # an offset into it, added to an address, must not wrap

Ranks = Annotated[int, msgspec.Meta(ge=1, le=1 << 10)]
Small = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of ``ranks`` tensor-parallel ranks: rank by rank bytes
    ``[num_blocks, layers, vectors, block_size, heads of the rank, head_bytes]``.

    ``vectors`` are those of a token, layer and head: K and V, or one latent (MLA). ``heads`` are the model's KV heads,
    1 for a latent. Ranks have equal shares of them; where there are more ranks than heads, each head is on several
    ranks in a row (spec pd-transfer 4.1: replicated). ``head_bytes`` are those of one vector. Raises ``ValueError`` for
    what cannot be.
    """

    ranks: Ranks
    num_blocks: Size
    layers: Small
    vectors: Small
    block_size: Size
    heads: Small
    head_bytes: Size

    def __post_init__(self) -> None:
        if self.heads % self.ranks and self.ranks % self.heads:
            raise ValueError(f"{self.heads} KV heads cannot be shared out over {self.ranks} ranks")
        if self.nbytes > _MAX_POOL_BYTES:
            raise ValueError(f"a KV pool of {self.nbytes} bytes")

    @property
    def rank_heads(self) -> int:
        """KV heads on each rank."""
        return max(1, self.heads // self.ranks)

    @property
    def copies(self) -> int:
        """Ranks that hold the same head."""
        return max(1, self.ranks // self.heads)

    @property
    def token_bytes(self) -> int:
        """What lies between two tokens of a block: the heads of one vector, on one rank."""
        return self.rank_heads * self.head_bytes

    @property
    def bytes_per_block(self) -> int:
        """Of a block on one rank, all layers."""
        return self.layers * self.vectors * self.block_size * self.token_bytes

    @property
    def rank_bytes(self) -> int:
        """Of one rank's blocks: where the next rank begins."""
        return self.num_blocks * self.bytes_per_block

    @property
    def nbytes(self) -> int:
        """Of the whole pool, all ranks."""
        return self.ranks * self.rank_bytes


def unlike(theirs: Geometry, ours: Geometry) -> str | None:
    """Why no KV can move between the two pools, with both values; None where it can.

    What a token's KV consists of must be the same. Block sizes and numbers of ranks may differ if one divides the other
    (spec pd-transfer 4: checked at run time).
    """
    for name, attribute in _EQUAL:
        their, our = getattr(theirs, attribute), getattr(ours, attribute)
        if their != our:
            return f"its KV pool has {their} {name}, ours {our}"
    for name, attribute, option in _DIVIDING:
        their, our = getattr(theirs, attribute), getattr(ours, attribute)
        if their % our and our % their:
            return f"it has {their} {name}, we have {our}: one must be a multiple of the other ({option})"
    return None


_EQUAL = (
    ("layers", "layers"),
    ("vectors a token, layer and head", "vectors"),
    ("KV heads", "heads"),
    ("bytes a head's vector", "head_bytes"),
)
_DIVIDING = (
    ("tokens a block", "block_size", "--block-size"),
    ("tensor-parallel ranks", "ranks", "--tensor-parallel-size"),
)
