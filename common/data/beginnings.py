"""Tokenizes texts that begin as the one before: the turns of a conversation, rendered one after the other."""

import re

from transformers import PreTrainedTokenizerBase

_CHECKED = 64  # Shortened encodings that are compared with whole ones, before they are trusted


class Beginnings:
    """Tokenizes texts, each as a whole; what it has in common with the text before is not tokenized again.

    A tokenizer cuts texts at special tokens before it does anything else, so what is before a special token has the
    same tokens before any text. A tokenizer for which this is not true is found out by the first texts, and then all
    are tokenized as a whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        tokens = tokenizer.added_tokens_decoder.values()
        # What is normalized is looked for in another text.
        names = {token.content for token in tokens if token.special and not token.normalized and token.content}
        self._special = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
        self._is_trusted = bool(names) and tokenizer.is_fast
        self._unchecked = _CHECKED
        self._text, self._ids = "", list[int]()
        self._starts: dict[int, int] = {}  # Of the special tokens in the text before, by their first character

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with nothing that the tokenizer puts around it."""
        ids = self._continued(text) if self._is_trusted else None
        if ids is None:
            return self._whole(text)
        if self._unchecked:
            self._unchecked -= 1
            whole = self._whole(text)
            self._is_trusted = ids == whole
            return whole
        return ids

    def _continued(self, text: str) -> list[int] | None:
        """Return the tokens of a text most of which begins the one before; None if there is no such special token."""
        for match in reversed(list(self._special.finditer(text, len(text) // 2))):
            number = self._starts.get(match.start())
            if number is not None and self._text.startswith(text[: match.end()]):
                rest = self._tokenizer(text[match.start() :], add_special_tokens=False, verbose=False)
                return self._ids[:number] + list(rest["input_ids"])
        return None

    def _whole(self, text: str) -> list[int]:
        if not self._is_trusted:
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        encoded = self._tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        self._text, self._ids = text, list(encoded["input_ids"])
        places = {match.start(): match.end() for match in self._special.finditer(text)}
        spans = enumerate(encoded["offset_mapping"])
        self._starts = {first: number for number, (first, end) in spans if places.get(first) == end}
        return list(self._ids)
