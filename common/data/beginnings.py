"""Tokenizes texts that begin as the one before: the turns of a conversation, rendered one after the other."""

import re

from transformers import BatchEncoding, PreTrainedTokenizerBase

_CHECKED = 64  # Shortened encodings that are compared with whole ones, before they are trusted
_SHORT = 64  # Characters of an end whose tokens are remembered, as that of a prompt for an answer
_ENDS_KEPT = 1024  # Number of these ends


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
        names = {
            token.content for token in tokens if token.special and not token.normalized and token.content
        }
        self._special = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
        self._is_trusted = bool(names) and tokenizer.is_fast
        self._unchecked = _CHECKED
        self._text = ""
        self._ids = list[int]()
        self._encoding = BatchEncoding()  # Of the text before
        self._ends: dict[str, list[int]] = {}  # Tokens of short ends

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
            if not self._text.startswith(text[: match.end()]):
                continue
            number = self._encoding.char_to_token(match.start())
            if number is not None and self._encoding.token_to_chars(number) == match.span():
                return self._ids[:number] + self._end(text[match.start() :])
        return None

    def _end(self, text: str) -> list[int]:
        """Return the tokens of an end; those of the same short end are not made twice."""
        ids = self._ends.get(text)
        if ids is None:
            ids = list(self._encoded(text)["input_ids"])
            if len(text) <= _SHORT and len(self._ends) < _ENDS_KEPT:
                self._ends[text] = ids
        return ids

    def _whole(self, text: str) -> list[int]:
        encoding = self._encoded(text)
        ids = list(encoding["input_ids"])
        if self._is_trusted:
            self._text = text
            self._ids = ids
            self._encoding = encoding
        return list(ids)

    def _encoded(self, text: str) -> BatchEncoding:
        return self._tokenizer(
            text,
            add_special_tokens=False,
            verbose=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
