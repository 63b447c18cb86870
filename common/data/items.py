"""Turn records into items: what of them belongs together, and the number that goes with it."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.data.messages import messages_of
from common.data.read import DataRecord, require_text
from common.data.shapes import Chat, Example, PlainText, example_of
from common.errors import UserError, did_you_mean

KNOWN_PAIRS = (
    "prompt, chosen, rejected | messages or conversations, chosen, rejected | instruction, chosen, rejected (and "
    "optionally input) | chosen, rejected"
)
# Columns with a pair's prompt, of which the first that has a value counts.
_PROMPTS = ("prompt", "messages", "conversations", "instruction")
# Columns that hold the prompt of pairs in other layouts, which would be trained on without it.
_QUESTIONS = ("question", "query", "input", "context", "problem")
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Item:
    """One of what ``--batch-size`` counts."""

    examples: tuple[Example, ...]  # What becomes its rows; none where the record has nothing to learn from
    mark: int = 0  # A number of 32 bits that goes with it
    where: str = ""  # File and line, for messages about it


def margin_of(mark: np.ndarray) -> np.ndarray:
    """Return the margins, fp32, that marks of pairs, uint32, stand for."""
    return mark.astype(np.uint32).view(np.float32)


def pairs_of_records(records: Iterable[DataRecord]) -> Iterator[Item]:
    """Return the preferred and the rejected answer of each record, each with its prompt.

    Both are what ``prompt`` and ``completion`` would be: texts, or conversations. Without a prompt, ``chosen`` and
    ``rejected`` are whole conversations (or texts), and what both begin with is the prompt. A ``margin`` says by how
    much the preferred answer is better. A rejected answer may be empty.
    """
    for record in records:
        values, where = _from_openai(record.values), record.where
        if not {"chosen", "rejected"} <= set(values):
            raise UserError(
                f"{where} has the columns {', '.join(values)}; a pair has chosen and rejected, and a prompt: "
                f"{KNOWN_PAIRS}."
            )
        mark = int(np.float32(_number(values, "margin", where)).view(np.uint32))
        yield Item(_pair(values, where), mark, where)


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
        values, where = record.values, record.where
        label, text = _label(values, where), require_text(values, "text", where)
        # A configuration without its own names calls its classes LABEL_0, LABEL_1, ...
        number = classes.get(label, classes.get(f"LABEL_{label}"))
        if number is None:
            known = ", ".join(list(classes)[:8])
            raise UserError(f"{where} has the label {label!r}; the model knows {known}.{did_you_mean(label, classes)}")
        yield Item((PlainText("", text, where=where),) if text.strip() else (), number, where)


def _label(values: Mapping[str, Any], where: str) -> str:
    label = values.get("label")
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    if not {"text", "label"} <= set(values):
        raise UserError(
            f"{where} has the columns {', '.join(values)}; a text with its class has text and label. Give columns of "
            "other names with --columns: text=review label=stars."
        )
    if not isinstance(label, str | int) or label == "":
        raise UserError(f"{where}: 'label' is {label!r}, and a class is a name or a whole number.")
    return str(int(label) if isinstance(label, bool) else label)


def _number(values: Mapping[str, Any], column: str, where: str) -> float:
    value = values.get(column)
    try:
        number = 0.0 if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    # Texts are of CSV files: float() takes more spellings than they have.
    if not abs(number) <= _LARGEST or isinstance(value, bool) or "_" in str(value):
        raise UserError(f"{where}: {column!r} must be a number of 32 bits, not {str(value)[:80]!r}.")
    return number


def _from_openai(values: dict[str, Any]) -> dict[str, Any]:
    names = {"input", "preferred_output", "non_preferred_output"}
    if not (names <= set(values) and isinstance(values["input"], dict)):
        return values
    return {**values["input"], "chosen": values["preferred_output"], "rejected": values["non_preferred_output"]}


def _pair(values: dict[str, Any], where: str) -> tuple[()] | tuple[Example, Example]:
    """Return both answers of a record, each with its prompt; none where there is nothing to prefer."""
    chosen, rejected = values["chosen"], values["rejected"]
    if chosen is None or rejected is None:
        return ()
    there = [name for name in _PROMPTS if values.get(name) is not None]
    column = next((name for name in there if values[name] not in ("", [])), there[0] if there else None)
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
    better, worse = (example_of(values, where, column or "prompt", answer) for answer in ("chosen", "rejected"))
    if type(better) is not type(worse):
        raise UserError(f"{where}: chosen and rejected must both be texts, or both be lists of messages.")
    if whole and isinstance(better, Chat) and isinstance(worse, Chat):
        alike = _alike(better.messages, worse.messages)
        better, worse = replace(better, prompt_messages=alike), replace(worse, prompt_messages=alike)
    return () if better.is_empty else (better, worse)


def _alike(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many entries both begin with, short of the last of each."""
    most = min(len(left), len(right)) - 1
    return next((at for at in range(most) if left[at] != right[at]), max(most, 0))
