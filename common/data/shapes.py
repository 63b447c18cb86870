"""What a record means: the four record shapes, told apart by column names, turned into examples to tokenize.

Where columns of several shapes have values, the more structured shape wins (``messages``, then ``prompt`` and
``completion``, then Alpaca, then ``text``): public data sets often carry a flattened ``text`` beside the real thing.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from common.errors import UserError

SEGMENT_CHARACTERS = 1 << 17
"""Longer texts are tokenized in segments of about this size, several at once on as many cores."""

ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)

KNOWN_SHAPES = "text | messages | prompt, completion | instruction, output (and optionally input)"


@dataclass(frozen=True)
class Plain:
    """A document, or a segment of one, as text. Loss is wanted on ``completion`` only."""

    prompt: str
    completion: str
    begins: bool = True
    """The document starts here: it gets the tokenizer's prefix (BOS, if it has one)."""
    ends: bool = True
    """The document ends here: it gets an EOS."""


@dataclass(frozen=True)
class Chat:
    """A conversation for the chat template."""

    messages: list[dict[str, Any]]
    prompt_messages: int | None = None
    """Loss is wanted on everything after the first so many messages; None: on what the assistant says."""
    where: str = ""
    """File and record, for error messages."""


Example = Plain | Chat


def examples_of_text_file(lines: Iterable[dict[str, Any]]) -> Iterator[Example]:
    """A text file is one document, blank lines included: paragraphs of a book belong together.

    Texts that have nothing to do with each other go into separate files, or into ``text`` records.
    """
    segment: list[str] = []
    size, begins = 0, True
    for line in lines:
        if size >= SEGMENT_CHARACTERS:
            yield Plain("", "".join(segment), begins, ends=False)
            segment, size, begins = [], 0, False
        segment.append(line["text"])
        size += len(line["text"])
    if not begins or "".join(segment).strip():
        yield Plain("", "".join(segment), begins, ends=True)


def examples_of_records(records: Iterable[dict[str, Any]], file: str) -> Iterator[Example]:
    """The examples of a file of records. Records whose text is missing or empty are passed over.

    Raises:
        UserError: a record of no known shape (names its columns), or with values that do not fit its shape.
    """
    for number, record in enumerate(records, 1):
        given = [column for column, value in record.items() if value is not None]
        shape = _shape_of(given) or _shape_of(list(record))
        if shape is None:
            raise UserError(
                f"{file}, record {number} has the columns {', '.join(record)}; "
                f"none of the known record shapes: {KNOWN_SHAPES}."
            )
        yield from shape(record, f"{file}, record {number}")


def _shape_of(columns: list[str]) -> Callable[[dict[str, Any], str], Iterator[Example]] | None:
    if "messages" in columns:
        return _messages
    if {"prompt", "completion"} <= set(columns):
        return _prompt_completion
    if {"instruction", "output"} <= set(columns):
        return _alpaca
    return _text if "text" in columns else None


def _text(record: dict[str, Any], where: str) -> Iterator[Example]:
    text = _string(record, "text", where)
    if not text.strip():
        return
    start = 0
    while len(text) - start > SEGMENT_CHARACTERS:
        # Behind a line break, else before a space: there, tokenizers cut as well.
        limit = start + SEGMENT_CHARACTERS
        stop = text.rfind("\n", start + 1, limit) + 1 or text.rfind(" ", start + 1, limit)
        stop = stop if stop > 0 else limit
        yield Plain("", text[start:stop], begins=start == 0, ends=False)
        start = stop
    yield Plain("", text[start:], begins=start == 0, ends=True)


def _messages(record: dict[str, Any], where: str) -> Iterator[Example]:
    messages = _conversation(record["messages"], "messages", where)
    if messages:
        yield Chat(messages, None, where)


def _prompt_completion(record: dict[str, Any], where: str) -> Iterator[Example]:
    prompt, completion = record["prompt"], record["completion"]
    if not isinstance(prompt, list) and not isinstance(completion, list):
        text = _string(record, "completion", where)
        if text:
            yield Plain(_string(record, "prompt", where), text)
        return
    asked = _conversation(prompt, "prompt", where, role="user")
    answer = _conversation(completion, "completion", where, role="assistant")
    if answer:
        yield Chat(asked + answer, len(asked), where)


def _alpaca(record: dict[str, Any], where: str) -> Iterator[Example]:
    fields = {name: _string(record, name, where) for name in ("instruction", "input", "output")}
    template = ALPACA_PROMPT_WITH_INPUT if fields["input"].strip() else ALPACA_PROMPT
    if fields["output"]:
        yield Plain(template.format(**fields), fields["output"])


def _string(record: dict[str, Any], column: str, where: str) -> str:
    value = record.get(column)
    if value is None:
        return ""
    if isinstance(value, (dict, list)):
        raise UserError(f"{where}: {column!r} is a {type(value).__name__}, expected a string.")
    return str(value)


def _conversation(value: Any, column: str, where: str, role: str | None = None) -> list[dict[str, Any]]:
    """A list of messages; a bare string becomes one message of ``role``, where that is given."""
    if value is None:
        return []
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}] if value else []
    if not isinstance(value, list) or not all(isinstance(item, dict) and item.get("role") for item in value):
        raise UserError(f'{where}: {column!r} is not a list of {{"role": ..., "content": ...}}: {str(value)[:80]}')
    return [_without_nones(message) for message in value]


def _without_nones(value: Any) -> Any:
    """``value`` without the keys that only exist because another record has them (columns are typed)."""
    if isinstance(value, dict):
        return {key: _without_nones(item) for key, item in value.items() if item is not None}
    return [_without_nones(item) for item in value] if isinstance(value, list) else value
