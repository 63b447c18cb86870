"""Texts that begin as the one before have the tokens that they have alone, with tokenizers of every kind."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BatchEncoding, PreTrainedTokenizerFast

from common.data.beginnings import Beginnings

WORDS = [
    "hello",
    " world",
    "  two",
    "\n",
    "\n\n",
    "a",
    "é",
    "e\u0301",
    " ",
    "<x>",
    "ab",
    "\t",
    "Ａ",
    "?!",
    "assistant",
]
SPECIAL = ["<|s|>", "<|e|>", "<x>"]


def byte_level(_: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def prefix_space(_: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "never")
    return tokenizer


def sentencepiece(_: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def words(_: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


KINDS = [
    (byte_level, ""),
    (prefix_space, ""),
    *((metaspace, scheme) for scheme in ("first", "always", "never")),
]
KINDS += [(sentencepiece, ""), (words, "")]


def trained(make: Callable[[str], Tokenizer], scheme: str, **mark: bool) -> PreTrainedTokenizerFast:
    tokenizer = make(scheme)
    trainer = (
        trainers.WordPieceTrainer if isinstance(tokenizer.model, models.WordPiece) else trainers.BpeTrainer
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet() if make in (byte_level, prefix_space) else []
    texts = ["".join(WORDS), "hello world hello world ab ab", "assistant\nhello\n\n two"]
    tokenizer.train_from_iterator(
        texts,
        trainer(vocab_size=400, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False),
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    made.add_tokens([AddedToken(name, special=True, **mark) for name in SPECIAL])
    return made


@pytest.mark.parametrize("mark", [{}, {"lstrip": True}, {"rstrip": True}, {"normalized": True}], ids=str)
@pytest.mark.parametrize(("make", "scheme"), KINDS)
def test_tokens_are_those_of_the_whole_text(
    make: Callable[[str], Tokenizer], scheme: str, mark: dict[str, bool]
) -> None:
    tokenizer = trained(make, scheme, **{"normalized": False} | mark)
    pieces = st.lists(st.sampled_from(WORDS + SPECIAL), max_size=12).map("".join)

    @settings(deadline=None, max_examples=25)
    @given(conversation=st.lists(pieces, min_size=1, max_size=5), ends=st.lists(pieces, max_size=3))
    def check(conversation: list[str], ends: list[str]) -> None:
        beginnings = Beginnings(tokenizer)
        beginnings._unchecked = 0  # also where the first texts would find out
        whole = "<|s|>".join(conversation)
        texts = [whole, *(whole[:end] for end in range(0, len(whole), 7)), *(whole + end for end in ends)]
        for text in texts:
            assert beginnings.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]

    check()


def test_a_tokenizer_that_is_no_such_thing_is_found_out() -> None:
    tokenizer = trained(byte_level, "")

    class Counting(PreTrainedTokenizerFast):
        def __call__(self, text: str, **options: Any) -> BatchEncoding:  # type: ignore[override]
            encoding = super().__call__(text, **options)
            encoding["input_ids"] = [each + len(text) for each in encoding["input_ids"]]
            return encoding

    odd = Counting(tokenizer_object=tokenizer._tokenizer)
    odd.add_tokens([AddedToken("z", special=True, normalized=False)])
    beginnings = Beginnings(odd)
    for text in ("hello z hello z hello", "hello z hello z", "hello z hello"):
        assert beginnings.encode(text) == odd(text, add_special_tokens=False)["input_ids"]
    assert not beginnings._is_trusted
