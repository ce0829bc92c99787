"""``--transfer-secret-file``: what it must look like, and what may not be bound without one."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from pdkv.errors import ConfigError
from pdkv.runtime.peer_auth import secret_key
from pdkv.runtime.settings import InstanceSettings

_OPTION = "--transfer-secret-file"
_MIN_BYTES = 32
_MAX_BYTES = 1 << 16
_MAKE_ONE = "make one with: (umask 077; openssl rand -hex 32 > FILE), and give it to all instances"


def transfer_secret(settings: InstanceSettings, environment: Mapping[str, str] = os.environ) -> bytes | None:
    """The key that peers must prove and are proved, from the file; None without one.

    Raises `ConfigError` for a file that cannot be used, and, without one, when UCX is told to listen beyond loopback
    (what the side channel listens on is the options' own rule).
    """
    path = settings.transfer_secret_file
    if path is not None:
        return secret_key(read_secret(path))
    devices = environment.get("UCX_NET_DEVICES", "lo")
    if settings.transport != "shm" and any(device.strip() != "lo" for device in devices.split(",")):
        raise ConfigError(
            f"UCX_NET_DEVICES={devices}: NIXL would be reachable from other hosts, and peers prove nothing; give "
            f"{_OPTION} FILE ({_MAKE_ONE}), or leave UCX_NET_DEVICES out where all instances run on this host"
        )
    return None


def read_secret(path: str) -> bytes:
    """The content without white space at its ends. Raises `ConfigError`, which never shows any of it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hold up the start
        try:
            found = os.fstat(descriptor)
            content = os.read(descriptor, _MAX_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"{_OPTION} {path}: cannot be read ({error.strerror or error}); {_MAKE_ONE}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{_OPTION} {path}: is no regular file; {_MAKE_ONE}")
    if found.st_mode & stat.S_IRWXO:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"{_OPTION} {path}: every user of this host may use it (mode {mode:04o}); chmod 600 {path}")
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{_OPTION} {path}: is longer than {_MAX_BYTES} bytes; {_MAKE_ONE}")
    secret = content.strip()
    if len(secret) < _MIN_BYTES:
        raise ConfigError(
            f"{_OPTION} {path}: holds {len(secret)} bytes, a secret has at least {_MIN_BYTES}; {_MAKE_ONE}"
        )
    return secret
