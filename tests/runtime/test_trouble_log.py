"""Every failed load and expired lease reaches the log, and a thousand of them do not flood it."""

from __future__ import annotations

import logging

import pytest

from pdkv.core.events import Event, LeaseReleased, LoadFailed
from pdkv.runtime.trouble_log import TroubleLog

S = 10**9


def failed(request_id: str, cause: str) -> Event:
    return LoadFailed(request_id=request_id, at_ns=0, handle=1, cause=cause)


@pytest.fixture
def troubles(caplog: pytest.LogCaptureFixture) -> TroubleLog:
    caplog.set_level(logging.WARNING)
    return TroubleLog(logging.getLogger("trouble"))


def test_each_cause_is_told_at_once(troubles: TroubleLog, caplog: pytest.LogCaptureFixture) -> None:
    released = LeaseReleased(request_id="p", at_ns=0, lease_id=7, blocks=3, expired=False)
    expired = LeaseReleased(request_id="q", at_ns=0, lease_id=8, blocks=3, expired=True)
    troubles.take((failed("a", "it is gone"), failed("b", "it refused"), released, expired), 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert caplog.messages[:2] == [
        "the KV of 'a' was not loaded: it is gone",
        "the KV of 'b' was not loaded: it refused",
    ]
    assert caplog.messages[2].startswith("lease 8 of 'q' expired: nobody said that the 3 blocks had been read")


def test_one_line_a_second_for_one_cause(troubles: TroubleLog, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(1000):
        troubles.take((failed(f"r{i}", f"slot {i} names another lease"),), i)
        troubles.tick(i)
    assert len(caplog.messages) == 1
    troubles.tick(S)
    assert caplog.messages[1:] == [
        "the KV of 'r999' was not loaded: slot 999 names another lease (and 998 more like it)"
    ]
    troubles.tick(3 * S)
    troubles.take((failed("z", "slot 1 names another lease"),), 3 * S)
    assert caplog.messages[2:] == ["the KV of 'z' was not loaded: slot 1 names another lease"]


def test_a_cause_that_goes_on_is_told_less_and_less_often(
    troubles: TroubleLog, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(600):
        troubles.take((failed(f"r{second}", "the dtypes differ"),), second * S)
        troubles.tick(second * S)
    assert 10 <= len(caplog.messages) <= 20
    assert "59 more like it" in caplog.messages[-1]


def test_invented_causes_do_not_flood_it(troubles: TroubleLog, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(1000):
        troubles.take((failed("r", "x" * i),), 0)
    assert len(caplog.messages) < 100


def test_a_strangers_text_stays_on_one_short_line(troubles: TroubleLog, caplog: pytest.LogCaptureFixture) -> None:
    troubles.take((failed("a\nroot: all is well\0", "\x1b[2J" + "y" * 10**6),), 0)
    (message,) = caplog.messages
    assert message.isprintable()
    assert len(message) < 1500
