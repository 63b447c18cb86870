"""Fields of records: text is text, and JSON means what JSON says."""

import datetime
from typing import Any

import pytest

from common.data.read import require_text, structured
from common.errors import UserError


@pytest.mark.parametrize(("value", "message"), [
    (3, 'is a number, where text is expected: 3. Write "3", in quotes'),
    (2.5, "a number"),
    (True, 'is true or false, where text is expected: True. Write "true"'),
    ([], "a list"),
    ({}, "an object"),
    (b"x", "of type bytes"),
    (datetime.date(2024, 1, 1), "of type date, where text is expected: 2024-01-01"),
])  # fmt: skip
def test_what_is_not_text_is_rejected_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        require_text({"text": value}, "text", "a.jsonl, line 7")
    assert str(error.value).startswith("a.jsonl, line 7: 'text' is ") and message in str(error.value)


def test_text_and_nothing() -> None:
    assert [require_text(record, "a", "") for record in ({"a": " 1 "}, {"a": None}, {})] == [" 1 ", "", ""]


def test_lists_and_objects_as_text() -> None:
    for value, expected in [
        ([1], [1]),
        ('[{"role": "user"}]', [{"role": "user"}]),
        (" {} ", {}),
        ("", None),
        ("a", "a"),
    ]:
        assert structured({"messages": value}, "messages", "") == expected
    with pytest.raises(
        UserError, match=r"a.csv, line 2: 'messages' is text that is not JSON \(.*\): \[\{'role'"
    ):
        structured({"messages": "[{'role': 'user'}]"}, "messages", "a.csv, line 2")
