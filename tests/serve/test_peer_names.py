from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import httpx
import msgspec
import pytest
from tests.core.helpers import source_for
from tests.serve.client import COMPLETIONS, GOOD_PARAMS, ask, post
from tests.serve.fake import FakeInstance

from pdkv.core.transfer.messages import Peer, RemoteSource
from pdkv.serve import peer_names
from pdkv.serve.peer_names import PeerNames


def source_at(host: str) -> RemoteSource:
    return msgspec.structs.replace(source_for(4, 4), peer=Peer("P", host, 5600))


def entry(family: socket.AddressFamily, address: str) -> tuple[Any, ...]:
    return (family, socket.SOCK_STREAM, 6, "", (address, 0))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that a fake name server was asked for; `hangs.test` never gets an answer while a test waits."""
    names: list[str] = []
    known = {
        "both.test": [entry(socket.AF_INET6, "fd00::1"), entry(socket.AF_INET, "10.0.0.5")],
        "six.test": [entry(socket.AF_INET6, "fd00::1")],
    }

    def getaddrinfo(name: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        names.append(name)
        if name == "hangs.test":
            threading.Event().wait(1.0)
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return known[name]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


def resolved(*hosts: str) -> list[str]:
    async def run() -> list[str]:
        names = PeerNames()
        try:
            return [one.peer.host for one in await asyncio.gather(*(names.resolve(source_at(h)) for h in hosts))]
        finally:
            names.close()

    return asyncio.run(run())


def test_addresses_are_taken_as_they_are(asked: list[str]) -> None:
    assert resolved("127.0.0.1", "::1", "10.1.2.3") == ["127.0.0.1", "::1", "10.1.2.3"]
    assert asked == []


def test_names_become_addresses_of_ipv4_first_and_are_asked_for_once(asked: list[str]) -> None:
    assert resolved("both.test", "six.test", "both.test", "none.test") == [
        *("10.0.0.5", "fd00::1", "10.0.0.5"),
        "none.test",
    ]
    assert sorted(asked) == ["both.test", "none.test", "six.test"]


def test_a_name_server_that_does_not_answer_holds_nobody_else_up(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_names, "_TIMEOUT_S", 0.05)

    async def run() -> None:
        names = PeerNames()
        slow = [asyncio.create_task(names.resolve(source_at("hangs.test"))) for _ in range(20)]
        assert (await names.resolve(source_at("six.test"))).peer.host == "fd00::1"
        assert {(await one).peer.host for one in slow} == {"hangs.test"}
        assert asked.count("hangs.test") == 1
        names.close()

    asyncio.run(run())


@pytest.mark.parametrize("max_tokens", [4, 0])
def test_the_instance_gets_addresses_also_for_grants_to_give_back(asked: list[str], max_tokens: int) -> None:
    instance = FakeInstance()
    params = {**GOOD_PARAMS, "remote_host": "both.test"}
    answer: httpx.Response = post(instance, COMPLETIONS, ask(kv_transfer_params=params, max_tokens=max_tokens))
    assert answer.status_code == (200 if max_tokens else 400)
    given = [request.source for request in instance.requests] if max_tokens else instance.released
    assert [source.peer.host for source in given if source] == ["10.0.0.5"]
