"""Turn records of every known layout into examples, texts and conversations; or into items: pairs of answers, and texts
with a class.

A layout is a column with the prompt or the whole, and one with the answer. Where the columns of several layouts have
values, the more structured one wins: public data sets often carry a flattened ``text`` next to the real thing.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from common.data.messages import Message, has_text, messages_of, same_turns
from common.data.read import DataRecord, require_text, structured
from common.data.selection import LAYOUTS
from common.errors import UserError, did_you_mean

ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)

# Columns with a whole conversation, also as JSON text
WHOLE = ("messages", "conversations")
# Columns with a pair's prompt, of which the first that has a value counts.
_PROMPTS = ("prompt", "messages", "conversations", "instruction")
# Columns that hold the prompt of pairs in other layouts, which would be trained on without it.
_QUESTIONS = ("question", "query", "input", "context", "problem")
# Columns with arguments for the chat template.
TEMPLATE_COLUMNS = ("tools", "functions", "documents", "chat_template_kwargs")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# Columns that are read next to any layout's but text.
_TURNS = ("system", "history", *TEMPLATE_COLUMNS, *MEDIA)
# Columns that are looked for in a prompt that is text, which has to hold them.
_PASSAGES = ("context", "input")
_PAIR = ("chosen", "rejected")
_OPENAI = ("input", "preferred_output", "non_preferred_output")
_CLASSIFIED = ("text", "label")


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


@dataclass(frozen=True)
class Item:
    """One of what ``--batch-size`` counts."""

    examples: tuple[Example, ...]  # What becomes its rows; none where the record has nothing to learn from
    mark: int = 0  # A number of 32 bits that goes with it
    where: str = ""  # File and line, for messages about it


@dataclass(frozen=True)
class ItemKind:
    """What items are made of: pairs of answers, or texts with a class."""

    name: str  # ``pairs`` or ``texts``
    items: Callable[[Iterable[DataRecord]], Iterator[Item]]
    rows: int = 1  # Rows of an item
    classifies: bool = False  # Whether batches are for a sequence classifier
    pad: int | None = None  # Token to pad with; None: the tokenizer's
    identity: tuple[object, ...] = ()  # What else the rows depend on, as JSON

    def values(self, marks: np.ndarray) -> dict[str, np.ndarray]:
        """Return what goes with a batch, given its items' marks, uint32: a classifier's ``labels``, int64, or the
        ``margins``, fp32, of pairs for one."""
        if not self.classifies:
            return {}
        return (
            {"margins": marks.view(np.float32)}
            if self.name == "pairs"
            else {"labels": marks.astype(np.int64)}
        )


def examples_of_records(records: Iterable[DataRecord]) -> Iterator[Example]:
    """Return records as examples; a text file is one document: paragraphs of a book belong together."""
    for record in records:
        values = record.values
        where = record.where
        layout = layout_of(values)
        if layout is None:
            hint = "Give columns of other names with --columns: prompt=question completion=answer."
            if {"chosen", "rejected"} <= set(values):
                hint = "A preferred and a rejected answer are for --objective dpo or reward."
            raise UserError(
                f"{where} has the columns {', '.join(values)}; none of the known record shapes: text | messages or "
                f"conversations | prompt, completion | instruction, output (and optionally input). {hint}"
            )
        yield example_of(values, where, *layout)


def layout_of(record: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the first layout whose columns have values, else the first whose columns are there; None: none is."""
    there = [layout for layout in LAYOUTS if set(layout) <= set(record)]
    for layout in there:
        values = [record[name] for name in layout]
        if None not in values and any(value not in ("", []) for value in values):
            return layout
    return there[0] if there else None


def objects_read(
    record: dict[str, Any], kind: ItemKind | None
) -> Iterator[tuple[str, dict[str, Any], set[str]]]:
    """Yield the record, and the object in it that holds the prompt (OpenAI's format): where it is, its values, and
    which of them are read."""
    yield "", record, columns_read(record, kind)
    if kind is not None and kind.name == "pairs" and _is_openai(record):
        read = columns_read(_from_openai(record), kind) - {*_PAIR, "margin"}
        yield " of 'input'", record["input"], read


def columns_read(record: Mapping[str, Any], kind: ItemKind | None) -> set[str]:
    """Return the columns of a record that are read; without a ``kind``, of documents and conversations."""
    if kind is not None and kind.name == "texts":
        return set(_CLASSIFIED)
    margin = {"margin"} if kind is not None and kind.classifies else set()
    if kind is not None and _is_openai(record):
        return {*_OPENAI, *margin}
    layout = layout_of(record) or () if kind is None else (_prompt_of(record) or "prompt", *_PAIR, *margin)
    if layout == ("text",):
        return set(layout)
    is_text = layout[:1] == ("instruction",) or (
        layout[:1] == ("prompt",) and isinstance(record.get("prompt"), str)
    )
    return {*layout, *_TURNS, *(_PASSAGES if is_text else ())}


def example_of(record: Mapping[str, Any], where: str, prompt: str, answer: str | None = None) -> Example:
    """Return a record as one example, from its columns ``prompt`` (the prompt, or the whole) and ``answer``, if any.

    Text with text is text; where either is a conversation, or the record has earlier turns, a system prompt, or
    arguments for the template, both are turns.
    """
    if prompt == "text":
        return PlainText("", require_text(record, "text", where), where=where)
    if media := next((name for name in MEDIA if record.get(name)), None):
        raise UserError(
            f"{where} has {media!r}, which is not read here: leave it out, with what the text says of it."
        )
    options = _template_options(record, where)
    system = require_text(record, "system", where)
    history = list(_history(record, where, prompt))
    asked = _value(record, prompt, where)
    answered = _value(record, answer, where) if answer else []
    _check_context(record, where, prompt, asked)
    if isinstance(asked, str) and isinstance(answered, str) and not (options or system.strip() or history):
        return PlainText(asked, answered, where=where)
    turns = history + (
        [{"role": "user", "content": asked}] * bool(asked) if isinstance(asked, str) else asked
    )
    answers = [{"role": "assistant", "content": answered}] if isinstance(answered, str) else answered
    plain = None
    if prompt == "instruction" and isinstance(answered, str) and not (system.strip() or history):
        fields = {name: require_text(record, name, where) for name in ("instruction", "input")}
        template = ALPACA_PROMPT_WITH_INPUT if fields["input"] else ALPACA_PROMPT
        plain = PlainText(template.format(**fields), answered, where=where)
    count, turns = continued(turns, answers, where)
    if system.strip():
        before = len(turns)
        turns = _with_system(system, turns, where)
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
    if (
        prompt
        and answer
        and prompt[-1]["role"] == "user"
        and answer[0]["role"] in ("user", "system", "developer")
    ):
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
    if column in WHOLE or isinstance(value, list | dict):
        return messages_of(structured(record, column, where), column, where)
    return require_text(record, column, where)


def _check_context(record: Mapping[str, Any], where: str, prompt: str, asked: str | list[Message]) -> None:
    """Refuse a text next to a prompt that belongs to it, as the passage that a question is about, and is not in it."""
    text = asked if isinstance(asked, str) else asked[0]["content"] if prompt == "instruction" else None
    if text is None:
        return
    for name in _PASSAGES:
        value = record.get(name)
        if isinstance(value, str) and value.strip() and value not in text:
            raise UserError(
                f"{where} has {name!r}, which {prompt!r} does not hold: write it there, or leave it out. (With "
                "instruction and output, the text that the instruction is about is 'input'.)"
            )


def _history(record: Mapping[str, Any], where: str, prompt: str) -> Iterator[Message]:
    """Yield the turns of Alpaca's ``history``, a list of questions with their answers."""
    history = structured(record, "history", where) or []
    if history and prompt in WHOLE:
        raise UserError(
            f"{where} has a 'history' column and {prompt!r}, which holds all turns: leave one out."
        )
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in history
    ):
        raise UserError(f"{where}: 'history' is not a list of [question, answer]: {str(history)[:80]}")
    for question, answer in history:
        yield from ({"role": "user", "content": question}, {"role": "assistant", "content": answer})


def _with_system(system: str, turns: list[Message], where: str) -> list[Message]:
    first = {"role": "system", "content": system}
    if turns and turns[0]["role"] in ("system", "developer"):
        if same_turns([{**turns[0], "role": "system"}], [first]):
            return turns
        raise UserError(
            f"{where} has a 'system' column, and a conversation with another system prompt: leave one out."
        )
    return [first, *turns]


def _template_options(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for column in TEMPLATE_COLUMNS:
        kind = dict if column == "chat_template_kwargs" else list
        value = structured(record, column, where)
        if not value:
            continue
        if not isinstance(value, kind) or (
            kind is list and not all(isinstance(item, dict) for item in value)
        ):
            expected = "an object" if kind is dict else "a list of objects"
            raise UserError(
                f"{where}: {column!r} is not {expected}, as chat templates take it: {str(value)[:80]}"
            )
        if column in ("tools", "functions"):  # OpenAI's format, of now and of before
            column = "tools"
            value = options.get("tools", []) + [_as_tool(tool) for tool in value]
        options |= value if isinstance(value, dict) else {column: value}
    return options


def _as_tool(tool: dict[str, Any]) -> dict[str, Any]:
    bare = (
        isinstance(tool.get("name"), str)
        and "function" not in tool
        and tool.get("type", "function") == "function"
    )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} if bare else tool


def pair_kind(classifies: bool = False, pad: int | None = None) -> ItemKind:
    """Return the kind of items that are pairs of answers: two rows, the preferred one first."""
    margins = ("margins",) if classifies else ()
    return ItemKind("pairs", partial(pairs_of_records, margins=classifies), 2, classifies, pad, margins)


def class_kind(classes: dict[str, int], pad: int | None = None) -> ItemKind:
    """Return the kind of items that are texts with a class, given the numbers of the classes by name."""
    return ItemKind(
        "texts", partial(classes_of_records, classes=classes), 1, True, pad, tuple(classes.items())
    )


def pairs_of_records(records: Iterable[DataRecord], margins: bool = True) -> Iterator[Item]:
    """Return the preferred and the rejected answer of each record, each with its prompt.

    Both are what ``prompt`` and ``completion`` would be: texts, or conversations. Without a prompt, ``chosen`` and
    ``rejected`` are whole conversations (or texts), and what both begin with is the prompt. A ``margin`` says by how
    much the preferred answer is better. A rejected answer may be empty.
    """
    for record in records:
        values = _from_openai(record.values)
        where = record.where
        if not {"chosen", "rejected"} <= set(values):
            raise UserError(
                f"{where} has the columns {', '.join(values)}; a pair has chosen and rejected, and a prompt, messages, "
                "conversations, or an instruction, if these do not begin with it."
            )
        margin = values.get("margin") if margins else None
        try:
            number = 0.0 if margin is None else float(margin)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= float(np.finfo(np.float32).max) or isinstance(margin, bool):
            raise UserError(f"{where}: 'margin' must be a number of 32 bits, not {str(margin)[:80]!r}.")
        yield Item(_pair(values, where), int(np.float32(number).view(np.uint32)), where)


def labels_of_records(records: Iterable[DataRecord]) -> list[str]:
    """Return the names of all classes in records with ``text`` and ``label``, in order; numbers by their size."""
    names = {_label(record.values, record.where) for record in records}
    if len(names) < 2:
        named = f"only {names.pop()!r}" if names else "none"
        raise UserError(f"A classifier learns to tell at least two classes apart, and the data have {named}.")
    numbers = all(name.isascii() and name.isdigit() and name == str(int(name)) for name in names)
    return sorted(names, key=int if numbers else None)


def classes_of_records(records: Iterable[DataRecord], classes: Mapping[str, int]) -> Iterator[Item]:
    """Return texts, each with the number of its class, given these by name."""
    for record in records:
        values = record.values
        where = record.where
        label = _label(values, where)
        text = require_text(values, "text", where)
        # A configuration without its own names calls its classes LABEL_0, LABEL_1, ...
        number = classes.get(label, classes.get(f"LABEL_{label}"))
        if number is None:
            known = ", ".join(list(classes)[:8])
            raise UserError(
                f"{where} has the label {label!r}; the model knows {known}.{did_you_mean(label, classes)}"
            )
        yield Item((PlainText("", text, where=where),) if text.strip() else (), number, where)


def _label(values: Mapping[str, Any], where: str) -> str:
    if not set(_CLASSIFIED) <= set(values):
        raise UserError(
            f"{where} has the columns {', '.join(values)}; a text with its class has text and label. Give columns of "
            "other names with --columns: text=review label=stars."
        )
    label = values["label"]
    if isinstance(label, bool) or (isinstance(label, float) and label.is_integer()):
        label = int(label)
    if not isinstance(label, str | int) or label == "":
        shown = "None (of a ClassLabel, -1)" if label is None else repr(label)
        raise UserError(f"{where}: 'label' is {shown}, and a class is a name or a whole number.")
    return str(label)


def _is_openai(values: Mapping[str, Any]) -> bool:
    return set(_OPENAI) <= set(values) and isinstance(values["input"], dict)


def _from_openai(values: dict[str, Any]) -> dict[str, Any]:
    if not _is_openai(values):
        return values
    answers = {"chosen": values["preferred_output"], "rejected": values["non_preferred_output"]}
    return {**values["input"], **answers, "margin": values.get("margin")}


def _pair(values: dict[str, Any], where: str) -> tuple[()] | tuple[Example, Example]:
    """Return both answers of a record, each with its prompt; none where there is nothing to prefer."""
    chosen = values["chosen"]
    rejected = values["rejected"]
    if chosen is None or rejected is None:
        return ()
    column = _prompt_of(values)
    opening = messages_of(chosen, "chosen", where)[:1] if isinstance(chosen, list | dict) else []
    answers_only = all(turn["role"] == "assistant" for turn in opening)
    whole = column is None or not answers_only
    if column is None and answers_only and (unread := next(filter(values.get, _QUESTIONS), None)):
        raise UserError(
            f"{where} has {unread!r} and no prompt: name it with --columns prompt={unread}, or leave it out."
        )
    if column is None and isinstance(chosen, str) and isinstance(rejected, str):
        alike = _alike(chosen, rejected)
        cut = max(chosen.rfind(" ", 0, alike), chosen.rfind("\n", 0, alike)) + 1
        values = {**values, "prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}
    better, worse = (
        example_of(values, where, column or "prompt", answer) for answer in ("chosen", "rejected")
    )
    if type(better) is not type(worse):
        raise UserError(f"{where}: chosen and rejected must both be texts, or both be lists of messages.")
    if whole and isinstance(better, Chat) and isinstance(worse, Chat):
        alike = _alike(better.messages, worse.messages)
        better = replace(better, prompt_messages=alike)
        worse = replace(worse, prompt_messages=alike)
    return () if better.is_empty else (better, worse)


def _prompt_of(values: Mapping[str, Any]) -> str | None:
    """Return the column with the prompt of a pair, the first that has a value; None if there is none."""
    there = [name for name in _PROMPTS if values.get(name) is not None]
    return next((name for name in there if values[name] not in ("", [])), there[0] if there else None)


def _alike(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many entries both begin with, short of the last of each."""
    most = min(len(left), len(right)) - 1
    return next((at for at in range(most) if left[at] != right[at]), max(most, 0))
