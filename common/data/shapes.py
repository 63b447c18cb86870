"""Turn records of every known layout into examples: texts and conversations.

A layout is a column with the prompt or the whole, and one with the answer. Where the columns of several layouts have
values, the more structured one wins: public data sets often carry a flattened ``text`` next to the real thing.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.data.messages import Message, has_text, messages_of, same_turns
from common.data.read import DataRecord, require_text, structured
from common.data.selection import LAYOUTS
from common.errors import UserError

ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)

_WHOLE = ("messages", "conversations")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
KNOWN_SHAPES = "text | messages or conversations | prompt, completion | instruction, output (and optionally input)"


@dataclass(frozen=True)
class PlainText:
    """A document, or a segment of one, as text. Only ``completion`` carries loss.

    It gets the tokenizer's prefix (BOS, if it has one) if nothing comes ``before``, and an EOS if it ``ends``.
    """

    prompt: str
    completion: str
    before: str = ""  # Of a segment, the end of the one before
    ends: bool = True  # Whether the document ends here
    where: str = ""  # File and line, for messages about it

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to learn from."""
        whole = self.ends and not self.before
        return whole and not (self.completion if self.prompt else self.completion.strip())


@dataclass(frozen=True)
class Chat:
    """A conversation for the chat template. The assistant's messages carry loss."""

    messages: list[Message]
    prompt_messages: int | None = None  # Number of messages of a completion's prompt, which carry no loss
    where: str = ""  # File and line, for messages about it
    options: dict[str, Any] = field(default_factory=dict)  # Other arguments of the template, such as `tools`
    untrained: frozenset[int] = frozenset()  # Places of messages of weight 0, which carry no loss
    plain: PlainText | None = None  # An instruction in Alpaca's words, for tokenizers without a chat template

    @property
    def answers(self) -> list[int]:
        """Places of the messages that carry loss."""
        first = self.prompt_messages or 0
        return [
            position
            for position, message in enumerate(self.messages)
            if position >= first and message["role"] == "assistant" and position not in self.untrained
        ]

    @property
    def is_empty(self) -> bool:
        """Whether there are answers, and none says anything."""
        said = [self.messages[position] for position in self.answers]
        return not self.messages[self.prompt_messages or 0 :] or (bool(said) and not any(map(has_text, said)))


Example = PlainText | Chat


def examples_of_records(records: Iterable[DataRecord]) -> Iterator[Example]:
    """Return records as examples; a text file is one document: paragraphs of a book belong together."""
    for record in records:
        values, where = record.values, record.where
        layout = layout_of(values)
        if layout is None:
            hint = "Give columns of other names with --columns: prompt=question completion=answer."
            if {"chosen", "rejected"} <= set(values):
                hint = "A preferred and a rejected answer are for --objective dpo or reward."
            columns = f"has the columns {', '.join(values)}; none of the known record shapes"
            raise UserError(f"{where} {columns}: {KNOWN_SHAPES}. {hint}")
        yield example_of(values, where, *layout)


def layout_of(record: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Return the first layout whose columns have values, else the first whose columns are there; None: none is."""
    columns = [(layout, {name for name in layout if name}) for layout in LAYOUTS]
    there = [layout for layout, names in columns if names <= set(record)]
    given = (
        layout
        for layout, names in columns
        if all(record.get(name) is not None for name in names) and any(record[name] not in ("", []) for name in names)
    )
    return next(given, there[0] if there else None)


def example_of(record: Mapping[str, Any], where: str, prompt: str, answer: str | None) -> Example:
    """Return a record as one example, from its columns ``prompt`` (the prompt, or the whole) and ``answer``, if any.

    Text with text is text; where either is a conversation, or the record has earlier turns, a system prompt, or
    arguments for the template, both are turns.
    """
    if prompt == "text":
        return PlainText("", require_text(record, "text", where), where=where)
    if media := next((name for name in _MEDIA if record.get(name)), None):
        raise UserError(f"{where} has {media!r}, which is not read here: leave it out, with what the text says of it.")
    options, system = _template_options(record, where), require_text(record, "system", where)
    history = list(_history(record, where, prompt))
    asked, answered = _value(record, prompt, where), _value(record, answer, where) if answer else []
    _check_context(record, where, prompt, asked)
    if isinstance(asked, str) and isinstance(answered, str) and not (options or system.strip() or history):
        return PlainText(asked, answered, where=where)
    turns, answers = history + _as_turns(asked, "user"), _as_turns(answered, "assistant")
    plain = None
    if prompt == "instruction" and isinstance(answered, str) and not (system.strip() or history):
        fields = {name: require_text(record, name, where) for name in ("instruction", "input")}
        template = ALPACA_PROMPT_WITH_INPUT if fields["input"] else ALPACA_PROMPT
        plain = PlainText(template.format(**fields), answered, where=where)
    count, turns = continued(turns, answers, where)
    if system.strip():
        before, turns = len(turns), _with_system(system, turns, where)
        count += len(turns) - before
    first = None if answer in (None, "output") else count
    weights = {position for position, message in enumerate(turns) if message.get("weight") == 0}
    messages = [{key: value for key, value in message.items() if key != "weight"} for message in turns]
    return Chat(messages, first, where, options, frozenset(weights), plain)


def continued(prompt: list[Message], answer: list[Message], where: str) -> tuple[int, list[Message]]:
    """Return the number of messages of a prompt, and all messages.

    An answer that is a whole conversation, which begins with the prompt, has it already (UltraFeedback's layout).
    """
    for start in (0, 1):
        end = start + len(prompt)
        leads = all(message["role"] == "system" for message in answer[:start])
        if prompt and leads and len(answer) > end and same_turns(answer[start:end], prompt):
            return end, answer
    if prompt and answer and prompt[-1]["role"] == "user" and answer[0]["role"] in ("user", "system", "developer"):
        raise UserError(
            f"{where}: the answer is a conversation that begins with another {answer[0]['role']} turn than the prompt: "
            f"{str(answer[0].get('content'))[:80]!r}. Leave the prompt or these turns out."
        )
    return len(prompt), prompt + answer


def _value(record: Mapping[str, Any], column: str, where: str) -> str | list[Message]:
    value = record.get(column)
    if column == "instruction":
        said = [require_text(record, name, where) for name in ("instruction", "input")]
        return [{"role": "user", "content": "\n".join(filter(None, said))}]
    if column in _WHOLE or isinstance(value, list | dict):
        return messages_of(structured(record, column, where), column, where)
    return require_text(record, column, where)


def _check_context(record: Mapping[str, Any], where: str, prompt: str, asked: str | list[Message]) -> None:
    """Refuse a text next to a prompt that belongs to it, as the passage that a question is about, and is not in it."""
    text = asked if isinstance(asked, str) else asked[0]["content"] if prompt == "instruction" else None
    for name in ("context", "input"):
        value = record.get(name)
        if text is not None and isinstance(value, str) and value.strip() and value not in text:
            raise UserError(
                f"{where} has {name!r}, which {prompt!r} does not hold: write it there, or leave it out. (With "
                "instruction and output, the text that the instruction is about is 'input'.)"
            )


def _as_turns(value: str | list[Message], role: str) -> list[Message]:
    if not isinstance(value, str):
        return value
    return [{"role": role, "content": value}] if value or role == "assistant" else []


def _history(record: Mapping[str, Any], where: str, prompt: str) -> Iterator[Message]:
    """Yield the turns of Alpaca's ``history``, a list of questions with their answers."""
    history = structured(record, "history", where) or []
    if history and prompt in _WHOLE:
        raise UserError(f"{where} has a 'history' column and {prompt!r}, which holds all turns: leave one out.")
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history
    ):
        raise UserError(f"{where}: 'history' is not a list of [question, answer]: {str(history)[:80]}")
    for question, answer in history:
        yield from ({"role": "user", "content": question}, {"role": "assistant", "content": answer})


def _with_system(system: str, turns: list[Message], where: str) -> list[Message]:
    first = {"role": "system", "content": system}
    if turns and turns[0]["role"] in ("system", "developer"):
        if same_turns([{**turns[0], "role": "system"}], [first]):
            return turns
        raise UserError(f"{where} has a 'system' column, and a conversation with another system prompt: leave one out.")
    return [first, *turns]


def _template_options(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for column in ("tools", "functions", "documents", "chat_template_kwargs"):
        kind = dict if column == "chat_template_kwargs" else list
        value = structured(record, column, where)
        if not value:
            continue
        if not isinstance(value, kind) or (kind is list and not all(isinstance(item, dict) for item in value)):
            expected = "an object" if kind is dict else "a list of objects"
            raise UserError(f"{where}: {column!r} is not {expected}, as chat templates take it: {str(value)[:80]}")
        if column in ("tools", "functions"):  # OpenAI's format, of now and of before
            column, value = "tools", options.get("tools", []) + [_as_tool(tool) for tool in value]
        options |= value if isinstance(value, dict) else {column: value}
    return options


def _as_tool(tool: dict[str, Any]) -> dict[str, Any]:
    bare = isinstance(tool.get("name"), str) and "function" not in tool and tool.get("type", "function") == "function"
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} if bare else tool
