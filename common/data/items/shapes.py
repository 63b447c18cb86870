"""Turn records into items: what of them belongs together, and the number that goes with it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.data.files import DataRecord
from common.data.shapes import (
    ALPACA_PROMPT,
    ALPACA_PROMPT_WITH_INPUT,
    Chat,
    Example,
    PlainText,
    prompt_completion,
    shape_of,
    string_of,
)
from common.errors import UserError, did_you_mean

KNOWN_PAIRS = "prompt, chosen, rejected | instruction, chosen, rejected (and optionally input) | chosen, rejected"

_MARKS = ("label", "kto_tag")
"""Columns that say whether an answer is desirable: TRL's, and LLaMA-Factory's."""
_WORDS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


@dataclass(frozen=True)
class Item:
    """One of what ``--batch-size`` counts."""

    examples: tuple[Example, ...]
    """What becomes its rows."""
    mark: int = 0
    """A number of 32 bits that goes with it."""


def margin_of(mark: np.ndarray) -> np.ndarray:
    """Return the margins, fp32, that marks of pairs, uint32, stand for."""
    return mark.astype(np.uint32).view(np.float32)


def pairs_of_records(records: Iterable[tuple[str, DataRecord]]) -> Iterator[Item]:
    """Return the preferred and the rejected answer of each record, each with its prompt.

    Both are what ``prompt`` and ``completion`` would be: texts, or conversations. Without a prompt, ``chosen`` and
    ``rejected`` are whole conversations (or texts), and what both begin with is the prompt. Alpaca's ``instruction``
    and ``input`` are a prompt, too. A ``margin`` says by how much the preferred answer is better.

    Args:
        records: each with the name of its file.

    Raises:
        UserError: a record has no such columns, or values that do not fit.
    """
    for file, (values, place) in records:
        where = f"{file}, {place}"
        if not {"chosen", "rejected"} <= set(values):
            raise UserError(
                f"{where} has the columns {', '.join(values)}; a pair has chosen and rejected, and a prompt: "
                f"{KNOWN_PAIRS}."
            )
        pair = _pair(values, where)
        if pair is not None:
            yield Item(pair, int(np.float32(_number(values, "margin", where)).view(np.uint32)))


def answers_of_records(records: Iterable[tuple[str, DataRecord]]) -> Iterator[Item]:
    """Return single answers, each with its prompt, and marked 1 if they are desirable, else 0.

    A record is of any shape that has a prompt and an answer, and says in ``label`` (or ``kto_tag``) whether the answer
    is desirable; of a conversation, the last message is the answer. A pair is two records: its preferred answer is
    desirable, and the rejected one is not.

    Args:
        records: each with the name of its file.

    Raises:
        UserError: a record has no such columns, or values that do not fit.
    """
    for file, (values, place) in records:
        where = f"{file}, {place}"
        mark = next((name for name in _MARKS if values.get(name) is not None), None)
        if mark is None and {"chosen", "rejected"} <= set(values):
            for is_desirable, answer in zip((1, 0), _pair(values, where) or (), strict=False):
                yield Item((answer,), is_desirable)
            continue
        given = [column for column, value in values.items() if value is not None]
        shape = shape_of([name for name in given if name != "text"])
        if mark is None or shape is None:
            raise UserError(
                f"{where} has the columns {', '.join(values)}; a labelled answer has a prompt, a completion, and a "
                "label that is true or false: prompt, completion, label | instruction, output, kto_tag (and optionally "
                "input) | messages, label."
            )
        said = _WORDS.get(str(values[mark]).strip().lower())
        if said is None:
            raise UserError(f"{where}: {mark!r} must be true or false, not {values[mark]!r}.")
        for example in shape(values, where):
            if isinstance(example, Chat) and example.prompt_messages is None:
                example = replace(example, prompt_messages=len(example.messages) - 1)
            yield Item((example,), int(said))


def labels_of_records(records: Iterable[tuple[str, DataRecord]]) -> list[str]:
    """Return the names of all classes in records with ``text`` and ``label``, in order; numbers by their size.

    Raises:
        UserError: there are none, or only one, or a record has no label.
    """
    found: set[str] = set()
    for file, (values, place) in records:
        found.add(_label(values, f"{file}, {place}"))
    if len(found) < 2:
        named = f"only {found.pop()!r}" if found else "none"
        raise UserError(f"A classifier learns to tell at least two classes apart, and the data have {named}.")
    if all(name.isdigit() for name in found):
        return [str(number) for number in range(max(map(int, found)) + 1)]
    return sorted(found)


def classes_of_records(records: Iterable[tuple[str, DataRecord]], classes: Mapping[str, int]) -> Iterator[Item]:
    """Return texts, each with the number of its class.

    Args:
        records: with ``text`` and ``label``, each with the name of its file.
        classes: numbers of the classes by name.

    Raises:
        UserError: a record lacks one of them, or the class is unknown.
    """
    for file, (values, place) in records:
        where = f"{file}, {place}"
        label, text = _label(values, where), string_of(values, "text", where)
        if label not in classes:
            known = ", ".join(list(classes)[:8])
            raise UserError(f"{where} has the label {label!r}; the model knows {known}.{did_you_mean(label, classes)}")
        if text.strip():
            yield Item((PlainText("", text, where=where),), classes[label])


def _label(values: Mapping[str, Any], where: str) -> str:
    label = values.get("label")
    if "text" not in values or label is None or isinstance(label, list | dict):
        raise UserError(
            f"{where} has the columns {', '.join(values)}; a text with its class has text and label. Columns of other "
            "names are told with --columns: text=review label=stars."
        )
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    return str(int(label) if isinstance(label, bool) else label)


def _number(values: Mapping[str, Any], column: str, where: str) -> float:
    value = values.get(column)
    try:
        return 0.0 if value is None else float(value)
    except (TypeError, ValueError):
        raise UserError(f"{where}: {column!r} must be a number, not {value!r}.") from None


def _pair(values: dict[str, Any], where: str) -> tuple[Example, Example] | None:
    """Return both answers of a record, each with its prompt; None where one is empty."""
    prompt, chosen, rejected = _prompted(values, where)
    rest = {name: value for name, value in values.items() if name not in ("chosen", "rejected", "messages")}
    made = [
        list(prompt_completion({**rest, "prompt": prompt, "completion": answer}, where))
        for answer in (chosen, rejected)
    ]
    return (made[0][0], made[1][0]) if all(made) else None


def _prompted(values: dict[str, Any], where: str) -> tuple[Any, Any, Any]:
    """Return prompt, preferred and rejected answer of a record."""
    chosen, rejected = values["chosen"], values["rejected"]
    if values.get("prompt") is not None:
        return values["prompt"], chosen, rejected
    if values.get("instruction") is not None:
        fields = {name: string_of(values, name, where) for name in ("instruction", "input")}
        template = ALPACA_PROMPT_WITH_INPUT if fields["input"].strip() else ALPACA_PROMPT
        return template.format(**fields), chosen, rejected
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise UserError(f"{where}: chosen and rejected must both be texts, or both be lists of messages.")
    alike = 0
    while alike < min(len(chosen), len(rejected)) and chosen[alike] == rejected[alike]:
        alike += 1
    if isinstance(chosen, str) and alike:  # not within a word
        alike = max(chosen.rfind(" ", 0, alike), chosen.rfind("\n", 0, alike)) + 1
    return chosen[:alike], chosen[alike:], rejected[alike:]
