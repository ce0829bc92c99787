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


class BadRequest(PdkvError):
    """A request that can never be served as it stands (HTTP 400)."""


class TransferFailed(PdkvError):
    """A KV transfer between two instances that did not complete (HTTP 500 under the ``fail`` policy)."""


class LeaseExpired(TransferFailed):
    """The producer released the blocks before they were read: the slot no longer names the lease."""


class PeerRefused(TransferFailed):
    """The peer declined a handshake or a claim; the text carries its reason."""
