"""Find text that a tokenizer does not write: white space, an unknown or a control token, or nothing is in its place."""

import re
import unicodedata
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from common.data.examples import Chat
from common.data.selection import Counts
from common.data.spelling import leaves, texts_of


class WrittenText:
    """Counts records with text in whose place the tokenizer writes something else, which is trained there."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, counts: Counts) -> None:
        self._tokenizer = tokenizer
        self._counts = counts
        # Tokenizers that write all bytes name EOS as their unknown token.
        is_mark = tokenizer.unk_token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id)
        self._unknown: int | None = None if is_mark else tokenizer.unk_token_id
        special = [str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(special_tokens(tokenizer))]
        self._control = re.compile("|".join(map(re.escape, _controlling(tokenizer, special))) or "(?!)")
        self._tested: set[str] = set()
        self._lost: set[str] = set()

    def count(self, text: str, documents: Iterable[list[int]], where: str) -> None:
        """Count the record at ``where``, given the text and the token ids of what is made of it."""
        if self._unknown is not None:
            named = text.count(str(self._tokenizer.unk_token))  # text may hold the token's name
            if any(ids.count(self._unknown) > named for ids in documents):
                self._counts.unknown.add(0, where)
        if names := set(self._control.findall(text)):
            self._counts.add_control(names, where)
        characters = set(text)
        if new := sorted(characters - self._tested):
            self._test(new)
        if lost := characters & self._lost:
            self._counts.add_unwritten(lost, where)

    def _test(self, characters: list[str]) -> None:
        """Find out which characters have the tokens of none, or of a space. A letter in their place is a choice."""
        self._tested.update(characters)
        without, space, *encoded = tokenized(
            self._tokenizer, ["aa", "a a", *(f"a{each}a" for each in characters)]
        )
        bare = self._shown(without)
        for each, ids in zip(characters, encoded, strict=True):
            if self._tokenizer.unk_token_id in ids:  # of these, tokens are counted
                continue
            if each.isspace():
                # NFKC writes a space for each kind of it.
                is_space = unicodedata.normalize("NFKC", each) == " "
                is_lost = ids == without or (ids == space and not is_space)
            else:
                shown = self._shown(ids)
                is_lost = shown == bare or ids == space or ("\ufffd" in shown and each != "\ufffd")
            if is_lost:
                self._lost.add(each)

    def _shown(self, ids: list[int]) -> str:
        return "".join(str(self._tokenizer.decode(ids)).split())


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that control a conversation and are no text of it."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    # A token that is spelled as an empty text has no number.
    return added | {number for number in tokenizer.all_special_ids if number is not None}


def _controlling(tokenizer: PreTrainedTokenizerBase, names: list[str]) -> list[str]:
    """Return those names of tokens that the tokenizer takes for the tokens in a text, the longer ones first."""
    encoded = zip(names, tokenized(tokenizer, names), strict=True)
    taken = [name for name, ids in encoded if name and tokenizer.convert_tokens_to_ids(name) in ids]
    return sorted(taken, key=len, reverse=True)


def tokenized(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the token ids of texts, with nothing that the tokenizer puts around them."""
    # Not verbose: documents longer than the model's context are cut later, which is no news.
    return list(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]) if texts else []


def text_of(chat: Chat) -> str:
    """Return all texts of a conversation, and of its tools and documents."""
    texts = [text for message in chat.messages for _, text in texts_of(message)]
    leaves(chat.options, lambda _, text: texts.append(text) or text)  # type: ignore[func-returns-value]
    return "".join(texts)
