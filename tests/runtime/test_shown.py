"""A stranger's text in logs and errors."""

from __future__ import annotations

import pytest

from pdkv.core.transfer.messages import Peer
from pdkv.runtime.peer_link import name_of
from pdkv.runtime.shown import quoted, readable
from pdkv.runtime.wire import BadFrame, Refused, decode_question, encode


def test_what_can_be_printed_stays() -> None:
    assert readable("prefill-3b1c at ärger:8") == "prefill-3b1c at ärger:8"
    assert (quoted("smol@ab"), quoted(None)) == ("'smol@ab'", "not set")


@pytest.mark.parametrize("text", ["a\nb", "\0", "\x1b[31m", "\ud800", "a\u2028b", "z" * 10**7, "\n" * 10**7])
def test_everything_else_becomes_short_and_harmless(text: str) -> None:
    for shown in (readable(text), quoted(text), name_of(Peer(text, text, 1))):
        assert shown.isprintable()
        assert len(shown) < 1500


def test_frames_cannot_write_into_the_log() -> None:
    frame = encode(Refused(seq=1, reason="r")).replace(b"refused", b"ref\n\0ed")
    with pytest.raises(BadFrame) as bad:
        decode_question(frame)
    assert str(bad.value).isprintable()
