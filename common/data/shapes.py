"""Turn records into examples to tokenize: four record shapes are told apart by their column names.

Where columns of several shapes have values, the more structured shape wins (``messages``, ``conversations``, then
``prompt`` and ``completion``, then Alpaca, then ``text``): public data sets often carry a flattened ``text`` beside the
real thing.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from common.data.files import DataRecord
from common.data.sharegpt import is_sharegpt, messages_of_sharegpt
from common.errors import UserError, did_you_mean

SEGMENT_CHARACTERS = 1 << 17
"""Number of characters of the segments in which longer texts are tokenized, several at once on as many cores."""

ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "document")
"""Roles of messages that chat templates know."""

_ROLE_SYNONYMS = {
    **dict.fromkeys(("gpt", "model", "bot", "chatbot", "ai", "chatgpt", "agent"), "assistant"),
    **dict.fromkeys(("human", "prompter", "customer"), "user"),
    **dict.fromkeys(("observation", "tool_response", "tool_result"), "tool"),
}
"""Other names that people give to roles. No template knows them, and none would be trained on."""

KNOWN_SHAPES = "text | messages or conversations | prompt, completion | instruction, output (and optionally input)"


@dataclass(frozen=True)
class PlainText:
    """A document, or a segment of one, as text. Only ``completion`` carries loss."""

    prompt: str
    completion: str
    begins: bool = True
    """Whether the document starts here: then it gets the tokenizer's prefix (BOS, if it has one)."""
    ends: bool = True
    """Whether the document ends here: then it gets an EOS."""
    where: str = ""
    """File and line, for messages about it."""


@dataclass(frozen=True)
class Chat:
    """A conversation for the chat template."""

    messages: list[dict[str, Any]]
    prompt_messages: int | None = None
    """Number of messages behind which everything carries loss; None: the assistant's messages carry loss."""
    where: str = ""
    """File and line, for messages about it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the template: ``tools``, ``documents``, and switches by their names."""
    untrained: frozenset[int] = frozenset()
    """Places of messages of weight 0, which carry no loss."""

    @property
    def answers(self) -> list[int]:
        """Places of the messages that carry loss."""
        first = self.prompt_messages
        return [
            place
            for place, message in enumerate(self.messages)
            if place not in self.untrained and (message["role"] == "assistant" if first is None else place >= first)
        ]


Example = PlainText | Chat


def examples_of_text_file(lines: Iterable[DataRecord]) -> Iterator[Example]:
    """Return a text file as one document, blank lines included: paragraphs of a book belong together.

    Unrelated texts go into separate files, or into ``text`` records.
    """
    segment: list[str] = []
    size, begins = 0, True
    for line in lines:
        if size >= SEGMENT_CHARACTERS:
            yield PlainText("", "".join(segment), begins, ends=False)
            segment, size, begins = [], 0, False
        segment.append(line.values["text"])
        size += len(line.values["text"])
    if not begins or "".join(segment).strip():
        yield PlainText("", "".join(segment), begins, ends=True)


def examples_of_records(records: Iterable[DataRecord], file: str) -> Iterator[Example]:
    """Return the examples of a file of records; those whose text is missing or empty are skipped.

    Raises:
        UserError: a record has no known shape, or values that do not fit its shape.
    """
    for values, place in records:
        where = f"{file}, {place}"
        given = [column for column, value in values.items() if value is not None]
        shape = shape_of(given) or shape_of(list(values))
        if shape is None:
            raise UserError(
                f"{where} has the columns {', '.join(values)}; none of the known record shapes: {KNOWN_SHAPES}. "
                "Columns of other names are told with --columns: prompt=question completion=answer."
            )
        yield from shape(values, where)


def shape_of(columns: list[str]) -> Callable[[dict[str, Any], str], Iterator[Example]] | None:
    """Return the function that makes examples of a record with these columns and its place; None: no known shape."""
    if "messages" in columns:
        return _messages
    if "conversations" in columns:
        return _conversations
    if {"prompt", "completion"} <= set(columns):
        return prompt_completion
    if {"instruction", "output"} <= set(columns):
        return _alpaca
    return _text if "text" in columns else None


def _text(record: dict[str, Any], where: str) -> Iterator[Example]:
    text = string_of(record, "text", where)
    if not text.strip():
        return
    start = 0
    while len(text) - start > SEGMENT_CHARACTERS:
        # Behind a line break, else before a space: there, tokenizers cut as well.
        limit = start + SEGMENT_CHARACTERS
        stop = text.rfind("\n", start + 1, limit) + 1 or text.rfind(" ", start + 1, limit)
        stop = stop if stop > 0 else limit
        yield PlainText("", text[start:stop], begins=start == 0, ends=False)
        start = stop
    yield PlainText("", text[start:], begins=start == 0, ends=True)


def _conversations(record: dict[str, Any], where: str) -> Iterator[Example]:
    yield from _messages({**record, "messages": record["conversations"]}, where)


def _messages(record: dict[str, Any], where: str) -> Iterator[Example]:
    turns = record["messages"]
    if is_sharegpt(turns):
        record = {**record, "messages": messages_of_sharegpt(turns, record.get("system"), where)}
    messages, untrained = _conversation(record["messages"], "messages", where, trains=("assistant",))
    if messages:
        yield Chat(messages, None, where, _template_options(record, where), frozenset(untrained))


def prompt_completion(record: dict[str, Any], where: str) -> Iterator[Example]:
    """Yield the example of a record with ``prompt`` and ``completion``, if it has a completion."""
    prompt, completion = record["prompt"], record["completion"]
    if not isinstance(prompt, list) and not isinstance(completion, list):
        text = string_of(record, "completion", where)
        if text:
            yield PlainText(string_of(record, "prompt", where), text, where=where)
        return
    asked, _ = _conversation(prompt, "prompt", where, role="user")
    answer, untrained = _conversation(completion, "completion", where, role="assistant", trains=ROLES)
    if answer:
        options = _template_options(record, where)
        yield Chat(asked + answer, len(asked), where, options, frozenset(len(asked) + place for place in untrained))


def _alpaca(record: dict[str, Any], where: str) -> Iterator[Example]:
    fields = {name: string_of(record, name, where) for name in ("instruction", "input", "output")}
    template = ALPACA_PROMPT_WITH_INPUT if fields["input"].strip() else ALPACA_PROMPT
    if fields["output"]:
        yield PlainText(template.format(**fields), fields["output"], where=where)


def string_of(record: dict[str, Any], column: str, where: str) -> str:
    """Return a record's value as text; none at all is empty.

    Raises:
        UserError: it is a list or a table.
    """
    value = record.get(column)
    if value is None:
        return ""
    if isinstance(value, (dict, list)):
        raise UserError(f"{where}: {column!r} is a {type(value).__name__}, expected a string.")
    return str(value)


def _template_options(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a record's arguments for the chat template beside its messages."""
    options: dict[str, Any] = {}
    for column in ("tools", "documents", "chat_template_kwargs"):
        kind = dict if column == "chat_template_kwargs" else list
        value = record.get(column)
        if isinstance(value, str):  # as tables have it, whose columns have one type
            with contextlib.suppress(ValueError):  # what is no JSON is no list either
                value = json.loads(value) if value.strip() else None
        if value is None or value in ([], {}):
            continue
        if not isinstance(value, kind) or (kind is list and not all(isinstance(item, dict) for item in value)):
            expected = "an object" if kind is dict else "a list of objects"
            raise UserError(f"{where}: {column!r} is not {expected}, as chat templates take it: {str(value)[:80]}")
        options |= value if isinstance(value, dict) else {column: value}
    return options


def _conversation(
    value: Any, column: str, where: str, role: str | None = None, trains: Collection[str] = ()
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return a list of messages, and the places of those that have the weight 0.

    Args:
        value: the value of ``column``; a bare string becomes one message of ``role``, where that is given.
        trains: roles that carry loss, whose messages may have a weight of 1.

    Raises:
        UserError: this is no conversation; the message names the place.
    """
    if value is None:
        return [], []
    if isinstance(value, str) and role:
        return ([{"role": role, "content": value}] if value else []), []
    if not isinstance(value, list) or not all(isinstance(item, dict) and item.get("role") for item in value):
        raise UserError(f'{where}: {column!r} is not a list of {{"role": ..., "content": ...}}: {str(value)[:80]}')
    messages, untrained = [], []
    for place, item in enumerate(value):
        # As in transformers: most templates ignore a key that is null, or write None.
        message = {key: field for key, field in item.items() if field is not None}
        which = f"{where}: message {place + 1} of {column!r}"
        _check_role(message["role"], which)
        weight = message.pop("weight", None)
        if weight is not None and not _is_weight(weight, trained=message["role"] in trains):
            raise UserError(
                f"{which} (role {message['role']}) has the weight {json.dumps(weight)}. A weight of 0 takes the loss "
                "from a message of the assistant, and 1 leaves it there: there are no others, nor a 1 for other roles."
            )
        if weight is not None and not weight:
            untrained.append(place)
        messages.append(message)
    return messages, untrained


def _is_weight(weight: Any, trained: bool) -> bool:
    """Return whether this is 0, or 1 where there is loss at all."""
    return isinstance(weight, int | float) and not isinstance(weight, bool) and weight in ((0, 1) if trained else (0,))


def _check_role(role: Any, which: str) -> None:
    """Refuse a role that no chat template knows: its turns would be left out, or be trained on as somebody else's."""
    if role in ROLES:
        return
    name = str(role).strip().lower()
    meant = name if name in ROLES else _ROLE_SYNONYMS.get(name)
    advice = f" Write {meant!r} instead." if meant else did_you_mean(name, ROLES)
    raise UserError(f"{which} has the role {role!r}, which is none of {', '.join(ROLES)}.{advice}")
