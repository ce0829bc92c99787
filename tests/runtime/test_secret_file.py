"""`--transfer-secret-file`: what is taken, what is refused with what to change, and what needs one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdkv.errors import ConfigError
from pdkv.runtime.peer_auth import secret_key
from pdkv.runtime.secret_file import read_secret, transfer_secret
from pdkv.serve.options import InstanceOptions

SECRET = b"0123456789abcdef0123456789abcdef"


def secret_file(directory: Path, content: bytes = SECRET, mode: int = 0o600) -> str:
    path = directory / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def options(**changes: str) -> InstanceOptions:
    return InstanceOptions(role="decode", model="smollm2", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o660])
def test_white_space_around_it_does_not_count(tmp_path: Path, mode: int) -> None:
    assert read_secret(secret_file(tmp_path, b"\n " + SECRET + b"\r\n", mode)) == SECRET


def test_its_key_is_what_peers_prove(tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    key = transfer_secret(options(transfer_secret_file=path), {"UCX_NET_DEVICES": "eth0"})
    assert key == secret_key(SECRET)
    assert key != secret_key(SECRET + b"!")


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path, mode=mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}\); chmod 600 {path}"):
        read_secret(path)


@pytest.mark.parametrize("content", [b"", b"hunter2", b" " * 100 + SECRET[:31] + b"\n" * 100])
def test_a_short_secret_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match=rf"holds {len(content.strip())} bytes.*at least 32.*openssl") as refused:
        read_secret(secret_file(tmp_path, content))
    assert content == b"" or content.strip().decode() not in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: cannot be read \(No such file"):
        read_secret(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no regular file"):
        read_secret(str(tmp_path))
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        read_secret(str(tmp_path / "fifo"))
    with pytest.raises(ConfigError, match="longer than 65536 bytes"):
        read_secret(secret_file(tmp_path, b"x" * 65537))


@pytest.mark.parametrize("devices", ["eth0", "all", "lo,eth0", "mlx5_0:1", ""])
def test_ucx_beyond_loopback_needs_a_secret(devices: str) -> None:
    with pytest.raises(ConfigError, match=rf"UCX_NET_DEVICES={devices}: .*--transfer-secret-file FILE"):
        transfer_secret(options(), {"UCX_NET_DEVICES": devices})
    assert transfer_secret(options(transport="shm"), {"UCX_NET_DEVICES": devices}) is None


@pytest.mark.parametrize("environment", [{}, {"UCX_NET_DEVICES": "lo"}, {"UCX_NET_DEVICES": "lo, lo"}])
def test_ucx_on_loopback_needs_none(environment: dict[str, str]) -> None:
    assert transfer_secret(options(), environment) is None
