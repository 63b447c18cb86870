"""Records of pairs and of classes: the shapes that they have, and what is refused."""

import datetime
import math
from pathlib import Path
from typing import Any

import pytest

from common.data.examples import classes_of_records, labels_of_records, pairs_of_records
from common.data.read import DataRecord
from common.errors import UserError


def given(*records: dict[str, Any]) -> list[DataRecord]:
    return [DataRecord(record, Path("a.jsonl"), f"line {i + 1}") for i, record in enumerate(records)]


def test_classes_are_numbered() -> None:
    records = given(
        {"text": "a", "label": "up"}, {"text": "b", "label": "down"}, {"text": " ", "label": "up"}
    )
    names = labels_of_records(records)
    assert names == ["down", "up"]
    items = classes_of_records(records, {name: number for number, name in enumerate(names)})
    assert [(item.mark, len(item.examples)) for item in items] == [(1, 1), (0, 1), (1, 0)]
    assert labels_of_records(given({"text": "a", "label": 10}, {"text": "b", "label": 0.0})) == ["0", "10"]
    for names in (["01", "02"], ["1.0", "2.0"], ["1", "\N{SUPERSCRIPT TWO}"], ["NA", "None"]):
        # As they are written
        assert labels_of_records(given(*({"text": "a", "label": name} for name in names))) == names


@pytest.mark.parametrize(("make", "record", "message"), [
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
        for value in (True, "x", math.inf, "nan", 1e300, 10**400)
    ),
    (labels_of_records, {"text": "a", "label": "x"}, "at least two classes apart, and the data have only 'x'"),
    (lambda records: classes_of_records(records, {"x": 0}), {"text": "a", "label": "y"}, "the model knows x"),
])  # fmt: skip
def test_what_does_not_fit_is_rejected(make: Any, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(make(given(record)))
