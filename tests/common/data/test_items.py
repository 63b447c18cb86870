"""Records of labelled answers and of classes: the shapes that they have, and what is refused."""

import datetime
import math
from typing import Any

import pytest

from common.data.items import Item, answers_of_records, classes_of_records, labels_of_records, pairs_of_records
from common.data.read import DataRecord
from common.data.shapes import Chat, PlainText
from common.errors import UserError


def given(*records: dict[str, Any]) -> list[tuple[str, DataRecord]]:
    return [("a.jsonl", DataRecord(record, f"line {i + 1}")) for i, record in enumerate(records)]


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(("record", "example"), [
    ({"prompt": "2+2 ", "completion": "4", "label": True}, PlainText("2+2 ", "4", where="a.jsonl, line 1")),
    ({"prompt": TURNS[:1], "completion": TURNS[1:], "label": 1}, Chat(TURNS, 1, "a.jsonl, line 1")),
    ({"messages": TURNS, "kto_tag": "true"}, Chat(TURNS, 1, "a.jsonl, line 1")),
])  # fmt: skip
def test_labelled_answers(record: dict[str, Any], example: Any) -> None:
    """As TRL and LLaMA-Factory have them."""
    assert list(answers_of_records(given(record))) == [Item((example,), 1, "a.jsonl, line 1")]


def test_classes_are_numbered() -> None:
    records = given({"text": "a", "label": "up"}, {"text": "b", "label": "down"}, {"text": " ", "label": "up"})
    names = labels_of_records(records)
    assert names == ["down", "up"]
    items = classes_of_records(records, {name: number for number, name in enumerate(names)})
    assert [(item.mark, len(item.examples)) for item in items] == [(1, 1), (0, 1), (1, 0)]
    assert labels_of_records(given({"text": "a", "label": 10}, {"text": "b", "label": 0.0})) == ["0", "10"]
    for names in (["01", "02"], ["1.0", "2.0"], ["1", "\N{SUPERSCRIPT TWO}"], ["NA", "None"]):  # as they are written
        assert labels_of_records(given(*({"text": "a", "label": name} for name in names))) == names


@pytest.mark.parametrize(("make", "record", "message"), [
    (answers_of_records, {"prompt": "a", "completion": "b"}, "a label that is true or false"),
    (answers_of_records, {"prompt": "a", "completion": "b", "label": "maybe"}, "must be true or false"),
    (answers_of_records, {"prompt": "a", "completion": "b", "label": 1, "kto_tag": 0}, "'label' is 1, and 'kto_tag'"),
    (labels_of_records, {"text": "a"}, "has text and label"),
    *(
        (
            labels_of_records,
            {"text": "a", "label": value},
            "line 1: 'label' is .* a class is a name or a whole number",
        )
        for value in (None, "", 0.5, math.nan, b"a", datetime.date(2024, 1, 1), ["a"])
    ),
    (pairs_of_records, {"chosen": "a", "rejected": "b", "question": "c"}, "line 1 has 'question' and no prompt"),
    *(
        (pairs_of_records, {"chosen": "a", "rejected": "b", "margin": value}, "line 1: 'margin' must be a number")
        for value in (True, "x", math.inf, "nan", 1e300, 10**400, "1_0")
    ),
    (labels_of_records, {"text": "a", "label": "x"}, "at least two classes apart, and the data have only 'x'"),
    (lambda records: classes_of_records(records, {"x": 0}), {"text": "a", "label": "y"}, "the model knows x"),
])  # fmt: skip
def test_what_does_not_fit_is_rejected(make: Any, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(make(given(record)))
