"""Encode examples as token ids, find which of them carry loss, and make records fit into rows.

A text begins with BOS where the tokenizer adds one by default, and ends with EOS, which is trained on; neither is added
where the text has it already. A conversation is what its chat template renders, with nothing added. The end of a prompt
is found by tokenizing the prompt alone and with its completion, and taking the common prefix, so that the ids are those
of the whole text.

A plain text continues in the next row. A record with a question does not: its answer would be trained without it. So a
long conversation keeps its beginning, including the system prompt, up to the last answer that fits as a whole; if not
even the first does, that answer is cut at the end of the row, as a completion is, without an end mark.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from common.data.examples import Chat, Example, PlainText
from common.data.lost_text import WrittenText, special_tokens, text_of, tokenized
from common.data.messages import other_keys
from common.data.selection import Counts
from common.data.spelling import varied
from common.data.template import ChatTemplate, Form, answer_kind
from common.errors import UserError, on_one_line
from common.limits import LimitExceeded

_BATCH_EXAMPLES = 256
_BATCH_CHARACTERS = 1 << 20  # an encoding takes some hundred bytes per token
SEGMENT_CHARACTERS = 1 << 17  # Characters of the segments in which longer texts are tokenized
_CONTEXT_CHARACTERS = 256

# Token ids of messages, given these, the template's options and, as `ask`, whether to prompt for an answer.
Render = Callable[..., list[int]]

_OTHER = "qz0zq"  # Text that no conversation has


class EncodedSegment(NamedTuple):
    """The token ids of a document, or of a segment of one."""

    ids: np.ndarray  # Token ids, uint32 [tokens]
    trained: np.ndarray  # Whether each token carries loss, bool [tokens]
    ends: bool  # Whether the document ends here


class TokenizedAnswer(NamedTuple):
    """The token ids of a record with a prompt, or of one of its answers with all that comes before it."""

    ids: list[int]
    trained: list[bool]  # Whether each token carries loss
    ends: tuple[int, ...] = ()  # Positions behind its answers where it may be cut, in order

    def before(self, stop: int) -> "TokenizedAnswer":
        return TokenizedAnswer(self.ids[:stop], self.trained[:stop])

    @property
    def teaches(self) -> bool:
        """Whether any token carries loss and has one before it to be predicted from."""
        return any(self.trained[1:])


class RowFitter(Counts):
    """Makes records fit into rows, and counts those that do not: cut if ``truncate``, else left out."""

    def is_long(self, tokens: int) -> bool:
        return tokens > self.seq_len

    def fit(self, parts: list[TokenizedAnswer], where: str) -> list[TokenizedAnswer]:
        """Return what goes into rows of a record, or of its parts, one for each of its answers."""
        tokens = sum(len(part.ids) for part in parts)
        if not any(part.teaches for part in parts):
            self.untrained.add(tokens, where)
            return []
        if not any(self.is_long(len(part.ids)) for part in parts):
            return parts
        fitting = self._cut(parts) if self.truncate else []
        (self.cut if fitting else self.left_out).add(tokens - sum(len(part.ids) for part in fitting), where)
        return fitting

    def _cut(self, parts: list[TokenizedAnswer]) -> list[TokenizedAnswer]:
        whole = [part for part in parts if part.teaches and not self.is_long(len(part.ids))]
        if whole:
            return whole
        first = next(part for part in parts if part.teaches)
        shorter = [first.before(end) for end in first.ends if not self.is_long(end)]
        shorter = [part for part in shorter if part.teaches] or [first.before(self.seq_len)]
        return shorter[-1:] if shorter[-1].teaches else []


class AnswerFinder:
    """Finds answers by rendering parts and variants of a conversation."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def spans(self, chat: Chat, whole: list[int], turns: list[int]) -> list[tuple[int, int]] | None:
        """Find where some turns are in ``whole``; None if a turn is rendered differently once others follow."""
        spans = []
        for turn in turns:
            last = turn + 1 == len(chat.messages)
            after = whole if last else self._render(chat.messages[: turn + 1], chat.options)
            if whole[: len(after)] != after:
                return None
            spans.append((self.start(chat, turn, after), len(after)))
        return spans

    def start(self, chat: Chat, turn: int, ids: list[int]) -> int:
        """Return where an answer begins in ``ids``, the rendering that ends with it: behind the prompt for it."""
        history = chat.messages[:turn]
        answer = chat.messages[turn]
        options = chat.options
        with contextlib.suppress(Exception):  # no template has to render what is no whole conversation
            asked = self._render(history, options, ask=True)
            start = common_prefix(asked, ids)
            if history and start == len(asked):
                return start
            if history and start >= common_prefix(self._render(history, options), asked):
                # Differs in the header alone
                return start
        # What comes before is rendered differently now. Vary the answer, then the rest, and see where ids change.
        first = common_prefix(ids, self._render([*history, varied(answer, _OTHER)], options))
        others = [varied(message, _OTHER) for message in history]
        last = (
            len(ids) - common_prefix(ids[::-1], self._render([*others, answer], options)[::-1])
            if history
            else 0
        )
        if last > first:
            raise UserError(f"{chat.where}: the chat template mixes turn {turn + 1} with those before it.")
        return max(last, self._behind_header(ids[:first], options))

    def _behind_header(self, ids: list[int], options: dict[str, Any]) -> int:
        """Return where the header of an answer ends that is the last one in ``ids``; their number if there is none."""
        probe = [{"role": "user", "content": _OTHER}]
        try:
            asked = self._render(probe, options, ask=True)
            header = asked[common_prefix(self._render(probe, options), asked) :]
        except Exception:  # nor does a template have to take a question alone
            return len(ids)
        starts = [at for at, token in enumerate(ids) if token in header[:1]]
        return starts[-1] + common_prefix(header, ids[starts[-1] :]) if starts else len(ids)


class AnswerEnds:
    """Has the model learn where an answer ends: a special token, at which generation stops, must carry loss.

    Most templates end an answer with one. Some begin the next turn with it (GLM-4.5: ``<|user|>``), or leave it out of
    what they mark as the assistant's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)

    def train(
        self, answer: TokenizedAnswer, stops: Collection[int], following: int | None
    ) -> tuple[TokenizedAnswer, bool]:
        """Return ``answer`` with loss on the tokens that end its answers, and whether each of them has such a token.

        Args:
            stops: tokens at which generation stops.
            following: token to add where the rendering ends without one; None: none can be added.
        """
        ids = list(answer.ids)
        trained = list(answer.trained)
        ends = []
        all_end = True
        for end in answer.ends:
            closing = self._closing(ids, end, stops)
            if closing is None and end == len(ids) and following is not None:
                ids.append(following)
                trained.append(False)
            if (
                closing not in stops
                and end < len(ids)
                and ids[end] in (self._special if closing is None else stops)
            ):
                trained[end] = True
                end += 1
            elif closing is None:
                all_end = False
            ends.append(end)
        return TokenizedAnswer(ids, trained, tuple(ends)), all_end

    def _closing(self, ids: list[int], end: int, stops: Collection[int]) -> int | None:
        """Return the last token before ``end``, but for white space, if it is special or generation stops at it."""
        for token in reversed(ids[:end]):
            if token in self._special or token in stops:
                return token
            if str(self._tokenizer.decode([token])).strip():
                return None
        return None


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return the number of tokens that both begin with."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


class Encoder:
    """Tokenizes examples with one tokenizer.

    Args:
        fitting: makes records with a prompt fit into rows, and counts them; None: they stay as they are.
        vocab_size: number of tokens that the model knows; None: all that the tokenizer has.
        every_token: whether all tokens carry loss: each record is one document, which continues in the next row.
        is_alone: whether each record has a row to itself, so that texts without a prompt are made to fit as well,
            and empty answers are not left out.
        drop_unseen: whether conversations with text that the template leaves out are counted and left out.
        source: the processor whose template conversations are written with; None: the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        fitting: RowFitter | None = None,
        *,
        vocab_size: int | None = None,
        every_token: bool = False,
        is_alone: bool = False,
        drop_unseen: bool = False,
        source: ProcessorMixin | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.fitting = fitting or RowFitter()
        self.eos: int | None = tokenizer.eos_token_id
        self._vocab_size = vocab_size
        self._every_token = every_token
        self._is_alone = is_alone
        self._drop_unseen = drop_unseen
        # What the tokenizer puts around every text by default: BOS, EOS, or nothing.
        bare = self._tokenize(["a"])[0]
        full = list(tokenizer("a")["input_ids"])
        starts = [at for at in range(len(full)) if full[at : at + len(bare)] == bare]
        self._prefix = full[: starts[0]] if starts else []
        self._suffix = full[starts[0] + len(bare) :] if starts else []
        self._written = WrittenText(tokenizer, self.fitting)
        self._template = ChatTemplate(source or tokenizer)
        self._finder = AnswerFinder(self._template.render)
        self._ends = AnswerEnds(tokenizer)
        self._renders_again = source is not None

    def encode(self, examples: Iterable[Example]) -> Iterator[EncodedSegment]:
        """Encode documents in the order of ``examples``; texts are tokenized in batches of bounded size."""
        batch: list[PlainText] = []
        characters = 0
        for example in chain.from_iterable(map(self._segments, examples)):
            if example.is_empty and not self._is_alone:  # of items, what may be empty depends on their kind
                self.fitting.empty.add(0, example.where)
                continue
            if isinstance(example, Chat) and example.plain is not None:
                plain = self._template.writes_alpaca
                (self.fitting.alpaca if plain else self.fitting.turns).add(0, example.where)
                example = example.plain if plain else example
            elif isinstance(example, PlainText) and self._could_be_turns(example):
                self.fitting.prompts.add(0, example.where)
            if isinstance(example, PlainText):
                batch.append(example)
                characters += len(example.prompt) + len(example.completion)
            if isinstance(example, Chat) or len(batch) >= _BATCH_EXAMPLES or characters >= _BATCH_CHARACTERS:
                yield from self._encode_texts(batch)
                batch = []
                characters = 0
            if isinstance(example, Chat):
                _, parts = self.parts(example)
                if parts:
                    yield from self._fitted(parts, example.where, self._every_token)
        yield from self._encode_texts(batch)

    def _could_be_turns(self, text: PlainText) -> bool:
        if not text.prompt or self._every_token or not self._template.is_there:
            return False
        return not self._template.has_marks(text.prompt)

    def _segments(self, example: Example) -> Iterator[Example]:
        """Cut a long text where no token of the whole crosses the cut."""
        if isinstance(example, Chat) or example.prompt or self._is_alone:
            yield example
            return
        text = example.completion
        before = ""
        start = 0
        stop = 0
        while len(text) - stop > SEGMENT_CHARACTERS:
            stop = _cut_before(text, stop, stop + SEGMENT_CHARACTERS)
            end = text[max(start, stop - _CONTEXT_CHARACTERS) : stop]
            ids, longer = self._tokenize([end, end + text[stop : stop + _CONTEXT_CHARACTERS]])
            if longer[: len(ids)] == ids:
                yield replace(example, completion=text[start:stop], before=before, ends=False)
                start = stop
                before = end
        yield replace(example, completion=text[start:], before=before)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return tokenized(self.tokenizer, texts)

    def _encode_texts(self, batch: list[PlainText]) -> Iterator[EncodedSegment]:
        whole = self._tokenize([example.before + example.prompt + example.completion for example in batch])
        leads = [example.before or example.prompt for example in batch]
        known = iter(self._tokenize([*filter(None, leads)]))
        for example, lead, ids in zip(batch, leads, whole, strict=True):
            untrained = common_prefix(next(known), ids) if lead else 0
            if example.before:
                ids = ids[untrained:]
                untrained = 0
            self._written.count(example.prompt + example.completion, [ids], example.where)
            trained = [False] * untrained + [True] * (len(ids) - untrained)
            prefix = [] if example.before or ids[: len(self._prefix)] == self._prefix else self._prefix
            ids = prefix + ids
            trained = [not example.prompt] * len(prefix) + trained
            if example.ends and not self._is_closed(ids, untrained + len(prefix)):
                ids = [*ids, self.eos]  # type: ignore[list-item]
                trained = [*trained, True]
            self.fitting.stop_at([self.eos] if example.ends and self.eos is not None else [])
            continues = self._every_token or not (example.prompt or self._is_alone)
            yield from self._fitted([TokenizedAnswer(ids, trained)], example.where, continues, example.ends)

    def encode_classified(self, texts: Iterable[Example]) -> Iterator[EncodedSegment]:
        """Encode texts for a classifier, with what the tokenizer puts around texts by default, and without loss.

        A text that is too long keeps these tokens, as with ``truncation=True`` of transformers: the last is often what
        the head reads.
        """
        for text in texts:
            assert isinstance(text, PlainText)
            ids = list(self.tokenizer(text.completion, verbose=False)["input_ids"])
            count = len(self._prefix)
            if ids[count : 2 * count] == self._prefix:  # the text has it already
                ids = ids[count:]
            self._written.count(text.completion, [ids], text.where)
            for part in self._fitted([TokenizedAnswer(ids, [True] * len(ids))], text.where, len(ids) == 1):
                shorter = ids if len(part.ids) == len(ids) else self._truncated(ids, len(part.ids))
                yield part._replace(
                    ids=np.array(shorter, np.uint32), trained=np.zeros(len(shorter), dtype=bool)
                )

    def _truncated(self, ids: list[int], tokens: int) -> list[int]:
        """Return a text in fewer tokens, with those that the tokenizer puts around it."""
        first = len(self._prefix)
        last = len(self._suffix)
        if self.tokenizer.truncation_side == "left":
            return ids[:first] + ids[len(ids) - tokens + first :]
        return ids[: tokens - last] + ids[len(ids) - last :]

    def _is_closed(self, ids: list[int], start: int) -> bool:
        ends = [at for at in (len(ids) - 1, len(ids) - 2) if at >= start and ids[at] == self.eos]
        return self.eos is None or any(not str(self.tokenizer.decode(ids[end + 1 :])).strip() for end in ends)

    def _fitted(
        self, parts: list[TokenizedAnswer], where: str, continues: bool, ends: bool = True
    ) -> Iterator[EncodedSegment]:
        """Yield what of a record goes into rows; one that ``continues`` in the next row goes there unchanged."""
        check_vocabulary(
            (max(part.ids, default=0) for part in parts), self._vocab_size, self.tokenizer, where
        )
        for part in parts if continues else self.fitting.fit(parts, where):
            trained = (
                np.ones(len(part.ids), bool) if self._every_token else np.array(part.trained, dtype=bool)
            )
            self.fitting.documents += ends
            yield EncodedSegment(np.array(part.ids, dtype=np.uint32), trained, ends)

    def parts(self, chat: Chat) -> tuple[Chat, list[TokenizedAnswer]]:
        """Return a conversation in the form that the template takes, and as one document; or as one for each answer,
        each as the model will see it.

        The latter is for templates that render a turn differently once others follow (Qwen3 drops earlier reasoning)
        and do not mark the assistant's tokens themselves.
        """
        for key, holder in (other for message in chat.messages for other in other_keys(message)):
            if not (self._template.is_there and self._template.reads_key(key)):
                self.fitting.add_unread(f"{key!r} of {holder}")
        try:
            seen, form = self._template.checked(chat, self.fitting.unseen if self._drop_unseen else None)
            if seen is None:
                return chat, []
            for name in form.unread:
                self.fitting.add_unread(name)
            parts = self._parts(seen, form)
            self._written.count(text_of(seen), [part.ids for part in parts], chat.where)
            if self._every_token:
                return seen, parts
            last = len(seen.messages) - 1
            turns = [
                last if part.ends else turn for turn, part in zip(seen.answers or [last], parts, strict=False)
            ]
            return seen, [
                self._ended(part, seen, turn, form) for turn, part in zip(turns, parts, strict=True)
            ]
        except UserError:
            raise
        except LimitExceeded as error:
            raise UserError(
                f"{chat.where}: the chat template {error} for one conversation. Give another with --chat-template."
            ) from error
        except Exception as error:  # templates are programs: they raise any exception
            if isinstance(error, OSError | SyntaxError) and not isinstance(error, LookupError):  # of PIL
                raise UserError(f"{chat.where}: an image cannot be read: {on_one_line(error)}") from error
            raise UserError(
                f"{chat.where}: the chat template refuses this conversation "
                f"(roles {', '.join(str(message.get('role')) for message in chat.messages)}): {error}"
            ) from error

    def _parts(self, chat: Chat, form: Form) -> list[TokenizedAnswer]:
        turns = chat.answers
        marks = form.marks_answers and chat.prompt_messages is None
        ids, trained = self._template.render_marked(chat.messages, chat.options, marks)
        if self._every_token or not turns:
            return [TokenizedAnswer(ids, [False] * len(ids))]
        turns_decide = trained is None or bool(chat.untrained)
        spans = None
        if form.is_whole and (turns_decide or self.fitting.is_long(len(ids))):
            spans = self._finder.spans(chat, ids, turns)
        if not form.is_whole or (turns_decide and spans is None):
            return [self._answer(chat, turn, marks) for turn in turns]
        if spans is not None and turns_decide:
            in_turns = [False] * len(ids)
            for start, stop in spans:
                in_turns[start:stop] = [True] * (stop - start)
            trained = (
                in_turns if trained is None else [a and b for a, b in zip(trained, in_turns, strict=True)]
            )
        assert trained is not None
        ends = _run_ends(trained) if spans is None else tuple(stop for _, stop in spans)
        return [TokenizedAnswer(ids, trained, ends)]

    def _answer(self, chat: Chat, turn: int, marks: bool) -> TokenizedAnswer:
        ids, marked = self._template.render_marked(chat.messages[: turn + 1], chat.options, marks)
        start = self._finder.start(chat, turn, ids)
        return TokenizedAnswer(
            ids, [at >= start and (marked is None or marked[at]) for at in range(len(ids))]
        )

    def _ended(self, part: TokenizedAnswer, chat: Chat, turn: int, form: Form) -> TokenizedAnswer:
        """Return a conversation up to ``turn``, or its last answer, with loss on what ends each answer."""
        whole = part if part.ends else part._replace(ends=_run_ends(part.trained)[-1:])
        # A processor renders the messages again, without what is added here.
        following = None if self._renders_again else form.stops.get(answer_kind(chat.messages, turn))
        ended, all_end = self._ends.train(whole, form.stops.values(), following)
        if whole.ends:
            self.fitting.stop_at(form.stops.values())
        if not all_end:
            self.fitting.endless.add(0, chat.where)
        return ended if part.ends else ended._replace(ends=())


def _cut_before(text: str, start: int, limit: int) -> int:
    """Return where to cut a text: behind a line break, else before a space, as tokenizers do; else at the limit."""
    first = max(start + 1, limit - 4096)
    for pattern in (r"\n(?=\S)", r"(?<=\S)(?= \S)"):  # tokens may hold several white spaces
        if cuts := [match.end() for match in re.finditer(pattern, text[first : limit + 1])]:
            return first + cuts[-1]
    return limit


def check_vocabulary(
    ids: Iterable[int], vocab_size: int | None, tokenizer: PreTrainedTokenizerBase, where: str
) -> None:
    """Raise ``UserError`` if a token of a record is none of the ``vocab_size`` that the model knows."""
    most = max(ids, default=0)
    if vocab_size is not None and most >= vocab_size:
        raise UserError(
            f"{where}: {tokenizer.convert_ids_to_tokens(most)!r} is token {most}, and the model knows {vocab_size:,} "
            "tokens: the tokenizer is another model's, or its new tokens are not in the model's embeddings yet."
        )


def _run_ends(trained: list[bool]) -> tuple[int, ...]:
    """Return the positions behind the runs of tokens that carry loss."""
    following = [*trained[1:], False]
    return tuple(at + 1 for at, carries in enumerate(trained) if carries and not following[at])
