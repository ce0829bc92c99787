"""Encoders of images, clips, ...: how much they may compute in a step, and how many of their outputs are kept."""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLimits:
    """Limits of the encoder that turns a request's items into embeddings, which stand for some of its prompt's tokens.

    ``step_embeddings`` may be computed in one step, ``cache_embeddings`` are kept at a time (whole items: an encoder
    looks at all of an item). ``whole_items``: a chunk of a prompt never ends inside an item that it begins in front of.
    """

    step_embeddings: int
    cache_embeddings: int
    whole_items: bool = False

    def __post_init__(self) -> None:
        for name in ("step_embeddings", "cache_embeddings"):
            if getattr(self, name) < 1:
                raise ConfigError(f"encoder limits: {name} is {getattr(self, name)}; it must be at least 1")

    @classmethod
    def of(cls, max_num_batched_tokens: int, longest_item: int, *, whole_items: bool = False) -> EncoderLimits:
        """vLLM's: both are a step's tokens, or the longest item where that is more.

        Raises `ConfigError` where ``whole_items`` could not be computed in any step.
        """
        if whole_items and longest_item > max_num_batched_tokens:
            raise ConfigError(
                f"an item of {longest_item} tokens must be computed in one step, and a step has "
                f"{max_num_batched_tokens} (max_num_batched_tokens). Raise it, or let items be computed in parts"
            )
        most = max(max_num_batched_tokens, longest_item)
        return cls(step_embeddings=most, cache_embeddings=most, whole_items=whole_items)
