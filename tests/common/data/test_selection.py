"""Which records are taken: the first ones, all but those held out, under other names."""

import pytest

from common.data.files import DataRecord
from common.data.selection import RecordSelection
from common.errors import UserError


def taken(selection: RecordSelection, count: int) -> list[int]:
    records = [("a.jsonl", DataRecord({"n": number}, f"line {number + 1}")) for number in range(count)]
    return [record.values["n"] for _, record in selection.of(records)]


@pytest.mark.parametrize(("part", "count"), [(0.02, 500), (0.1, 95), (0.5, 7), (0.25, 1), (0.03, 1000)])
def test_what_is_held_out_and_the_rest_are_all_records_once(part: float, count: int) -> None:
    rest, held_out = (taken(RecordSelection(held_out=part, takes_held_out=out), count) for out in (False, True))
    assert sorted(rest + held_out) == list(range(count))
    window = round(1 / part)
    assert [number // window for number in held_out] == sorted({number // window for number in held_out})
    assert len(held_out) in (count // window, count // window + 1)


def test_what_is_held_out_of_the_first_records_stays_held_out_when_there_are_more() -> None:
    part = RecordSelection(held_out=0.1, takes_held_out=True)
    assert taken(part, 50) == [number for number in taken(part, 500) if number < 50]


def test_no_more_than_the_limit() -> None:
    assert taken(RecordSelection(limit=3), 10) == [0, 1, 2] == taken(RecordSelection(limit=30), 3)


def test_columns_by_other_names() -> None:
    selection = RecordSelection({"prompt": "question", "completion": "answer"})
    record = DataRecord({"question": "a", "answer": "b", "prompt": "no", "id": 3}, "line 1")
    ((_, renamed),) = selection.of([("f", record)])
    assert renamed.values == {"prompt": "a", "completion": "b", "id": 3}
    with pytest.raises(UserError, match=r"f, line 2 has no column 'question' .*Did you mean 'questions'"):
        list(selection.of([("f", DataRecord({"questions": 1}, "line 2"))]))


def test_selections_differ_in_what_prepared_data_depend_on() -> None:
    selections = [
        RecordSelection(), RecordSelection({"text": "a"}), RecordSelection(limit=1), RecordSelection(held_out=0.1),
        RecordSelection(held_out=0.1, takes_held_out=True),
    ]  # fmt: skip
    identities = [str(selection.identity) for selection in selections]
    assert len(set(identities)) == len(identities) and identities[0] == "[]"
