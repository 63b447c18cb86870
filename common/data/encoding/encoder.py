"""Encode examples as token ids, and find which of them carry loss.

Every document ends with EOS, which is trained on; it starts with BOS where the tokenizer adds one by default. The end
of a prompt is found by tokenizing the prompt alone and with its completion, and taking the common prefix, so that the
ids are those of the whole text.
"""

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.data.encoding.chat_template import ChatTemplate
from common.data.encoding.fitting import RowFitter, TokenizedAnswer, run_ends
from common.data.shapes import Chat, Example, PlainText
from common.errors import UserError

_BATCH_EXAMPLES = 256
_BATCH_CHARACTERS = 1 << 20  # an encoding takes some hundred bytes per token


class EncodedSegment(NamedTuple):
    """The token ids of a document, or of a segment of one."""

    ids: np.ndarray
    """Token ids, uint32 [tokens]."""
    trained: np.ndarray
    """Whether each token carries loss, bool [tokens]."""
    ends: bool
    """Whether the document ends here."""


class Encoder:
    """Tokenizes examples with one tokenizer.

    Args:
        tokenizer: the checkpoint's tokenizer.
        fitting: makes records with a prompt fit into rows, and counts them; None: they stay as they are.

    Raises:
        UserError: (while encoding) a conversation, but no chat template or one that refuses it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, fitting: RowFitter | None = None) -> None:
        self.tokenizer = tokenizer
        self.fitting = fitting or RowFitter()
        self.eos: int | None = tokenizer.eos_token_id
        self._prefix = self._default_prefix()
        self._template = ChatTemplate(tokenizer)

    def encode(self, examples: Iterable[Example]) -> Iterator[EncodedSegment]:
        """Encode documents in the order of ``examples``; texts are tokenized in batches of bounded size."""
        batch: list[PlainText] = []
        characters = 0
        for example in examples:
            if isinstance(example, Chat):
                yield from self._encode_texts(batch)
                batch, characters = [], 0
                yield from self._encode_chat(example)
                continue
            batch.append(example)
            characters += len(example.prompt) + len(example.completion)
            if len(batch) >= _BATCH_EXAMPLES or characters >= _BATCH_CHARACTERS:
                yield from self._encode_texts(batch)
                batch, characters = [], 0
        yield from self._encode_texts(batch)

    def _default_prefix(self) -> list[int]:
        """Return the tokens that the tokenizer puts before every text by default: BOS, or none."""
        bare, full = self._tokenize(["a"])[0], list(self.tokenizer("a")["input_ids"])
        starts = [i for i in range(len(full)) if full[i : i + len(bare)] == bare]
        return full[: starts[0]] if starts else []

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        # Not verbose: documents longer than the model's context are cut later, which is no news.
        return list(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]) if texts else []

    def _encode_texts(self, batch: list[PlainText]) -> Iterator[EncodedSegment]:
        whole = self._tokenize([example.prompt + example.completion for example in batch])
        prompts = iter(self._tokenize([example.prompt for example in batch if example.prompt]))
        for example, ids in zip(batch, whole, strict=True):
            untrained = _common_prefix(next(prompts), ids) if example.prompt else 0
            trained = [False] * untrained + [True] * (len(ids) - untrained)
            if example.begins:
                ids, trained = self._prefix + ids, [not example.prompt] * len(self._prefix) + trained
            if example.ends:
                ids, trained = self._closed(ids, trained, trained_end=True)
            if not example.prompt:  # a text goes on in the next row
                yield _encoded(ids, trained, example.ends)
                continue
            for part in self.fitting.fit([TokenizedAnswer(ids, trained)], example.where):
                yield _encoded(part.ids, part.trained)

    def _closed(self, ids: list[int], trained: list[bool], *, trained_end: bool) -> tuple[list[int], list[bool]]:
        """Append EOS, unless it is there."""
        if self.eos is None or self._is_closed(ids):
            return ids, trained
        return [*ids, self.eos], [*trained, trained_end]

    def _is_closed(self, ids: list[int]) -> bool:
        """Return whether the last token is EOS, or is white space behind EOS, as at the end of many chat templates."""
        if len(ids) > 1 and ids[-2] == self.eos and not str(self.tokenizer.decode(ids[-1:])).strip():
            return True
        return bool(ids) and ids[-1] == self.eos

    def _encode_chat(self, chat: Chat) -> Iterator[EncodedSegment]:
        try:
            parts = self._parts(self._template.adapted(chat))
        except UserError:
            raise
        except Exception as error:  # templates are programs: they raise whatever they like
            raise UserError(
                f"{chat.where}: the tokenizer's chat template refuses this conversation "
                f"(roles {', '.join(str(message.get('role')) for message in chat.messages)}): {error}"
            ) from error
        for part in self.fitting.fit(parts, chat.where):
            yield _encoded(part.ids, part.trained)

    def _parts(self, chat: Chat) -> list[TokenizedAnswer]:
        """Return the conversation as one document; or as one for each answer, each as the model will see it.

        The latter is for templates that render a turn differently once others follow (Qwen3 drops earlier reasoning)
        and do not mark the assistant's tokens themselves.
        """
        wanted = chat.answers
        ids, trained = self._render(chat)
        if chat.prompt_messages is not None:
            start = _common_prefix(self._template.render(chat, chat.prompt_messages, ask=True), ids)
            trained = [place >= start for place in range(len(ids))]
        turns_decide = trained is None or bool(chat.untrained)
        spans = self._spans(chat, ids, wanted) if turns_decide or self.fitting.is_long(len(ids) + 1) else None
        if turns_decide:
            if spans is None:
                return [self._answer(chat, turn) for turn in wanted]
            in_turns = _within(spans, len(ids))
            trained = in_turns if trained is None else [a and b for a, b in zip(trained, in_turns, strict=True)]
        assert trained is not None
        ends = run_ends(trained) if spans is None else tuple(stop for _, stop in spans)
        return [TokenizedAnswer(*self._closed(ids, trained, trained_end=len(chat.messages) - 1 in wanted), ends)]

    def _render(self, chat: Chat, stop: int | None = None) -> tuple[list[int], list[bool] | None]:
        """Return token ids, and which of them the template marks as the assistant's; None if it marks none."""
        if chat.prompt_messages is None and self._template.marks_answers(chat):
            return self._template.render_marked(chat, stop)
        return self._template.render(chat, stop), None

    def _spans(self, chat: Chat, whole: list[int], turns: list[int]) -> list[tuple[int, int]] | None:
        """Find where in ``whole`` some turns are, by rendering growing prefixes of the conversation.

        Returns:
            None if a turn is rendered differently once others follow.
        """
        spans = []
        for turn in turns:
            after = whole if turn + 1 == len(chat.messages) else self._template.render(chat, turn + 1)
            if whole[: len(after)] != after:
                return None
            spans.append((self._start(chat, turn, after), len(after)))
        return spans

    def _answer(self, chat: Chat, turn: int) -> TokenizedAnswer:
        """Return the conversation up to a turn, with loss on that one."""
        ids, marked = self._render(chat, turn + 1)
        start = self._start(chat, turn, ids)
        trained = [place >= start and (marked is None or marked[place]) for place in range(len(ids))]
        return TokenizedAnswer(*self._closed(ids, trained, trained_end=True))

    def _start(self, chat: Chat, turn: int, ids: list[int]) -> int:
        """Find where the last turn in ``ids`` begins, behind the prompt for an answer."""
        ask = chat.messages[turn]["role"] == "assistant"
        return _common_prefix(self._template.render(chat, turn, ask=ask), ids)


def _encoded(ids: list[int], trained: list[bool], ends: bool = True) -> EncodedSegment:
    return EncodedSegment(np.array(ids, dtype=np.uint32), np.array(trained, dtype=bool), ends)


def _within(spans: list[tuple[int, int]], length: int) -> list[bool]:
    trained = [False] * length
    for start, stop in spans:
        trained[start:stop] = [True] * (stop - start)
    return trained


def _common_prefix(left: list[int], right: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
