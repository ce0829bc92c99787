from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.fake import EOS, ByteTokenizer

from pdkv.serve.detokenizer import IncrementalDetokenizer, StopChecker, TextStream

TEXT = "Zürich 🧪: 漢字かな, e\u0301 and a family 👩‍👩‍👧‍👦.\n\ttabs  and   spaces"
BYTES = ByteTokenizer()


def streamed(tokenizer: Any, ids: list[int], prompt: list[int] = []) -> list[str]:  # noqa: B006
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [detokenizer.push(token) for token in ids]


def test_characters_torn_into_bytes_come_out_whole() -> None:
    ids = BYTES(TEXT)["input_ids"]
    pieces = streamed(BYTES, ids)
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)


@given(st.text(max_size=40), st.text(max_size=12))
def test_any_text_after_any_prompt(text: str, prompt: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert "".join(streamed(BYTES, BYTES(text)["input_ids"], BYTES(prompt)["input_ids"])) == text


def test_a_prompt_that_ends_inside_a_character_does_not_leak() -> None:
    ids = BYTES("a€b")["input_ids"]  # the euro sign is three bytes
    assert "".join(streamed(BYTES, ids[2:], ids[:2])).endswith("b")


def test_an_unfinished_character_is_never_shown() -> None:
    ids = BYTES("ok🧪")["input_ids"][:-1]
    assert "".join(streamed(BYTES, ids)) == "ok"


def test_invalid_bytes_for_ever_stay_bounded_and_text_goes_on() -> None:
    broken = BYTES("🧪")["input_ids"][:1] * 500
    detokenizer = IncrementalDetokenizer(BYTES, [])
    for token in broken:
        detokenizer.push(token)
        assert len(detokenizer._window) < 64
    assert "".join(detokenizer.push(t) for t in BYTES("fine")["input_ids"]).endswith("fine")


def test_special_tokens_show_nothing_unless_wanted() -> None:
    ids = [*BYTES("a")["input_ids"], EOS, *BYTES("b")["input_ids"]]
    assert "".join(streamed(BYTES, ids)) == "ab"
    shown = IncrementalDetokenizer(BYTES, [], skip_special_tokens=False)
    assert "".join(shown.push(t) for t in ids) == "a<eos>b"


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert streamed(None, [1, 2, 3]) == ["", "", ""]


@pytest.mark.slow
def test_the_real_tokenizer_agrees_with_decoding_at_once() -> None:
    found = sorted((Path.home() / ".cache/pdkv/converted").glob("SmolLM2*/tokenizer.json"))
    if not found:
        pytest.skip("smollm2 was not converted on this machine")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(found[0].parent, local_files_only=True)
    ids = tokenizer(TEXT * 3)["input_ids"]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    rng = random.Random(5)
    for _ in range(20):
        noise = [rng.randrange(tokenizer.vocab_size) for _ in range(60)]
        whole = tokenizer.decode(noise, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(streamed(tokenizer, noise)).rstrip("\ufffd") == whole.rstrip("\ufffd")


# ------------------------------------------------------------------------------------------------------- stop strings


def reference(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """Grow the text letter by letter; the first moment at which it ends with a stop string is the end."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_how_text_was_cut(text: str, stops: list[str], rng: Any, include: bool) -> None:
    checker = StopChecker(tuple(stops), include=include)
    shown, hit, at = "", None, 0
    while at < len(text) and hit is None:
        step = rng.randint(1, 5)
        piece, hit = checker.push(text[at : at + step])
        shown += piece
        at += step
        if hit is None:
            assert not any(stop in shown for stop in stops)
    if hit is None:
        shown += checker.flush()
    expected, stop = reference(text, stops, include=include)
    assert (shown, hit.stop if hit else None) == (expected, stop)


def test_only_what_may_be_a_stop_string_is_held_back() -> None:
    checker = StopChecker(("STOP",))
    assert checker.push("go ST") == ("go ", None)
    assert checker.push("AY") == ("STAY", None)
    text, hit = checker.push(" and STOP now")
    assert text == " and "
    assert hit is not None


def test_a_stop_token_shows_nothing_and_min_tokens_delays_stops() -> None:
    ids = BYTES("a.b.")["input_ids"]
    stream = TextStream(BYTES, [], stops=(".",), min_tokens=2)
    assert "".join(stream.push(t) for t in ids) == "a.b"
    assert stream.stop is not None
    letter = BYTES("b")["input_ids"][0]
    ended = TextStream(BYTES, [], stop_token_ids=frozenset({letter}))
    assert "".join(ended.push(t) for t in BYTES("ab")["input_ids"]) == "a"
