"""From examples to token ids, and which of them carry loss.

Every document ends with EOS, which is trained on; it starts with BOS where the tokenizer adds one by default.
Where a prompt ends and its completion begins is found by tokenizing the prompt alone and both together and taking the
common prefix, so that the ids are those the tokenizer gives the whole text.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.data.shapes import Chat, Example, Plain
from common.errors import UserError

_BATCH_EXAMPLES = 256
_BATCH_CHARACTERS = 1 << 20  # an encoding takes some hundred bytes per token

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Encoded(NamedTuple):
    """Token ids of a document, or of the next segment of one."""

    ids: np.ndarray
    """uint32 [tokens]"""
    trained: np.ndarray
    """bool [tokens]: this token carries loss."""
    ends: bool
    """The document ends here."""


class Encoder:
    """Tokenizes examples with one tokenizer.

    Raises:
        UserError: (while encoding) a conversation, but no chat template or one that refuses it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.eos: int | None = tokenizer.eos_token_id
        self._prefix = self._default_prefix()
        template = tokenizer.chat_template
        self._marks_generation = (
            tokenizer.is_fast and isinstance(template, str) and bool(_GENERATION_MARK.search(template))
        )

    def encode(self, examples: Iterable[Example]) -> Iterator[Encoded]:
        """The encoded documents, in the order of ``examples``; texts are tokenized in batches of bounded size."""
        batch: list[Plain] = []
        characters = 0
        for example in examples:
            if isinstance(example, Chat):
                yield from self._encode_plain(batch)
                batch, characters = [], 0
                yield from self._encode_chat(example)
                continue
            batch.append(example)
            characters += len(example.prompt) + len(example.completion)
            if len(batch) >= _BATCH_EXAMPLES or characters >= _BATCH_CHARACTERS:
                yield from self._encode_plain(batch)
                batch, characters = [], 0
        yield from self._encode_plain(batch)

    def _default_prefix(self) -> list[int]:
        """What the tokenizer puts before every text by default: BOS, or nothing."""
        bare, full = self._tokenize(["a"])[0], list(self.tokenizer("a")["input_ids"])
        starts = [i for i in range(len(full)) if full[i : i + len(bare)] == bare]
        return full[: starts[0]] if starts else []

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        # Not verbose: documents longer than the model's context are cut later, which is no news.
        return list(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]) if texts else []

    def _encode_plain(self, batch: list[Plain]) -> Iterator[Encoded]:
        whole = self._tokenize([example.prompt + example.completion for example in batch])
        prompts = iter(self._tokenize([example.prompt for example in batch if example.prompt]))
        for example, ids in zip(batch, whole, strict=True):
            untrained = _common_prefix(next(prompts), ids) if example.prompt else 0
            trained = [False] * untrained + [True] * (len(ids) - untrained)
            if example.begins:
                ids, trained = self._prefix + ids, [not example.prompt] * len(self._prefix) + trained
            yield self._finish(ids, trained, trained_end=True, ends=example.ends)

    def _finish(self, ids: list[int], trained: list[bool], *, trained_end: bool, ends: bool = True) -> Encoded:
        if ends and self.eos is not None and not self._is_closed(ids):
            ids, trained = [*ids, self.eos], [*trained, trained_end]
        return Encoded(np.array(ids, dtype=np.uint32), np.array(trained, dtype=bool), ends)

    def _is_closed(self, ids: list[int]) -> bool:
        """EOS is there already, at most followed by white space, as many chat templates end."""
        if len(ids) > 1 and ids[-2] == self.eos and not str(self.tokenizer.decode(ids[-1:])).strip():
            return True
        return bool(ids) and ids[-1] == self.eos

    def _encode_chat(self, chat: Chat) -> Iterator[Encoded]:
        if self.tokenizer.chat_template is None:
            raise UserError(
                f"{chat.where} is a conversation, but the tokenizer has no chat template. "
                "Use the tokenizer of a chat model, or records with text or with prompt and completion strings."
            )
        try:
            yield from self._rendered(chat)
        except UserError:
            raise
        except Exception as error:  # templates are programs: they raise whatever they like
            raise UserError(
                f"{chat.where}: the tokenizer's chat template refuses this conversation "
                f"(roles {', '.join(str(message.get('role')) for message in chat.messages)}): {error}"
            ) from error

    def _rendered(self, chat: Chat) -> Iterator[Encoded]:
        messages = chat.messages
        ends_trained = messages[-1]["role"] == "assistant"
        if chat.prompt_messages is not None:
            ids = self._render(messages)
            start = _common_prefix(self._render(messages[: chat.prompt_messages], ask=True), ids)
            yield self._finish(ids, [i >= start for i in range(len(ids))], trained_end=True)
        elif self._marks_generation:
            out: Any = self.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            yield self._finish(
                list(out["input_ids"]), [bool(bit) for bit in out["assistant_masks"]], trained_end=ends_trained
            )
        else:
            yield from self._without_marks(messages, ends_trained)

    def _without_marks(self, messages: list[dict[str, Any]], ends_trained: bool) -> Iterator[Encoded]:
        """Find what the assistant says by rendering growing prefixes of the conversation.

        Some templates render a turn differently once others follow (Qwen3 drops earlier reasoning). Such a
        conversation becomes one document per turn of the assistant, each as the model will see it.
        """
        whole = self._render(messages)
        turns = [
            (self._render(messages[:i], ask=True), self._render(messages[: i + 1]))
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        if all(whole[: len(after)] == after for _, after in turns):
            trained = [False] * len(whole)
            for before, after in turns:
                start = _common_prefix(before, after)
                trained[start : len(after)] = [True] * (len(after) - start)
            yield self._finish(whole, trained, trained_end=ends_trained)
            return
        for before, after in turns:
            start = _common_prefix(before, after)
            yield self._finish(after, [i >= start for i in range(len(after))], trained_end=True)

    def _render(self, messages: list[dict[str, Any]], ask: bool = False) -> list[int]:
        """Token ids of ``messages``; with ``ask``, up to where the assistant would speak."""
        if not messages:
            return []
        out: Any = self.tokenizer.apply_chat_template(messages, add_generation_prompt=ask, return_dict=True)
        return list(out["input_ids"])


def _common_prefix(left: list[int], right: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
