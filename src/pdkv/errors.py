"""The errors a person can meet, as one tree. Each says what was asked, what there is, and what to change."""

from __future__ import annotations


class PdkvError(Exception):
    """Root of every error that is shown to a person (CLI: exit code 2, no traceback; HTTP: a JSON error)."""


class ConfigError(PdkvError):
    """A setting, a file or a combination of settings that cannot be used."""


class UnsupportedModel(ConfigError):
    """A model whose layers pdkv cannot size or run; the text says what is missing."""


class DoesNotFit(PdkvError):
    """More memory was asked for than there is; the text carries both numbers in blocks or bytes."""


class BlocksInUse(PdkvError):
    """What was asked for needs an idle pool; the text says who holds how many blocks."""


class BadRequest(PdkvError):
    """A request that can never be served as it stands (HTTP 400)."""


class RankFailed(PdkvError):
    """A tensor-parallel rank of an instance has died, or hangs: the instance cannot go on. The text names it."""


class FenceLost(PdkvError):
    """A mover could not be ended: what it has under way may still write to the pool, so that memory is lost.

    The instance that owns the pool must stop serving and must not reuse the memory; the end of its process is the
    fence that is left.
    """


def in_words(error: BaseException) -> str:
    """What a foreign ``error`` says, in a line: its first, with the next where that ends in a colon; or what it is."""
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{first} {rest[0]}" if first.endswith(":") and rest else first
