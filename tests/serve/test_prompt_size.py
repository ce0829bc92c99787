from __future__ import annotations

import random
from typing import Any

import pytest
from tests.serve.fake import ByteTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pdkv.serve.prompt_size import TokenBound, most_characters, token_bound


class Wrapped:
    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()


def sentence_pieces(longest: int) -> Tokenizer:
    """A Unigram model as SentencePiece makes them: `▁` for spaces, runs of unknown characters are one `<unk>`."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("a", -2.0), ("b", -3.0), ("a" * longest, -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def byte_level(**changes: Any) -> Tokenizer:
    """Merges `aa`, `aaaa` and `ab`; the bytes 0x00-0x1f are not in the vocabulary."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {chr(256 + i) for i in range(32)})
    vocab = {piece: i for i, piece in enumerate([*alphabet, "aa", "aaaa", "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "a"), ("aa", "aa"), ("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_it_is_a_lower_bound(normalizer: Any) -> None:
    tokenizer = byte_level(**({} if normalizer is None else {"normalizer": normalizer}))
    tokenizer.add_special_tokens(["<eos>"])
    bound = token_bound(Wrapped(tokenizer))
    assert bound is not None
    assert bound.longest == len("<eos>")
    rng = random.Random(0)
    pieces = ["a", "aaaa", "ab", "\x04", "é", "e\u0301", "ᾂ", "\u1f82", "漢", "🧪", " ", "\n", "<eos>", "<eos"]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 40)))
        assert bound.tokens_at_least(text) <= len(tokenizer.encode(text).ids)
    assert bound.tokens_at_least("a" * 1000) == 200
    assert bound.tokens_at_least("\x04" * 1000) == 0, "these become no tokens"


def test_our_own_fake_has_one_token_a_byte() -> None:
    bound = token_bound(ByteTokenizer())
    assert bound is not None
    assert bound == TokenBound(longest=5, dropped=b"", normal_form=False)


def test_there_is_none_where_text_can_shrink() -> None:
    assert token_bound(None) is None
    assert token_bound(Wrapped(byte_level(normalizer=normalizers.Strip()))) is None
    assert token_bound(Wrapped(byte_level(pre_tokenizer=pre_tokenizers.Whitespace()))) is None
    removing = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert token_bound(Wrapped(byte_level(pre_tokenizer=removing))) is None
    swallowing = byte_level()
    swallowing.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert token_bound(Wrapped(swallowing)) is None
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    assert token_bound(Wrapped(words)) is None


@pytest.mark.parametrize("longest", [3, 40])
def test_no_text_of_few_tokens_is_longer_where_no_character_vanishes(longest: int) -> None:
    tokenizer = sentence_pieces(longest)
    rng = random.Random(longest)
    for _ in range(200):
        text = "".join(rng.choices(["a", "a" * longest, "b", " ", "  "], k=rng.randrange(1, 30)))
        tokens = len(tokenizer.encode(text).ids)
        assert len(text) <= most_characters(Wrapped(tokenizer), tokens)
    assert most_characters(Wrapped(tokenizer), 100) == 100 * max(longest, 16)
    assert len(tokenizer.encode("漢" * 10_000).ids) <= 2, "these vanish: only their number can be limited"


def test_a_token_that_is_added_counts_too() -> None:
    tokenizer = sentence_pieces(3)
    tokenizer.add_special_tokens(["<" + "x" * 70 + ">"])
    assert most_characters(Wrapped(tokenizer), 2) == 2 * 72
