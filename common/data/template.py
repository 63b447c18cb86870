"""Render conversations with a chat template so that every text of a record appears, or find the one that does not.

Templates are programs, each of which takes what its author thought of. What one takes is found by rendering each kind
of conversation (its roles, keys, and parts) with marks in place of its texts, and looking for the marks.
"""

import contextlib
import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin, processing_utils, tokenization_utils_base

from common.data.beginnings import Beginnings
from common.data.examples import Chat
from common.data.lost_text import special_tokens
from common.data.messages import Message, parsed
from common.data.selection import Tally
from common.data.spelling import CHANGES, SPELLINGS, Change, joined, leaves, map_texts, texts_of
from common.errors import UserError
from common.files import preset_files
from common.limits import LimitExceeded, limited

_CALL = re.compile(r"""strftime_now\(\s*(["'])(.{0,200}?)\1\s*\)""")  # no search to the end from each call
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_KINDS_KEPT = 4096  # Number of kinds of conversations whose form is remembered
# What one rendering of a conversation may take. Templates of models take a millisecond.
RENDERING_SECONDS = 10.0
_RENDERING_MEMORY = 512 << 20
_WRITTEN_FREELY = 1 << 20  # Characters that a template may write for any conversation
# Characters that it may write for each in the conversation, with its tools and documents
_WRITTEN_PER_CHARACTER = 32

AnswerKind = tuple[bool, str]  # Whether an answer calls tools, and the role that follows it
_ANSWERS_CALLS = ("tool", "function", "ipython")  # Roles whose name is that of a tool
# Texts that no conversation has
_OTHER = "qz0zq"
_ASKED = "qz00zq"


def dated(template: str | dict[str, str] | None, day: date) -> str | dict[str, str] | None:
    """Return a chat template, or several by name, in which ``strftime_now`` is a text: ``day`` in its format.

    Raises:
        UserError: it begins with a byte order mark, which would be a part of each conversation.
    """
    if isinstance(template, dict):
        return {name: str(dated(text, day)) for name, text in template.items()}
    if template and template.startswith("\ufeff"):
        raise UserError(
            "The chat template of the model begins with a byte order mark, which would be a part of each conversation: "
            "remove the first 3 bytes of its file, or give another --chat-template."
        )
    return template and _CALL.sub(lambda call: json.dumps(day.strftime(call[2])), template)


def _described(options: list[dict[str, Any]]) -> list[str]:
    """Return the texts of documents, and of tools the names and descriptions: schemas are written in many ways."""
    texts: list[str] = []
    for option in options:
        tool = option.get("function")
        shown = {key: tool.get(key) for key in ("name", "description")} if isinstance(tool, dict) else option
        leaves(shown, lambda _, text: texts.append(text) or text)  # type: ignore[func-returns-value]
    return texts


def _with_marked_parameters(schema: Any, names: set[str]) -> Any:
    """Return tools, or a part of a schema, with a mark in place of each parameter's name, which is added to ``names``.

    Parameters of parts, alternatives, and definitions are among them.
    """
    if isinstance(schema, list):
        return [_with_marked_parameters(part, names) for part in schema]
    if not isinstance(schema, dict):
        return schema
    marked: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties" and isinstance(value, dict):
            names.update(value)
            marked[key] = {_mark(name): _with_marked_parameters(part, names) for name, part in value.items()}
        elif key == "required" and isinstance(value, list):
            marked[key] = [_mark(name) for name in value]
        else:
            marked[key] = _with_marked_parameters(value, names)
    return marked


def _descriptions(schema: Any) -> Iterator[str]:
    """Yield all descriptions in tools, those of parameters among them."""
    for key, part in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if key == "description" and isinstance(part, str):
            yield part
        elif isinstance(part, dict | list):
            yield from _descriptions(part)


def _mark(name: Any) -> str:
    return f"qz{name}zq"


def _alike(left: str, right: str) -> int:
    """Return how many characters both begin with."""
    return next(
        (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


_REFUSED = (-2, "")  # All texts of a conversation that the template refuses


@dataclass
class Form:
    """What a template makes of one kind of conversation."""

    changes: list[Change]  # What messages are put through
    missing: list[tuple[int, str]]  # Messages and fields that do not appear; negative numbers are arguments
    # Whether all texts appear in one rendering, not only in those that end with their own turn
    is_whole: bool
    marks_answers: bool  # Whether the template marks tokens of the assistant, and only of the assistant
    # Special token at which generation has to stop after an answer, where the template writes one
    stops: dict[AnswerKind, int] = field(default_factory=dict)
    unread: Sequence[str] = ()  # What it leaves out without harm to other texts, in words


@contextlib.contextmanager
def limited_rendering() -> Iterator[list[tuple[int, int]]]:
    """Limit what a template may take in each rendering by ``apply_chat_template``, but not the tokenizer after it.

    Yields:
        A list that gets what the template marks as the assistant's, in a call for its mask: first and end character.

    Raises:
        LimitExceeded: the template took more.
    """
    render: Any = tokenization_utils_base.render_jinja_template
    spans: list[tuple[int, int]] = []

    def render_limited(*args: Any, **options: Any) -> Any:
        with limited(RENDERING_SECONDS, _RENDERING_MEMORY):
            result = render(*args, **options)
        _check_length(max(map(len, result[0]), default=0), (args, options))
        for marked in result[1]:
            spans.extend(marked)
        return result

    modules: tuple[Any, ...] = (tokenization_utils_base, processing_utils)
    for module in modules:
        module.render_jinja_template = render_limited
    try:
        yield spans
    finally:
        for module in modules:
            module.render_jinja_template = render


def _check_length(written: int, given: Any) -> None:
    if written > _WRITTEN_FREELY and written > _WRITTEN_PER_CHARACTER * len(str(given)):
        raise LimitExceeded(f"makes {written:,} characters of text")


class ChatTemplate:
    """A chat template: that of a tokenizer or processor; without one, every conversation is refused."""

    def __init__(self, source: PreTrainedTokenizerBase | ProcessorMixin) -> None:
        self._source: Any = source
        self._tokenizer: Any = getattr(source, "tokenizer", source)
        self._beginnings = Beginnings(self._tokenizer)
        self._rendered: tuple[list[Message], dict[str, Any]] | None = None  # What was rendered last as text
        self._rendered_text = ""
        self._forms: dict[bytes, Form] = {}
        self._keys: dict[str, bool] = {}
        self._special = self._by_name(special_tokens(self._tokenizer))
        self._added = self._by_name(self._tokenizer.added_tokens_decoder)

    def _by_name(self, tokens: Iterable[int]) -> dict[str, int]:
        names = {str(self._tokenizer.convert_ids_to_tokens(token)): token for token in tokens}
        return dict(sorted(names.items(), key=lambda item: len(item[0]), reverse=True))

    @property
    def is_there(self) -> bool:
        """Whether there is any."""
        return self._source.chat_template is not None or self._tokenizer.chat_template is not None

    def has_marks(self, text: str) -> bool:
        """Return whether a text has special tokens, as what a template has written."""
        return any(name in text for name in self._special)

    def reads_key(self, key: str) -> bool:
        """Return whether the template speaks of a key of messages."""
        if key not in self._keys:
            self._keys[key] = bool(re.search(rf"\b{re.escape(key)}\b", self._program({})))
        return self._keys[key]

    @cached_property
    def writes_alpaca(self) -> bool:
        """Whether instructions become Alpaca's texts: there is no template, or it is the one of that name."""
        template = self._source.chat_template
        return template is None or template == preset_files("chat_templates", ".jinja")["alpaca"].read_text()

    def render(self, messages: list[Message], options: dict[str, Any], *, ask: bool = False) -> list[int]:
        """Return the token ids of messages; with ``ask``, also the prompt for an answer."""
        if self._source is not self._tokenizer:
            with limited_rendering():
                out = self._source.apply_chat_template(
                    messages, tokenize=True, add_generation_prompt=ask, return_dict=True, **options
                )
            return list(out["input_ids"][0])
        if ask or (messages, options) != self._rendered:
            text = self._written(messages, options, ask)
            text = text if ask else text.removesuffix(self._unasked)
        else:
            text = self._rendered_text
        return self._beginnings.encode(text)

    def render_marked(
        self, messages: list[Message], options: dict[str, Any], marks: bool = True
    ) -> tuple[list[int], list[bool] | None]:
        """Return the token ids of messages, and for each whether the template ``marks`` it as the assistant's."""
        if not marks:
            return self.render(messages, options), None
        with limited_rendering() as spans:
            out = self._source.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"return_offsets_mapping": True},
                **options,
            )
        # Not "assistant_masks": they end at the first token of a last character that has several, and where a first or
        # last character has none, they lack all turns from there on, or have them all, the user's among them.
        starts = [start for start, _ in out["offset_mapping"]]
        ends = [end for _, end in out["offset_mapping"]]
        trained = [False] * len(starts)
        for first, stop in spans:
            # White space that a tokenizer leaves out of its offsets lies before the next token.
            behind = max(bisect_left(starts, stop), bisect_right(ends, stop))
            for token in range(bisect_right(ends, first), behind):
                trained[token] = True
        return list(out["input_ids"]), trained

    def checked(self, chat: Chat, drop_unseen: Tally | None) -> tuple[Chat | None, Form]:
        """Return a conversation in the form that the template takes, and what is known about that form.

        Args:
            chat: the conversation.
            drop_unseen: counts it, and None is returned, where a text appears in no rendering; None: it is an error.
        """
        if not self.is_there:
            raise UserError(
                f"{chat.where} is a conversation, but the tokenizer has no chat template. Give one with "
                "--chat-template (chatml, llama-3, ... or a file), or records with text or with prompt and completion "
                "strings."
            )
        contents = [message.get("content") for message in chat.messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        if self._source is self._tokenizer and (other := [part for part in parts if part["type"] != "text"]):
            raise UserError(
                f"{chat.where}: content has a part {str(other[0])[:80]}, and a tokenizer takes text only."
            )
        kind = replace(chat, messages=_marked(chat.messages))
        key = hashlib.blake2b(json.dumps([kind.messages, chat.options], default=str).encode()).digest()
        if key not in self._forms:
            if len(self._forms) >= _KINDS_KEPT:
                self._forms.clear()
            self._forms[key] = self._form(kind)
        form = self._forms[key]
        chat = replace(chat, messages=_changed(chat.messages, form.changes))
        missing = form.missing
        if not missing:
            missing, is_whole = self._missing(chat)
            form = replace(form, is_whole=is_whole)
        if not missing or _REFUSED in missing:  # rendering it says why
            return chat, form
        if drop_unseen is None:
            number, unseen = missing[0]
            if number >= 0:
                message = chat.messages[number]
                text = next((text for name, text in texts_of(message) if name == unseen), "")
                unseen = (
                    f"{unseen!r} of turn {number + 1} ({message['role']}): {' '.join(text.split())[:60]!r}"
                )
            raise UserError(
                f"{chat.where}: the chat template leaves out {unseen}. Use the tokenizer of a model whose template "
                "shows it, take it out of the data, or leave out such records with --drop-unseen."
            )
        drop_unseen.add(0, chat.where)
        return None, form

    def _form(self, chat: Chat) -> Form:
        content = [joined] if self._source is self._tokenizer else []  # processors take parts
        calls = any(message.get("tool_calls") for message in chat.messages)
        best: Form | None = None
        for spelling in SPELLINGS if calls else SPELLINGS[:1]:
            form = self._adapted(chat, [*content, spelling])
            if best is None or len(form.missing) < len(best.missing):
                best = form
            if not form.missing:
                break
        assert best is not None
        if _REFUSED in best.missing:  # rendering it says why
            return replace(best, missing=[])
        chat = replace(chat, messages=_changed(chat.messages, best.changes))
        missing = [*best.missing, *self._unread(chat)]
        marks = self._marks_answers(chat)
        unread = list(self._left_out(chat))
        return replace(best, missing=missing, marks_answers=marks, stops=self._stops(chat), unread=unread)

    def _adapted(self, chat: Chat, changes: list[Change]) -> Form:
        """Return the form with ``changes``, and with all others with which more texts appear."""
        chat = replace(chat, messages=_changed(chat.messages, changes))
        missing, is_whole = self._missing(chat, is_kind=True)
        for change in CHANGES if missing else ():
            other = replace(chat, messages=_changed(chat.messages, [change]))
            if other.messages == chat.messages:
                continue
            still, still_whole = self._missing(other, is_kind=True)
            if len(still) < len(missing):
                chat = other
                missing = still
                is_whole = still_whole
                changes = [*changes, change]
        return Form(changes, missing, is_whole, False)

    def _stops(self, chat: Chat) -> dict[AnswerKind, int]:
        stops: dict[AnswerKind, int] = {}
        for turn, message in enumerate(chat.messages):
            kind = answer_kind(chat.messages, turn)
            if message["role"] == "assistant" and kind not in stops:
                token = self._stop(chat.messages[: turn + 1], kind, chat.options)
                stops |= {} if token is None else {kind: token}
        return stops

    def _stop(self, messages: list[Message], kind: AnswerKind, options: dict[str, Any]) -> int | None:
        """Return the token that ends the last of the messages: a special one that it ends with, or that the next turn
        begins with; else one that was added to the tokenizer."""
        alone = (self._text(messages, options) or "").rstrip()
        if ending := next((name for name in self._special if alone.endswith(name)), None):
            return self._special[ending]
        between = self._between(messages, kind, options)
        if places := [
            (between.index(name), token) for name, token in self._special.items() if name in between
        ]:
            return min(places, key=lambda place: place[0])[1]
        return next((token for name, token in self._added.items() if alone.endswith(name)), None)

    def _between(self, messages: list[Message], kind: AnswerKind, options: dict[str, Any]) -> str:
        """Return what is written between the text of the last of the messages and that of the next turn."""
        calls, role = kind
        following = {"role": role, "content": _OTHER}
        if role == "tool":
            call = messages[-1]["tool_calls"][0] if calls else {}
            following |= {
                "name": call.get("function", {}).get("name", ""),
                "tool_call_id": call.get("id", ""),
            }
        texts = texts_of(messages[-1])
        written = self._text([*messages, following], options)
        if written is None or not texts:
            return ""
        return written.rpartition(texts[-1][1])[2].partition(_OTHER)[0]

    def _text(self, messages: list[Message], options: dict[str, Any]) -> str | None:
        text = self._whole_text(messages, options)
        if text is not None:
            text = text.removesuffix(self._unasked)
            self._rendered = (messages, options)
            self._rendered_text = text
        return text

    def _whole_text(
        self, messages: list[Message], options: dict[str, Any], *, ask: bool = False
    ) -> str | None:
        try:
            return self._written(messages, options, ask)
        except Exception:  # templates raise any exception
            return None

    def _written(self, messages: list[Message], options: dict[str, Any], ask: bool) -> str:
        with limited(RENDERING_SECONDS, _RENDERING_MEMORY):  # processors compile it before they render it
            text = self._source.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=ask, **options
            )
        _check_length(len(text), (messages, options))
        return str(text)

    @cached_property
    def _unasked(self) -> str:
        """The prompt for an answer, if the template ends all conversations with it, unasked; else empty."""
        user = {"role": "user", "content": _ASKED}
        answer = {"role": "assistant", "content": _OTHER}
        asked = self._whole_text([user], {}, ask=True)
        plain, answered, continued = (
            self._whole_text(chat, {}) for chat in ([user], [user, answer], [user, answer, user])
        )
        if (
            plain is None
            or plain != asked
            or answered is None
            or continued is None
            or continued.startswith(answered)
        ):
            return ""
        end, following = (text.rpartition(_OTHER)[2] for text in (answered, continued))
        shared = _alike(end, following)
        alike = _alike(plain[::-1], end[::-1])
        marks = [mark.span() for mark in re.finditer("|".join(map(re.escape, self._special)) or "(?!)", end)]
        # It begins where the next turn would: behind the answer's mark, at a later mark, or at a line.
        begins = [0, *(stop for _, stop in marks[:1]), *(start for start, _ in marks[1:])]
        begins += [line.end() for line in re.finditer("\n", end)]
        prompt = end[max(len(end) - alike, *(begin for begin in begins if begin <= shared)) :]
        return prompt if plain.endswith(prompt) else ""

    def _missing(self, chat: Chat, is_kind: bool = False) -> tuple[list[tuple[int, str]], bool]:
        """Return the messages and fields whose text does not appear, and whether one rendering has all others.

        What the assistant thought may be there only until other turns follow.
        """
        texts = [
            (number, *text) for number, message in enumerate(chat.messages) for text in texts_of(message)
        ]
        whole = self._text(chat.messages, chat.options)
        if whole is None:
            return [(number, name) for number, name, _ in texts] + [_REFUSED], False
        garbled = [
            number for number, message in enumerate(chat.messages) if _is_garbled(message, whole, is_kind)
        ]
        missing = [(number, "content or tool_calls") for number in garbled]
        late = [(number, name, text) for number, name, text in texts if not _appears(text, whole)]
        for number, name, text in late:
            answers = chat.messages[number]["role"] == "assistant"
            alone = self._text(chat.messages[: number + 1], chat.options) if answers else None
            if alone is None or not _appears(text, alone):
                missing.append((number, name))
        return missing, not late

    def _left_out(self, chat: Chat) -> Iterator[str]:
        """Yield what the template leaves out of turns and tools that it shows: names, and parameters' descriptions."""
        written = self._text(chat.messages, chat.options) or ""
        names = [
            turn["name"] for turn in chat.messages if turn["role"] not in _ANSWERS_CALLS and turn.get("name")
        ]
        if any(name not in written for name in names):
            yield "'name' of turns"
        if not all(_appears(text, written) for text in _descriptions(chat.options.get("tools", []))):
            yield "'description' of tools' parameters"

    def _unread(self, chat: Chat) -> Iterator[tuple[int, str]]:
        written = self._text(chat.messages, chat.options)
        for name in chat.options:
            rest = {key: other for key, other in chat.options.items() if key != name}
            if name not in ("tools", "documents"):  # a switch may well make no difference to one conversation
                is_read = bool(re.search(rf"\b{re.escape(name)}\b", self._program(chat.options)))
            else:
                is_read = written is None or written != self._text(chat.messages, rest)
                if is_read and (lost := next(self._lost(chat, name, written), None)) is not None:
                    is_read = False
                    name = f"{lost[:60]!r} of {name}"
            if not is_read:
                yield -1, name

    def _lost(self, chat: Chat, name: str, written: str | None) -> Iterator[str]:
        """Yield texts of tools or documents, and names of tools' parameters, that are not ``written``."""
        yield from (
            text for text in _described(chat.options[name]) if written and not _appears(text, written)
        )
        names: set[str] = set()
        marked = {**chat.options, name: _with_marked_parameters(chat.options[name], names)}
        text = self._text(chat.messages, marked) if names else None
        yield from (each for each in sorted(names) if text is not None and _mark(each) not in text)

    def _program(self, options: dict[str, Any]) -> str:
        if self._source is self._tokenizer:
            return str(self._tokenizer.get_chat_template(tools=options.get("tools")))
        return str(self._source.chat_template or self._tokenizer.chat_template)

    def _marks_answers(self, chat: Chat) -> bool:
        # Only fast tokenizers know which characters a token comes from.
        if self._source is not self._tokenizer or not self._tokenizer.is_fast:
            return False
        if not _GENERATION_MARK.search(self._program(chat.options)):
            return False
        try:
            ids, marked = self.render_marked(chat.messages, chat.options)
        except Exception:  # a template that refuses this; rendering it says why
            return False
        trained = str(
            self._tokenizer.decode([token for token, mark in zip(ids, marked or (), strict=True) if mark])
        )
        others = [message for message in chat.messages if message["role"] != "assistant"]
        return not any(text in trained for message in others for _, text in texts_of(message))


def answer_kind(messages: list[Message], turn: int) -> AnswerKind:
    """Return what decides which token ends an answer. Where no other role follows, the answer asks for the next one."""
    calls = bool(messages[turn].get("tool_calls"))
    role = messages[turn + 1]["role"] if turn + 1 < len(messages) else "assistant"
    return calls, role if role != "assistant" else "tool" if calls else "user"


def _marked(messages: list[Message]) -> list[Message]:
    """Return messages with a separate mark in place of each text; a tool's name has the same one wherever it is."""
    names: dict[str, str] = {}
    number = 0

    def mark(field: str, text: str) -> str:
        nonlocal number
        if not text.strip():
            return text
        number += 1
        return names.setdefault(text, f"qz{number}zq") if field == "tool_calls" else f"qz{number}zq"

    marked = [map_texts(message, mark) for message in messages]
    return [
        {**turn, "name": mark("tool_calls", str(turn["name"]))} if turn.get("name") else turn
        for turn in marked
    ]


def _changed(messages: list[Message], changes: list[Change]) -> list[Message]:
    for change in changes:
        messages = [change(message) for message in messages]
    return messages


def _appears(text: str, written: str) -> bool:
    text = text.strip()
    if text in written:
        return True
    forms = (json.dumps(text, ensure_ascii=kind)[1:-1] for kind in (False, True))
    return any(form in written for form in forms) or "".join(text.split()) in "".join(written.split())


def _is_garbled(message: Message, written: str, is_kind: bool) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    shown = (
        text for part in parts for text in (str(part), json.dumps(part), json.dumps(part, ensure_ascii=False))
    )
    if any(text in written for text in shown):
        return True
    arguments = [call["function"].get("arguments") for call in message.get("tool_calls") or ()]
    texts = [text for text in arguments if isinstance(text, str) and isinstance(parsed(text), dict)]
    # Of a kind of conversation only: a real text, of a tool say, may well be what Python writes.
    as_python = [str(value) for value in arguments if is_kind and value and isinstance(value, dict)]
    return any(
        text in written for text in (*(json.dumps(text, ensure_ascii=False) for text in texts), *as_python)
    )
