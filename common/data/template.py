"""Render conversations with a chat template so that every text of a record appears, or find the one that does not.

Templates are programs, each of which takes what its author thought of. What one takes is found by rendering each kind
of conversation (its roles, keys, and parts) with marks in place of its texts, and looking for the marks.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from common.data.messages import REASONING, Message, parsed
from common.data.selection import Tally
from common.data.shapes import Chat
from common.errors import UserError
from common.files import preset_files

_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_KINDS_KEPT = 4096  # Number of kinds of conversations whose form is remembered

Change = Callable[[Message], Message]


def dated(template: str | dict[str, str] | None, day: date) -> str | dict[str, str] | None:
    """Return a chat template, or several by name, in which ``strftime_now`` is a text: ``day`` in its format."""
    if isinstance(template, dict):
        return {
            name: _CALL.sub(lambda call: json.dumps(day.strftime(call[2])), text) for name, text in template.items()
        }
    return template and _CALL.sub(lambda call: json.dumps(day.strftime(call[2])), template)


def texts_of(message: Message) -> list[tuple[str, str]]:
    """Return the texts of a message, each with the name of its field."""
    texts: list[tuple[str, str]] = []
    _map_texts(message, lambda name, text: texts.append((name, text)) or text)  # type: ignore[func-returns-value]
    return [(name, text) for name, text in texts if text.strip()]


def varied(message: Message, mark: str) -> Message:
    """Return a message with other texts: ``mark`` in each of them."""
    return _map_texts(message, lambda _, text: mark if text.strip() else text)


def _map_texts(message: Message, change: Callable[[str, str], str]) -> Message:
    result = dict(message)
    for name in (*REASONING, "content", "refusal"):
        value = message.get(name)
        if isinstance(value, str):
            result[name] = change(name, value)
        elif isinstance(value, list):
            result[name] = [
                {**part, "text": change(name, part["text"])} if isinstance(part.get("text"), str) else part
                for part in value
            ]

    def changed(function: dict[str, Any]) -> dict[str, Any]:
        result = {**function, "name": change("tool_calls", function["name"])}
        if "arguments" in function:
            arguments, inner = function["arguments"], parsed(function["arguments"])
            leaves = _leaves(inner if isinstance(inner, dict) else arguments, change)
            result["arguments"] = json.dumps(leaves, ensure_ascii=False) if isinstance(inner, dict) else leaves
        return result

    return _with_functions(result, changed)


def _with_functions(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [{**call, "function": change(call["function"])} for call in message["tool_calls"]]}


def _leaves(value: Any, change: Callable[[str, str], str]) -> Any:
    if isinstance(value, dict):
        return {key: _leaves(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_leaves(item, change) for item in value]
    return change("tool_calls", value) if isinstance(value, str) else value


def _described(options: list[dict[str, Any]]) -> list[str]:
    """Return the texts of documents, and of tools the names and descriptions: schemas are written in many ways."""
    texts: list[str] = []
    for option in options:
        tool = option.get("function")
        shown = {key: tool.get(key) for key in ("name", "description")} if isinstance(tool, dict) else option
        _leaves(shown, lambda _, text: texts.append(text) or text)  # type: ignore[func-returns-value]
    return texts


def _joined(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(part.get("text"), str) for part in content):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _parted(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _arguments_as_text(function: dict[str, Any]) -> dict[str, Any]:
    given = function.get("arguments")
    return {**function, "arguments": json.dumps(given, ensure_ascii=False)} if isinstance(given, dict) else function


def _arguments_parsed(function: dict[str, Any]) -> dict[str, Any]:
    inner = parsed(function.get("arguments"))
    return {**function, "arguments": inner} if isinstance(inner, dict) else function


def _reasoning_as(name: str, message: Message) -> Message:
    given = next((message[key] for key in REASONING if key in message), None)
    rest = {key: value for key, value in message.items() if key not in REASONING}
    return message if given is None else {**rest, name: given}


def _role_as(role: str, other: str, message: Message) -> Message:
    return {**message, "role": other} if message["role"] == role else message


_REFUSED = (-2, "")  # All texts of a conversation that the template refuses
# Other forms of the same messages, which are tried in this order where a text would not appear.
_CHANGES: tuple[Change, ...] = (
    _joined,
    _parted,
    partial(_with_functions, change=_arguments_parsed),
    partial(_with_functions, change=_arguments_as_text),
    *(partial(_reasoning_as, name) for name in REASONING),
    partial(_role_as, "developer", "system"),
    partial(_role_as, "function", "tool"),
    partial(_role_as, "ipython", "tool"),
    lambda message: {"content": "", **message},
)


@dataclass
class Form:
    """What a template makes of one kind of conversation."""

    changes: list[Change]  # What messages are put through
    missing: list[tuple[int, str]]  # Messages and fields that do not appear; negative numbers are arguments
    is_whole: bool  # Whether all texts appear in one rendering, not only in those that end with their own turn
    marks_answers: bool  # Whether the template marks tokens of the assistant, and only of the assistant


class ChatTemplate:
    """A chat template: that of a tokenizer or processor; without one, every conversation is refused."""

    def __init__(self, source: PreTrainedTokenizerBase | ProcessorMixin) -> None:
        self._source: Any = source
        self._tokenizer: Any = getattr(source, "tokenizer", source)
        self._forms: dict[bytes, Form] = {}

    @cached_property
    def writes_alpaca(self) -> bool:
        """Whether instructions become Alpaca's texts: there is no template, or it is the one of that name."""
        template = self._source.chat_template
        return template is None or template == preset_files("chat_templates", ".jinja")["alpaca"].read_text()

    def render(self, messages: list[Message], options: dict[str, Any], *, ask: bool = False) -> list[int]:
        """Return the token ids of messages; with ``ask``, also the prompt for an answer."""
        out = self._source.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=ask, return_dict=True, **options
        )
        return list(out["input_ids"] if self._source is self._tokenizer else out["input_ids"][0])

    def render_marked(
        self, messages: list[Message], options: dict[str, Any], marks: bool = True
    ) -> tuple[list[int], list[bool] | None]:
        """Return the token ids of messages, and for each whether the template ``marks`` it as the assistant's."""
        if not marks:
            return self.render(messages, options), None
        out = self._source.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        return list(out["input_ids"]), [bool(bit) for bit in out["assistant_masks"]]

    def checked(self, chat: Chat, drop_unseen: Tally | None) -> tuple[Chat | None, Form]:
        """Return a conversation in the form that the template takes, and what is known about that form.

        Args:
            chat: the conversation.
            drop_unseen: counts it, and None is returned, where a text appears in no rendering; None: it is an error.
        """
        if self._source.chat_template is None and self._tokenizer.chat_template is None:
            raise UserError(
                f"{chat.where} is a conversation, but the tokenizer has no chat template. Give one with "
                "--chat-template (chatml, llama-3, ... or a file), or records with text or with prompt and completion "
                "strings."
            )
        contents = [message.get("content") for message in chat.messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        if self._source is self._tokenizer and (other := [part for part in parts if part["type"] != "text"]):
            raise UserError(f"{chat.where}: content has a part {str(other[0])[:80]}, and a tokenizer takes text only.")
        kind = replace(chat, messages=_marked(chat.messages))
        key = hashlib.blake2b(json.dumps([kind.messages, chat.options], default=str).encode()).digest()
        if key not in self._forms:
            if len(self._forms) >= _KINDS_KEPT:
                self._forms.clear()
            self._forms[key] = self._form(kind)
        form = self._forms[key]
        chat, missing = replace(chat, messages=_changed(chat.messages, form.changes)), form.missing
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
                unseen = f"{unseen!r} of turn {number + 1} ({message['role']}): {' '.join(text.split())[:60]!r}"
            raise UserError(
                f"{chat.where}: the chat template leaves out {unseen}. Use the tokenizer of a model whose template "
                "shows it, take it out of the data, or leave out such records with --drop-unseen."
            )
        drop_unseen.add(0, chat.where)
        return None, form

    def _form(self, chat: Chat) -> Form:
        changes: list[Change] = []
        missing, is_whole = self._missing(chat)
        for change in _CHANGES if missing else ():
            other = replace(chat, messages=_changed(chat.messages, [change]))
            if other.messages == chat.messages:
                continue
            still, still_whole = self._missing(other)
            if len(still) < len(missing):
                chat, missing, is_whole = other, still, still_whole
                changes.append(change)
        if _REFUSED in missing:  # rendering it says why
            return Form(changes, [], False, False)
        return Form(changes, [*missing, *self._unread(chat)], is_whole, self._marks_answers(chat))

    def _text(self, messages: list[Message], options: dict[str, Any]) -> str | None:
        try:
            return str(self._source.apply_chat_template(messages, tokenize=False, **options))
        except Exception:  # templates raise any exception
            return None

    def _missing(self, chat: Chat) -> tuple[list[tuple[int, str]], bool]:
        """Return the messages and fields whose text does not appear, and whether one rendering has all others.

        What the assistant thought may be there only until other turns follow.
        """
        texts = [(number, *text) for number, message in enumerate(chat.messages) for text in texts_of(message)]
        whole = self._text(chat.messages, chat.options)
        if whole is None:
            return [(number, name) for number, name, _ in texts] + [_REFUSED], False
        garbled = [number for number, message in enumerate(chat.messages) if _is_garbled(message, whole)]
        missing = [(number, "content or tool_calls") for number in garbled]
        late = [(number, name, text) for number, name, text in texts if not _appears(text, whole)]
        for number, name, text in late:
            answers = chat.messages[number]["role"] == "assistant"
            alone = self._text(chat.messages[: number + 1], chat.options) if answers else None
            if alone is None or not _appears(text, alone):
                missing.append((number, name))
        return missing, not late

    def _unread(self, chat: Chat) -> Iterator[tuple[int, str]]:
        written = self._text(chat.messages, chat.options)
        for name, value in chat.options.items():
            rest = {key: other for key, other in chat.options.items() if key != name}
            if name not in ("tools", "documents"):  # a switch may well make no difference to one conversation
                is_read = bool(re.search(rf"\b{re.escape(name)}\b", self._program(chat.options)))
            else:
                is_read = written is None or (
                    written != self._text(chat.messages, rest)
                    and all(_appears(text, written) for text in _described(value))
                )
            if not is_read:
                yield -1, name

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
        trained = str(self._tokenizer.decode([token for token, mark in zip(ids, marked or (), strict=True) if mark]))
        others = [message for message in chat.messages if message["role"] != "assistant"]
        return not any(text in trained for message in others for _, text in texts_of(message))


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

    marked = [_map_texts(message, mark) for message in messages]
    return [turn | ({"name": names[turn["name"]]} if turn.get("name") in names else {}) for turn in marked]


def _changed(messages: list[Message], changes: list[Change]) -> list[Message]:
    for change in changes:
        messages = [change(message) for message in messages]
    return messages


def _appears(text: str, written: str) -> bool:
    text = text.strip()
    forms = (text, *(json.dumps(text, ensure_ascii=kind)[1:-1] for kind in (False, True)))
    return any(form in written for form in forms) or "".join(text.split()) in "".join(written.split())


def _is_garbled(message: Message, written: str) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    shown = (text for part in parts for text in (str(part), json.dumps(part), json.dumps(part, ensure_ascii=False)))
    if any(text in written for text in shown):
        return True
    arguments = [call["function"].get("arguments") for call in message.get("tool_calls") or ()]
    texts = [text for text in arguments if isinstance(text, str) and isinstance(parsed(text), dict)]
    return any(json.dumps(text, ensure_ascii=False) in written for text in texts)
